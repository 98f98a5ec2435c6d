"""torch's DistributedDataParallel with exact weighting, and with its silent traps made loud.

Communication: the parameters of rank 0 are broadcast once; every backward pass that closes a
global batch averages the gradients bucket by bucket while it still runs (Li et al., VLDB 2020).
Nothing is sent for the other micro-batches. Buffers are not broadcast where they are equal by
construction, and never in evaluation, so one rank may evaluate alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from lockstep.errors import SettingError, UsageError
from lockstep.runtime.choice import Choice
from lockstep.runtime.run import Run
from lockstep.runtime.step import Step
from lockstep.strategies.base import Strategy, Wrapped
from lockstep.strategies.replica_check import check_replicas
from lockstep.strategies.sync_batchnorm import SyncBatchNorm

_EARLY_CHECKS = frozenset({1, 2, 3, 10})


@dataclass(frozen=True, kw_only=True)
class DDP(Strategy):
    """Options of DDP.

    Raises:
        SettingError: a value out of range.
    """

    name: ClassVar[str] = "ddp"

    bucket_mib: float | None = None
    """Size of a gradient bucket in MiB; None: chosen by backend."""
    find_unused_parameters: bool = False
    """Look for parameters without gradient in every step; costs a walk over the graph."""
    static_graph: bool = False
    """The same parameters are used in every step: torch may then reorder more freely."""
    check_every: int = 100
    """Global batches between comparisons of the replicas (besides steps 1, 2, 3, 10); 0: never."""

    def __post_init__(self) -> None:
        if self.bucket_mib is not None and self.bucket_mib <= 0:
            raise SettingError(
                f"bucket_mib={self.bucket_mib}", "a bucket holds something", "give MiB above 0"
            )
        if self.check_every < 0:
            raise SettingError(
                f"check_every={self.check_every}", "a number of steps is at least 0", "0: never"
            )

    def check(self, run: Run) -> None:
        """DDP runs on any number of processes, one included."""

    def wrap(self, module: nn.Module, run: Run) -> Wrapped:
        """The module in DDP, rank 0's parameters and buffers on all ranks.

        A module that has parameters on several devices, or none to train, is handed on as it is
        needed: the former spans devices inside each process, the latter has nothing to average.
        """
        spans = len({p.device for p in module.parameters() if p.device.type == "cuda"}) > 1
        if not spans:
            module.to(run.device)
        if not any(p.requires_grad for p in module.parameters()):
            return Wrapped(module, [Choice("ddp", "not wrapped", "no parameter to train")])
        bucket = self.bucket_mib or 25.0
        wrapped = ExactDDP(
            module,
            run.step,
            self,
            device_ids=[run.device.index] if run.device.type == "cuda" and not spans else None,
            bucket_cap_mb=bucket,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=True,
        )
        size = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        choices = [
            Choice("gradients", _mib(size), "averaged in buckets during backward, in place"),
            Choice("bucket", f"{bucket:g} MiB", self._bucket_reason(size, bucket)),
        ]
        if not wrapped.buffers_stay_equal:
            choices.append(
                Choice("buffers", "from rank 0", "they differ between ranks; sent while training")
            )
        return Wrapped(wrapped, choices)

    def release(self, module: nn.Module) -> None:
        """Lets go of the process group."""
        if isinstance(module, ExactDDP):
            module.release()

    def _bucket_reason(self, size: int, bucket: float) -> str:
        if self.bucket_mib is not None:
            return "as set"
        whole = size <= 2**20 * bucket
        return (
            "all gradients fit into it" if whole else "torch's default; large enough to fill a link"
        )

    def before_step(self, module: nn.Module) -> None:
        """Raises UsageError: gradients that were not averaged, or parameters without any."""
        if isinstance(module, ExactDDP):
            module.check_gradients()

    def after_step(self, module: nn.Module) -> None:
        """Compares the replicas now and then."""
        if isinstance(module, ExactDDP) and self.check_every:
            number = module.step_state.number
            if number in _EARLY_CHECKS or number % self.check_every == 0:
                module.check_parameters()
                check_replicas(module.module, f"step {number}", buffers=module.buffers_stay_equal)


class ExactDDP(DistributedDataParallel):
    """DDP that follows the global batch: it communicates on its last micro-batch alone."""

    def __init__(self, module: nn.Module, step: Step, options: DDP, **torch_options: Any) -> None:
        super().__init__(module, **torch_options)
        self.step_state = step
        self.options = options
        self.buffers_stay_equal = not any(
            isinstance(m, _BatchNorm) and not isinstance(m, SyncBatchNorm) and m.track_running_stats
            for m in module.modules()
        )
        self._forwards = 0
        self._inside = False
        self._trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        module.register_forward_pre_hook(self._check_way)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass; without gradients it involves no other rank."""
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        if self.reducer is None:
            raise UsageError(
                "a training forward pass after world.close()",
                "the process group is closed, so gradients cannot be averaged",
                "close at the very end, or evaluate under torch.no_grad()",
            )
        self.require_backward_grad_sync = self.step_state.current.last
        self._forwards += 1
        self._inside = True
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except Exception as error:
            present = self.step_state.current
            if present.count and not present.local:
                error.add_note(
                    f"lockstep: this rank has none of the {present.count} samples of this batch "
                    "and takes part with tensors of shape (0, *). Write the forward pass for any "
                    "number of samples (x.flatten(1), not x.view(len(x), -1)), or leave short "
                    "batches out with drop_last=True."
                )
            raise
        finally:
            self._inside = False

    def release(self) -> None:
        """Drops what keeps the process group, and so its threads, alive.

        A Gloo thread that outlives the group may still want the interpreter's lock, to drop a
        tensor, while the interpreter is shutting down; Python then ends the thread in the middle
        of C++, and the process aborts ("terminate called without an active exception").
        """
        self.reducer = self.logger = self.process_group = None  # type: ignore[assignment]

    def will_sync_module_buffers(self) -> bool:
        """Torch asks before every forward pass whether rank 0's buffers are to be sent."""
        wanted: bool = super().will_sync_module_buffers()  # type: ignore[no-untyped-call]
        return wanted and self.training and not self.buffers_stay_equal

    def check_gradients(self) -> None:
        """Raises UsageError where a step would use gradients that are not the global batch's."""
        missing = [name for name, parameter in self._trained if parameter.grad is None]
        forwards, self._forwards = self._forwards, 0
        if len(missing) == len(self._trained):
            return
        if not forwards:
            raise UsageError(
                "a backward pass whose forward pass did not go through the prepared model",
                "its gradients stayed on this rank: they were not averaged",
                "call the object that world.prepare returned, not its .module or a method of it",
            )
        if missing:
            self.check_parameters()
        if missing and not (self.options.find_unused_parameters or self.options.static_graph):
            shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
            raise UsageError(
                "an optimizer step while some parameters have no gradient",
                f"{len(missing)} of {len(self._trained)} were not used for the loss: {shown}; "
                "DDP waits for them, so others may not be averaged either",
                "use them, freeze them with requires_grad_(False) before world.prepare, or pass "
                "strategy=lockstep.strategies.DDP(find_unused_parameters=True)",
            )

    def check_parameters(self) -> None:
        """Raises UsageError where the module's parameters are not those that were wrapped."""
        known = {id(parameter) for _, parameter in self._trained}
        new = [
            name
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and id(parameter) not in known
        ]
        if new:
            raise UsageError(
                "parameters added, replaced or unfrozen after world.prepare",
                f"DDP does not average the gradients of {', '.join(new[:8])}",
                "change the model first, then call world.prepare",
            )

    def _check_way(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled() and module.training and not self._inside:
            raise UsageError(
                "a training forward pass through .module",
                "DDP averages the gradients of its own forward passes only; these would stay here",
                "call the object that world.prepare returned; .module is for reading and for "
                "evaluation under torch.no_grad()",
            )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
