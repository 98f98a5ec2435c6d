"""What is held beside a module that is sharded with torch's `fully_shard`.

What reaches into torch's private parts is at the end of the file; what is expected there is tested
in tests/strategies/test_fsdp.py.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lockstep.errors import UsageError, some
from lockstep.runtime.run import Run
from lockstep.strategies.buffers import MovingBuffers
from lockstep.strategies.replica_check import check_equal, due
from lockstep.strategies.same_use import SameUse
from lockstep.strategies.shards import Shards

_ATTRIBUTE = "_lockstep_sharded"


class Sharded:
    """A sharded module in the course of the global batch.

    Args:
        root: the module, after `fully_shard`.
        units: the names of all modules that `fully_shard` was applied to, and the modules; the
            root, whose name is empty, is the last.
        use: counts the passes of these units.
        mesh: of the ranks.
        run: whose steps it follows.
        keep_whole: gathered parameters stay until the last micro-batch is through.
        accumulate_shards: gradients are averaged in every micro-batch.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Mapping[str, nn.Module],
        use: SameUse,
        mesh: DeviceMesh,
        run: Run,
        *,
        keep_whole: bool,
        accumulate_shards: bool,
    ) -> None:
        self.root = cast(FSDPModule, root)
        self.run = run
        self._module = root
        self._mesh = mesh
        self._units = [cast(FSDPModule, unit) for unit in units.values()]
        self._use = use
        self._keep_whole = keep_whole
        self._accumulate_shards = accumulate_shards
        self._whole = dict(_whole_parameters(units))
        _make_root(self.root)
        self._shards = Shards(root)
        self.moving_buffers = MovingBuffers(root)
        self._batch: object = None
        """The global batch that the last pass belonged to."""
        self._last = True
        """Whether torch is set to average the gradients."""
        self._kept = False
        """Whether units stay gathered, for a backward pass through a backward pass."""
        self._failed = self._released = False
        root.register_forward_pre_hook(self._before_forward, prepend=True)
        root.register_forward_hook(self._after_forward, always_call=True)
        vars(root)[_ATTRIBUTE] = self
        root.register_load_state_dict_pre_hook(self._before_load)  # type: ignore[no-untyped-call]
        vars(root)["_apply"] = self._moved  # what .to(...) and its like call
        vars(root)["__deepcopy__"] = _no_copy

    @property
    def whole(self) -> list[nn.Parameter]:
        """What forward passes compute with; the gradients of micro-batches add up there."""
        return list(self._whole.values())

    def follow(self) -> None:
        """Sets torch to what the present micro-batch needs."""
        step = self.run.step
        if self._batch != step.batch:
            self._batch = step.batch
            if not self._last:  # the batch before was left in its middle
                self._drop_gradients()
        last = step.current.last
        if last is self._last:
            return
        self._last = last
        self.root.set_is_last_backward(last)
        if not self._accumulate_shards:
            self.root.set_requires_gradient_sync(last)
        if self._keep_whole:
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
        self.root.set_reshard_after_backward(self._last or not self._keep_whole)
        if not self._keep_whole:
            for unit in self._units[:-1]:
                unit.set_reshard_after_forward(True, recurse=False)
        if self._last or not self._keep_whole:
            self.reshard()

    def reshard(self) -> None:
        """Lets go of all gathered parameters."""
        for unit in self._units:
            unit.reshard()

    def before_step(self) -> None:
        """Lets go of whole parameters; looks whether the gradients are those of the global batch.

        Raises:
            UsageError: some stayed on this rank, or what the user has changed does not take hold.
            RanksDifferError: in the step before, the ranks had run different units or used
                different parameters.
        """
        self.end_keeping()
        self.reshard()
        left = [name for name, p in self._whole.items() if p.grad is not None]
        if left:
            raise UsageError(
                "a backward pass around the outputs of a sharded model",
                f"the gradients of {some(left)} stayed on this rank: when the last backward pass "
                "of the global batch ended, torch did not know that they were there",
                "compute the loss of every micro-batch from what the model returns, in tensors, "
                "tuples, lists or dicts",
            )
        if due(self.run.step.number + 1):
            self._shards.guard()
            self._shards.check()
        self._use.compare(self._shards.named)

    def after_step(self) -> None:
        """Shares buffers that move; compares what is the same on several ranks."""
        number = self.run.step.number
        looks = due(number)
        if looks:
            self.moving_buffers.find()
        self.moving_buffers.share()
        if looks:
            self._compare(f"step {number}")

    def release(self) -> None:
        """Drops what keeps the process group, and so its threads, alive; see `ExactDDP.release`."""
        self._released = True
        self._use.release()
        # Not the mesh of the parameters: torch caches that of an equal one from an earlier run.
        let_go(self._units, self._mesh)

    def _compare(self, when: str) -> None:
        """Buffers are the same on all ranks; shards, where there are several copies, on some."""
        check_equal({}, dict(self._module.named_buffers()), when)
        if self._mesh.ndim > 1:
            shards = {name: cast(DTensor, p).to_local() for name, p in self._shards.named.items()}
            check_equal(shards, {}, when, self._mesh.get_group(0))

    def _moved(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Raises UsageError unless a move or conversion of the model leaves it as it is."""
        shards = [cast(DTensor, p).to_local() for p in self._shards.named.values()]
        for tensor in [*shards, *self._module.buffers()]:
            if change(tensor) is not tensor:
                raise UsageError(
                    "a model moved or converted after world.prepare",
                    f"its shards stay in {tensor.dtype} on {tensor.device}",
                    "do it before world.prepare, or choose precision= in lockstep.init",
                    code="LS303",
                )
        return self._module

    def _before_load(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any
    ) -> None:
        """Counts the loading of a state; raises UsageError where it has whole tensors."""
        self._use.loads += 1
        found = {name: state.get(prefix + name) for name in self._shards.named}
        whole = [
            n for n, t in found.items() if isinstance(t, Tensor) and not isinstance(t, DTensor)
        ]
        if whole:
            raise UsageError(
                "load_state_dict of a sharded model with the state of a whole one",
                f"{some(whole)} would have to be cut, alike on all ranks",
                "load it before world.prepare, or from a file with "
                "lockstep.load_weights(model, path)",
            )

    def _freeze_shards(self) -> None:
        """Shards are frozen where the user has frozen what is in their place just now."""
        now = dict(self._module.named_parameters())
        for name, shard in self._shards.named.items():
            if name in now and not isinstance(now[name], DTensor):
                shard.requires_grad_(now[name].requires_grad)

    def _drop_gradients(self) -> None:
        for parameter in self._whole.values():
            parameter.grad = None

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._released:
            raise UsageError(
                "a forward pass of a sharded model after world.close()",
                "its parameters are on all ranks, and the process group is closed",
                "evaluate before closing; world.checkpoint keeps whole weights",
            )
        self.run.collectives.check_turn("a forward pass of a sharded model")
        if self._failed:
            raise UsageError(
                "a forward pass of a sharded model after one that raised",
                f"torch {torch.__version__} cannot take up such a model",
                "let the error end the run, or use a newer torch",
            )
        self._use.finish()
        if torch.is_grad_enabled():
            self.follow()
            if self._keep_whole and not self.run.step.current.first:
                self._freeze_shards()

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        present = self.run.step.current
        error = sys.exception() if output is None else None  # torch calls this after one, too
        if error is not None:
            if present.count and not present.local:
                error.add_note(EMPTY_PART.format(count=present.count))
            # Torch would go on as if the pass still ran, with parameters as old as that.
            reset = getattr(self.root, "reset_iter_state", None)
            self._failed = reset is None
            if reset is not None:
                reset()
        elif not torch.is_grad_enabled() and not self._kept:
            # Torch keeps the root's for a backward pass. A step would make them old.
            self.reshard()


EMPTY_PART = (
    "lockstep: this rank has none of the {count} samples of this batch and takes part with tensors "
    "of shape (0, *). Write the forward pass for any number of samples (x.flatten(1), not "
    "x.view(len(x), -1)), or leave short batches out with drop_last=True."
)


def sharded(module: nn.Module) -> Sharded | None:
    """What is held beside a module; None where it is not sharded."""
    held = vars(module).get(_ATTRIBUTE)
    return held if isinstance(held, Sharded) else None


def _whole_parameters(units: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that torch puts into the modules while they run, with their names.

    Gathering each unit once makes them; torch keeps the objects and only frees their memory. If
    they were made in a forward pass under `torch.inference_mode()`, they could never train.
    """
    for name, module in units.items():
        unit = cast(Any, module)
        unit.unshard()
        for own, p in module.named_parameters(prefix=name):
            if not isinstance(p, DTensor):
                yield own, p
        unit.reshard()


def _no_copy(memo: Any) -> nn.Module:
    raise UsageError(
        "a copy of a sharded model",
        "its parameters are gathered and averaged for this very object",
        "copy the model first and prepare both: ema = copy.deepcopy(model); "
        "model, ema = world.prepare(model, ema)",
    )


def _make_root(module: FSDPModule) -> None:
    """Torch would take the first unit that runs for the root, and refuse the model after it."""
    module._get_fsdp_state()._lazy_init()


def let_go(units: Sequence[FSDPModule], mesh: DeviceMesh) -> None:
    """Clears the places where torch keeps process groups for sharded modules.

    A copy of a shard has a copy of the mesh, and torch's cache of operations keeps both.
    """
    for unit in units:
        state = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # older: one, or None
        for group in filter(None, [state._fsdp_param_group] if groups is None else groups):
            for info in filter(None, (group.mesh_info, group.post_forward_mesh_info)):
                for name in vars(info):
                    if name.endswith("process_group"):
                        setattr(info, name, None)
    for each in gc.get_objects():
        if type(each) is DeviceMesh and each == mesh:
            getattr(each, "_pg_registry", {}).clear()
