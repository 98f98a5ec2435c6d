"""Collectives: the Flight Recorder, and how many this rank has called."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterable
from typing import Any

from lockstep.torch_compat.process_groups import gpu_of_default_group

RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")
"""Functions of `torch._C._distributed_c10d` that return the Flight Recorder's calls, of Gloo and of
NCCL. With `_json` at the end of its name, each returns them without stacks and much faster."""


def flight_record(*, stacks: bool) -> str:
    """Returns the calls in torch's Flight Recorder, as JSON.

    Torch has a recorder for each kind of backend, such as NCCL. The result is a list with one
    element for each recorder.

    Args:
        stacks: True to include the stack of each call, if that is possible at once (see
            `_can_record_stacks_at_once`). 2000 calls take 0.2 s with stacks, 50 ms without.
    """
    import torch._C._distributed_c10d as c10d

    with_stacks = stacks and _can_record_stacks_at_once()
    records: list[bytes] = []
    for name in RECORDERS:
        # Torch has two functions for each recorder. Only the one without `_json` returns stacks.
        function_name = name if with_stacks else f"{name}_json"
        if hasattr(c10d, function_name):
            records.append(getattr(c10d, function_name)())
    if with_stacks:
        # Records with stacks are pickles. They are safe to load: torch made them in this process.
        # They may contain values that JSON does not know; these become texts.
        return json.dumps([pickle.loads(record) for record in records], default=str)

    texts = [record.decode(errors="replace") for record in records]
    return f"[{', '.join(texts)}]"


def _can_record_stacks_at_once() -> bool:
    """Returns True if torch's compiler is loaded, and no thread is importing it just now.

    Torch needs its compiler to write down stacks. If it is not loaded, torch loads it, in 2 s and
    while it holds the interpreter's lock. A process that uses DDP has loaded it.
    """
    compiler = sys.modules.get("torch._dynamo")
    if compiler is None:
        return False

    # Python's import system sets `__spec__._initializing` to True while it imports the module. If
    # the attribute is missing, the module is taken to be still importing, to be safe.
    import_spec = getattr(compiler, "__spec__", None)
    is_being_imported = getattr(import_spec, "_initializing", True)
    return not is_being_imported


def take_gpu(fallback_index: int | None = None) -> None:
    """Makes the GPU of this rank the current one of this thread, before `flight_record` is called.

    Torch's Flight Recorder asks CUDA whether a call has ended. A thread that has no current GPU
    would open GPU 0 for that, and every rank of the machine would take some hundred MiB of its
    memory.

    Args:
        fallback_index: number of the GPU to take if the process group does not say which GPU it
            uses. If it is None, the number in LOCAL_RANK is used.
    """
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():  # the process uses no GPU
        return

    gpu_of_group = gpu_of_default_group()
    if gpu_of_group is not None:
        index = gpu_of_group.index
    elif fallback_index is not None:
        index = fallback_index
    else:
        index = int(os.environ.get("LOCAL_RANK", 0))
    if index < cuda.device_count():
        cuda.set_device(index)


def num_collectives() -> int | None:
    """Returns how many collectives this rank has begun, in all process groups that are open.

    Messages between two ranks (`dist.send`) are not counted. The result is None if a backend, such
    as MPI, does not count its collectives.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return 0

    total = 0
    for group in list(c10d._world.pg_names):
        count = _num_collectives_of(group)
        if count is None:
            return None
        total += count
    return total


def has_not_communicated(groups: Iterable[Any]) -> bool:
    """Returns True if this rank has certainly called no collective and sent no message.

    The Flight Recorder has both, of Gloo and NCCL. The groups themselves count the collectives of
    other backends.

    Args:
        groups: all default process groups that were opened; they may be closed by now.
    """
    if not _flight_recorder_is_complete():  # nothing is certain
        return False

    for record in json.loads(flight_record(stacks=False)):
        if record.get("entries"):
            return False

    return all(_num_collectives_of(group) == 0 for group in groups)


def _num_collectives_of(group: Any) -> int | None:
    """Returns how many collectives a group has begun, or None if its backend does not count."""
    try:
        count: int = group._get_sequence_number_for_group()
    except RuntimeError:
        return None
    return count


def _flight_recorder_is_complete() -> bool:
    """Returns True if torch's Flight Recorder is on, and records both Gloo and NCCL."""
    buffer_size = os.environ.get("TORCH_FR_BUFFER_SIZE", "")
    is_on = buffer_size.isdigit() and int(buffer_size) > 0
    return is_on and _torch_records_gloo()


def _torch_records_gloo() -> bool:
    """Returns True if torch's Flight Recorder records the calls of Gloo; before 2.8 only NCCL's."""
    import torch._C._distributed_c10d as c10d

    return hasattr(c10d, "_dump_fr_trace_json")
