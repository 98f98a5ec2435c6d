"""Computes digests of samples: short JSON values by which two readings of a sample are compared.

A digest is exact, except for large arrays of measured numbers (pixels, audio, features). It has
three means of these, because machines decode images and round sums a little differently.
`digest_matching` compares digests.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SAMPLES_COMPARED = 16
"""The largest number of samples of a batch that are compared."""
MAX_NUMBERS = 2**16
"""About how many numbers of an array, evenly spread, go into its digest."""
MAX_NUMBERS_IN_BATCH = 512
"""The same for samples that are compared while a training loop is running."""
MAX_NUMBERS_KEPT = 16
"""The digest of an array of at most this size has all of its numbers."""
_DTYPES_OF_NUMPY = {
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip


def batch_digests(samples: Sequence[Any]) -> list[Any]:
    """Returns the digests of the first samples of a batch; None for one that cannot be read."""
    digests: list[Any] = []
    for sample in islice(samples, SAMPLES_COMPARED):
        try:
            digests.append(digest(sample, MAX_NUMBERS_IN_BATCH))
        except Exception:  # the sample is of a class of the user's, which may raise anything
            digests.append(None)
    return digests


def digest(value: Any, max_numbers: int = MAX_NUMBERS, *, file_names: bool = False) -> Any:
    """Returns the digest of a sample, or of a part of it.

    The digest of a container is the list of the digests of its items. For a mapping each item is
    `[key, digest]`: `{"label": 3}` gives `[["label", 3]]`.

    Args:
        value: the sample.
        max_numbers: the digest of an array is made of about this many of its numbers, evenly
            spread, so that a large array does not take long.
        file_names: True to digest the file name of a path, without its folders, which may differ
            between machines. False to take all paths for equal.
    """
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:  # the numbers of a sparse tensor are not compared
            return [str(value.dtype), list(value.shape)]
        value = value.detach().cpu()
        if value.dtype not in _DTYPES_OF_NUMPY:  # e.g. bfloat16, float8
            value = value.to(torch.float32)
        return _digest_array(value.numpy(), max_numbers)

    if hasattr(value, "__array_interface__"):  # a numpy array or an image
        return _digest_array(np.asarray(value), max_numbers)

    if isinstance(value, str):
        file_name = _file_name(value)
        is_path = file_name != value  # folders come before the file name
        if is_path and not file_names:
            return "path"  # the same for all paths
        return zlib.crc32(file_name.encode())

    if isinstance(value, bytes):
        return zlib.crc32(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return [
            [str(key), digest(item, max_numbers, file_names=file_names)]
            for key, item in value.items()
        ]
    if isinstance(value, Sequence):
        return [digest(item, max_numbers, file_names=file_names) for item in value]

    return type(value).__name__  # of any other object only the class is compared


def _file_name(text: str) -> str:
    """Returns the file name in a path, `images/7.png` -> `7.png`; any other text as it is."""
    return text.replace("\\", "/").rpartition("/")[2]


def _digest_array(array: npt.NDArray[Any], max_numbers: int) -> list[Any]:
    """Returns the digest of an array: its dtype, its shape, and something about its numbers.

    - Exact numbers, such as labels and tokens, give a checksum. These are all numbers that are not
      measured.
    - A few measured numbers (of type float) are kept, and compared with a tolerance.
    - Many measured numbers (of type float, or the bytes of an image) give three means, which are
      compared with a tolerance.

    Args:
        array: the array.
        max_numbers: the digest is made of about this many numbers, evenly spread.
    """
    dtype_and_shape = [str(array.dtype), list(array.shape)]
    is_numeric = array.dtype.kind in "biufc"  # bool, integers, float, complex
    if not is_numeric:
        return dtype_and_shape

    stride = max(1, array.size // max_numbers)
    chosen = array.reshape(-1)[::stride]

    few_are_chosen = chosen.size <= MAX_NUMBERS_KEPT
    is_floating_point = array.dtype.kind == "f"
    may_be_image = array.dtype == np.uint8 and not few_are_chosen
    is_measured = is_floating_point or may_be_image
    if not is_measured:
        return [*dtype_and_shape, zlib.crc32(np.ascontiguousarray(chosen).tobytes())]

    numbers = chosen.astype(np.float64)
    if few_are_chosen:
        return [*dtype_and_shape, *numbers.tolist()]

    # The first mean shows other magnitudes, the second another order of the numbers, and the third
    # other signs. Magnitudes are used because numbers with both signs could have a mean near 0, for
    # which a relative tolerance is too strict.
    magnitudes = np.abs(numbers)
    mean = float(magnitudes.mean())
    weights = np.linspace(0.5, 1.5, len(numbers))
    weighted_mean = float((magnitudes * weights).mean())
    mean_of_positive = float(np.maximum(numbers, 0.0).mean())
    return [*dtype_and_shape, mean, weighted_mean, mean_of_positive]
