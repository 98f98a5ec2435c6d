"""A pipeline over NCCL: no operations wait for each other, and no host waits for its GPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from nccl_streams import Event, judge_nccl, recording
from ranks import run_ranks
from test_pipeline import CASES, train
from test_pipeline_odd import train as train_odd, train_two

from lockstep.strategies.pipeline.place import PipelinePlace
from lockstep.strategies.pipeline.schedule import order

pytestmark = pytest.mark.ranks

PROGRAMS: dict[str, tuple[Any, ...]] = {
    "1f1b": (train, "language, short batches, clipped"),
    "gpipe": (train, "language, gpipe"),
    "interleaved": (train, "language, interleaved, met by all"),
    "gpipe, interleaved": (train, "language, gpipe interleaved"),
    "broken off": (train, "language, broken off"),
    "two models, 1f1b": (train_two, "1f1b"),
    "two models, gpipe": (train_two, "gpipe"),
    "interrupted": (train_odd, "interrupted"),
    "form that depends on values": (train_odd, "masked by need"),
    "form that depends on values, interleaved": (train_odd, "masked by need, interleaved"),
    "gradients that are missing": (train_odd, "unused"),
    "detached": (train_odd, "detached"),
}


def record(names: list[str]) -> dict[str, list[Event]]:
    """What this rank does in some of the programs."""
    found = {}
    for name in names:
        function, argument = PROGRAMS[name]
        with recording() as recorder:
            if function is train:
                train(**CASES[argument])
            else:
                function(argument)
        found[name] = recorder.events
    return found


QUICK = (
    "interleaved",
    "two models, 1f1b",
    "form that depends on values, interleaved",
    "gradients that are missing",
)

# The other programs cut their models for two ranks.
ON_THREE_RANKS = ("1f1b", "gpipe", "broken off", "two models, 1f1b", "two models, gpipe")


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, QUICK),
        pytest.param(2, [n for n in PROGRAMS if n not in QUICK], marks=pytest.mark.thorough),
        pytest.param(3, ON_THREE_RANKS, marks=pytest.mark.thorough),
    ],
)
def test_over_nccl_no_rank_would_wait_for_ever_nor_read_what_comes_to_the_gpu(size, names):
    ranks = run_ranks(record, size, list(names))
    for name in names:
        events = [rank[name] for rank in ranks]
        assert len(events[0]) > 20
        assert judge_nccl(events) == "", name


def events_of_schedule(
    schedule: str, positions: int, per_rank: int, micro_batches: int
) -> list[list[Event]]:
    """What the ranks of a pipeline do in one global batch, by position."""
    found = []
    for position in range(positions):
        place = PipelinePlace(
            num_positions=positions,
            stages_per_rank=per_rank,
            num_pipelines=1,
            position=position,
            pipeline=0,
        )
        before, after = (position - 1) % positions, (position + 1) % positions
        events: list[Event] = []

        def exchange(kind: str, group: str, peer: int, cut: int, events: Any = events) -> None:
            number = len(events)
            events.append(Event(kind, number, group, peer, (1,), cut))
            if kind == "receive":
                events.append(Event("wait", number))

        for forward, stage, _ in order(schedule, position, positions, per_rank, micro_batches):
            if forward and stage > 0:
                exchange("receive", "activations", before, stage - 1)
            if forward and stage < place.last_stage:
                exchange("send", "activations", after, stage)
            if not forward and stage < place.last_stage:
                exchange("receive", f"gradients {place.gradient_group(stage)}", after, stage)
            if not forward and stage > 0:
                exchange("send", f"gradients {place.gradient_group(stage - 1)}", before, stage - 1)
        found.append(events)
    return found


@pytest.mark.parametrize("positions", [2, 3, 4, 5])
def test_no_schedule_has_a_circle_of_waits(positions: int):
    for schedule, per_rank in product(("gpipe", "1f1b"), (1, 2, 3)):
        for micro_batches in (1, 2, 3, 4, 8, 12):
            sizes = (positions, per_rank, micro_batches)
            assert judge_nccl(events_of_schedule(schedule, *sizes)) == "", (schedule, sizes)


def test_a_circle_and_a_wrong_partner_are_found():
    """Both ranks send first, in one group and in two; and two messages come in another order."""
    send = Event("send", 0, "a", 1, (1,))
    receive = Event("receive", 1, "a", 1, (1,))
    wait = Event("wait", 1)
    mine = [send, receive, wait]
    theirs = [event._replace(peer=0) for event in mine]
    assert "waits for ever" in judge_nccl([mine, theirs])
    theirs = [receive._replace(peer=0), wait, send._replace(peer=0)]
    assert judge_nccl([mine, theirs]) == ""
    large = send._replace(number=2, sizes=(9,))
    small_first = [
        receive._replace(number=0, peer=0),
        receive._replace(number=2, peer=0, sizes=(9,)),
    ]
    assert "goes to" in judge_nccl([[large, send], small_first])
