from __future__ import annotations

import ast
import inspect
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from fake_snapshots import (
    C10D,
    TORCH,
    script_frame,
    stack_at,
    stack_in_backward,
    stack_in_data_loader,
    stack_in_ddp_buffer_broadcast,
    stack_in_ddp_constructor,
    stack_in_init_process_group,
    stack_in_lockstep_init,
    stack_in_op,
    stack_in_pipeline_wire,
)

from lockstep import errors
from lockstep.communication import shared_memory
from lockstep.distributed import process_group
from lockstep.run.start import worker
from lockstep.run.watch import stacks
from lockstep.run.watch.stacks import (
    DDP_BUFFER_BROADCAST,
    PIPELINE_TRANSFER,
    Frame,
    Stack,
    Wait,
    find_wait,
    user_frame,
    waits_for_data_loader,
)
from lockstep.strategies.pipeline.wire import Wire

pytestmark = pytest.mark.launcher

LOGGER = Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper")
SHARED_MEMORY = shared_memory.__file__
SITE = "/opt/venv/lib/python3.12/site-packages"


def in_installed_program(line: int) -> Stack:
    """A barrier in a library that `python -m installed.package.module` calls."""
    program = f"{SITE}/accelerate/test_utils/scripts/test_loop.py"
    return (
        Frame(C10D, 3252, "barrier"),
        Frame(f"{SITE}/accelerate/state.py", 412, "wait_for_everyone"),
        Frame(program, line, "main"),
        Frame(program, 300, "<module>"),
        Frame("<frozen runpy>", 88, "_run_code"),
        Frame(worker.__file__, 170, "run_as_main"),
    )


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        (stack_at(7), 7),
        (stack_in_backward(8), 8),
        (stack_in_data_loader(9), 9),
        ((Frame("<string>", 1, "f"), script_frame(3)), 3),
        ((Frame(str(errors.__file__), 1, "f"), script_frame(4)), 4),
        ((Frame(subprocess.__file__, 1, "run"), script_frame(5)), 5),
        ((Frame(torch.__file__, 1, "f"), Frame(f"{SITE}/rich/a.py", 6, "f"), script_frame(6)), 6),
        # A module of an installed package is run: its line, not torch's.
        ((Frame(C10D, 1, "barrier"), Frame(f"{SITE}/titan/train.py", 10, "main")), 10),
        ((Frame(C10D, 11, "barrier"), Frame("<frozen runpy>", 1, "f")), 11),
        (in_installed_program(12), 12),
        ((*in_installed_program(13)[:2], script_frame(14), *in_installed_program(13)[2:]), 14),
    ],
)
def test_user_frame_is_the_innermost_of_the_users_code(stack: Stack, line: int) -> None:
    found = user_frame(stack)
    assert found is not None
    assert found.line == line


def test_launcher_frames_are_never_the_users() -> None:
    """At a program's end nothing of it is on the stack: the launcher's command is not its line."""
    launcher = (Frame(worker.__file__, 170, "leave"), Frame("/opt/venv/bin/lockstep", 8, "f"))
    shutdown = Frame("/usr/lib/python3.11/threading.py", 1590, "_shutdown")
    assert user_frame((shutdown, *launcher)) == shutdown
    assert user_frame((script_frame(3), *launcher)) == script_frame(3)
    assert user_frame(launcher) is None


def test_no_stack_has_no_user_frame() -> None:
    assert user_frame(None) is None
    assert user_frame(()) is None


@pytest.mark.parametrize(
    ("stack", "wait"),
    [
        (stack_in_op("barrier", 3), Wait("barrier")),
        (stack_in_op("destroy_process_group", 3), Wait("destroy_process_group")),
        (stack_in_init_process_group(3), Wait("init_process_group")),
        (stack_in_lockstep_init(3), Wait("lockstep.init")),
        (
            (Frame(process_group.__file__, 1, "main_process_first"),
             Frame("/usr/lib/python3.11/contextlib.py", 137, "__enter__"), script_frame(3)),
            Wait("main_process_first"),
        ),
        (stack_in_ddp_buffer_broadcast(3), Wait("", DDP_BUFFER_BROADCAST)),
        (stack_in_ddp_constructor(3), Wait("", "while DDP is constructed")),
        (stack_in_backward(3), Wait("", "in backward", certain=False)),
        # The function that the user called, not the one that it is made of.
        (
            (Frame(C10D, 3151, "broadcast"), LOGGER, Frame(C10D, 4026, "broadcast_object_list"),
             LOGGER, script_frame(3)),
            Wait("broadcast_object_list"),
        ),
        (
            (Frame(C10D, 2169, "_new_process_group_helper"),
             Frame(C10D, 6056, "_new_group_with_tag"), Frame(C10D, 5863, "new_group"),
             script_frame(3)),
            Wait("new_group"),
        ),
        (  # since torch 2.14
            (Frame(C10D, 669, "_create_gloo_process_group"),
             Frame(C10D, 2874, "_new_process_group_helper"),
             Frame(C10D, 2553, "init_process_group"), LOGGER, script_frame(3)),
            Wait("init_process_group"),
        ),
        # A rank that sleeps looks now and then whether the others are still there.
        (
            (Frame(psutil.__file__, 1, "status"), Frame(SHARED_MEMORY, 5, "_is_there"),
             Frame(SHARED_MEMORY, 4, "_ended"), Frame(SHARED_MEMORY, 3, "_wait"),
             Frame(SHARED_MEMORY, 2, "_barrier"), Frame(SHARED_MEMORY, 1, "all_gather"),
             script_frame(3)),
            Wait("all_gather"),
        ),
        # Its own frames between do not hide what a backward pass waits for.
        (
            (Frame(C10D, 3252, "all_reduce"), LOGGER, Frame(str(errors.__file__), 1, "f"),
             *stack_in_backward(4)),
            Wait("all_reduce", "in backward"),
        ),
    ],
)  # fmt: skip
def test_stacks_in_which_ranks_wait(stack: Stack, wait: Wait) -> None:
    assert find_wait(stack) == wait


@pytest.mark.parametrize(
    "stack",
    [
        (), stack_at(3), stack_in_data_loader(3),
        # Pickling a large object is work.
        (Frame(C10D, 1, "_object_to_tensor"), Frame(C10D, 2, "all_gather_object"), script_frame(3)),
        # A hook of the user's in a backward pass.
        (script_frame(9, "hook"), *stack_in_backward(3)),
        (Frame(f"{TORCH}/distributed/checkpoint/filesystem.py", 1, "write"), script_frame(3)),
        (Frame(f"{TORCH}/nn/functional.py", 1, "linear"), script_frame(3)),
        (Frame("/home/me/torch_distributed/distributed_c10d.py", 1, "all_reduce"), script_frame(3)),
    ],
)  # fmt: skip
def test_stacks_in_which_ranks_do_not_wait(stack: Stack) -> None:
    assert find_wait(stack) is None


def test_waiting_for_a_data_loader_is_recognized() -> None:
    assert waits_for_data_loader(stack_in_data_loader(3))
    assert not waits_for_data_loader(stack_in_op("barrier", 3))
    assert not waits_for_data_loader(None)


def test_waits_between_pipeline_stages_are_recognized() -> None:
    assert find_wait(stack_in_pipeline_wire("take", 5)) == Wait("recv", PIPELINE_TRANSFER)
    assert find_wait(stack_in_pipeline_wire("wait", 5)) == Wait("send", PIPELINE_TRANSFER)
    assert find_wait((*stack_in_op("recv", 5)[:2], *stack_in_pipeline_wire("receive", 5))) == Wait(
        "recv", PIPELINE_TRANSFER
    )
    assert find_wait(stack_in_pipeline_wire("expect", 5)) is None
    named = {
        frame.function for name in ("take", "wait") for frame in stack_in_pipeline_wire(name, 5)[:1]
    }
    assert all(callable(getattr(Wire, name)) for name in named)
    assert Path(inspect.getfile(Wire)).match("lockstep/strategies/pipeline/wire.py")


def test_the_files_and_functions_of_ours_that_are_known_as_waiting_are_there() -> None:
    """A stack names a file and a function: with other names a wait would be taken for work."""
    package = Path(errors.__file__).parent
    known = {path: set(functions) for path, functions in stacks._WAITING_FUNCTIONS.items()}
    known.update({path: set() for path in stacks._WAITING_FILES})
    own = {path: functions for path, functions in known.items() if path.startswith("lockstep/")}
    assert len(own) == 7
    assert "_wait" in stacks._POLLING_FUNCTIONS[stacks._SHARED_MEMORY]
    own[stacks._SHARED_MEMORY] |= {"_wait"}
    own[stacks._JOINING] |= {"join_run"}
    for path, functions in own.items():
        tree = ast.parse((package.parent / path).read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert functions <= defined, path
    for path in stacks._LAUNCHER_FILES:
        assert Path(path).is_file()
