"""What is held beside a module that is sharded with torch's `fully_shard`.

What a script cannot do with the parameters of a sharded model, said where it is tried.

The objects that were parameters before are of no use, gradients come to the shards around autograd,
and torch keeps the values of a shard apart from the object. All of it would go wrong in silence.

What leaves a sharded unit in a forward pass, and how torch comes to know of it.

Torch hangs what a unit needs for its backward pass, its parameters gathered and its gradients
averaged, on the tensors that it returns in lists, tuples and dicts. Those that leave it otherwise,
in an object (a distribution) or in an attribute of one of its modules (`self.aux_loss`), it is
shown here. A gradient that comes to the unit around them would be computed from memory that is
free already.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lockstep.distributed import torch_compat
from lockstep.distributed.process_group import Run
from lockstep.errors import UsageError
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import check_due
from lockstep.strategies.base import (
    MODULE_ATTRIBUTES,
    EqualTensors,
    may_set_attributes,
    note_empty_part,
)
from lockstep.strategies.fsdp_unused import UnusedParameters
from lockstep.strategies.replication import MovingBuffers
from lockstep.wording import join_first


@dataclasses.dataclass(eq=False)
class Sharded(Extension):
    """A sharded module, which follows the steps of the training."""

    units: Mapping[str, nn.Module]
    """The names of all modules that `fully_shard` was applied to, and the modules; the whole one,
    whose name is empty, is the last."""
    mesh: DeviceMesh
    """Of the ranks."""
    run: Run
    """Whose steps it follows."""
    keep_whole: bool
    """Gathered parameters stay until the last micro-batch is through."""
    accumulate_shards: bool
    """Gradients are averaged in every micro-batch."""
    find_unused_parameters: bool
    """Ranks may use different parameters."""

    def __post_init__(self) -> None:
        self._units: list[Any] = list(self.units.values())
        self.root = root = self._units[-1]
        self.whole = dict(_whole_parameters(self.units))
        """What forward passes compute with; the gradients of micro-batches add up there."""
        torch_compat.make_fsdp_root(root)
        self._shards: dict[str, DTensor] = dict(root.named_parameters())
        self._unused: UnusedParameters | None = None
        if self.find_unused_parameters:
            root.set_reduce_scatter_unused_params(True)
            whole = [self.whole[name] for name in self._shards]
            self._unused = UnusedParameters([*root.parameters()], whole)
        # Torch keeps the object of a storage, so it is another one if this is not the same.
        self._storages = {name: p.untyped_storage() for name, p in self._shards.items()}
        self._hooked: set[str] = set()
        self._refuse_gradients()
        self.moving_buffers: MovingBuffers | None = None
        """Its buffers that forward passes change."""
        self._batch: object = None
        """The global batch that the last pass belonged to."""
        self._last = True
        """Whether torch is set to average the gradients."""
        self._kept = False
        """Whether units stay gathered, for a backward pass through a backward pass."""
        self._running = False
        """Whether torch is in a forward pass; not where it is refused before it begins."""
        self._failed = self._released = False
        root.register_forward_pre_hook(self._before_forward, prepend=True)
        root.register_forward_hook(self._after_forward, always_call=True)
        root.register_load_state_dict_pre_hook(self._before_load)
        torch_compat.replace_apply(root, self._moved)
        for unit in self._units:
            vars(unit)["__deepcopy__"] = _no_copy
            vars(unit)["__reduce_ex__"] = _no_pickle

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Follows the loop to the micro-batch; raises UsageError for a loss made of shards."""
        if isinstance(weighted_loss, DTensor):
            raise _outside_of_forward("the loss is a DTensor, as parameters are")
        self.follow()
        if self._unused is not None:
            self._unused.before_backward()

    def backward_ended(self, micro_batch: MicroBatch) -> None:
        """Frees gathered units, and drops zeros that stand for no gradient."""
        self.end_keeping()
        if self._unused is not None and self._last:
            self._unused.end_round()

    def follow(self) -> None:
        """Sets torch to what the present micro-batch needs."""
        step = self.run.step
        if self._batch != step.key:
            self._batch = step.key
            if not self._last:  # the batch before was left in its middle
                for parameter in self.whole.values():
                    parameter.grad = None
                if self._unused is not None:
                    self._unused.forget_round()
        last = step.micro_batch.last
        if last is self._last:
            return
        self._last = last
        self.root.set_is_last_backward(last)
        if not self.accumulate_shards:
            self.root.set_requires_gradient_sync(last)
        if self.keep_whole:
            self.root.set_reshard_after_backward(last)

    def keep(self) -> None:
        """Keeps gathered units: a backward pass is differentiated, and will need them again."""
        if not self._kept:
            self._kept = True
            self.root.set_reshard_after_backward(False)
            self.root.set_reshard_after_forward(False)

    def end_keeping(self) -> None:
        """Units are let go again; to be called after the backward pass of a loss."""
        if not self._kept:
            return
        self._kept = False
        self.root.set_reshard_after_backward(self._last or not self.keep_whole)
        if not self.keep_whole:
            for unit in self._units[:-1]:
                unit.set_reshard_after_forward(True, recurse=False)
        if self._last or not self.keep_whole:
            self.reshard()

    def reshard(self) -> None:
        """Lets go of all gathered parameters."""
        for unit in self._units:
            unit.reshard()

    def after_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Makes buffers that forward passes change equal on all ranks."""
        if self.moving_buffers is not None and self.root in modules:
            self.moving_buffers.follow()

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Frees whole parameters, which the step would make out of date, and checks gradients.

        Raises:
            UsageError: some stayed on this rank, or what the user has changed does not take hold.
        """
        if self.root not in modules:
            return
        self._check_failed()
        self.end_keeping()
        self.reshard()
        left = [name for name, p in self.whole.items() if p.grad is not None]
        if left:
            raise UsageError(
                "a backward pass around the outputs of a sharded model",
                f"the gradients of {join_first(left)} stayed on this rank: when the last backward "
                "pass of the global batch ended, torch did not know that they were there",
                "compute the loss of every micro-batch from what the model returns, in tensors, "
                "tuples, lists or dicts",
            )
        if self._unused is not None:
            self._unused.before_step()
        if check_due(self.run.step.number + 1):
            self._refuse_gradients()
            self._check_shards()

    def _check_failed(self) -> None:
        """Raises UsageError once a forward pass has raised, where torch cannot reset it."""
        if self._failed:
            raise UsageError(
                "a sharded model whose forward pass has raised",
                f"torch {torch.__version__} cannot take up such a model",
                "let the error end the run, or use torch 2.13 or later",
            )

    def _refuse_gradients(self) -> None:
        """Of those that autograd brings; to be called again as parameters unfreeze."""
        for name, shard in self._shards.items():
            if shard.requires_grad and name not in self._hooked:
                self._hooked.add(name)
                shard.register_hook(partial(_refuse, name))  # type: ignore[no-untyped-call]

    def _check_shards(self) -> None:
        """Raises UsageError where the user has changed them in a way that has no effect."""
        check_hooks(self._shards, ours=1)
        new = [n for n, p in self._shards.items() if p.untyped_storage() is not self._storages[n]]
        if new:
            raise UsageError(
                "parameter.data = ... of a sharded model",
                f"it has no effect on {join_first(new)}: the shards are elsewhere",
                "write into them, under torch.no_grad(): parameter.copy_(...), .clamp_(...)",
            )

    def release(self) -> None:
        """Drops what keeps the process group, and so its threads, alive; see `ExactDDP.release`."""
        self._released = True
        # Not the mesh of the parameters: torch caches that of an equal one from an earlier run.
        torch_compat.drop_fsdp_groups(self._units, self.mesh)

    def equal_tensors(self) -> Iterator[EqualTensors]:
        """Buffers are the same on all ranks; shards, where there are several copies, on some."""
        yield EqualTensors({}, dict(self.root.named_buffers()))
        if self.mesh.ndim > 1:
            shards = {name: p.to_local() for name, p in self._shards.items()}
            yield EqualTensors(shards, {}, self.mesh.get_group(0))

    def _moved(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Raises UsageError unless a move or conversion of the model leaves it as it is."""
        shards = [p.to_local() for p in self._shards.values()]
        for tensor in [*shards, *self.root.buffers()]:
            if change(tensor) is not tensor:
                raise UsageError(
                    "a model moved or converted after world.prepare",
                    f"its shards stay in {tensor.dtype} on {tensor.device}",
                    "do it before world.prepare, or choose precision= in lockstep.init",
                    code="LS303",
                )
        return self.root

    def _before_load(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any
    ) -> None:
        """Raises UsageError where a state that is loaded has whole tensors."""
        found = {name: state.get(prefix + name) for name in self._shards}
        whole = [
            n for n, t in found.items() if isinstance(t, Tensor) and not isinstance(t, DTensor)
        ]
        if whole:
            raise UsageError(
                "load_state_dict of a sharded model with the state of a whole one",
                f"{join_first(whole)} would have to be cut, alike on all ranks",
                "load it before world.prepare, or with lockstep.load_weights(model, path)",
            )

    def _freeze_shards(self) -> None:
        """Shards are frozen where the user has frozen what is in their place just now."""
        now = dict(self.root.named_parameters())
        for name, shard in self._shards.items():
            if name in now and not isinstance(now[name], DTensor):
                shard.requires_grad_(now[name].requires_grad)

    @torch_compat.outside_compiled_code
    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._released:
            raise UsageError(
                "a forward pass of a sharded model after world.close()",
                "its parameters are on all ranks, and the process group is closed",
                "evaluate before closing; world.checkpoint keeps whole weights",
            )
        self.run.collectives.check_turn("a forward pass of a sharded model")
        self._check_failed()
        if torch.is_grad_enabled():
            self.follow()
            if self._unused is not None:
                self._unused.before_forward()
            if self.keep_whole and not self.run.step.micro_batch.first:
                self._freeze_shards()
        self._running = True

    @torch_compat.outside_compiled_code
    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        present = self.run.step.micro_batch
        error = sys.exception() if output is None else None  # torch calls this after one, too
        began, self._running = self._running, False
        if error is not None and began:
            note_empty_part(error, present)
            # Torch would go on as if the pass still ran, with parameters as old as that.
            reset = getattr(self.root, "reset_iter_state", None)
            self._failed = reset is None
            if reset is not None:
                reset()
        elif error is None and not torch.is_grad_enabled() and not self._kept:
            # Torch keeps the root's for a backward pass. A step would make them old.
            self.reshard()


def _whole_parameters(units: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that torch puts into the modules while they run, with their names.

    Gathering each unit once makes them; torch keeps the objects and only frees their memory. If
    they were made in a forward pass under `torch.inference_mode()`, they could never train.
    """
    unit: Any
    for name, unit in units.items():
        unit.unshard()
        for own, p in unit.named_parameters(prefix=name):
            if not isinstance(p, DTensor):
                yield own, p
        unit.reshard()


def _no_copy(memo: Any) -> NoReturn:
    raise UsageError(
        "a copy of a sharded model",
        "its parameters are gathered and averaged for this very object",
        "copy the model first and prepare both: ema = copy.deepcopy(model); "
        "model, ema = world.prepare(model, ema)",
    )


def _no_pickle(protocol: SupportsIndex) -> NoReturn:
    raise UsageError(
        "torch.save, pickle or copy.copy of a sharded model",
        "this rank has only its shards of the parameters, and they are bound to this run",
        "save the weights instead, on all ranks together: lockstep.save_weights(model, path); or "
        "all that is needed to resume: world.checkpoint(path, model=model, ...)",
    )


def _refuse(name: str, gradient: Tensor) -> None:
    """A hook of a shard: autograd has nothing to bring there."""
    raise _outside_of_forward(f"{name} was a shard there, or made whole from shards")


def _outside_of_forward(found: str) -> UsageError:
    """The error of a loss that reaches shards around the forward pass."""
    return UsageError(
        "a loss computed from a parameter of a sharded model, outside of its forward pass",
        f"{found}: such a gradient is neither averaged over the ranks nor weighted",
        "compute it in the model's forward pass, where parameters are whole, and return it; "
        "for a penalty on weights there is weight_decay of the optimizer",
    )


def check_hooks(parameters: Mapping[str, Tensor], *, ours: int = 0) -> None:
    """Raises UsageError where gradients have more hooks than `ours`, which nothing would call."""
    hooked = [name for name, p in parameters.items() if torch_compat.gradient_hooks(p) > ours]
    if hooked:
        raise UsageError(
            "hooks on the gradients of a sharded model's parameters",
            f"those of {join_first(hooked)} are not called: gradients of shards do not come from "
            "autograd",
            "read or change gradients between world.backward and optimizer.step",
        )


class Replaced(nn.Parameter):
    """A parameter whose place in the model a shard has taken; nothing can be done with it.

    It would pass for one without elements and without gradient: a norm of 0, a penalty of 0.
    """

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        """Refuses every operation and attribute."""
        raise UsageError(
            "a parameter that was taken from a model before world.prepare",
            "a shard has taken its place in the model",
            "take it from the prepared model: model.parameters(), model.head.weight",
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return "a parameter that was replaced in world.prepare"


_SHOWN = "_lockstep_shown"
_DEPTH = 4
"""How far objects in objects are followed."""


class Outputs:
    """Two hooks of one unit: before torch's own of the forward pass, and after it.

    Args:
        unit: a module, before `fully_shard`.
        others: units inside of it, which have outputs of their own.
        second: called in a backward pass that is differentiated itself.
    """

    def __init__(
        self, unit: nn.Module, others: Sequence[nn.Module], second: Callable[[], None]
    ) -> None:
        theirs = {id(part) for other in others for part in other.modules()}
        self._attributes = [
            vars(part)
            for part in unit.modules()
            if id(part) not in theirs and may_set_attributes(part)
        ]
        self._second = second

    @torch_compat.outside_compiled_code
    def before(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """The output beside all other tensors that backward passes may begin with.

        Outputs that are views become tensors of their own over the same memory: an operation in
        place on a view would drop what torch hangs on it, and torch warns of each.
        """
        if not torch.is_grad_enabled():
            return output
        leaves, structure = torch_compat.pytree.tree_flatten(output)
        leaves = [_no_view(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        seen = {id(leaf) for leaf in leaves}
        loose = [tensor for tensor in self._loose(leaves) if id(tensor) not in seen]
        for tensor in [*leaves, *loose]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._look)  # type: ignore[no-untyped-call]
        return torch_compat.pytree.tree_unflatten(leaves, structure), loose

    @torch_compat.outside_compiled_code
    def after(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """The output alone."""
        return output[0] if torch.is_grad_enabled() else output

    def _loose(self, leaves: Sequence[Any]) -> Iterator[Tensor]:
        for leaf in leaves:
            yield from _tensors(leaf, objects=True)
        own = (
            v
            for found in self._attributes
            for name, v in found.items()
            if name not in MODULE_ATTRIBUTES
        )
        for value in own:
            for tensor in _tensors(value, objects=False):
                # It may stay there for more passes than this one.
                units = vars(tensor).setdefault(_SHOWN, set())
                if id(self) not in units:
                    units.add(id(self))
                    yield tensor

    def _look(self, gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            self._second()


def _tensors(value: Any, *, objects: bool, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Results of operations with gradients in containers and, if asked for, in other objects."""
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value
        return
    inside: Any = ()
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple):
        inside = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif objects and not isinstance(value, nn.Module | type):
        inside = list(getattr(value, "__dict__", {}).values())
    if depth:
        for one in inside:
            yield from _tensors(one, objects=objects, depth=depth - 1)


def _no_view(tensor: Tensor) -> Tensor:
    viewed = tensor.requires_grad and torch_compat.is_view(tensor)
    return _Same.apply(tensor) if viewed else tensor  # type: ignore[no-untyped-call]


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
