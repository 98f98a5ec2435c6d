"""Chooses the device that this process computes on, and advises when it runs out of memory.

A *visible* GPU is one that CUDA shows to this process: CUDA_VISIBLE_DEVICES lists some of the
*physical* GPUs and numbers them from 0. By default local rank r takes visible GPU r. AMD's GPUs
under ROCm are called `cuda` in torch, and so they are here; HIP_VISIBLE_DEVICES lists them.

A *MIG slice* is a part of an NVIDIA GPU that counts as a GPU of its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import LockstepError, SettingError, add_note_once
from lockstep.language import translate_sentences
from lockstep.machine.topology import Topology
from lockstep.session.step import Step
from lockstep.settings import SUPPORTED_DEVICES, check_device
from lockstep.wording import count_noun


def choose_device(
    wanted: str | None,
    topology: Topology,
    environ: Mapping[str, str],
    *,
    may_share: bool,
    exchange_on_machine: Callable[[str], Sequence[str] | None],
) -> tuple[torch.device, str]:
    """Chooses the device that this process computes on.

    Args:
        wanted: the user's setting: `cpu`, `cuda`, `cuda:1`, or None for a GPU if there is one.
        topology: this process's rank, and how many processes this machine has.
        environ: the environment variables; `CUDA_VISIBLE_DEVICES` renumbers the GPUs.
        may_share: True if several processes may use one GPU. Gloo allows it; NCCL refuses it.
        exchange_on_machine: function that sends a text to the other processes on this machine, and
            returns the texts of all of them; None if some have not come in time.

    Returns:
        The device, and the reason for the choice, for the log.

    Raises:
        SettingError: there is no such device, its type is not supported, the GPU does not work, or
            there are fewer GPUs than processes.
    """
    # The user asked for the CPU.
    given = None if wanted is None else _parse_device(wanted)
    if given is not None and given.type == "cpu":
        return given, "as set"

    # No GPU is visible.
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus == 0:
        if given is None:
            return torch.device("cpu"), "no CUDA device is visible" + _format_unused_accelerator()

        raise SettingError(
            f"device={wanted!r}",
            "no CUDA device is visible" + _format_visible_devices(environ),
            "use device='cpu', or install a build of torch for CUDA or ROCm and check the driver",
            may_be_temporary=True,
        )

    _check_cuda_works(num_gpus, environ)

    # The user asked for a GPU by its number.
    if given is not None and given.index is not None:
        _check_given_gpu(given, topology, num_gpus)
        return given, "as set" + _format_physical_gpu(given.index, environ)

    # Any GPU will do.
    index, reason = _choose_gpu_by_local_rank(
        topology, num_gpus, environ, may_share=may_share, exchange_on_machine=exchange_on_machine
    )
    return torch.device("cuda", index), reason + _format_physical_gpu(index, environ)


def _choose_gpu_by_local_rank(
    topology: Topology,
    num_gpus: int,
    environ: Mapping[str, str],
    *,
    may_share: bool,
    exchange_on_machine: Callable[[str], Sequence[str] | None],
) -> tuple[int, str]:
    """Returns the number of the GPU that this process takes, and the reason for the choice.

    Args:
        topology: this process's rank, and how many processes this machine has.
        num_gpus: the number of visible GPUs.
        environ: the environment variables.
        may_share: True if several processes may use one GPU.
        exchange_on_machine: exchanges a text with the other processes here, see `choose_device`.

    Raises:
        SettingError: there are fewer GPUs than processes on this machine.
    """
    index = topology.local_rank % num_gpus
    reason = f"local rank {topology.local_rank}"

    # Two processes may now have the same GPU: there may be fewer GPUs than processes, or the
    # visible devices may be MIG slices of one GPU. NCCL mostly refuses that.
    sees_too_few = topology.local_size > num_gpus
    has_slices = topology.local_size > 1 and any(map(_is_mig_slice, range(num_gpus)))
    may_collide = sees_too_few or has_slices
    sharing_is_allowed = may_share or _nccl_shares_gpus(environ)
    if sharing_is_allowed or not may_collide:
        return index, reason

    if not _processes_see_different_gpus(index, exchange_on_machine):
        raise _too_few_gpus_error(topology, num_gpus, environ, has_slices=has_slices)

    # A scheduler may show each of 4 processes one GPU of its own. Each then sees too few, and takes
    # GPU 0, and yet they are different ones.
    if sees_too_few:
        return index, "the one that this process is shown"
    return index, reason


def _parse_device(wanted: str) -> torch.device:
    """Returns the device that a setting names, or raises SettingError if it is not supported."""
    check_device(wanted)
    return torch.device(wanted)


def _processes_see_different_gpus(
    index: int, exchange_on_machine: Callable[[str], Sequence[str] | None]
) -> bool:
    """Returns True if certainly no two processes on this machine have chosen the same physical GPU.

    Even if each process sees only one GPU, with the number 0, these may be different GPUs. That is
    so with `srun --gpus-per-task=1`, with `--virtual-local-rank` of `lockstep run` and torchrun,
    and in scripts that set CUDA_VISIBLE_DEVICES themselves.

    Args:
        index: the number of the GPU that this process has chosen, as the process sees it.
        exchange_on_machine: exchanges a text with the other processes here, see `choose_device`.
    """
    # NCCL compares the PCI addresses, too. So it takes MIG slices of one GPU for the same GPU. They
    # are not known here if some process has not come in time.
    pci_addresses = exchange_on_machine(_pci_address(index))
    if pci_addresses is None:
        return False
    return len(set(pci_addresses)) == len(pci_addresses)


def _pci_address(index: int) -> str:
    """Returns the domain, bus and device numbers of a visible GPU, such as "0000:3b:00"."""
    gpu: Any = torch.cuda.get_device_properties(index)  # torch's annotations leave these out
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}"


def _is_mig_slice(index: int) -> bool:
    """Returns True if a visible GPU is a MIG slice, such as "NVIDIA A100-SXM4-40GB MIG 1g.5gb"."""
    return " MIG " in torch.cuda.get_device_properties(index).name


def _nccl_shares_gpus(environ: Mapping[str, str]) -> bool:
    """Returns True if NCCL lets several ranks use one GPU.

    NCCL does since version 2.30, if NCCL_MULTI_RANK_GPU_ENABLE is 1.

    Source: NCCL's "Environment Variables", NCCL_MULTI_RANK_GPU_ENABLE.
    """
    is_enabled = environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return is_enabled and _nccl_can_share_gpus()


def _nccl_can_share_gpus() -> bool:
    """Returns True if this NCCL knows the variable NCCL_MULTI_RANK_GPU_ENABLE; RCCL does not."""
    if torch.version.hip is not None or not dist.is_nccl_available():
        return False
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return version >= (2, 30)


def _too_few_gpus_error(
    topology: Topology, num_gpus: int, environ: Mapping[str, str], *, has_slices: bool
) -> SettingError:
    """Returns the error to raise if processes on one machine would have to share a GPU.

    Example: "2 visible GPUs (CUDA_VISIBLE_DEVICES=0,1); NCCL needs one for each".

    Args:
        topology: this process's rank, and how many processes this machine has.
        num_gpus: the number of visible GPUs.
        environ: the environment variables.
        has_slices: True if some of the visible GPUs are slices: parts of a GPU (MIG).
    """
    found = f"{count_noun(num_gpus, 'visible GPU')}{_format_visible_devices(environ)}; "
    if has_slices:
        # torch counts a slice as a GPU. NCCL counts all slices of one GPU as the same GPU.
        found += "MIG slices are among them, and NCCL takes slices of one GPU for one GPU"
        do = (
            "use slices of different GPUs, one for each process, or device='cpu', or "
            "backend='gloo' to share GPUs"
        )
    else:
        found += "NCCL needs one for each"
        do = f"start {num_gpus}, or use device='cpu', or backend='gloo' to share GPUs"
    if _nccl_can_share_gpus():
        do += "; this NCCL shares GPUs, too, with NCCL_MULTI_RANK_GPU_ENABLE=1"
    return SettingError(f"{topology.local_size} processes on this machine", found, do)


def why_cuda_fails() -> str | None:
    """Returns the reason why CUDA cannot be used although GPUs are visible, or None if it can.

    `torch.cuda.is_available()` does not find this out. `import lockstep` sets
    PYTORCH_NVML_BASED_CUDA_CHECK, so that it only asks NVIDIA's management library, which does not
    know whether the driver is too old for this torch.
    """
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def _check_cuda_works(num_gpus: int, environ: Mapping[str, str]) -> None:
    """Raises SettingError if CUDA cannot be used.

    Args:
        num_gpus: the number of visible GPUs.
        environ: the environment variables; the message shows the one that lists the visible GPUs.
    """
    problem = why_cuda_fails()
    if problem is not None:
        # The problem may pass: another process may hold the GPU. So a restart may help.
        raise SettingError(
            f"{count_noun(num_gpus, 'visible GPU')}{_format_visible_devices(environ)}",
            f"CUDA does not work: {problem}",
            "mend that, or use device='cpu'",
            may_be_temporary=True,
        )


def _format_unused_accelerator() -> str:
    """Returns a note for the log if this machine has an accelerator that Lockstep does not support.

    An example is Apple's mps. Returns "" if there is none.
    """
    if not torch.accelerator.is_available():  # torch 2.6 then refuses the next call
        return ""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type == "cuda":
        return ""
    return f"; {SUPPORTED_DEVICES}, not on {accelerator.type}"


def _check_given_gpu(device: torch.device, topology: Topology, num_gpus: int) -> None:
    """Raises SettingError if a GPU given by its number does not exist, or all processes take it."""
    if topology.local_size > 1:
        raise SettingError(
            f"device='{device}' with {topology.local_size} processes on this machine",
            "all of them would use this one GPU",
            "use device='cuda': local rank r then takes visible GPU r",
        )

    if device.index >= num_gpus:
        # The variable need not be set, so this is the usual one for this kind of GPU.
        visible_devices_variable = _visible_devices_variable(environ={})
        raise SettingError(
            f"device='{device}'",
            f"{count_noun(num_gpus, 'visible GPU')}, numbered from 0",
            f"choose a lower number; {visible_devices_variable} renumbers the GPUs it lists from 0",
        )


def _format_physical_gpu(index: int, environ: Mapping[str, str]) -> str:
    """Returns " (physical GPU 2)" if a variable such as CUDA_VISIBLE_DEVICES renumbers the GPUs.

    Args:
        index: the number of a GPU as this process sees it.
        environ: the environment variables. With CUDA_VISIBLE_DEVICES="2,3", GPU 0 of the process is
            physical GPU 2.
    """
    value = environ.get(_visible_devices_variable(environ))
    if not value:
        return ""

    visible_gpus = value.split(",")
    if index >= len(visible_gpus):
        return ""

    physical_gpu = visible_gpus[index].strip()
    return f" (physical GPU {physical_gpu})" if physical_gpu else ""


def _format_visible_devices(environ: Mapping[str, str]) -> str:
    """Returns " (CUDA_VISIBLE_DEVICES=0,1)" if the variable is set; else ""."""
    variable = _visible_devices_variable(environ)
    value = environ.get(variable)
    if value is None:
        return ""
    return f" ({variable}={value})"


def _visible_devices_variable(environ: Mapping[str, str]) -> str:
    """Returns the name of the environment variable that lists the visible GPUs.

    With CUDA, this is CUDA_VISIBLE_DEVICES. With ROCm, it is HIP_VISIBLE_DEVICES, unless only
    CUDA_VISIBLE_DEVICES is set.
    """
    if torch.version.hip is None:
        return "CUDA_VISIBLE_DEVICES"
    if "CUDA_VISIBLE_DEVICES" in environ and "HIP_VISIBLE_DEVICES" not in environ:
        return "CUDA_VISIBLE_DEVICES"
    return "HIP_VISIBLE_DEVICES"


# What to do when memory runs out

# The CPU's allocator, CUDA itself and its libraries raise plain RuntimeErrors with these texts.
OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if the error says that a GPU or the CPU has run out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True

    # Other errors are recognized by their text. Lockstep's own errors are left out, as some of them
    # are RuntimeErrors that mention memory for other reasons.
    if isinstance(error, LockstepError) or not isinstance(error, RuntimeError):
        return False
    message = str(error)
    return any(text in message for text in OUT_OF_MEMORY_TEXTS)


def add_memory_advice(error: BaseException | None, samples: int, devices: int = 1) -> None:
    """Adds a note to an out-of-memory error that says what the user can do about it.

    Example: "lockstep: out of memory with 8 samples at a time on this rank. Take fewer at a time,
    say micro_batch_size=4: ..."

    Args:
        error: the error. If it is None, another error, or has the note already, nothing happens.
        samples: the number of samples that this rank was computing at a time.
        devices: the number of devices of this rank, over which the samples were divided.
    """
    if error is None or not is_out_of_memory(error):
        return

    sentences = [f"out of memory with {count_noun(samples, 'sample')} at a time on this rank."]
    if devices > 1:
        sentences[0] = (
            f"out of memory with {count_noun(samples, 'sample')} at a time on this rank of "
            f"{devices} devices."
        )

    samples_per_device = math.ceil(samples / devices)
    if samples_per_device > 1:
        sentences.append(
            f"Take fewer at a time, say micro_batch_size={samples_per_device // 2}: the global "
            "batch and the numbers stay the same; micro_batch_size='auto' finds the largest that "
            "fits."
        )
    sentences.append(
        "lockstep.checkpoint_activations(model) keeps less for the backward pass, as does "
        "precision='bf16'; strategy='fsdp' divides the model over the ranks."
    )
    add_note_once(error, "out of memory", translate_sentences(*sentences))


def _add_no_other_notes(error: BaseException) -> None:
    pass


def add_memory_advice_at_end(
    step: Step, add_other_notes: Callable[[BaseException], None] = _add_no_other_notes
) -> Callable[[], None]:
    """Installs a hook that adds the memory advice to an uncaught error before Python prints it.

    Args:
        step: the current step of the run, which knows how many samples were computed at a time.
        add_other_notes: function that is called with the uncaught error and may add more notes.

    Returns:
        A function that removes the hook.
    """
    previous_hook = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """Adds the notes to the error, and then lets the previous hook print it."""
        add_memory_advice(error, step.latest_micro_batch.local_rows, step.num_devices)
        add_other_notes(error)
        previous_hook(kind, error, traceback)

    def undo() -> None:
        """Removes the hook, unless another one has been installed over it."""
        if sys.excepthook is hook:
            sys.excepthook = previous_hook

    sys.excepthook = hook
    return undo
