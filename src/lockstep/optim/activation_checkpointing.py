"""Activation checkpointing: saves memory, costs time, and gives the same gradients bit for bit.

A wrapped submodule keeps only its inputs; in the backward pass its forward pass runs a second time
(Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174). That is
`torch.utils.checkpoint` without reentrant autograd, with two additions. The submodule stays the
same object under the same name, so `state_dict` keys do not change. And the second run sees buffers
and the random streams of numpy and `random` as they were before the first run, and restores them
afterwards. Torch alone would update BatchNorm's running statistics twice, and draw again whether a
block is skipped.
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

from lockstep.distributed.torch_compat import is_sharded
from lockstep.errors import SettingError, UsageError
from lockstep.optim.module_filter import ModuleFilter, candidates, repeated_blocks, select_modules
from lockstep.optim.saved_activations import Activations, measure
from lockstep.settings import check_whole_number
from lockstep.units import parse_bytes

Example = tuple[tuple[Any, ...], Mapping[str, Any]]
"""The positional and the keyword arguments of one call of a model."""

MAX_BLOCKS_COMPARED = 8
"""How many of the remaining blocks are compared before the next one is chosen."""
SHARE_OF_FREE_MEMORY = 0.9
"""What `budget="auto"` uses of the free memory. Some is lost between tensors and to kernels."""
TENSORS_PER_PARAMETER = 3
"""How many tensors of a parameter's size a training adds: the gradient and the state of Adam."""


def checkpoint_activations(
    module: nn.Module,
    submodules: ModuleFilter | None = None,
    *,
    every: int = 1,
    budget: int | str | None = None,
    example: Example | None = None,
) -> int:
    """Makes the chosen submodules recompute their activations in backward instead of keeping them.

    `checkpoint_activations(model)` takes the blocks that the model repeats. Call it before or after
    `world.prepare`, with `budget` before it; a second call wraps nothing twice. Random numbers
    (dropout) are the same in both runs. A SyncBatchNorm inside communicates in both, at the
    same points on all ranks, so all ranks choose the same. With `torch.compile` around them, torch
    refuses blocks that have buffers of their own in training (BatchNorm).

    Args:
        module: the model, changed in place; the model as a whole is never wrapped.
        submodules: a class or tuple of classes, a pattern of names as in `named_modules()`
            (`"encoder.layers.*"`), or a function that returns True for the modules to take. Of
            nested matches the outermost is taken. None for
            `lockstep.optim.module_filter.repeated_blocks`.
        every: take the first of these and every k-th after it.
        budget: take as few of these as needed, so that what the model keeps for backward fits into
            this many bytes (`"2GiB"`; a number), also while one of them is recomputed. They are
            chosen one by one, those that save most first. The model is measured by calling it
            once, in its present mode, with `example`. Nothing is kept meanwhile, and random
            streams and buffers are restored.
            `"auto"`: 9/10 of the free memory of the model's GPU, on the rank that has the least,
            minus the gradients and the state of Adam. All ranks of the run have to call it.
        example: `(args, kwargs)` of one call of the model, as large as those of the training, on
            the model's device.

    Returns:
        The number of submodules that were chosen and now recompute.

    Raises:
        SettingError: nothing matches, an argument has no meaning, or no choice fits the budget.
        UsageError: `budget` with a model that is prepared, or that computes gradients itself in
            its forward pass.
    """
    _check_policy(every, budget, example)
    blocks = _select_blocks(module, submodules)
    if budget is not None and example is not None:  # both or neither are given
        chosen = _choose_by_budget(module, blocks, budget, example)
    else:
        chosen = blocks[::every]

    for block in chosen:
        if not _recomputes(block):
            block.forward = _RecomputedForward(block)

    return len(chosen)


def _check_policy(every: int, budget: int | str | None, example: Example | None) -> None:
    """Raises SettingError for arguments of `checkpoint_activations` that have no meaning.

    That is so if they do not go together, or if one is not of its type.
    """
    check_whole_number(f"checkpoint_activations(..., every={every!r})", every)
    if budget is None and example is None:
        return

    if budget is None or example is None:
        given = "budget=...)" if example is None else "example=...)"
        raise SettingError(
            f"checkpoint_activations(..., {given}",
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
        submodules: which ones; None: the blocks that the model repeats.

    Raises:
        SettingError: there are none.
    """
    if submodules is not None:
        # In an error, the braces are replaced by the user's choice.
        selected = select_modules(module, submodules, "checkpoint_activations(..., {})")
    else:
        selected = repeated_blocks(module)

    if not selected:
        raise SettingError(
            "checkpoint_activations(model)",
            "no block repeats in it",
            f"choose among: {candidates(module)}",
        )

    return [block for _, block in selected]


def _choose_by_budget(
    module: nn.Module, blocks: list[nn.Module], budget: int | str, example: Example
) -> list[nn.Module]:
    """Returns the blocks that recompute already, and as few others as are needed for the budget.

    Raises:
        SettingError: no choice fits, or the budget is no amount of memory.
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

    # The forward pass changes random streams and buffers. They are restored when the contexts are
    # left: torch's streams by `fork_rng`, all others by `_StateBefore`.
    gpus = {p.device.index for p in module.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(gpus), _StateBefore(module):
        args, kwargs = example
        activations = measure(module, blocks, args, kwargs)

    # From here on blocks are identified by their numbers in `blocks`.
    recomputed = {number for number in activations.inside if _recomputes(blocks[number])}
    peaks = _add_until_it_fits(activations, recomputed, max_bytes)
    if peaks[-1] > max_bytes:
        raise SettingError(
            f"checkpoint_activations(..., budget={budget!r})",
            f"{max_bytes:,} bytes; the least that any choice keeps is {min(peaks):,}, and "
            f"{peaks[0]:,} are kept as it is",
            "make the example (and micro_batch_size) smaller, or choose other submodules",
        )

    return [blocks[number] for number in sorted(recomputed)]


def _add_until_it_fits(activations: Activations, recomputed: set[int], max_bytes: int) -> list[int]:
    """Adds blocks to those that recompute, one by one, until what is kept fits into a budget.

    Args:
        activations: what each block keeps.
        recomputed: the numbers of the blocks that recompute. The new ones are added.
        max_bytes: the budget.

    Returns:
        The peaks of memory in bytes: before the first block was added, and after each. The last one
        exceeds the budget if it does not fit even with all blocks.
    """
    # Those that save most stand first.
    remaining = [number for number in activations.by_saving() if number not in recomputed]
    peaks = [activations.peak(recomputed)]
    while peaks[-1] > max_bytes and remaining:
        # Of the first few, take the one with which the peak is lowest: the later a block runs, the
        # more is kept while it is recomputed.
        best = remaining[0]
        lowest_peak = activations.peak(recomputed | {best})
        for number in remaining[1:MAX_BLOCKS_COMPARED]:
            peak = activations.peak(recomputed | {number})
            if peak < lowest_peak:
                best = number
                lowest_peak = peak

        remaining.remove(best)
        recomputed.add(best)
        peaks.append(lowest_peak)

    return peaks


def _free_bytes(module: nn.Module) -> int:
    """Returns the bytes of GPU memory that a training leaves for activations.

    It is the same on all ranks: that of the rank with the least. One all-reduce, if there are
    several ranks.

    Raises:
        SettingError: the model is not on a GPU.
    """
    parameters = list(module.parameters())
    device = parameters[0].device
    if device.type != "cuda":
        raise SettingError(
            "checkpoint_activations(..., budget='auto')",
            f"the model is on {device.type}, whose free memory says little",
            "move it to the GPU first (model.to(world.device)), or give bytes",
        )

    free, _ = torch.cuda.mem_get_info(device)

    # Torch keeps memory of freed tensors, which counts as used.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    still_needed = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        num_tensors = TENSORS_PER_PARAMETER
        if parameter.grad is not None:  # the gradient is in memory already
            num_tensors -= 1
        still_needed += num_tensors * parameter.nbytes

    available = torch.tensor([int(SHARE_OF_FREE_MEMORY * free) - still_needed], device=device)
    if dist.is_initialized():
        dist.all_reduce(available, dist.ReduceOp.MIN)

    return int(available)


def _recomputes(module: nn.Module) -> bool:
    """Returns True if `checkpoint_activations` has chosen a module before."""
    # It sets `forward` on the object itself, where it hides that of the class.
    return isinstance(vars(module).get("forward"), _RecomputedForward)


class _RecomputedForward:
    """Replaces a module's `forward` by one that runs again in the backward pass.

    It is an object and not a function, so that copies of the module copy it too.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.__wrapped__ = module.forward  # the name by which `inspect.signature` finds it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # no backward pass will follow
            return self.__wrapped__(*args, **kwargs)
        run = partial(self.__wrapped__, **kwargs)
        if torch.compiler.is_compiling() and not _changing_buffers(self.module):
            # The compiler puts both runs into one graph, which cannot have contexts. It needs none,
            # since there are no buffers that change.
            return checkpoint.checkpoint(run, *args, use_reentrant=False)
        return checkpoint.checkpoint(run, *args, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Returns the contexts of the two runs. Torch calls it before the first run."""
        return nullcontext(), _StateBefore(self.module)


class _Buffer(NamedTuple):
    """A buffer of a module."""

    module: nn.Module
    name: str
    tensor: Tensor


class _StateBefore:
    """A context in which buffers and random streams are as they were when it was created.

    The buffers of the module are replaced by copies, and the streams of numpy and `random` are
    set; torch restores its own streams. All is put back on leaving. It may be entered several
    times: each backward pass through a graph that is kept runs the forward pass again.

    Args:
        module: its buffers, and those of all its submodules, are replaced.
    """

    def __init__(self, module: nn.Module) -> None:
        self._before: list[_Buffer] = []
        """Copies of the buffers from when this object was created."""
        for buffer in _changing_buffers(module):
            self._before.append(buffer._replace(tensor=buffer.tensor.clone()))

        self._streams_before = _random_states()
        self._current: list[_Buffer] = []
        """The buffers outside of the context, while it is entered."""
        self._current_streams = self._streams_before
        """The random streams outside of the context, while it is entered."""

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
    """Returns the states of the random streams of numpy and of `random`."""
    return np.random.get_state(), random.getstate()


def _set_random_states(states: tuple[Any, Any]) -> None:
    """Sets the random streams of numpy and of `random`."""
    numpy_state, python_state = states
    np.random.set_state(numpy_state)
    random.setstate(python_state)


def _changing_buffers(module: nn.Module) -> list[_Buffer]:
    """Returns the buffers of a module and its submodules, as far as these are in training mode.

    In evaluation mode forward passes do not change buffers.
    """
    buffers: list[_Buffer] = []
    for submodule in module.modules():
        if submodule.training:
            for name, tensor in submodule.named_buffers(recurse=False):
                buffers.append(_Buffer(submodule, name, tensor))
    return buffers
