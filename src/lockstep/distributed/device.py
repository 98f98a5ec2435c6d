"""Which device this process computes on, and why; what to do when it runs out of memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import torch

from lockstep.distributed.topology import Topology
from lockstep.errors import LockstepError, SettingError
from lockstep.session.step import Step
from lockstep.wording import count_noun


def choose_device(
    wanted: str | None,
    topology: Topology,
    environ: Mapping[str, str],
    *,
    may_share: bool,
    on_this_machine: Callable[[str], Sequence[str]],
) -> tuple[torch.device, str]:
    """The device and the reason for it.

    Args:
        wanted: `cpu`, `cuda`, `cuda:1`, or None for a GPU where there is one.
        topology: local rank r takes visible GPU r.
        environ: for `CUDA_VISIBLE_DEVICES`, which renumbers the GPUs.
        may_share: more processes than GPUs are allowed (Gloo can; NCCL refuses).
        on_this_machine: tells a text to the other processes of this machine, and returns those of
            all; called where there are fewer GPUs than processes.

    Raises:
        SettingError: no such device, or fewer GPUs than processes.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted is None and not count:
        return torch.device("cpu"), "no CUDA device is visible"
    if wanted is not None:
        try:
            device = torch.device(wanted)
        except RuntimeError:
            raise SettingError(
                f"device={wanted!r}", "torch knows no such device", "use cpu, cuda or cuda:0"
            ) from None
        if device.type != "cuda":
            return device, "as set"
        if not count:
            raise SettingError(
                f"device={wanted!r}",
                "no CUDA device is visible" + _visible(environ),
                "use device='cpu', or install a CUDA build of torch and check the driver",
            )
        if device.index is not None:
            _check_one_process(device, topology, count)
            return device, "as set" + physical(device.index, environ)
    index = topology.local_rank % count
    own = topology.local_size > count and not may_share
    if own and not _each_has_its_own(index, on_this_machine):
        raise SettingError(
            f"{topology.local_size} processes on this machine",
            f"{count_noun(count, 'visible GPU')}{_visible(environ)}; NCCL needs one for each",
            f"start {count}, or use device='cpu', or backend='gloo' to share GPUs",
        )
    reason = "the one that this process is shown" if own else f"local rank {topology.local_rank}"
    return torch.device("cuda", index), reason + physical(index, environ)


def _each_has_its_own(index: int, on_this_machine: Callable[[str], Sequence[str]]) -> bool:
    """Whether each process of this machine is shown another GPU.

    So do `srun --gpus-per-task=1`, `--virtual-local-rank` of `lockstep run` and torchrun, and
    scripts that set `CUDA_VISIBLE_DEVICES` themselves; the number is 0 in all of them.
    """
    shown = on_this_machine(str(torch.cuda.get_device_properties(index).uuid))
    return len(set(shown)) == len(shown)


def _check_one_process(device: torch.device, topology: Topology, count: int) -> None:
    if topology.local_size > 1:
        raise SettingError(
            f"device='{device}' with {topology.local_size} processes on this machine",
            "all of them would use this one GPU",
            "use device='cuda': local rank r then takes visible GPU r",
        )
    if device.index >= count:
        raise SettingError(
            f"device='{device}'",
            f"{count_noun(count, 'visible GPU')}, numbered from 0",
            "choose a lower number; CUDA_VISIBLE_DEVICES renumbers the GPUs it lists from 0",
        )


def physical(index: int, environ: Mapping[str, str]) -> str:
    """` (physical GPU 2)` where CUDA_VISIBLE_DEVICES renumbers; else nothing."""
    listed = [part.strip() for part in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return f" (physical GPU {listed[index]})" if index < len(listed) and listed[index] else ""


def _visible(environ: Mapping[str, str]) -> str:
    value = environ.get("CUDA_VISIBLE_DEVICES")
    return "" if value is None else f" (CUDA_VISIBLE_DEVICES={value})"


# Of the CPU's allocator, of CUDA itself, and of its libraries: plain RuntimeErrors.
_TEXTS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_BEGIN = "lockstep: out of memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the CPU's allocator, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    plain = isinstance(error, RuntimeError) and not isinstance(error, LockstepError)
    return plain and any(text in str(error) for text in _TEXTS)


def add_memory_advice(error: BaseException | None, samples: int, devices: int = 1) -> None:
    """Adds to an error of this kind, once, what can be done about it.

    Args:
        error: anything; None: nothing.
        samples: what this rank was computing at a time.
        devices: of this rank, which divide them; `micro_batch_size` is of one.
    """
    told = any(note.startswith(_BEGIN) for note in getattr(error, "__notes__", ()))
    if error is None or told or not is_out_of_memory(error):
        return
    of = f" of {devices} devices" if devices > 1 else ""
    note = f"{_BEGIN} with {count_noun(samples, 'sample')} at a time on this rank{of}."
    if (each := -(-samples // devices)) > 1:
        note += (
            f" Take fewer at a time, say micro_batch_size={each // 2}: the global batch and the "
            "numbers stay the same; micro_batch_size='auto' finds the largest that fits."
        )
    error.add_note(
        f"{note} lockstep.checkpoint_activations(model) keeps less for the backward pass, as does "
        "precision='bf16'; strategy='fsdp' divides the model over the ranks."
    )


def add_memory_advice_at_end(
    step: Step, also: Callable[[BaseException], None] = lambda error: None
) -> Callable[[], None]:
    """Advises on an error that nobody catches, before it is printed.

    Args:
        step: of the run.
        also: adds other notes to the error.

    Returns:
        What ends that.
    """
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        add_memory_advice(error, step.latest_micro_batch.local_rows, step.num_devices)
        also(error)
        before(kind, error, traceback)

    def undo() -> None:
        if sys.excepthook is hook:
            sys.excepthook = before

    sys.excepthook = hook
    return undo
