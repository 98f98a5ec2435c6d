"""Snapshots made by hand, with stacks and calls as torch 2.13 writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.run.watch.snapshot import CollectiveCall, Group, RankState, Snapshot
from lockstep.run.watch.stacks import Frame, Stack

TORCH = "/usr/lib/python3/dist-packages/torch"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
DDP = f"{TORCH}/nn/parallel/distributed.py"
SCRIPT = "/home/me/train.py"
TIME = 1_000_000.0
"""The time of the later snapshot."""


def script_frame(line: int, function: str = "main") -> Frame:
    return Frame(SCRIPT, line, function)


def stack_in_op(op: str, line: int) -> Stack:
    logger = Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper")
    return (Frame(C10D, 3252, op), logger, script_frame(line), script_frame(1, "<module>"))


def stack_in_pipeline_wire(function: str, line: int) -> Stack:
    """The stack of a pipeline stage that waits to receive (`take`) or to have sent (`wait`)."""
    folder = "/opt/venv/lib/python3.12/site-packages/lockstep"
    return (
        Frame(f"{folder}/strategies/pipeline/wire.py", 184, function),
        Frame(f"{folder}/strategies/pipelining/run.py", 270, "_through"),
        Frame(f"{TORCH}/nn/modules/module.py", 1789, "_call_impl"),
        script_frame(line),
    )


def stack_in_backward(line: int) -> Stack:
    return (
        Frame(f"{TORCH}/autograd/graph.py", 979, "_engine_run_backward"),
        Frame(f"{TORCH}/autograd/__init__.py", 395, "backward"),
        Frame(f"{TORCH}/_tensor.py", 623, "backward"),
        script_frame(line),
        script_frame(1, "<module>"),
    )


def stack_in_ddp_buffer_broadcast(line: int) -> Stack:
    return (
        Frame(DDP, 2363, "_distributed_broadcast_coalesced"),
        Frame(DDP, 2451, "_default_broadcast_coalesced"),
        Frame(DDP, 2429, "_sync_module_buffers"),
        Frame(DDP, 2425, "_sync_buffers"),
        Frame(DDP, 1782, "_pre_forward"),
        Frame(DDP, 1886, "forward"),
        Frame(f"{TORCH}/nn/modules/module.py", 1789, "_call_impl"),
        script_frame(line),
    )


def stack_in_ddp_constructor(line: int) -> Stack:
    verify = Frame(f"{TORCH}/distributed/utils.py", 286, "_verify_param_shape_across_processes")
    return (verify, Frame(DDP, 1064, "__init__"), script_frame(line))


def stack_in_init_process_group(line: int) -> Stack:
    return (
        Frame(f"{TORCH}/distributed/rendezvous.py", 199, "_create_c10d_store"),
        Frame(f"{TORCH}/distributed/rendezvous.py", 280, "_env_rendezvous_handler"),
        Frame(C10D, 1892, "init_process_group"),
        Frame(f"{TORCH}/distributed/c10d_logger.py", 97, "wrapper"),
        script_frame(line),
    )


def stack_in_lockstep_init(line: int, *innermost: Frame) -> Stack:
    """The stack of a rank that tries to meet the others, with the frames of its last attempt."""
    folder = "/opt/venv/lib/python3.12/site-packages/lockstep"
    return (
        *innermost,
        Frame(f"{folder}/distributed/rendezvous.py", 408, "connect"),
        Frame(f"{folder}/distributed/rendezvous.py", 230, "_open_store"),
        Frame(f"{folder}/distributed/rendezvous.py", 160, "join"),
        Frame(f"{folder}/distributed/process_group.py", 325, "_meet_other_ranks"),
        Frame(f"{folder}/distributed/process_group.py", 198, "join_run"),
        Frame(f"{folder}/world.py", 789, "init"),
        script_frame(line),
    )


def stack_in_data_loader(line: int) -> Stack:
    return (
        Frame("/usr/lib/python3.11/threading.py", 331, "wait"),
        Frame("/usr/lib/python3.11/queue.py", 180, "get"),
        Frame(f"{TORCH}/utils/data/dataloader.py", 1275, "_try_get_data"),
        script_frame(line),
    )


def stack_at(line: int) -> Stack:
    return (script_frame(line), script_frame(1, "<module>"))


def make_call(op: str, seq: int, size: int | None = None, **fields: Any) -> CollectiveCall:
    sizes = () if size is None else ((size,),)
    standard: dict[str, Any] = {
        "group": "0",
        "backend": "gloo",
        "input_sizes": sizes,
        "output_sizes": sizes,
        "dtypes": () if size is None else ("float",),
        "time_s": TIME - 100.0 + seq,
        "thread": 7,
    }
    return CollectiveCall(op=op, seq=seq, **{**standard, **fields})


def completed_all_reduces(count: int, **fields: Any) -> tuple[CollectiveCall, ...]:
    """Calls that all ranks made and completed."""
    return tuple(make_call("all_reduce", seq, 25, **fields) for seq in range(1, count + 1))


def rank_state(
    rank: int, stack: Stack | None = None, *calls: CollectiveCall, **fields: Any
) -> RankState:
    """A rank that waits or is blocked: it uses no processor time between the snapshots."""
    completed = {}
    for made in calls:
        # All but a group's last call, as Gloo says it.
        completed[f"{made.backend}:{made.group}"] = made.seq - 1
    standard: dict[str, Any] = {
        "host": "a",
        "pid": 100 + rank,
        "alive": True,
        "state": "S",
        "cpu_s": 5.0,
        "main_cpu_s": 4.0,
        "stack": stack,
        "threads": (),
        "answered": True,
        "calls": calls,
        "completed": completed,
        "groups": (Group("0", "default_pg", (0, 1)),),
        "steps": 5,
    }
    return RankState(rank=rank, **{**standard, **fields})


def ended_rank(rank: int, code: int | None = 0) -> RankState:
    return rank_state(rank, alive=False, code=code, answered=None)


def make_snapshots(
    *later: RankState, working: Sequence[int] = (), seconds: float = 1.0
) -> tuple[Snapshot, Snapshot]:
    """Two snapshots between which nothing moves, except that the ranks `working` compute."""
    earlier = [
        replace(s, cpu_s=s.cpu_s - seconds, main_cpu_s=s.main_cpu_s - seconds)
        if s.rank in working and s.cpu_s is not None and s.main_cpu_s is not None
        else s
        for s in later
    ]
    return Snapshot(TIME - seconds, tuple(earlier)), Snapshot(TIME, tuple(later))
