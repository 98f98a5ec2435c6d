"""What is held beside a module that is sharded with torch's `fully_shard`.

The one place that reaches into torch's private parts is `let_go`; what it expects there is
tested in tests/strategies/test_fsdp.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from lockstep.errors import UsageError
from lockstep.runtime.run import Run
from lockstep.strategies.buffers import MovingBuffers
from lockstep.strategies.replica_check import check_equal, due

_ATTRIBUTE = "_lockstep_sharded"


class Sharded:
    """A sharded module in the course of the global batch.

    Args:
        root: the module, after `fully_shard`.
        units: all modules that `fully_shard` was applied to, the root among them.
        mesh: of the ranks.
        run: whose steps it follows.
        keep_whole: gathered parameters stay until the last micro-batch is through.
        accumulate_shards: gradients are averaged in every micro-batch.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[nn.Module],
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
        self._units = [cast(FSDPModule, unit) for unit in units]
        self._keep_whole = keep_whole
        self._accumulate_shards = accumulate_shards
        self.whole = list(_whole_parameters(units))
        """What forward passes compute with; the gradients of micro-batches add up there."""
        self.moving_buffers = MovingBuffers(root)
        self._batch: object = None
        """The global batch that the last pass belonged to."""
        self._last = True
        """Whether torch is set to average the gradients."""
        self._released = False
        root.register_forward_pre_hook(self._before_forward, prepend=True)
        root.register_forward_hook(self._after_forward, always_call=True)
        vars(root)[_ATTRIBUTE] = self

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

    def reshard(self) -> None:
        """Lets go of all gathered parameters."""
        for unit in self._units:
            unit.reshard()

    def after_step(self) -> None:
        """Shares buffers that move; looks for new parameters."""
        number = self.run.step.number
        if due(number):
            self.moving_buffers.find()
            self._check_parameters()
        self.moving_buffers.share()
        if due(number):
            self._compare(f"step {number}")

    def release(self) -> None:
        """Drops what keeps the process group, and so its threads, alive; see `ExactDDP.release`."""
        self._released = True
        # Not the mesh of the parameters: torch caches that of an equal one from an earlier run.
        let_go(self._units, self._mesh)

    def _compare(self, when: str) -> None:
        """Buffers are the same on all ranks; shards, where there are several copies, on some."""
        check_equal({}, dict(self._module.named_buffers()), when)
        if self._mesh.ndim > 1:
            named = self._module.named_parameters()
            shards = {name: p.to_local() for name, p in named if isinstance(p, DTensor)}
            check_equal(shards, {}, when, self._mesh.get_group(0))

    def _drop_gradients(self) -> None:
        for parameter in self.whole:
            parameter.grad = None

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._released:
            raise UsageError(
                "a forward pass of a sharded model after world.close()",
                "its parameters are on all ranks, and the process group is closed",
                "evaluate before closing; world.checkpoint keeps whole weights",
            )
        if torch.is_grad_enabled():
            self.follow()

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        present = self.run.step.current
        error = sys.exception() if output is None else None  # torch calls this after one, too
        if error is not None and present.count and not present.local:
            error.add_note(EMPTY_PART.format(count=present.count))
        if not torch.is_grad_enabled():
            # Torch keeps the root's for a backward pass. A step would make them old.
            self.reshard()

    def _check_parameters(self) -> None:
        new = [
            name
            for name, p in self._module.named_parameters()
            if p.requires_grad and not isinstance(p, DTensor)
        ]
        if new:
            raise UsageError(
                "parameters added or replaced after world.prepare",
                f"the gradients of {', '.join(new[:8])} are not averaged over the ranks",
                "change the model first, then call world.prepare",
                code="LS303",
            )


EMPTY_PART = (
    "lockstep: this rank has none of the {count} samples of this batch and takes part with tensors "
    "of shape (0, *). Write the forward pass for any number of samples (x.flatten(1), not "
    "x.view(len(x), -1)), or leave short batches out with drop_last=True."
)


def without_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """A forward hook: outputs that are views become tensors of their own over the same memory.

    Torch hangs the gathering of parameters for the backward pass on what a unit returns. An
    operation in place on a view would drop it, and torch warns of each view.
    """
    if not torch.is_grad_enabled():
        return output
    return pytree.tree_map_only(Tensor, _no_view, output)


def _no_view(tensor: Tensor) -> Tensor:
    viewed = tensor.requires_grad and tensor._is_view()
    return _Same.apply(tensor) if viewed else tensor  # type: ignore[no-untyped-call]


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def sharded(module: nn.Module) -> Sharded | None:
    """What is held beside a module; None where it is not sharded."""
    held = vars(module).get(_ATTRIBUTE)
    return held if isinstance(held, Sharded) else None


def _whole_parameters(units: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """The parameters that torch puts into the modules while they run.

    Gathering each unit once makes them; torch keeps the objects and only frees their memory. If
    they were made in a forward pass under `torch.inference_mode()`, they could never train.
    """
    for unit in units:
        unit = cast(Any, unit)
        unit.unshard()
        yield from (p for p in unit.parameters() if not isinstance(p, DTensor))
        unit.reshard()


def let_go(units: Sequence[FSDPModule], mesh: DeviceMesh) -> None:
    """Clears the places where torch keeps process groups for sharded modules."""
    for unit in units:
        state = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # older: one, or None
        for group in filter(None, [state._fsdp_param_group] if groups is None else groups):
            for info in filter(None, (group.mesh_info, group.post_forward_mesh_info)):
                for name in vars(info):
                    if name.endswith("process_group"):
                        setattr(info, name, None)
    getattr(mesh, "_pg_registry", {}).clear()
