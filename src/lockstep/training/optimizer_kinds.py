"""What differs between the optimizers of torch: which of them compute with shards, and faster ways.

A *shard* is the part of a parameter that one rank holds, under FSDP.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from lockstep.errors import UsageError
from lockstep.strategies.base import parameters_of
from lockstep.torch_compat import is_sharded

# On the CPU, torch's implementations over lists of tensors (`foreach`) give the same bits as those
# over single tensors with a fraction of the calls (tests/optim/test_accumulation.py). The fused
# implementations do not.
OPTIMIZERS_WITH_SAME_BITS = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adamax,
    torch.optim.Adadelta,
)
# With few tensors, lists cost as much as they save. With large tensors, each operation reads memory
# that the previous one has pushed out of the cache, and temporary lists are as large as the model.
FOREACH_MIN_TENSORS = 8
FOREACH_MAX_MEAN_ELEMENTS = 2**14

# On the CPU, torch's unfused updates of float32 and float64 give the same bits wherever a tensor is
# cut, which those of smaller types do not.
MIN_BYTES_WITH_SAME_BITS = 4

# Every error of torch about operations on shards contains one of these words, for example
# "aten.add.Tensor: got mixed torch.Tensor and DTensor".
WORDS_OF_SHARD_ERRORS = ("DTensor", "Sharding propagation")


def refuse_optimizer_wrong_on_shards(optimizer: Optimizer) -> None:
    """Raises UsageError for an optimizer that torch computes wrongly with shards, without an error.

    Adafactor takes means over the rows and columns of a parameter. Torch 2.11 and later refuse that
    for shards; in torch 2.9 the results differ from those of whole parameters.
    """
    # `torch.__version__` compares itself as a version, so 2.9 is less than 2.11.
    torch_computes_it_wrongly = torch.__version__ < "2.11"
    is_adafactor = isinstance(optimizer, torch.optim.Adafactor)
    if not (is_adafactor and torch_computes_it_wrongly):
        return

    if any(is_sharded(parameter) for parameter in parameters_of(optimizer)):
        kind = type(optimizer).__name__
        raise UsageError(
            f"{kind} on the shards of a model, with torch {torch.__version__}",
            "torch 2.9 computes it wrongly with parameters that are spread over the ranks, without "
            "an error; so it is refused before torch 2.11",
            f"use strategy='ddp' with {kind}, or another optimizer",
        )


def refuse_optimizer_with_bits_that_depend_on_shards(optimizer: Optimizer) -> None:
    """Raises UsageError for an optimizer whose bits depend on how parameters are cut into shards.

    On the CPU, torch computes the elements of a tensor in full vectors, and the last ones one by
    one. The two ways round differently in an operation that rounds several times, such as a fused
    update, or any update in bf16. So where a shard ends decides some bits.
    """
    shards = [parameter for parameter in parameters_of(optimizer) if is_sharded(parameter)]
    if not any(shard.device.type == "cpu" for shard in shards):
        return

    kind = type(optimizer).__name__
    if any(group.get("fused") for group in optimizer.param_groups):
        raise UsageError(
            f"{kind}(fused=True) on the shards of a model, with virtual_ranks",
            "on the CPU torch's fused kernel rounds the last elements of each shard differently, "
            "so bits depend on the number of processes",
            "leave fused=True out, or use strategy='ddp'",
        )

    for shard in shards:
        is_half_precision = shard.dtype.itemsize < MIN_BYTES_WITH_SAME_BITS
        if is_half_precision:
            raise UsageError(
                f"{kind} on shards of the type {shard.dtype}, with virtual_ranks",
                "on the CPU torch rounds the last elements of each shard differently in half "
                "precision, so bits depend on the number of processes",
                "keep the weights in float32 (precision='bf16' computes in bf16 all the same), or "
                "use strategy='ddp'",
            )


def explain_shard_error(optimizer: Optimizer, error: Exception) -> UsageError | None:
    """Returns an error with advice if an optimizer failed in its step because of shards.

    Returns:
        The error to raise, or None if the error of the step has another cause.
    """
    if not any(words in str(error) for words in WORDS_OF_SHARD_ERRORS):
        return None
    shards = [parameter for parameter in parameters_of(optimizer) if is_sharded(parameter)]
    if not shards:
        return None

    kind = type(optimizer).__name__
    for shard in shards:
        gradient_is_whole = shard.grad is not None and not is_sharded(shard.grad)
        if gradient_is_whole:
            return UsageError(
                f"{kind}.step() with a gradient that the script has made itself",
                f"the gradient of a parameter of shape {tuple(shard.shape)} is an ordinary tensor, "
                "while the parameter is spread over the ranks",
                "weigh the loss instead, so that world.backward computes the gradients, or change "
                "its gradients in place (parameter.grad.mul_(...))",
            )

    first_line = str(error).strip().splitlines()[0]
    first_sentence = first_line.split(". ")[0]
    return UsageError(
        f"{kind}.step() on the shards of a model",
        "torch cannot compute it with parameters that are spread over the ranks "
        f"({first_sentence[:200]})",
        f"use strategy='ddp' with {kind}, or an optimizer that updates every element by itself "
        "and without masks, such as SGD, Adam, AdamW, RMSprop or Adagrad",
    )


def choose_foreach(optimizer: Optimizer, device: torch.device) -> str | None:
    """Switches an optimizer to `foreach` if this is faster and gives the same bits.

    `foreach` is torch's implementation that works on lists of tensors.

    Returns:
        The reason to print; None if nothing was changed.
    """
    if device.type != "cpu" or type(optimizer) not in OPTIMIZERS_WITH_SAME_BITS:
        return None

    # With `fused` the user has chosen another implementation. With the others it is not tested
    # that `foreach` gives the same bits.
    flags_against_foreach = ("fused", "differentiable", "capturable", "maximize")
    for group in optimizer.param_groups:
        user_has_chosen = group.get("foreach") is not None
        if user_has_chosen or any(group.get(flag) for flag in flags_against_foreach):
            return None

        # `foreach` does not accept a learning rate or beta that is a tensor itself.
        settings = [group.get("lr"), *group.get("betas", ())]
        if any(isinstance(setting, torch.Tensor) for setting in settings):
            return None

    sizes = [parameter.numel() for parameter in parameters_of(optimizer)]
    if len(sizes) < FOREACH_MIN_TENSORS:
        return None

    mean_size = sum(sizes) / len(sizes)
    if mean_size > FOREACH_MAX_MEAN_ELEMENTS:
        return None

    for group in optimizer.param_groups:
        group["foreach"] = True

    return "updates all tensors in one call; the same bits as one at a time"
