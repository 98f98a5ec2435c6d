"""What this process learns about GPUs and CUDA without initialising CUDA in itself.

`lockstep.launch` runs what cannot be pickled in copies of this process, made by `os.fork`. CUDA
does not work in a copy if its driver was initialised (by `cuInit`) in the process that was copied.
Looking for GPUs may do that: `torch.cuda.is_available()` does, unless the variable
PYTORCH_NVML_BASED_CUDA_CHECK is 1, which `import lockstep` sets; and `torch.cuda.device_count()`
does where NVIDIA's management library (NVML) cannot count the visible devices, as on MIG slices.
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

    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        # torch knows one kind of accelerator at a time, so this is another one, or none.
        return torch.accelerator.device_count() if torch.accelerator.is_available() else 0

    from lockstep.distributed.torch_compat import count_gpus_without_cuda

    count = count_gpus_without_cuda()
    if count is not None:
        return count
    if cuda_is_initialised() is not None:
        return torch.cuda.device_count()  # it changes nothing any more

    # The copy initialises CUDA, and ends.
    return _answer_of_copy(torch.cuda.device_count) or 0


def cuda_is_initialised() -> str | None:
    """Returns how CUDA was initialised in this process, so that its copies cannot use it; or None.

    torch itself says so only once it has used a GPU. Here it is also seen that torch has asked CUDA
    for its devices, and that another library has initialised CUDA's driver.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        if torch.cuda.is_initialized():
            return "torch has used a GPU"
        from lockstep.distributed.torch_compat import cuda_is_refused_in_this_copy

        # torch has a copy refuse CUDA if the process that was copied had asked CUDA for anything.
        if _answer_of_copy(cuda_is_refused_in_this_copy):
            return "torch has asked CUDA for its devices"

    if _cuda_driver_is_initialised():
        return "a library has initialised CUDA's driver"

    return None


def _cuda_driver_is_initialised() -> bool:
    """Returns True if `cuInit` was called in this process, by whatever library.

    Source: CUDA Driver API, "Initialization": any other function returns
    CUDA_ERROR_NOT_INITIALIZED before.
    """
    try:
        # RTLD_NOLOAD: only if a library of this process has loaded it already.
        driver = ctypes.CDLL(CUDA_DRIVER_LIBRARY, mode=os.RTLD_NOLOAD)
        count = ctypes.c_int()
        result: int = driver.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return False
    return result == 0


def _answer_of_copy(question: Callable[[], int]) -> int | None:
    """Returns what a function returns in a copy of this process, which ends at once.

    Args:
        question: returns a number.

    Returns:
        The number, or None if the function raised.
    """
    read_end, write_end = os.pipe()

    with warnings.catch_warnings():
        # Since Python 3.12 os.fork warns if this process has threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()

    if pid == 0:
        try:
            os.write(write_end, str(int(question())).encode())
        finally:
            os._exit(0)

    os.close(write_end)
    answer = os.read(read_end, 64)  # empty if the copy has written nothing
    os.close(read_end)

    with contextlib.suppress(ChildProcessError):  # a handler of SIGCHLD may have been faster
        os.waitpid(pid, 0)

    return int(answer) if answer else None
