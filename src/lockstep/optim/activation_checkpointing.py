"""Activation checkpointing: memory for time, with the same gradients bit for bit.

A wrapped submodule keeps its inputs alone; in backward its forward runs a second time (Chen et al.,
"Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174). That is
`torch.utils.checkpoint` without reentrant autograd. Two things are added here. The submodule stays
the same object under the same name, so `state_dict` keys do not change. And the second run
sees the buffers, and the random streams of numpy and `random`, as they were before the first and
leaves them as it found them: torch alone would update BatchNorm's running statistics twice, and
draw again whether a block is skipped.

What a forward pass keeps for backward, in bytes, block by block.

Autograd asks `torch.autograd.graph.saved_tensors_hooks` what to do with each tensor that it keeps.
Here it is told to keep nothing: the bytes are counted by storage and let go, so a model is measured
that would not fit. Parameters and buffers are there anyway and are not counted.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint

from lockstep.batch.pytree import tensors
from lockstep.distributed.torch_compat import is_sharded
from lockstep.errors import SettingError, UsageError
from lockstep.optim.module_filter import ModuleFilter, candidates, repeated_blocks, select_modules
from lockstep.settings import check_whole_number
from lockstep.units import parse_bytes

Example = tuple[tuple[Any, ...], Mapping[str, Any]]

MAX_COMPARED = 8

_OF_FREE = 0.9
"""What `budget="auto"` takes of the free memory: some is lost between tensors and to kernels."""
_PER_PARAMETER = 3
"""Tensors of a parameter's size that a training adds: its gradient and what Adam remembers."""


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
            (`"encoder.layers.*"`), or a function that says yes or no to each module; of nested
            matches the outermost is taken. None: `lockstep.optim.module_filter.repeated_blocks`.
        every: of these the first and every k-th after it.
        budget: of these as few as are needed so that what the model keeps for backward fits into
            so many bytes (`"2GiB"`; a number), also while one of them is recomputed. They are
            chosen one by one, those that save most first. It is measured by calling the model
            once, in its present mode, with `example`; nothing is kept meanwhile, and random
            streams and buffers stay as they are.
            `"auto"`: 9/10 of the free memory of the model's GPU, on the rank that has the least,
            less the gradients and the state of Adam; every rank of the run then needs to call it.
        example: `(args, kwargs)` of one call of the model, as large as those of the training, on
            the model's device.

    Returns:
        How many submodules are chosen and now recompute.

    Raises:
        SettingError: nothing matches, an argument has no meaning, or no choice fits the budget.
        UsageError: `budget` with a model that is prepared, or that computes gradients itself in
            its forward pass.
    """
    _check_policy(every, budget, example)
    found = _found(module, submodules)
    chosen = found[::every]
    if budget is not None and example is not None:
        chosen = _fitting(module, found, budget, example)
    for submodule in chosen:
        if not _recomputes(submodule):
            submodule.forward = _Recomputed(submodule)
    return len(chosen)


def _check_policy(every: int, budget: int | str | None, example: Example | None) -> None:
    check_whole_number(f"checkpoint_activations(..., every={every!r})", every)
    if budget is None and example is None:
        return
    if budget is None or example is None:
        raise SettingError(
            "checkpoint_activations(..., " + ("budget=...)" if example is None else "example=...)"),
            "the budget is met by measuring an example, so the two go together",
            "give both: budget='2GiB', example=((images,), {})",
        )
    if every != 1:
        raise SettingError(
            f"checkpoint_activations(..., every={every}, budget={budget!r})",
            "each of them says how many blocks recompute",
            "give one of the two",
        )
    pair = isinstance(example, tuple) and len(example) == 2
    if not pair or not isinstance(example[0], tuple) or not isinstance(example[1], Mapping):
        raise SettingError(
            "checkpoint_activations(..., example=...)",
            "it is no pair of a tuple and a dict",
            "for model(images, scale=2) give example=((images,), {'scale': 2})",
        )


def _found(module: nn.Module, submodules: ModuleFilter | None) -> list[nn.Module]:
    if submodules is not None:
        return [m for _, m in select_modules(module, submodules, "checkpoint_activations(..., {})")]
    found = [block for _, block in repeated_blocks(module)]
    if not found:
        raise SettingError(
            "checkpoint_activations(model)",
            "no block repeats in it",
            f"choose among: {candidates(module)}",
        )
    return found


def _fitting(
    module: nn.Module, found: list[nn.Module], budget: int | str, example: Example
) -> list[nn.Module]:
    """Those that recompute already, and the fewest others that make the rest fit."""
    sharded = any(map(is_sharded, module.parameters()))
    if isinstance(module, DistributedDataParallel) or sharded:
        raise UsageError(
            "checkpoint_activations(..., budget=...) of a prepared model",
            "it is measured by a forward pass, and this one would involve the other ranks",
            "call it before world.prepare",
        )
    size = _free_bytes(module) if budget == "auto" else parse_bytes(budget)
    if size is None:
        raise SettingError(
            f"checkpoint_activations(..., budget={budget!r})",
            "it is no amount of memory",
            "give bytes, a text such as '2GiB' or '500MB', or 'auto'",
        )
    devices = {p.device.index for p in module.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices), _AsBefore(module):
        kept = measure(module, found, *example)
    recomputed = {i for i in kept.inside if _recomputes(found[i])}
    rest = [i for i in kept.by_saving() if i not in recomputed]
    peaks = [kept.peak(recomputed)]
    while peaks[-1] > size and rest:
        # Of those that save most the one after which the peak is lowest: the later a block runs,
        # the more is held while it is recomputed.
        best = min(rest[:MAX_COMPARED], key=lambda i: kept.peak(recomputed | {i}))
        rest.remove(best)
        recomputed.add(best)
        peaks.append(kept.peak(recomputed))
    if peaks[-1] > size:
        raise SettingError(
            f"checkpoint_activations(..., budget={budget!r})",
            f"{size:,} bytes; the least that any choice keeps is {min(peaks):,}, and {peaks[0]:,} "
            "are kept as it is",
            "make the example (and micro_batch_size) smaller, or choose other submodules",
        )
    return [found[i] for i in sorted(recomputed)]


def _free_bytes(module: nn.Module) -> int:
    """What a training leaves free for activations on the GPU, the least over all ranks."""
    parameters = list(module.parameters())
    device = parameters[0].device
    if device.type != "cuda":
        raise SettingError(
            "checkpoint_activations(..., budget='auto')",
            f"the model is on {device.type}, whose free memory says little",
            "move it to the GPU first (model.to(world.device)), or give bytes",
        )
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    trained = [p for p in parameters if p.requires_grad]
    coming = sum(p.nbytes * (_PER_PARAMETER - (p.grad is not None)) for p in trained)
    left = torch.tensor([int(_OF_FREE * free) - coming], device=device)
    if dist.is_initialized():
        dist.all_reduce(left, dist.ReduceOp.MIN)
    return int(left)


def _recomputes(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), _Recomputed)


class _Recomputed:
    """Stands in for a module's `forward`; an object, so that copies of the module copy it too."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.__wrapped__ = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        run = partial(self.__wrapped__, **kwargs)
        if torch.compiler.is_compiling() and next(_changing_buffers(self.module), None) is None:
            # Both runs become one graph, which has no place for contexts.
            return checkpoint.checkpoint(run, *args, use_reentrant=False)
        return checkpoint.checkpoint(run, *args, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _AsBefore(self.module)


class _AsBefore:
    """While entered, the buffers of `module` are copies of what they were when this was made.

    Likewise numpy and `random` draw what they drew then; torch sees to its own streams. May be
    entered again: each backward through a kept graph runs the forward once more.
    """

    def __init__(self, module: nn.Module) -> None:
        self._before = [(m, name, buffer.clone()) for m, name, buffer in _changing_buffers(module)]
        self._now: list[tuple[nn.Module, str, Tensor]] = []
        self._streams = self._outer = _streams()

    def __enter__(self) -> None:
        self._now = [(m, name, m.get_buffer(name)) for m, name, _ in self._before]
        for m, name, buffer in self._before:
            setattr(m, name, buffer.clone())
        self._outer = _streams()
        _set_streams(self._streams)

    def __exit__(self, *_: object) -> None:
        for m, name, buffer in self._now:
            setattr(m, name, buffer)
        _set_streams(self._outer)


def _streams() -> tuple[Any, Any]:
    return np.random.get_state(), random.getstate()


def _set_streams(states: tuple[Any, Any]) -> None:
    np.random.set_state(states[0])
    random.setstate(states[1])


def _changing_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for m in module.modules():
        if m.training:
            for name, buffer in m.named_buffers(recurse=False):
                yield m, name, buffer


Kept = dict[Hashable, int]
"""Bytes of storages, by what tells them apart."""


class Activations(NamedTuple):
    """What one forward pass keeps; blocks by their numbers, in the order in which they run."""

    outside: Kept
    """Kept by what is in no block."""
    inputs: dict[int, Kept]
    """What a block is called with, and so keeps if it recomputes."""
    inside: dict[int, Kept]
    """What it keeps if it does not."""

    def peak(self, recomputed: set[int]) -> int:
        """Bytes at the worst moment: after the forward pass, or while a block is recomputed."""
        return self._bytes(recomputed)[1]

    def by_saving(self) -> list[int]:
        """The blocks: those first whose recomputation saves most; of equals the first to run."""
        return sorted(self.inside, key=lambda block: self._bytes({block})[0])

    def _bytes(self, recomputed: set[int]) -> tuple[int, int]:
        """After the forward pass, and at the worst moment.

        Backward goes from the last block to the first and lets go of what it has passed. What is
        kept outside of blocks is counted as if it stayed to the end.
        """
        held = dict(self.outside)
        total = worst = sum(held.values())
        for block, inside in self.inside.items():
            inputs = self.inputs[block]
            if block in recomputed:
                worst = max(worst, total + _more(inputs | inside, held))
            kept = inputs if block in recomputed else inside
            total += _more(kept, held)
            held |= kept
        return total, max(worst, total)


def _more(kept: Kept, held: Kept) -> int:
    """Bytes that are kept and not held yet."""
    return sum(size for storage, size in kept.items() if storage not in held)


def measure(
    module: nn.Module, blocks: Sequence[nn.Module], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> Activations:
    """Calls `module(*args, **kwargs)` once, with gradients, and counts what is kept.

    Buffers and random streams are changed as the call changes them. What a block keeps that
    recomputes already is not seen; its inputs are.

    Raises:
        UsageError: the forward pass computes gradients itself.
    """
    there_anyway: Kept = {}
    kept = Activations({}, {}, {})
    running = kept.outside

    def count(tensor: Tensor, into: Kept) -> None:
        if tensor.layout is torch.strided:  # others have no storage of their own
            storage = tensor.untyped_storage()
            # It is the same Python object as long as it lives; its reference equals no other after.
            reference = weakref.ref(storage)
            if reference not in there_anyway:
                into[reference] = storage.nbytes()

    def enter(block: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal running
        inputs = kept.inputs.setdefault(block, {})
        for tensor in tensors((args, kwargs)):
            count(tensor, inputs)
        running = kept.inside.setdefault(block, {})

    def leave(*_: Any) -> None:
        nonlocal running
        running = kept.outside

    for tensor in [*module.parameters(), *module.buffers()]:
        count(tensor, there_anyway)
    hooks = saved_tensors_hooks(lambda tensor: count(tensor, running), _cannot_give_back)
    with hooks, torch.enable_grad(), ExitStack() as stack:
        for i, block in enumerate(blocks):
            entering = block.register_forward_pre_hook(partial(enter, i), with_kwargs=True)
            stack.enter_context(entering)
            stack.enter_context(block.register_forward_hook(leave, always_call=True))
        module(*args, **kwargs)
    return kept


def _cannot_give_back(_: object) -> Tensor:
    raise UsageError(
        "checkpoint_activations(..., budget=...)",
        "the forward pass of the example computes gradients itself, and cannot be measured",
        "choose submodules= or every= by hand",
    )
