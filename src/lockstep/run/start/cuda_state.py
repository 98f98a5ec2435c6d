"""Finds out about GPUs and CUDA without initialising CUDA in this process.

`lockstep.launch` runs functions that cannot be pickled in copies of this process, made by
`os.fork`. CUDA does not work in a copy if its driver was initialised (by `cuInit`) in the process
that was copied. Looking for GPUs may do that: `torch.cuda.is_available()` does, unless the variable
PYTORCH_NVML_BASED_CUDA_CHECK is 1, which `import lockstep` sets; and `torch.cuda.device_count()`
does if NVIDIA's management library (NVML) cannot count the visible devices, as with MIG slices.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import warnings
from collections.abc import Callable

CUDA_DRIVER_LIBRARY = "libcuda.so.1"


def count_gpus() -> int:
    """Returns the number of CUDA devices, or of devices of torch's current accelerator."""
    import torch

    # torch is built for one kind of accelerator. If that is not CUDA, it may be another kind.
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return torch.accelerator.device_count() if torch.accelerator.is_available() else 0

    from lockstep.torch_compat import count_gpus_without_cuda

    # If CUDA itself counts, it is initialised, and copies of this process could no longer use it.
    # So ask the vendor's management library first, which may not be there (None).
    count = count_gpus_without_cuda()
    if count is not None:
        return count

    # If CUDA is initialised already, it does no harm to let it count.
    if how_cuda_was_initialised() is not None:
        return torch.cuda.device_count()

    # Otherwise let a copy of this process initialise CUDA and count.
    return _answer_of_copy(torch.cuda.device_count) or 0


def how_cuda_was_initialised() -> str | None:
    """Returns how CUDA was initialised in this process, so that its copies cannot use it.

    torch only reports this once it has used a GPU. This function also notices if torch has asked
    CUDA for its devices, or if another library has initialised the driver of CUDA.

    Returns:
        A text for an error, or None if CUDA was not initialised.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        if torch.cuda.is_initialized():
            return "torch has used a GPU"

        # Once this process has asked CUDA for anything, torch refuses to use CUDA in forked copies
        # of it. torch shows that only in a copy, so fork one and ask torch there.
        from lockstep.torch_compat import cuda_is_refused_in_this_copy

        if _answer_of_copy(cuda_is_refused_in_this_copy):
            return "torch has asked CUDA for its devices"

    if _cuda_driver_is_initialised():
        return "a library has initialised CUDA's driver"

    return None


def _cuda_driver_is_initialised() -> bool:
    """Returns True if any library has called `cuInit` in this process.

    Before that, every other function of the driver, such as `cuDeviceGetCount`, returns
    CUDA_ERROR_NOT_INITIALIZED; see "Initialization" in the documentation of the CUDA Driver API.
    """
    try:
        # With RTLD_NOLOAD, the library is only found if it has been loaded in this process already.
        driver = ctypes.CDLL(CUDA_DRIVER_LIBRARY, mode=os.RTLD_NOLOAD)
        count = ctypes.c_int()
        result: int = driver.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return False
    return result == 0  # CUDA_SUCCESS


def _answer_of_copy(question: Callable[[], int]) -> int | None:
    """Calls a function in a copy of this process, which then ends, and returns its result.

    Args:
        question: function that returns a number.

    Returns:
        The number, or None if the function raised an exception.
    """
    read_end, write_end = os.pipe()

    with warnings.catch_warnings():
        # Since Python 3.12, os.fork warns if this process has threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()

    if pid == 0:  # in the copy
        try:
            os.write(write_end, str(int(question())).encode())
        finally:
            os._exit(0)  # also after an exception, before anything was written

    os.close(write_end)
    answer = os.read(read_end, 64)  # empty if the copy has written nothing
    os.close(read_end)

    with contextlib.suppress(ChildProcessError):  # a handler of SIGCHLD may have been faster
        os.waitpid(pid, 0)
    return int(answer) if answer else None
