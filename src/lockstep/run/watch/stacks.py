"""Reads Python stacks: finds the user's own line, and the place where ranks wait for each other.

A *stack* is a tuple of `Frame`s, the innermost first. It may come from another machine, so a file
is recognized by a part of its path. A *wait* is a place in torch.distributed, or in Lockstep's own
communication code, where a thread waits until other ranks arrive.
"""

from __future__ import annotations

import linecache
import re
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Frame:
    """One line of a Python stack."""

    file: str
    line: int
    function: str


Stack = tuple[Frame, ...]
"""The innermost frame comes first."""


# --- Reading stacks that were written as text

# A frame in Python's own tracebacks and in the output of faulthandler:
#   File "/home/me/train.py", line 41, in main
#   File "/home/me/train.py", line 41 in main
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?),? in (?P<function>.*)')


def parse_frames(text: str) -> tuple[Frame, ...]:
    """Reads the frames of a traceback, or of faulthandler's output, in the order of the text."""
    frames = []
    for text_line in text.splitlines():
        match = _FRAME.fullmatch(text_line)
        if match is not None:
            # Faulthandler writes ??? if it does not know the line.
            line = 0 if match["line"] == "???" else int(match["line"])
            frames.append(Frame(match["file"], line, match["function"]))
    return tuple(frames)


def parse_stack(text: str, thread: int = 0) -> Stack | None:
    """Reads the last stack that `faulthandler` has written for one thread.

    Faulthandler writes the 100 innermost frames of a stack.

    Args:
        text: the output of faulthandler, which may contain several dumps.
        thread: the identifier of the thread; needed if the stacks of all threads were written.

    Returns:
        The stack, the innermost frame first; None if the text has no stack of this thread.
    """
    # Each stack begins with one of these headings. The first form is written if only one thread was
    # asked for. In the other two, the identifier of the thread has leading zeros.
    # Stack (most recent call first):
    # Thread 0x00007f5c2a7fc640 (most recent call first):
    # Current thread 0x00007f5c2a7fc640 (most recent call first):
    heading = rf"(?:Stack|.*[Tt]hread 0x0*{thread:x}\b.*) \(most recent call first\):\n"
    parts = re.split(heading, text)
    if len(parts) == 1:  # there is no heading
        return None

    # The stack ends at an empty line. The stacks of other threads may follow.
    after_last_heading = parts[-1]
    stack_text, _, _ = after_last_heading.partition("\n\n")
    return parse_frames(stack_text)


# --- The user's own line

LOCKSTEP_FOLDER = str(Path(__file__).parents[2]) + "/"
STANDARD_LIBRARY_FOLDER = sysconfig.get_paths()["stdlib"] + "/"

# The standard library is listed a second time, by the name that its folder has on any machine.
_LIBRARY_FOLDERS = ("/site-packages/", "/dist-packages/", "/lib/python3")
_TORCH_FOLDERS = ("/torch/",)
_FILES_WITHOUT_SOURCE = ("<frozen ", "<string>", "<stdin>", "???")
_NEVER_USER_CODE = (LOCKSTEP_FOLDER, STANDARD_LIBRARY_FOLDER, *_FILES_WITHOUT_SOURCE)

# These files run the user's program in a rank. From there outwards, all frames are the launcher's.
_LAUNCHER_FILES = (
    f"{LOCKSTEP_FOLDER}run/start/worker.py",
    f"{LOCKSTEP_FOLDER}run/start/process_exit.py",
    f"{LOCKSTEP_FOLDER}run/start/function_worker.py",
)


def user_frame(stack: Stack | None) -> Frame | None:
    """Finds the innermost frame of the user's own code.

    The first of these that exists is returned:

    1. the innermost frame outside installed packages, or in the file that was started, which may
       belong to an installed package (`-m package.module`);
    2. the innermost frame outside torch;
    3. the innermost frame of all.

    Returns:
        The frame, or None if there is no stack, or only frames of the launcher.
    """
    program_frames = _without_launcher(stack or ())

    candidates = []  # frames that may be the user's code, the innermost first
    for frame in program_frames:
        if not frame.file.startswith(_NEVER_USER_CODE):
            candidates.append(frame)

    # First skip all installed packages. If nothing is left, skip only torch.
    script = _started_file(candidates)
    for skipped_folders in (_LIBRARY_FOLDERS, _TORCH_FOLDERS):
        for frame in candidates:
            is_skipped = any(folder in frame.file for folder in skipped_folders)
            if frame.file == script or not is_skipped:
                return frame

    # There are only frames of torch, and of files that are never the user's.
    return program_frames[0] if program_frames else None


class _CollectiveMethods(NamedTuple):
    """The methods of a class of Lockstep's that all ranks must call together."""

    variable: str
    """How users usually name an object of the class."""
    methods: tuple[str, ...]


_COLLECTIVES_OF_FILE = {
    f"{LOCKSTEP_FOLDER}world.py": _CollectiveMethods(
        "world",
        ("barrier", "broadcast", "gather", "loss", "max", "mean", "means", "min", "sum"),
    ),
    f"{LOCKSTEP_FOLDER}checkpoint/checkpointer.py": _CollectiveMethods(
        "checkpoint",
        ("resume", "save", "step", "wait"),
    ),
}
_SYNC_BATCHNORM_FILE = f"{LOCKSTEP_FOLDER}strategies/sync_batchnorm.py"


def collective_of_lockstep(stack: Stack | None) -> str:
    """Returns the collective of Lockstep that the user's line calls, such as "world.loss()".

    If one collective calls another, the outermost one is returned. Empty if there is none.
    """
    users_frame = user_frame(stack)
    outermost = ""
    for frame in stack or ():  # from the innermost frame outwards, to the user's
        if frame == users_frame:
            return outermost
        collectives = _COLLECTIVES_OF_FILE.get(frame.file)
        if collectives is not None and frame.function in collectives.methods:
            outermost = f"{collectives.variable}.{frame.function}()"
    return ""  # no frame is the user's


def is_in_sync_batchnorm(stack: Stack | None) -> bool:
    """Returns True if the user's line calls a model whose BatchNorm exchanges statistics."""
    users_frame = user_frame(stack)
    for frame in stack or ():  # from the innermost frame outwards, to the user's
        if frame == users_frame:
            return False
        if frame.file == _SYNC_BATCHNORM_FILE and frame.function == "forward":
            return True
    return False


def _without_launcher(stack: Stack) -> Stack:
    """Cuts off the launcher's frames, which are the outermost ones, at the end of the stack."""
    for index, frame in enumerate(stack):
        if frame.file in _LAUNCHER_FILES:
            return stack[:index]
    return stack


def _started_file(frames: list[Frame]) -> str | None:
    """Returns the file of the script that was started, or None if it is not in the stack.

    It is the file of the outermost frame that runs the code of a module.

    Args:
        frames: the frames of a stack, the innermost first.
    """
    for frame in reversed(frames):
        if frame.function == "<module>":
            return frame.file
    return None


# --- Waiting for other ranks

DDP_BUFFER_BROADCAST = "in the DDP model's forward, which broadcasts its buffers"
LOCKSTEP_INIT = "lockstep.init"
PIPELINE_TRANSFER = "between the stages of the pipeline"


@dataclass(frozen=True)
class Wait:
    """What a stack says about waiting for other ranks."""

    op: str = ""
    """The function of torch.distributed that the user called; empty in a backward pass."""
    context: str = ""
    """The part of torch around the wait, such as "in backward"; empty if it is not known."""
    certain: bool = True
    """False if code at this place may be computing as well as waiting, as in a backward pass."""


_C10D = "torch/distributed/distributed_c10d.py"
_C10D_LOGGER = "torch/distributed/c10d_logger.py"
_DDP = "torch/nn/parallel/distributed.py"
_SHARED_MEMORY = "lockstep/communication/shared_memory.py"
_ROUTING = "lockstep/communication/routing.py"
_TRAFFIC = "lockstep/communication/traffic.py"
_JOINING = "lockstep/distributed/process_group.py"
_PIPELINE_WIRE = "lockstep/strategies/pipeline/wire.py"

# The functions in which a stage of a pipeline waits for another stage, and what they wait for.
_OP_OF_WIRE_FUNCTION = {"take": "recv", "wait": "send"}

# In these files every public function that takes time is waiting for other ranks...
_WAITING_FILES = (
    _C10D,
    _SHARED_MEMORY,
    "torch/distributed/rendezvous.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/nn/functional.py",
)
# ... and so is each of these functions, which are private or are called by a public one.
_INNER_WAITING_FUNCTION = re.compile(
    r"_new_process_group_helper|_create_\w+_process_group|_store_based_barrier|"
    r"_new_group_with_tag|_create_c10d_store|_env_rendezvous_handler|_tcp_rendezvous_handler|"
    r"_barrier|_wait|posted_within"
)
# In other files, these functions, with all that they call, do nothing but wait.
_WAITING_FUNCTIONS = {
    _PIPELINE_WIRE: set(_OP_OF_WIRE_FUNCTION),
    _ROUTING: {"exchange"},
    _TRAFFIC: {"wait"},
    _JOINING: {"main_process_first", "_exchange_on_this_machine"},
    "lockstep/distributed/rendezvous.py": {"join"},
    "lockstep/distributed/backend.py": {"_wait_until_all_are_connected"},
    "torch/distributed/utils.py": {
        "_verify_param_shape_across_processes",
        "_sync_params_and_buffers",
    },
    _DDP: {"_distributed_broadcast_coalesced"},
    "torch/distributed/pipelining/schedules.py": {"_wait_batch_p2p", "_batch_p2p"},
}
# Some functions look again and again for the other ranks while they wait. Each time that such a
# function is seen, other frames may be inside its frame. They say nothing.
_POLLING_FUNCTIONS = {
    _SHARED_MEMORY: {"_wait"},
    _JOINING: {"_exchange_on_this_machine"},
    "lockstep/distributed/rendezvous.py": {"join"},
    "lockstep/distributed/backend.py": {"_wait_until_all_are_connected"},
}
# Code in these files and folders calls C++ code that both computes and waits.
_COMPUTING_OR_WAITING = (
    "torch/autograd/graph.py",
    _DDP,
    "torch/distributed/fsdp/",
    "torch/distributed/tensor/",
    "torch/distributed/algorithms/",
    "torch/distributed/optim/",
    "torch/distributed/pipelining/",
)
# The file or folder of a frame, its function (None: any function), and the context it stands for.
_CONTEXTS: tuple[tuple[str, set[str] | None, str], ...] = (
    (_PIPELINE_WIRE, None, PIPELINE_TRANSFER),
    (_DDP, {"__init__"}, "while DDP is constructed"),
    (_DDP, {"_sync_buffers", "_sync_module_buffers"}, DDP_BUFFER_BROADCAST),
    (_DDP, {"_pre_forward", "forward"}, "in the DDP model's forward"),
    ("torch/autograd/graph.py", {"_engine_run_backward"}, "in backward"),
    ("torch/distributed/fsdp/", None, "in FSDP"),
    ("torch/distributed/checkpoint/", None, "in a distributed checkpoint"),
)


def find_wait(stack: Stack | None) -> Wait | None:
    """Tells from the innermost frame of a stack whether it waits for other ranks.

    A polling function checks and sleeps in a loop until the other ranks have come. Frames inside it
    are cut off: `sleep`, called by `join`, counts as `join`.

    The names of files and functions are those of torch 2.11, 2.13 and 2.14. A C function that waits
    and is called directly by the user, such as `work.wait()` or `store.get()`, has no Python frame,
    so such a wait is not seen.

    Returns:
        The wait, or None if ranks do not wait for each other in the innermost frame.
    """
    if not stack:
        return None

    stack = without_polling(stack)
    innermost = stack[0]
    if _is_communication(innermost):
        return Wait(op=_called_op(stack), context=_context(stack))

    # In some functions of torch, such as a backward pass, a rank may compute as well as wait: such
    # a wait is not certain.
    if _is_in(innermost, *_COMPUTING_OR_WAITING):
        return Wait(op="", context=_context(stack), certain=False)
    return None


def without_polling(stack: Stack) -> Stack:
    """Cuts off the frames inside a polling function, so that the stack begins in that function.

    A polling function waits for other ranks by checking and sleeping in a loop. In shared memory, a
    rank checks now and then whether the other ranks still exist; in `lockstep.init`, it tries again
    and again to connect to them.
    """
    for index, frame in enumerate(stack):
        if _is_one_of(frame, _POLLING_FUNCTIONS):
            return stack[index:]
    return stack


def _called_op(stack: Stack) -> str:
    """Returns the operation that the user's code called, for a stack that is in a wait.

    The innermost function is often only a part of it. So the stack is followed outwards, until a
    frame is neither communication code nor a wrapper around it, and the outermost operation is
    returned. For `broadcast_object_list`, which waits in `broadcast`:

        frame                                           operation so far
        broadcast, in distributed_c10d.py               broadcast
        wrapper, in c10d_logger.py                      broadcast
        broadcast_object_list, in distributed_c10d.py   broadcast_object_list
        wrapper, in c10d_logger.py                      broadcast_object_list
        train, in train.py                              stop

    Returns:
        The name of a function; empty if the user did not call an operation, but `backward`, say.
    """
    op_of_lockstep = _op_of_init_or_pipeline(stack)
    if op_of_lockstep:
        return op_of_lockstep

    # All of Lockstep's collectives wait in one function of `traffic.py`, whose name says nothing.
    innermost = stack[0]
    op = "" if _is_in(innermost, _TRAFFIC) else innermost.function

    for frame in stack[1:]:
        if _is_operation(frame):
            op = frame.function
        elif not _is_part_of_operation(frame):
            break  # the user's code, or another part of torch, such as DDP

    return "" if op.startswith("_") else op  # a private name means nothing to the user


def _op_of_init_or_pipeline(stack: Stack) -> str:
    """Returns the operation of a rank that waits in `lockstep.init` or a pipeline; else empty."""
    # `lockstep.init` waits for the other ranks several times, in several functions. All of these
    # waits count as one call: the user has made one, and so ranks in two of them wait in the same.
    if any(_is_in(frame, _JOINING) and frame.function == "join_run" for frame in stack):
        return LOCKSTEP_INIT

    # The sends and receives of a pipeline are Lockstep's. The user only called the model.
    innermost = stack[0]
    if _is_in(innermost, _PIPELINE_WIRE):
        return _OP_OF_WIRE_FUNCTION[innermost.function]
    return ""


def _context(stack: Stack) -> str:
    """Returns the part of torch that a stack is in, such as "in backward"; empty if in none.

    The innermost frame that `_CONTEXTS` has a text for decides.
    """
    for frame in stack:
        for path, functions, context in _CONTEXTS:
            if _is_in(frame, path) and (functions is None or frame.function in functions):
                return context
    return ""


def _is_operation(frame: Frame) -> bool:
    """Returns True if a frame is in an operation that users call, such as `all_reduce`.

    torch's `distributed_c10d.py` and two modules of Lockstep contain them.
    """
    return _is_communication(frame) and _is_in(frame, _C10D, _SHARED_MEMORY, _ROUTING)


def _is_part_of_operation(frame: Frame) -> bool:
    """Returns True if a frame is in what an operation calls, or in what calls it for the user."""
    # torch wraps its operations in a logger, and Lockstep's methods call them for the user.
    is_wrapper = _is_in(frame, _C10D_LOGGER) or frame.file.startswith(LOCKSTEP_FOLDER)
    return is_wrapper or _is_communication(frame)


def _is_communication(frame: Frame) -> bool:
    """Returns True if a frame is in a function that does nothing but wait for other ranks."""
    if _is_in(frame, *_WAITING_FILES):
        # All public functions of these files wait, apart from quick ones such as `get_rank`, which
        # a stack hardly ever shows. Some private functions that the public ones call wait too.
        is_public = not frame.function.startswith("_")
        return is_public or _INNER_WAITING_FUNCTION.fullmatch(frame.function) is not None

    # In other files, only some functions wait.
    return _is_one_of(frame, _WAITING_FUNCTIONS)


def _is_one_of(frame: Frame, functions_of_file: Mapping[str, set[str]]) -> bool:
    """Returns True if a frame is in one of these functions, which are given for each file."""
    for path, functions in functions_of_file.items():
        if _is_in(frame, path) and frame.function in functions:
            return True
    return False


def _is_in(frame: Frame, *paths: str) -> bool:
    """Returns True if a frame's file is one of these relative paths, or lies in one of them."""
    return any(f"/{path}" in f"/{frame.file}" for path in paths)


# --- Other states of a thread

# Threads that run these functions wake up now and then, but make no calls that ranks wait for. In
# Lockstep, one touches a lock file, and the other ends the process at a signal. The last one copies
# a DataLoader's batches to pinned memory.
_HOUSEKEEPING_FUNCTIONS = {
    "lockstep/checkpoint/signs_of_life.py": {"_run"},
    "lockstep/checkpoint/termination.py": {"_watch"},
    "torch/utils/data/_utils/pin_memory.py": {"_pin_memory_loop"},
}

# Parts of installed libraries whose own threads draw progress bars, or write and send what a script
# reports. At most they ask the script for a number to report. A library that runs work of the
# script when its time has come, as a scheduler does, must not be listed, and neither must one that
# puts frames of its own around those of the script's threads, as sentry_sdk does: at rest, the
# stacks of such threads look no different. For the same reason no rule about stacks, or about who
# has started a thread, can replace this list: the thread by which ClearML pings its server looks
# like one that only reports, and calls the abort callback of the script.
_REPORTING_LIBRARIES = (
    "mlflow/system_metrics/",
    "mlflow/utils/async_logging/",
    "opentelemetry/sdk/",  # W&B starts it
    "rich/live.py",
    "tensorboard/compat/",
    "tensorboard/summary/writer/",
    "tensorboardX/",
    "tqdm/_monitor.py",
    "wandb/sdk/",
)
_INSTALLED_FILE = re.compile(r".*/(?:site|dist)-packages/(?P<path>.*)")
_STANDARD_LIBRARY_FILE = re.compile(r".*/lib/python3\.\d+t?/(?!site-packages/|dist-packages/)")


def is_housekeeping(stack: Stack) -> bool:
    """Returns True if a thread does nothing that another thread or another rank waits for."""
    does_housekeeping = any(_is_one_of(frame, _HOUSEKEEPING_FUNCTIONS) for frame in stack)
    return does_housekeeping or _is_thread_of_reporting_library(stack)


def _is_thread_of_reporting_library(stack: Stack) -> bool:
    """Returns True if a thread runs code of `_REPORTING_LIBRARIES`, and no code of the user's.

    All its frames are those of such libraries, or of Python's standard library, which alone do not
    show who has started a thread.
    """
    other_frames = [frame for frame in stack if not _STANDARD_LIBRARY_FILE.match(frame.file)]
    return bool(other_frames) and all(map(_is_of_reporting_library, other_frames))


def _is_of_reporting_library(frame: Frame) -> bool:
    installed = _INSTALLED_FILE.match(frame.file)
    return installed is not None and installed["path"].startswith(_REPORTING_LIBRARIES)


def may_continue_alone(stack: Stack) -> bool:
    """Returns True if a thread may go on even if no other thread and no other rank does anything.

    That is assumed of every thread but these:

    - a thread without a stack: it is about to begin or to end, and runs no code of the user's
    - a thread that certainly waits for other ranks, in `torch.distributed` or Lockstep
    - a thread that does housekeeping: nobody is helped if it goes on
    - an idle worker of `concurrent.futures`, which waits for work
    - a thread that waits for a lock of Python's `threading`, without a timeout
    """
    if not stack:
        return False

    # If the wait is not certain, the thread may be computing at this place.
    wait = find_wait(stack)
    if wait is not None and wait.certain:
        return False

    if is_housekeeping(stack):
        return False

    innermost = stack[0]
    is_idle_worker = _is_in(innermost, "concurrent/futures/thread.py")
    return not is_idle_worker and not _waits_for_lock_without_timeout(innermost)


def _waits_for_lock_without_timeout(frame: Frame) -> bool:
    """Returns True if a frame of Python's `threading` acquires a lock without a timeout.

    The source of the line shows that: `waiter.acquire()`, and not `waiter.acquire(True, timeout)`.
    """
    source = linecache.getline(frame.file, frame.line).rstrip()
    return _is_in(frame, "threading.py") and source.endswith(".acquire()")


def is_at_exit(stack: Stack | None) -> bool:
    """Returns True if the script has ended and the interpreter waits for its remaining threads."""
    # `threading._shutdown` joins them, and may be one or two calls deep in that.
    innermost_frames = (stack or ())[:3]
    return any(
        frame.function == "_shutdown" and _is_in(frame, "threading.py")
        for frame in innermost_frames
    )


def waits_for_data_loader(stack: Stack | None) -> bool:
    """Returns True if the stack waits for the next batch of a DataLoader."""
    # The DataLoader waits in queues and pipes, so up to a dozen frames may be inside its own.
    innermost_frames = (stack or ())[:12]
    return any(_is_in(frame, "torch/utils/data/dataloader.py") for frame in innermost_frames)
