"""Encodes floating-point numbers in fewer bytes, and decodes them.

`bf16` rounds each number. `int8` and `int4` replace each number by a small integer, its *code*, and
store one scale for every *block* of 128 numbers, with `number = code * scale` (block-wise
quantization, Dettmers et al., arXiv 2110.02861).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Method = Literal["bf16", "int8", "int4"]
"""How numbers are quantized."""

BLOCK = 128
"""Number of values that share one scale."""
LARGEST_CODE = {"int8": 127, "int4": 7}
# A CPU encodes this many values at a time, so that they stay in its cache from one operation to the
# next: 11 million values then take 23 ms instead of 115.
VALUES_IN_CACHE = 2**18


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns float32, or the dtype itself if it has more bits."""
    return torch.promote_types(dtype, torch.float32)


def encode(values: Tensor, method: Method, errors_out: Tensor | None = None) -> Tensor:
    """Encodes rows of numbers as rows of bytes.

    Args:
        values: contiguous tensor of shape `(rows, n)`, where n is a positive multiple of `BLOCK`.
        method: how the numbers are quantized.
        errors_out: tensor like `values`, which is filled with the rounding errors (0 where an error
            is not finite). It is not written for bf16.

    Returns:
        A tensor of dtype uint8, of shape `(rows, 2 n)` for bf16, `(rows, n + 4 n / BLOCK)` for
        int8 and `(rows, n / 2 + 4 n / BLOCK)` for int4. If a value is NaN or infinite, its whole
        block is decoded as values that are NaN or infinite.
    """
    if method == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)

    # For each block, with integers from -L to L as codes:
    #     scale = max(abs(values)) / L
    #     code = round(value / scale)
    #     error = value - code * scale
    # `codes` and `scales` make up the result. They are filled through views in which each block is
    # a row.
    num_rows, length = values.shape
    codes = values.new_empty(num_rows, length, dtype=torch.int8)
    scales = values.new_empty(num_rows, length // BLOCK, dtype=torch.float32)
    blocks = values.view(-1, BLOCK)
    code_blocks = codes.view(-1, BLOCK)
    scale_of_block = scales.view(-1, 1)
    error_blocks = None if errors_out is None else errors_out.view(-1, BLOCK)
    num_blocks = len(blocks)

    # A GPU encodes all blocks at once, a CPU as many as fit into its cache.
    blocks_at_once = num_blocks if values.is_cuda else VALUES_IN_CACHE // BLOCK
    buffer = torch.empty_like(blocks[:blocks_at_once], dtype=wide_dtype(values.dtype))
    for begin in range(0, num_blocks, blocks_at_once):
        chosen_blocks = slice(begin, begin + blocks_at_once)
        wide = blocks[chosen_blocks].to(buffer.dtype)
        result = buffer[: len(wide)]  # overwritten by each operation below
        scale = scale_of_block[chosen_blocks]

        # `aminmax` over a short axis takes twenty times as long as `amax` of the absolute values.
        torch.abs(wide, out=result)
        scale.copy_(result.amax(dim=1, keepdim=True)).div_(LARGEST_CODE[method])
        scale.clamp_(min=torch.finfo(torch.float32).tiny)  # avoids a division by 0
        torch.div(wide, scale, out=result)
        result.round_()
        code_blocks[chosen_blocks].copy_(result)

        if error_blocks is not None:
            errors = error_blocks[chosen_blocks]
            result.mul_(scale)  # the values that `decode` will return
            torch.sub(wide, result, out=errors)
            # A NaN shows in the sum of this step, but must not be added to all later steps.
            errors.nan_to_num_(0.0, 0.0, 0.0)

    if method == "int4":
        # Each byte holds two codes: one from the first half of the row in its low four bits, and
        # one from the second half in its high four bits.
        first_half, second_half = codes.tensor_split(2, dim=1)
        codes = (first_half & 15) | (second_half << 4)

    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], dim=1)


def decode(encoded: Tensor, method: Method, out: Tensor) -> Tensor:
    """Decodes the result of `encode` into `out`, and returns `out`.

    Args:
        encoded: the result of `encode`: each row holds its codes, then a scale for each block.
        method: the method that was passed to `encode`.
        out: tensor of shape `(rows, n)` that the numbers are written to.
    """
    if method == "bf16":
        return out.copy_(encoded.view(torch.bfloat16))

    # The number of bytes with codes in each row. For n = 256, a row has 2 blocks: with int4 these
    # are 2 * 64 bytes, followed by 2 * 4 bytes of scales.
    num_blocks = out.shape[1] // BLOCK
    codes_per_byte = 1 if method == "int8" else 2
    num_code_bytes = num_blocks * BLOCK // codes_per_byte

    codes = encoded[:, :num_code_bytes].view(torch.int8)
    if method == "int4":
        codes = _unpack_four_bit_codes(codes)
    code_blocks = codes.view(len(encoded), num_blocks, BLOCK)  # (rows, blocks, values of a block)

    scales = encoded[:, num_code_bytes:].contiguous().view(torch.float32)  # (rows, blocks)

    # number = code * scale, multiplied in float32, or in float64 if `out` is of that dtype.
    scales = scales.to(wide_dtype(out.dtype)).unsqueeze(2)
    torch.mul(code_blocks, scales, out=out.view(code_blocks.shape))
    return out


def _unpack_four_bit_codes(packed: Tensor) -> Tensor:
    """Returns the codes from -7 to 7 (-8 is not used) that are packed two to a byte.

    The low four bits of each byte are a code of the first half of the row, and the high four bits a
    code of the second half. The byte `1101 0010`, for example, has the codes 2 and -3.

    Args:
        packed: tensor of dtype int8, shape `(rows, n / 2)`.

    Returns:
        A tensor of dtype int8, shape `(rows, n)`.
    """
    # A right shift of a signed integer repeats the sign bit: 1101 0010 becomes 1111 1101, which is
    # -3 as an int8.
    codes_of_second_half = packed >> 4

    # Shift the low bits to the high half first, which drops the other code: 1101 0010 becomes
    # 0010 0000, and then 0000 0010, which is 2.
    codes_of_first_half = (packed << 4) >> 4

    return torch.cat([codes_of_first_half, codes_of_second_half], dim=1)
