"""What to do about a hang."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.diagnose.finding import Row, Verdict
from lockstep.diagnose.matching import Parting, signature
from lockstep.diagnose.stacks import IN_BUFFERS, IN_PIPELINE, Wait

_GENERAL: dict[Verdict, str] = {
    "stopped": "find out who has stopped it: a scheduler, a debugger, Ctrl-Z, or `kill -STOP`",
    "left": "every rank must come to every collective: look why it returned early (fewer batches, "
    "a `return`, a condition on the rank)",
    "lost": "look at its own output first: the others wait for it as a consequence",
    "loading": "look at its DataLoader: slow storage, a worker that is stuck",
    "gil": "wait if the call in its line may take that long; a library that holds the lock can "
    "often be told to use a process of its own",
    "unknown": "look whether the run's folder is there and its disk has room: what a rank is asked "
    "for it writes there",
    "transport": "look at the network between the machines (interface, firewall, cable) or at the "
    "GPUs; for broadcast, reduce, gather and scatter, look whether all ranks name the same rank",
}


_PAIRS = (
    "every send needs its receive, in the same order on both ranks: where both send or receive "
    "first, change the order on one of them, or use `batch_isend_irecv`"
)
_TURNS = (
    "every rank of a pipeline must make the same turns of the loop: look for a `continue`, a "
    "`break`, an exception that was caught, or a collective such as `world.sum` that only some "
    "ranks come to; those without the last stage get NaN for a loss"
)
_EVALUATION = (
    "where one rank alone evaluates, call `model.module(...)` there, or let all ranks evaluate"
)
_STEPS = (
    "give each rank the same number of batches (DistributedSampler, drop_last), or use `Join`; do "
    "not skip a step on one rank alone"
)


def advise(
    kind: Verdict,
    rows: Iterable[Row],
    waits: Sequence[Wait | None] = (),
    parting: Parting | None = None,
    *,
    several_groups: bool = False,
    new_line: bool | None = None,
    p2p: bool = False,
) -> tuple[str, ...]:
    """What to do, most likely first; empty where waiting is all there is to do.

    Args:
        kind: the verdict.
        rows: what the ranks do.
        waits: what the stacks of the waiting ranks say.
        parting: where the ranks parted.
        several_groups: the waiting ranks wait in different process groups.
        new_line: a DDP model is called from a line from which no collective came before; None: not
            known.
        p2p: some of the ranks wait in sends and receives.
    """
    if p2p:
        in_pipeline = any(wait is not None and wait.where == IN_PIPELINE for wait in waits)
        return (_TURNS if in_pipeline else _PAIRS,)
    if kind != "deadlock":
        text = _GENERAL.get(kind)
        if kind == "transport" and any("init_process_group" in row.does for row in rows):
            text = "look whether all ranks were given the same address, port and number of ranks"
        return () if text is None else (text,)
    return _for_deadlock(waits, parting, several_groups, new_line)


def _for_deadlock(
    waits: Sequence[Wait | None],
    parting: Parting | None,
    several_groups: bool,
    new_line: bool | None,
) -> tuple[str, ...]:
    places = [wait.where for wait in waits if wait is not None]
    names = {wait.op for wait in waits if wait is not None}
    calls = [] if parting is None else [call for _, call in parting.calls if call is not None]
    kinds = {signature(call) for call in calls}
    if 0 < places.count(IN_BUFFERS) < len(waits):
        return {True: (_EVALUATION,), False: (_STEPS,), None: (_EVALUATION, _STEPS)}[new_line]
    if "new_group" in names:
        return ("`new_group` must be called by all ranks of the run, in the same order, also by "
                "those outside the group",)  # fmt: skip
    if "while DDP is constructed" in places:
        return ("construct DistributedDataParallel on all ranks, at the same point",)
    if 0 < places.count("in backward") < len(waits):
        return (_STEPS,)
    if len(kinds) > 1 and len({call.op for call in calls}) == 1:
        return (
            "bring tensors of the same size and type on all ranks: pad them, or exchange the "
            "sizes first",
        )
    if several_groups:
        return ("use the same process groups in the same order on all their ranks",)
    return (
        "every rank must call the same collectives in the same order: look for one that only some "
        "ranks reach (`if rank == 0`, an exception that was caught, `continue`)",
    )
