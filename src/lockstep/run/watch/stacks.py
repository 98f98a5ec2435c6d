"""A Python stack: reading it, which line is the user's own, whether it waits for other ranks."""

from __future__ import annotations

import linecache
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Frame:
    """One line of a Python stack."""

    file: str
    line: int
    function: str


Stack = tuple[Frame, ...]
"""Innermost first."""


# By its folder and by how such folders are called on any host: a stack may come from elsewhere.
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python3")
_NOT_CODE = ("<frozen ", "<string>", "<stdin>", "???")
_OWN_FOLDERS = (str(Path(__file__).parents[2]) + "/", sysconfig.get_paths()["stdlib"] + "/")


# What runs the user's program in a rank: the frames below it are the launcher's.
_LAUNCHER = tuple(f"{_OWN_FOLDERS[0]}run/start/{name}.py" for name in ("worker", "spawn"))

IN_BUFFERS = "in the DDP model's forward, which broadcasts its buffers"
IN_PIPELINE = "between the stages of the pipeline"


@dataclass(frozen=True)
class Wait:
    """What a stack says about waiting for other ranks."""

    op: str = ""
    """The outermost function of torch.distributed that was called; "" in a backward pass."""
    where: str = ""
    """What of torch it happens in, in words: "in backward", ..."""
    sure: bool = True
    """False: this place may be waiting or computing; other signs must decide."""


_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?),? in (.*)')


def parse_frames(text: str) -> tuple[Frame, ...]:
    """The frames in what Python's traceback or faulthandler has written, in their order there."""
    found = filter(None, map(_FRAME.fullmatch, text.splitlines()))
    return tuple(Frame(f[1], 0 if f[2] == "???" else int(f[2]), f[3]) for f in found)


def parse_stack(text: str, thread: int = 0) -> Stack | None:
    """The last stack in what `faulthandler` writes for one thread; None: there is none.

    It has the 100 innermost frames.

    Args:
        text: what was written.
        thread: the thread's identifier, to find it where all threads were written.
    """
    heading = rf"(?:Stack|.*hread 0x0*{thread:x}\b.*) \(most recent call first\):\n"
    _, *found = re.split(heading, text)
    return parse_frames(found[-1].partition("\n\n")[0]) if found else None


def own_line(stack: Stack | None) -> Frame | None:
    """The innermost line that is the user's own; else the innermost outside torch; else any.

    The program's own file is the user's wherever it lies, as that of `-m installed.package.module`.
    """
    below = (number for number, frame in enumerate(stack or ()) if frame.file in _LAUNCHER)
    stack = (stack or ())[: next(below, None)]
    outside = [f for f in stack if not f.file.startswith((*_OWN_FOLDERS, *_NOT_CODE))]
    script = next((f.file for f in reversed(outside) if f.function == "<module>"), None)
    for others in (_LIBRARY, ("/torch/",)):
        for frame in outside:
            if frame.file == script or not any(part in frame.file for part in others):
                return frame
    return stack[0] if stack else None


# What a pipeline's stages send each other, by the function that waits until it has come or gone.
_WIRE = "lockstep/strategies/pipeline/wire.py"
_ON_WIRE = {"take": "recv", "wait": "send"}
_SHARED_MEMORY = "lockstep/communication/shared_memory.py"
_ROUTING = "lockstep/communication/routing.py"
_LINK = "lockstep/communication/link.py"
_C10D = "torch/distributed/distributed_c10d.py"
_DDP = "torch/nn/parallel/distributed.py"
# Files whose public functions do nothing that takes time but wait, and those of their inner
# functions that do so as well.
_WAITING_FILES = (
    _C10D,
    _SHARED_MEMORY,
    "torch/distributed/rendezvous.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/nn/functional.py",
)
_INNER = re.compile(
    r"_new_process_group_helper|_create_\w+_process_group|_store_based_barrier|"
    r"_new_group_with_tag|_create_c10d_store|_env_rendezvous_handler|_tcp_rendezvous_handler|"
    r"_barrier|_wait|posted_within"
)
# Elsewhere, functions in which nothing but waiting takes time.
_WAITING = {
    _WIRE: set(_ON_WIRE),
    _ROUTING: {"exchange"},
    _LINK: {"wait"},
    "torch/distributed/utils.py": {
        "_verify_param_shape_across_processes",
        "_sync_params_and_buffers",
    },
    _DDP: {"_distributed_broadcast_coalesced"},
    "torch/distributed/pipelining/schedules.py": {"_wait_batch_p2p", "_batch_p2p"},
}
# Places that compute and wait, in C++.
_PERHAPS = (
    "torch/autograd/graph.py",
    _DDP,
    "torch/distributed/fsdp/",
    "torch/distributed/tensor/",
    "torch/distributed/algorithms/",
    "torch/distributed/optim/",
    "torch/distributed/pipelining/",
)
# What the torch code around a place means, by file and function; None: all of the file or folder.
_MEANINGS: tuple[tuple[str, set[str] | None, str], ...] = (
    (_WIRE, None, IN_PIPELINE),
    (_DDP, {"__init__"}, "while DDP is constructed"),
    (_DDP, {"_sync_buffers", "_sync_module_buffers"}, IN_BUFFERS),
    (_DDP, {"_pre_forward", "forward"}, "in the DDP model's forward"),
    ("torch/autograd/graph.py", {"_engine_run_backward"}, "in backward"),
    ("torch/distributed/fsdp/", None, "in FSDP"),
    ("torch/distributed/checkpoint/", None, "in a distributed checkpoint"),
)


def waits_in(stack: Stack | None) -> Wait | None:
    """Where a stack's innermost frame is one in which ranks wait for each other; None: elsewhere.

    From the Python files of torch 2.11, 2.13 and 2.14. Waiting in a C function that the user calls
    (such as `work.wait()` or `store.get()`) leaves no frame, so it is not seen here.
    """
    if not stack:
        return None
    for place, frame in enumerate(stack):
        if frame.function == "_wait" and _in(frame, _SHARED_MEMORY):
            stack = stack[place:]  # what it calls looks whether the other ranks still run
            break
    where = _where(stack)
    if _is_waiting(stack[0]):
        op = "" if _in(stack[0], _LINK) else stack[0].function
        if _in(stack[0], _WIRE):
            return Wait(_ON_WIRE[op], where)
        for frame in stack[1:]:
            between = _in(frame, "torch/distributed/c10d_logger.py")
            if not (between or _is_waiting(frame) or frame.file.startswith(_OWN_FOLDERS[0])):
                break
            if _in(frame, _C10D, _SHARED_MEMORY, _ROUTING) and _is_waiting(frame):
                op = frame.function
        return Wait("" if op.startswith("_") else op, where)
    if _in(stack[0], *_PERHAPS):
        return Wait("", where, sure=False)
    return None


def may_go_on(stack: Stack) -> bool:
    """Whether a thread may go on though no other thread, and no other rank, does anything.

    It does not where it waits for one of them without a limit of time: of Python's library that is
    seen in `threading`, by the line, and in the workers of `concurrent.futures`.
    """
    wait = waits_in(stack)
    if not stack or (wait is not None and wait.sure):
        return False
    limitless = linecache.getline(stack[0].file, stack[0].line).rstrip().endswith(".acquire()")
    in_threading = _in(stack[0], "threading.py") and limitless
    return not in_threading and not _in(stack[0], "concurrent/futures/thread.py")


def is_leaving(stack: Stack | None) -> bool:
    """The program has come to its end, where the interpreter waits for its other threads."""
    return any(
        frame.function == "_shutdown" and _in(frame, "threading.py") for frame in (stack or ())[:3]
    )


def is_loading(stack: Stack | None) -> bool:
    """Waits for the next batch of a DataLoader."""
    return any(_in(frame, "torch/utils/data/dataloader.py") for frame in (stack or ())[:12])


def _where(stack: Stack) -> str:
    """The meaning of the torch code around the place, the innermost that says something."""
    for frame in stack:
        for path, functions, meaning in _MEANINGS:
            if _in(frame, path) and (functions is None or frame.function in functions):
                return meaning
    return ""


def _is_waiting(frame: Frame) -> bool:
    if _in(frame, *_WAITING_FILES):
        return not frame.function.startswith("_") or bool(_INNER.fullmatch(frame.function))
    return any(_in(frame, path) and frame.function in found for path, found in _WAITING.items())


def _in(frame: Frame, *paths: str) -> bool:
    return any(f"/{path}" in f"/{frame.file}" for path in paths)
