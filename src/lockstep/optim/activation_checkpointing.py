"""Activation checkpointing: it saves memory, costs time, and gives the same gradients bit for bit.

A wrapped submodule keeps only its inputs, and runs its forward pass again in the backward pass
(Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174). This is
`torch.utils.checkpoint` without reentrant autograd, with two additions. The submodule stays the
same object with the same name, so the keys of `state_dict` do not change. And the second run sees
buffers and the random streams of numpy and `random` as they were before the first run; they are
restored afterwards. Otherwise BatchNorm's running statistics would be updated twice, and a block
that is skipped at random might be skipped in only one of the runs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint

from lockstep.errors import SettingError, UsageError
from lockstep.keyword_arguments import check_keywords
from lockstep.optim.module_filter import ModuleFilter, candidates, repeated_blocks, select_modules
from lockstep.optim.saved_activations import Activations, measure
from lockstep.settings import check_whole_number
from lockstep.torch_compat import is_sharded
from lockstep.units import parse_bytes

Example = tuple[tuple[Any, ...], Mapping[str, Any]]
"""The positional and the keyword arguments of one call of a model."""

MAX_BLOCKS_COMPARED = 8
"""How many candidates are compared when the next block is chosen."""
SHARE_OF_FREE_MEMORY = 0.9
"""The fraction of the free memory that `budget="auto"` uses. Some memory is lost to gaps between
tensors and to kernels."""
TENSORS_PER_PARAMETER = 3
"""A training adds this many tensors of a parameter's size: its gradient and the state of Adam."""


@check_keywords("lockstep.checkpoint_activations")
def checkpoint_activations(
    module: nn.Module,
    submodules: ModuleFilter | None = None,
    *,
    every: int = 1,
    budget: int | str | None = None,
    example: Example | None = None,
) -> int:
    """Makes the chosen submodules recompute their activations in backward instead of keeping them.

    `checkpoint_activations(model)` chooses the repeated blocks of the model. It can be called
    before or after `world.prepare` (with `budget`, before it), and a second call wraps nothing
    twice. Random numbers (dropout) are the same in both runs. A SyncBatchNorm inside communicates
    in both, at the same points on all ranks, so all ranks must choose the same submodules. If the
    model is compiled (`torch.compile`), the submodules must have no buffers that change in
    training, such as those of BatchNorm: torch does not support this.

    Args:
        module: the model, which is changed in place. The model as a whole is never wrapped.
        submodules: a class or tuple of classes, a pattern of names as in `named_modules()`
            (`"encoder.layers.*"`), or a function that returns True for the modules to choose. If a
            chosen module is inside another one, only the outer one is wrapped. None for
            `lockstep.optim.module_filter.repeated_blocks`.
        every: 2 chooses every second of these submodules, beginning with the first one.
        budget: the memory for what the model keeps for backward: `"2GiB"`, or a number of bytes.
            As few submodules as possible are chosen, those that save most first; the model is
            called once with `example` to measure what they save. `"auto"` is 9/10 of the free
            memory of the model's GPU, minus what gradients and Adam need: with 80 GiB free and
            10 GiB for them, 62 GiB. It is that of the rank with the least, so all ranks of the run
            must call this together.
        example: `(args, kwargs)` of one call of the model, of the size used in training, on the
            model's device.

    Returns:
        The number of chosen submodules, which now recompute their activations.

    Raises:
        SettingError: nothing matches, an argument is invalid, or no choice fits the budget.
        UsageError: `budget` was given for a model that is prepared, or that computes gradients in
            its forward pass.
    """
    _check_policy(every, budget, example)
    blocks = _select_blocks(module, submodules)
    if budget is not None:
        assert example is not None  # `_check_policy` demands both or none
        chosen = _choose_by_budget(module, blocks, budget, example)
    else:
        chosen = blocks[::every]

    for block in chosen:
        if not _recomputes(block):
            block.forward = _RecomputedForward(block)

    return len(chosen)


def _check_policy(every: int, budget: int | str | None, example: Example | None) -> None:
    """Raises SettingError for arguments that are invalid or exclude each other."""
    check_whole_number(f"checkpoint_activations(..., every={every!r})", every)
    if budget is None and example is None:
        return

    if budget is None or example is None:
        given = "budget" if example is None else "example"
        raise SettingError(
            f"checkpoint_activations(..., {given}=...)",
            "the budget is met by measuring an example, so the two go together",
            "give both: budget='2GiB', example=((images,), {})",
        )

    if every != 1:
        raise SettingError(
            f"checkpoint_activations(..., every={every}, budget={budget!r})",
            "each of them says how many blocks recompute",
            "give one of the two",
        )

    is_pair = isinstance(example, tuple) and len(example) == 2
    if not is_pair or not isinstance(example[0], tuple) or not isinstance(example[1], Mapping):
        raise SettingError(
            "checkpoint_activations(..., example=...)",
            "it is no pair of a tuple and a dict",
            "for model(images, scale=2) give example=((images,), {'scale': 2})",
        )


def _select_blocks(module: nn.Module, submodules: ModuleFilter | None) -> list[nn.Module]:
    """Returns the submodules that may recompute their activations.

    Args:
        module: the model.
        submodules: the user's choice; None for the repeated blocks of the model.

    Raises:
        SettingError: there are none.
    """
    if submodules is not None:
        # If nothing matches, this raises an error about the given call, such as
        # checkpoint_activations(..., ['encoder.*']).
        selected = select_modules(module, submodules, "checkpoint_activations(..., {})")
        return [block for _, block in selected]

    repeated = repeated_blocks(module)
    if not repeated:
        raise SettingError(
            "checkpoint_activations(model)",
            "no block repeats in it",
            f"choose among: {candidates(module)}",
        )
    return [block for _, block in repeated]


def _choose_by_budget(
    module: nn.Module, blocks: list[nn.Module], budget: int | str, example: Example
) -> list[nn.Module]:
    """Returns the blocks that recompute already, and as few others as the budget requires.

    Raises:
        SettingError: no choice fits, or the budget is not an amount of memory.
        UsageError: the model is prepared, so its forward pass involves other ranks.
    """
    is_sharded_model = any(is_sharded(parameter) for parameter in module.parameters())
    if isinstance(module, DistributedDataParallel) or is_sharded_model:
        raise UsageError(
            "checkpoint_activations(..., budget=...) of a prepared model",
            "it is measured by a forward pass, and this one would involve the other ranks",
            "call it before world.prepare",
        )

    max_bytes = _free_bytes(module) if budget == "auto" else parse_bytes(budget)
    if max_bytes is None:
        raise SettingError(
            f"checkpoint_activations(..., budget={budget!r})",
            "it is no amount of memory",
            "give bytes, a text such as '2GiB' or '500MB', or 'auto'",
        )

    # The forward pass changes random streams and buffers, which are restored afterwards: torch's
    # streams by `fork_rng`, all others by `_StateBefore`.
    gpus = {p.device.index for p in module.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(gpus), _StateBefore(module):
        args, kwargs = example
        activations = measure(module, blocks, args, kwargs)

    # From here on blocks are identified by their numbers in `blocks`. Some of those that ran may
    # recompute already, from an earlier call of `checkpoint_activations`.
    numbers_of_called_blocks = activations.activations_of_block.keys()
    already_recomputed = {
        number for number in numbers_of_called_blocks if _recomputes(blocks[number])
    }
    recomputed, peaks = _add_until_it_fits(activations, already_recomputed, max_bytes)

    # `peaks[0]` is the most memory that is kept at a time with `already_recomputed`, and
    # `peaks[-1]` with `recomputed`.
    if peaks[-1] > max_bytes:
        raise SettingError(
            f"checkpoint_activations(..., budget={budget!r})",
            f"{max_bytes:,} bytes; the least that any choice keeps is {min(peaks):,}, and "
            f"{peaks[0]:,} are kept as it is",
            "make the example (and micro_batch_size) smaller, or choose other submodules",
        )

    return [blocks[number] for number in sorted(recomputed)]


def _add_until_it_fits(
    activations: Activations, already_recomputed: set[int], max_bytes: int
) -> tuple[set[int], list[int]]:
    """Chooses blocks to recompute, one by one, until the kept memory fits into a budget.

    Args:
        activations: what each block keeps.
        already_recomputed: the numbers of the blocks that recompute already.
        max_bytes: the budget.

    Returns:
        The numbers of all blocks that recompute then; and the peaks of kept memory in bytes, before
        the first block was chosen and after each choice. The last peak exceeds the budget if even
        all blocks do not suffice.
    """
    recomputed = set(already_recomputed)

    # Begin with the blocks that save most.
    remaining = [number for number in activations.by_saving() if number not in recomputed]
    peaks = [activations.peak(recomputed)]
    while peaks[-1] > max_bytes and remaining:
        # Of the few that save most, choose the one that gives the lowest peak. This may not be the
        # first one: the later a block runs, the more is in memory while it is recomputed.
        peak_with = {}
        for number in remaining[:MAX_BLOCKS_COMPARED]:
            peak_with[number] = activations.peak(recomputed | {number})
        best = min(peak_with, key=lambda number: peak_with[number])

        remaining.remove(best)
        recomputed.add(best)
        peaks.append(peak_with[best])

    return recomputed, peaks


def _free_bytes(module: nn.Module) -> int:
    """Returns how many bytes of GPU memory a training leaves for activations.

    All ranks get the same result, that of the rank with the least memory. With several ranks it
    takes one all-reduce.

    Raises:
        SettingError: the model is not on a GPU, or has no parameters.
    """
    parameters = list(module.parameters())
    if not parameters:
        raise SettingError(
            "checkpoint_activations(..., budget='auto')",
            "the model has no parameters, which would tell what GPU it is on",
            "give bytes",
        )

    device = parameters[0].device
    if device.type != "cuda":
        raise SettingError(
            "checkpoint_activations(..., budget='auto')",
            f"the model is on {device.type}, whose free memory says little",
            "move it to the GPU first (model.to(world.device)), or give bytes",
        )

    free, _ = torch.cuda.mem_get_info(device)

    # Torch keeps the memory of freed tensors, which the driver reports as used.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    # The gradients and the state of Adam, which training will add.
    still_needed = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        num_tensors = TENSORS_PER_PARAMETER
        if parameter.grad is not None:  # the gradient is already in memory
            num_tensors -= 1
        still_needed += num_tensors * parameter.nbytes

    available = torch.tensor([int(SHARE_OF_FREE_MEMORY * free) - still_needed], device=device)
    if dist.is_initialized():
        dist.all_reduce(available, dist.ReduceOp.MIN)

    return int(available)


def _recomputes(module: nn.Module) -> bool:
    """Returns True if `checkpoint_activations` has wrapped a module."""
    # The wrapper is an attribute of the module object, which hides the method of the class.
    return isinstance(vars(module).get("forward"), _RecomputedForward)


class _RecomputedForward:
    """Replaces a module's `forward` by one that runs again in the backward pass.

    It is an object instead of a function, so that a copy of the module contains a copy of it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.__wrapped__ = module.forward  # `inspect.signature` looks for this name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # no backward pass will follow
            return self.__wrapped__(*args, **kwargs)
        run = partial(self.__wrapped__, **kwargs)
        if torch.compiler.is_compiling() and not _changing_buffers(self.module):
            # The compiler puts both runs into one graph, which supports no contexts. None is
            # needed, because there are no buffers to restore.
            return checkpoint.checkpoint(run, *args, use_reentrant=False)
        return checkpoint.checkpoint(run, *args, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Returns the contexts of the first and the second run; called by torch before both."""
        return nullcontext(), _StateBefore(self.module)


class _Buffer(NamedTuple):
    """A buffer of a module."""

    module: nn.Module
    name: str
    tensor: Tensor


class _StateBefore:
    """A context in which buffers and random streams are as they were when it was created.

    The buffers of the module are replaced by copies, and the streams of numpy and `random` are set;
    torch restores its own streams. Everything is restored when the context is left. It may be
    entered several times, because each backward pass through a retained graph runs the forward pass
    again.

    Args:
        module: the module whose buffers are replaced, including those of its submodules.
    """

    def __init__(self, module: nn.Module) -> None:
        self._before: list[_Buffer] = []
        """Copies of the buffers, made when this object was created."""
        for buffer in _changing_buffers(module):
            self._before.append(buffer._replace(tensor=buffer.tensor.clone()))

        self._streams_before = _random_states()
        self._current: list[_Buffer] = []
        """While the context is entered: the buffers to restore when it is left."""
        self._current_streams = self._streams_before
        """While the context is entered: the random streams to restore when it is left."""

    def __enter__(self) -> None:
        self._current = []
        for buffer in self._before:
            tensor = buffer.module.get_buffer(buffer.name)
            self._current.append(buffer._replace(tensor=tensor))
        for buffer in self._before:
            setattr(buffer.module, buffer.name, buffer.tensor.clone())
        self._current_streams = _random_states()
        _set_random_states(self._streams_before)

    def __exit__(self, *_: object) -> None:
        for buffer in self._current:
            setattr(buffer.module, buffer.name, buffer.tensor)
        _set_random_states(self._current_streams)


def _random_states() -> tuple[Any, Any]:
    """Returns the states of the random streams of numpy and `random`."""
    return np.random.get_state(), random.getstate()


def _set_random_states(states: tuple[Any, Any]) -> None:
    """Sets the random streams of numpy and `random` to the given states."""
    numpy_state, python_state = states
    np.random.set_state(numpy_state)
    random.setstate(python_state)


def _changing_buffers(module: nn.Module) -> list[_Buffer]:
    """Returns the buffers of those submodules of a module that are in training mode.

    In evaluation mode, forward passes do not change buffers.
    """
    buffers: list[_Buffer] = []
    for submodule in module.modules():
        if submodule.training:
            for name, tensor in submodule.named_buffers(recurse=False):
                buffers.append(_Buffer(submodule, name, tensor))
    return buffers
