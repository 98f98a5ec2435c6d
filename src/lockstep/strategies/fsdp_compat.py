"""Makes methods of other libraries work on models whose parameters are shards.

`fully_shard` replaces the parameters of a model by DTensors, of which each rank has a *shard*. Some
methods expect whole parameters: `save_pretrained` of Hugging Face's models would write shards, and
torch's `AveragedModel` would mix shards and plain tensors in one call. They are replaced here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from lockstep.checkpoint.modules import plain_state_dict
from lockstep.checkpoint.weights import gather_on_main
from lockstep.distributed.collectives import run_on_all_ranks
from lockstep.distributed.process_group import Run


def save_pretrained_whole(module: Any, run: Run) -> None:
    """Makes `save_pretrained`, a method of Hugging Face's models, write whole weights.

    All ranks have to call the method together: rank 0 gathers the weights on the CPU and writes
    them.
    """
    original = module.save_pretrained

    def save_pretrained(save_directory: Any, *args: Any, **options: Any) -> Any:
        """Gathers the weights of `module` on rank 0, and calls its original method there."""
        # A caller that passes the weights has gathered them itself, and decides which ranks write.
        if options.get("state_dict") is not None:
            return original(save_directory, *args, **options)

        state = plain_state_dict(module)
        gather_on_main(state, run.collectives)  # replaces shards by whole weights, on rank 0

        def write() -> Any:
            """Writes the weights on rank 0; called on all ranks, so that all get its errors."""
            if not run.topology.is_main:
                return None
            # Not all libraries accept the weights as an argument of `save_pretrained`, but all of
            # them call the model's `state_dict`.
            with _with_state_dict(module, state):
                return original(save_directory, *args, **options)

        return run_on_all_ranks(run.collectives, f"saving weights to {save_directory}", write)

    module.save_pretrained = save_pretrained


@contextmanager
def _with_state_dict(module: Any, state: Mapping[str, Any]) -> Iterator[None]:
    """A context in which `module.state_dict()` returns a copy of the given state."""
    vars(module)["state_dict"] = lambda *_, **__: OrderedDict(state)
    try:
        yield
    finally:
        del vars(module)["state_dict"]


def average_shards_separately(module: AveragedModel) -> None:
    """Lets `AveragedModel(use_buffers=True)` average a model whose parameters are shards.

    `AveragedModel` passes parameters and buffers to one call of `multi_avg_fn`, but torch cannot
    compute with DTensors and plain tensors in one list. So they are passed in two calls.
    """
    original_average = module.multi_avg_fn
    if original_average is None:
        # An `avg_fn` is called for one tensor at a time. Without it, torch would average lists with
        # both kinds of tensors on GPUs.
        if module.avg_fn is None:
            module.avg_fn = get_swa_avg_fn()  # type: ignore[no-untyped-call]
        return

    def average_separately(
        averaged: Sequence[Tensor], current: Sequence[Tensor], num_averaged: Tensor | int
    ) -> None:
        """Calls the original `multi_avg_fn` for the shards, and then for the plain tensors."""
        shards: list[tuple[Tensor, Tensor]] = []
        plain_tensors: list[tuple[Tensor, Tensor]] = []
        for pair in zip(averaged, current, strict=True):
            is_shard = isinstance(pair[0], DTensor)
            pairs = shards if is_shard else plain_tensors
            pairs.append(pair)

        for pairs in (shards, plain_tensors):
            if pairs:
                averaged_of_kind = [average for average, _ in pairs]
                current_of_kind = [current for _, current in pairs]
                original_average(averaged_of_kind, current_of_kind, num_averaged)

    module.multi_avg_fn = average_separately
