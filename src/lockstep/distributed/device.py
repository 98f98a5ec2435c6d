"""Chooses the device that this process computes on, and advises when it runs out of memory.

A *visible* GPU is one that CUDA shows to this process: CUDA_VISIBLE_DEVICES lists some of the
*physical* GPUs and numbers them from 0. By default local rank r takes visible GPU r.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import torch

from lockstep.distributed.topology import Topology
from lockstep.errors import LockstepError, SettingError, add_note_once
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
    """Returns the device and the reason for it.

    Args:
        wanted: `cpu`, `cuda`, `cuda:1`, or None for a GPU if there is one.
        topology: this process's place.
        environ: for `CUDA_VISIBLE_DEVICES`, which renumbers the GPUs.
        may_share: more processes than GPUs are allowed (Gloo can; NCCL refuses).
        on_this_machine: exchanges a text with the other processes of this machine and returns the
            texts of all; called if there are fewer visible GPUs than processes.

    Raises:
        SettingError: no such device, or fewer GPUs than processes.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0  # visible ones
    # 1. Nothing is wanted, and there is no GPU.
    if wanted is None and num_gpus == 0:
        return torch.device("cpu"), "no CUDA device is visible"
    # 2. A device is wanted that is no GPU, or is a certain GPU.
    if wanted is not None:
        try:
            device = torch.device(wanted)
        except RuntimeError:
            raise SettingError(
                f"device={wanted!r}", "torch knows no such device", "use cpu, cuda or cuda:0"
            ) from None
        if device.type != "cuda":
            return device, "as set"
        if num_gpus == 0:
            raise SettingError(
                f"device={wanted!r}",
                "no CUDA device is visible" + _format_cuda_visible_devices(environ),
                "use device='cpu', or install a CUDA build of torch and check the driver",
            )
        if device.index is not None:
            _check_given_gpu(device, topology, num_gpus)
            return device, "as set" + _format_physical_gpu(device.index, environ)
    # 3. Any GPU: each process of the machine takes one, by its local rank.
    index = topology.local_rank % num_gpus
    reason = f"local rank {topology.local_rank}"
    if topology.local_size > num_gpus and not may_share:
        if not _every_process_sees_another_gpu(index, on_this_machine):
            visible_gpus = count_noun(num_gpus, "visible GPU")
            raise SettingError(
                f"{topology.local_size} processes on this machine",
                f"{visible_gpus}{_format_cuda_visible_devices(environ)}; NCCL needs one for each",
                f"start {num_gpus}, or use device='cpu', or backend='gloo' to share GPUs",
            )
        # Although each process sees too few GPUs for all, it sees others than the other processes.
        reason = "the one that this process is shown"
    return torch.device("cuda", index), reason + _format_physical_gpu(index, environ)


def _every_process_sees_another_gpu(
    index: int, on_this_machine: Callable[[str], Sequence[str]]
) -> bool:
    """Returns True if the visible GPUs of this number differ in all processes of this machine.

    They do under `srun --gpus-per-task=1`, under `--virtual-local-rank` of `lockstep run` and
    torchrun, and in scripts that set CUDA_VISIBLE_DEVICES themselves: each process sees one GPU,
    with the number 0.

    Args:
        index: the number of the GPU in this process.
        on_this_machine: exchanges a text with the other processes of this machine and returns the
            texts of all.
    """
    gpu_uuids = on_this_machine(str(torch.cuda.get_device_properties(index).uuid))
    return len(set(gpu_uuids)) == len(gpu_uuids)


def _check_given_gpu(device: torch.device, topology: Topology, num_gpus: int) -> None:
    """Raises SettingError if the GPU that was given by its number does not exist or is shared."""
    if topology.local_size > 1:
        raise SettingError(
            f"device='{device}' with {topology.local_size} processes on this machine",
            "all of them would use this one GPU",
            "use device='cuda': local rank r then takes visible GPU r",
        )
    if device.index >= num_gpus:
        raise SettingError(
            f"device='{device}'",
            f"{count_noun(num_gpus, 'visible GPU')}, numbered from 0",
            "choose a lower number; CUDA_VISIBLE_DEVICES renumbers the GPUs it lists from 0",
        )


def _format_physical_gpu(index: int, environ: Mapping[str, str]) -> str:
    """Returns " (physical GPU 2)" if CUDA_VISIBLE_DEVICES renumbers the GPUs; else "".

    Args:
        index: the number of a GPU as this process sees it.
        environ: with CUDA_VISIBLE_DEVICES="2,3", GPU 0 of the process is physical GPU 2.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if not value:
        return ""
    visible_gpus = value.split(",")
    if index >= len(visible_gpus):
        return ""
    physical_gpu = visible_gpus[index].strip()
    return f" (physical GPU {physical_gpu})" if physical_gpu else ""


def _format_cuda_visible_devices(environ: Mapping[str, str]) -> str:
    """Returns " (CUDA_VISIBLE_DEVICES=0,1)" if the variable is set; else ""."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return ""
    return f" (CUDA_VISIBLE_DEVICES={value})"


# What to do when memory runs out

# The CPU's allocator, CUDA itself and its libraries raise plain RuntimeErrors with these texts.
OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
ADVICE_BEGINNING = "lockstep: out of memory"
"""How the note begins that `add_memory_advice` adds to an error."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if the error says that a device, or the CPU, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    # Some errors of Lockstep's are RuntimeErrors too, and their texts may speak of memory.
    if isinstance(error, LockstepError) or not isinstance(error, RuntimeError):
        return False
    message = str(error)
    return any(text in message for text in OUT_OF_MEMORY_TEXTS)


def add_memory_advice(error: BaseException | None, samples: int, devices: int = 1) -> None:
    """Adds a note to an out-of-memory error that says what can be done about it.

    Args:
        error: other errors, None, and an error that has such a note are left as they are.
        samples: how many samples this rank was computing at a time.
        devices: the number of devices of this rank, over which the samples were divided.
    """
    if error is None or not is_out_of_memory(error):
        return
    text = f" with {count_noun(samples, 'sample')} at a time on this rank"
    if devices > 1:
        text += f" of {devices} devices"
    text += "."
    samples_per_device = math.ceil(samples / devices)
    if samples_per_device > 1:
        text += (
            f" Take fewer at a time, say micro_batch_size={samples_per_device // 2}: the global "
            "batch and the numbers stay the same; micro_batch_size='auto' finds the largest that "
            "fits."
        )
    text += (
        " lockstep.checkpoint_activations(model) keeps less for the backward pass, as does "
        "precision='bf16'; strategy='fsdp' divides the model over the ranks."
    )
    add_note_once(error, ADVICE_BEGINNING, text)


def _add_no_other_notes(error: BaseException) -> None:
    pass


def add_memory_advice_at_end(
    step: Step, add_other_notes: Callable[[BaseException], None] = _add_no_other_notes
) -> Callable[[], None]:
    """Adds the advice to an error that nobody catches, before Python prints it.

    Args:
        step: of the run; it knows how many samples were computed at a time.
        add_other_notes: called with the error, too.

    Returns:
        A function that undoes this.
    """
    previous_hook = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        add_memory_advice(error, step.latest_micro_batch.local_rows, step.num_devices)
        add_other_notes(error)
        previous_hook(kind, error, traceback)

    def undo() -> None:
        if sys.excepthook is hook:  # nobody has set another one since
            sys.excepthook = previous_hook

    sys.excepthook = hook
    return undo
