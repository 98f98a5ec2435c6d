"""Each step is kept in memory of the launcher: ranks that fail cost the step under way."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from launched import launch
from problems import Scale
from ranks import rank_environment, run_ranks
from saved import full_state_dict
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoint import (
    background_copy,
    copy_interval,
    keeping_plan,
    kept_steps,
    memory_area,
    state_copier,
    step_keeper,
)
from lockstep.checkpoint.copy_interval import choose_every
from lockstep.checkpoint.kept_layout import KeptLayout, Section, sections_of
from lockstep.checkpoint.kept_reading import (
    RANDOM,
    KeptStep,
    PartReport,
    choose_step,
    describe_incomplete,
    read_random_state,
    read_step,
    report_parts,
)
from lockstep.checkpoint.layout import step_folder
from lockstep.checkpoint.memory_area import PAGE_BYTES, Area
from lockstep.checkpoint.modules import plain_state_dict
from lockstep.checkpoint.partner_copies import PartnerCopies, find_partners
from lockstep.checkpoint.sharding import copy_to_memory
from lockstep.extensions.ledger.judge import judge
from lockstep.machine.topology import AREAS_PER_RANK, OWN_AREAS_PER_RANK
from lockstep.run.start.step_memory import StepMemory
from lockstep.strategies import HSDP, Pipeline
from lockstep.torch_compat import copy_to_each
from lockstep.units import format_bytes

pytestmark = pytest.mark.launcher
THOROUGH = pytest.mark.thorough


@pytest.fixture
def memory() -> Iterator[dict[str, str]]:
    """The variables of three ranks, whose areas this process holds."""
    with closing(StepMemory(3)) as held:
        yield held.variables


def areas_of(memory: dict[str, str]) -> list[Area]:
    return [Area(path) for path in memory["LOCKSTEP_STEP_MEMORY"].split()]


# An area


def header_of(rank: int, size: int, sections: str = "[]") -> bytes:
    facts = {
        "rank": rank,
        "world_size": size,
        "folders": ["x"],
        "machine": 0,
        "ranks_on_machine": size,
        "machine_has_whole_state": False,
        "strategy": "ddp",
        "epoch": 0,
        "announcement_checksum": keeping_plan.NOT_ANNOUNCED,
    }
    return f'{{"facts": {json.dumps(facts)}, "sections": {sections}}}'.encode()


def reports_of(areas: list[Area]) -> list[dict[str, Any]]:
    return report_parts(areas, holder_rank=0, holder_machine=0)


def read_all(chosen: KeptStep) -> dict[str, Any]:
    """Reads a step that one machine has kept."""
    (ranks,) = chosen.complete_sets
    paths = [chosen.copies_of(rank)[0].path for rank in ranks]
    random_states = [read_random_state(path) for path in paths]
    step = read_step(paths, ["model"], random_states, only_local_shards=False)
    return copy_to_memory(step)


def write(area: Area, serial: int, value: int) -> None:
    area.begin_writing(header_bytes=100, values_bytes=64)
    area.view(area.values_at, torch.int64, (8,)).fill_(value)
    area.set_seal(1, serial, 10 * serial, header_of(0, 1))


def test_what_is_damaged_is_not_taken_for_a_step(memory: dict[str, str]) -> None:
    area = areas_of(memory)[0]
    assert area.seal is None
    write(area, serial=3, value=5)
    seal = Area(area.path).seal  # as another process sees it
    assert seal is not None
    assert (seal.serial, seal.step) == (3, 30)
    assert len(reports_of([area])) == 1
    places = {"seal": 20, "header": 4096 + 5, "values": area.values_at + 9}
    for place, offset in places.items():
        with open(area.path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 4]))
            file.flush()
            assert reports_of([area]) == [], place
            file.seek(offset)
            file.write(byte)
    assert len(reports_of([area])) == 1
    area.begin_writing(header_bytes=100, values_bytes=64)  # and then it is killed
    assert reports_of([area]) == []
    area.free()
    assert os.stat(area.path).st_size == 4096


def test_the_launcher_sees_that_a_rank_has_kept_a_step() -> None:
    with closing(StepMemory(2)) as held:
        areas = areas_of(held.variables)
        assert held.kept_steps() == [frozenset(), frozenset()]
        write(areas[1], serial=1, value=5)
        write(areas[AREAS_PER_RANK - 1], serial=1, value=5)  # a copy of another machine's step
        first, none = held.kept_steps()
        assert (len(first), len(none)) == (1, 0)
        write(areas[0], serial=2, value=5)
        areas[1].begin_writing(header_bytes=100, values_bytes=64)
        (second, _) = held.kept_steps()
        assert len(second) == 1
        assert second.isdisjoint(first)
        assert {len(seal) for seal in second} == {memory_area._CRC_AT + memory_area._CRC.size}


def report(
    path: str, serial: int, rank: int, size: int = 2, attempt: int = 1, **more: Any
) -> PartReport:
    usual: dict[str, Any] = {
        "writer_machine": 0,
        "num_ranks_on_writer_machine": size,
        "machine_has_whole_state": False,
        "strategy": "fsdp",
        "epoch": 0,
        "num_bytes": 4096,
        "holder_rank": rank,
        "holder_machine": 0,
        "announcement_checksum": keeping_plan.NOT_ANNOUNCED,
    }
    where = (path, attempt, serial, 10 * serial, rank, size, ["folder", "its other path"])
    return PartReport(*where, **{**usual, **more})


def test_the_newest_step_of_which_all_parts_are_there_is_chosen() -> None:
    parts = [report("a", 4, 0), report("b", 5, 0), report("c", 4, 1), report("d", 3, 1)]
    chosen = choose_step(parts, ["folder"])
    assert chosen is not None
    assert (chosen.attempt, chosen.serial, chosen.step) == (1, 4, 40)
    assert chosen.paths_on(0) == {"a", "c"}
    assert chosen.complete_sets == ((0, 1),)
    assert choose_step(parts, ["another folder"]) is None
    assert choose_step(parts, ["another folder", "its other path"]) == chosen
    # A part of another attempt makes no step complete.
    others = [report("a", 5, 1), report("b", 5, 0, attempt=2)]
    assert choose_step(others, ["folder"]) is None
    lost = [report("a", 4, 0, size=4), report("b", 5, 1, size=4)]
    what_is_missing = "step 50 in memory is incomplete: what ranks 0, 2-3 kept is missing"
    assert describe_incomplete(lost, ["folder"]) == what_is_missing
    assert describe_incomplete(lost, ["another folder"]) == "no step of this run is in memory"


def test_a_lost_machine_takes_only_what_no_other_one_has() -> None:
    """Of two machines with two ranks each, the second is lost."""
    here = {"writer_machine": 0, "num_ranks_on_writer_machine": 2}
    there = {"writer_machine": 1, "num_ranks_on_writer_machine": 2}
    shards = [report(f"own {rank}", 4, rank, size=4, **here) for rank in range(2)]
    assert choose_step(shards, ["folder"]) is None
    copies = [report(f"copy {rank}", 4, rank, size=4, **there) for rank in (2, 3)]
    chosen = choose_step(shards + copies, ["folder"])
    assert chosen is not None
    assert chosen.complete_sets == ((0, 1, 2, 3),)
    equal = {**here, "machine_has_whole_state": True}
    replicas = [report(f"own {rank}", 4, rank, size=4, **equal) for rank in range(2)]
    chosen = choose_step(replicas, ["folder"])
    assert chosen is not None
    assert chosen.complete_sets == ((0, 1),)
    assert choose_step(replicas[:1], ["folder"]) is None


@pytest.mark.parametrize(
    ("places", "partners"),
    [
        ([(0, 0), (0, 1)], None),
        ([(0, 0), (0, 1), (1, 0), (1, 1)], [(2, [2]), (3, [3]), (0, [0]), (1, [1])]),
        ([(4, 0), (7, 0), (9, 0)], [(1, [2]), (2, [0]), (0, [1])]),
        # Machines with different numbers of ranks, in any order:
        ([(0, 0), (0, 1), (1, 0)], [(2, [2]), (2, []), (0, [0, 1])]),
        (
            [(2, 0), (1, 0), (1, 1), (0, 0), (0, 1), (0, 2)],
            [(3, [1, 2]), (0, [3, 5]), (0, [4]), (1, [0]), (2, []), (1, [])],
        ),
        ([(0, 0), (0, 1), (0, 2), (1, 0)], None),
    ],
)
def test_machines_copy_in_a_ring(
    places: list[tuple[int, int]], partners: list[tuple[int, list[int]]] | None
) -> None:
    assert find_partners(places) == partners


def test_an_error_of_an_exchange_is_not_that_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [True]

    def exchange(copies: PartnerCopies, area: object, serial: int) -> None:
        if failing.pop():
            raise RuntimeError("the connection is broken")

    monkeypatch.setattr(PartnerCopies, "_exchange", exchange)
    copies = PartnerCopies.__new__(PartnerCopies)
    copies._error = None
    copies.start(None, 1)
    with pytest.raises(RuntimeError, match="is broken"):
        copies.wait()
    failing.append(False)
    copies.start(None, 2)
    copies.wait()


# The layout


def odd_state() -> dict[str, Any]:
    """What a checkpoint may hold."""
    tied = torch.randn(3, 4)
    model = OrderedDict(
        first=torch.randn(7, 3), tied=tied, again=tied, none=torch.empty(0, 4),
        number=torch.tensor(3), half=torch.randn(5, 2).bfloat16(), turned=torch.randn(4, 6).t(),
        odd=torch.randn(3, dtype=torch.complex128), many=torch.arange(9).to(torch.uint16),
    )  # fmt: skip
    optimizer = {
        "state": {
            0: {"step": torch.tensor(4.0), "mean": torch.randn(7, 3), "past": np.arange(6.0)},
            1: {"count": 3},
        },
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
    }
    mine = {"array": np.arange(5.0), "scalar": np.float32(2.5), "nan": float("nan"), "x": (1, None)}
    return {
        "world": {"step": 3, "scaler": None},
        "model": model,
        "optimizer": optimizer,
        "me": mine,
    }


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    elif isinstance(one, Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    else:
        np.testing.assert_equal(one, other)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_state_divided_between_ranks_is_read_as_one(memory: dict[str, str], size: int) -> None:
    """Also after it has changed: values, tensors in place of others, other shapes, other names."""
    state = odd_state()
    areas = areas_of(memory)[:size]
    layouts = [KeptLayout(rank, size) for rank in range(size)]

    def replace() -> None:
        state["optimizer"]["state"][0]["mean"] = torch.randn(7, 3)

    def grow() -> None:
        state["optimizer"]["state"][1] = {"mean": torch.randn(11, 3)}

    def untie() -> None:
        state["model"]["again"] = state["model"]["tied"] + 1

    def retype() -> None:
        state["model"]["first"] = torch.randint(9, (7, 3), dtype=torch.int32)

    def change_values() -> None:
        state["model"]["first"] += 1
        state["me"]["array"] = np.arange(5.0) + 3
        state["world"]["step"] += 1

    def set_text_like_a_leaf() -> None:
        state["world"]["place"] = "$leaf"

    def set_tensor_in_its_place() -> None:
        state["world"]["place"] = torch.ones(2)

    changes: list[Callable[[], object]] = [
        *(change_values, replace, grow, untie, retype, change_values),
        *(set_text_like_a_leaf, set_tensor_in_its_place),
    ]
    versions = []
    for serial, change in enumerate(changes, 1):
        change()
        for rank, layout in enumerate(layouts):
            sections = sections_of(state, ["model"], ["optimizer"], [])
            sections.append(Section(RANDOM, ("state",), {"rank": rank}, True, False))
            layout.update(sections)
            header = header_of(rank, size, layout.header_sections)
            areas[rank].begin_writing(len(header), layout.num_bytes)
            copy_to_each(layout.destinations_in(areas[rank]), layout.sources)
            areas[rank].set_seal(1, serial, serial, header)
        reports = [PartReport(**part) for part in reports_of(areas)]
        chosen = choose_step(reports, ["x"])
        assert chosen is not None
        saved = read_all(chosen)
        assert [each["rank"] for each in saved.pop("random")] == list(range(size))
        saved.pop("manifest")
        assert saved.keys() == state.keys()
        for name, value in state.items():
            assert_equal(saved[name], value)
        if change is not untie:
            assert (saved["model"]["again"] is saved["model"]["tied"]) == (serial < 4)
        versions.append(layouts[-1].version)
    # What only has other values stays where it is.
    assert versions[1] == versions[0]
    assert versions[5] == versions[4]
    sizes = [layout.num_bytes for layout in layouts]
    assert max(sizes) < 1.6 * sum(sizes) / size


# Trainings that go on

BATCH, SAMPLES = 12, 40
STEPS_AN_EPOCH = 4
STRATEGIES: dict[str, Any] = {
    "single": "single",
    "ddp": "ddp",
    "fsdp": "fsdp",
    "hsdp": HSDP(shard_size=1),
    "pipeline": Pipeline(num_micro_batches=3),
}


def model() -> nn.Module:
    torch.manual_seed(2)
    norm = nn.BatchNorm1d(8).eval()  # statistics that stay, and would be missed
    for statistics in (norm.running_mean, norm.running_var):
        assert statistics is not None
        statistics.uniform_(0.5, 1.5)
    first = [nn.Linear(5, 8), norm, nn.Tanh()]
    last = [nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 3), Scale()]
    return nn.Sequential(*first, *last).double()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (SAMPLES,), generator=generator))


def train(strategy: str, folder: str, until: int) -> tuple[dict[str, Tensor], str]:
    """Goes on from memory, and stops in the middle of the step after `until`."""
    copy_interval.MAX_COST = copy_interval.MAX_SHARE_OF_LINK = 1e9  # each step is kept, as it comes
    with lockstep.init(STRATEGIES[strategy], seed=5, device="cpu") as world:
        made = model()
        # Every second piece gives the optimizer the parameters of each group in reverse.
        order = -1 if until // 3 % 2 else 1
        first = list(made[:2].parameters())[::order]
        second = list(made[2:].parameters())[::order]
        groups = [{"params": first}, {"params": second}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        prepared, optimizer, scheduler = world.prepare(made, optimizer, scheduler)
        loader = world.loader(data(), BATCH, shuffle=True)
        state = {"model": prepared, "optimizer": optimizer, "scheduler": scheduler}
        folder += os.environ.get("MACHINE", "")  # its path may differ between machines
        checkpoint = world.checkpoint(folder, **state, loader=loader)
        checkpoint.resume()
        for _epoch in world.epochs(100):
            for x, y in loader:
                if world.step == until and world.is_last_micro_batch:
                    world.barrier()  # a rank of a pipeline may be ahead of another
                    whole = full_state_dict(plain_state_dict(prepared))
                    found = {n: v.detach().clone() for n, v in whole.items() if not v.is_meta}
                    return found, checkpoint.last_resume_note
                world.backward(F.cross_entropy(prepared(x), y))
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        raise AssertionError("the loop has ended early")


FEW_PIECES = [("fsdp", 3), ("ddp", 2)]
MANY_PIECES = [
    *(("ddp", 2), ("fsdp", 3), ("pipeline", 2), ("single", 1), ("hsdp", 2), ("ddp", 3)),
    *(("fsdp", 2), ("pipeline", 3), ("fsdp", 1), ("hsdp", 3), ("single", 1)),
]


@THOROUGH
@pytest.mark.parametrize("pieces", [FEW_PIECES, MANY_PIECES], ids=len)
def test_any_strategy_goes_on_from_what_any_other_has_kept(
    memory: dict[str, str], tmp_path: Path, pieces: list[tuple[str, int]]
) -> None:
    """On other numbers of ranks, at the end of an epoch and in its middle; nothing is on disk."""
    folder = str(tmp_path / "checkpoints")
    until = 0
    for number, (strategy, size) in enumerate(pieces):
        before = until
        until += 3
        store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        parts = run_ranks(
            train,
            size,
            *(strategy, folder, until),
            environment=lambda rank, s=size, p=store.port: {
                **rank_environment(rank, s, p),
                **memory,
            },
        )
        weights: dict[str, Tensor] = {}
        for found, note in parts:
            weights |= found
            if number > 0:
                assert f"resumed from step {before} in memory" in note
                assert note.endswith("; there is no checkpoint on disk")
    assert not os.path.exists(folder)
    ((expected, _),) = run_ranks(train, 1, "single", folder, until, environment=alone)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)


def alone(rank: int) -> dict[str, str]:
    return {}


# Several machines


# In each piece: the strategy, and the machines, by the number of their memory, with as many ranks.
FEW_MACHINES = [
    ("fsdp", {0: 1, 1: 1}),  # machine 1 is lost:
    ("fsdp", {0: 1}),  # machine 2 joins:
    ("ddp", {0: 1, 2: 1}),  # machine 0 is lost:
    ("fsdp", {2: 2}),
]
MANY_MACHINES = [
    *(("fsdp", {0: 1, 1: 1, 2: 1}), ("ddp", {0: 1, 2: 1}), ("ddp", {1: 1, 2: 1})),
    *(("pipeline", {1: 1, 2: 1}), ("single", {2: 1}), ("hsdp", {2: 1, 0: 1})),
    *(("fsdp", {0: 2, 2: 1}), ("fsdp", {2: 1, 0: 2}), ("ddp", {0: 2, 2: 1}), ("ddp", {2: 1})),
]


# Machines with different numbers of ranks: the larger one is lost, then the smaller one.
UNEQUAL_MACHINES = [
    *(("fsdp", {0: 2, 1: 1}), ("fsdp", {1: 1}), ("fsdp", {1: 1, 2: 2}), ("pipeline", {2: 2})),
    *(("pipeline", {2: 2, 0: 1}), ("fsdp", {0: 1})),
]


# Machine 1 comes back as the first of the machines, with the memory of step 3.
MACHINES_THAT_COME_BACK = [
    *(("fsdp", {0: 1, 1: 1}), ("fsdp", {0: 1}), ("fsdp", {1: 1, 0: 1}), ("ddp", {2: 1, 0: 1})),
    *(("ddp", {1: 1, 2: 1}), ("fsdp", {0: 1, 1: 1})),
]


def check_unused_areas(
    held: dict[int, StepMemory], strategy: str, machines: dict[int, int]
) -> None:
    """The areas of ranks that are gone, and for copies that no rank sends, take no memory."""
    places = [(place, local) for place, n in enumerate(machines.values()) for local in range(n)]
    partners = None if strategy in ("ddp", "single") else find_partners(places)
    num_used = {}  # by machine and local rank
    for rank, (place, local_rank) in enumerate(places):
        num_senders = 0 if partners is None else len(partners[rank].senders)
        machine = list(machines)[place]
        num_used[machine, local_rank] = OWN_AREAS_PER_RANK * (1 + num_senders)
    for machine in machines:
        paths = held[machine].variables["LOCKSTEP_STEP_MEMORY"].split()
        for number, path in enumerate(paths):
            local_rank, area = divmod(number, AREAS_PER_RANK)
            if area >= num_used.get((machine, local_rank), 0):
                assert os.stat(path).st_size == PAGE_BYTES, (strategy, machines, machine, number)


@pytest.mark.parametrize(
    ("pieces", "forget"),
    [
        (FEW_MACHINES, True),
        pytest.param(MANY_MACHINES, True, marks=THOROUGH),
        pytest.param(UNEQUAL_MACHINES, True, marks=THOROUGH),
        pytest.param(MACHINES_THAT_COME_BACK, False, marks=THOROUGH),
    ],
    ids=str,
)
def test_machines_are_lost_and_join(
    tmp_path: Path, pieces: list[tuple[str, dict[int, int]]], forget: bool
) -> None:
    """A machine that is not in a piece has lost its memory, or comes back with what is old."""
    folder = str(tmp_path / "checkpoints")
    until = 0
    weights: dict[str, Tensor] = {}
    held: dict[int, StepMemory] = {}
    for number, (strategy, machines) in enumerate(pieces):
        before = until
        until += 3
        for lost in held.keys() - machines.keys() if forget else ():
            held.pop(lost).close()
        for machine in machines.keys() - held.keys():
            held[machine] = StepMemory(2)
        store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        size = sum(machines.values())
        places = [(m, local) for m, count in machines.items() for local in range(count)]

        def environment(rank: int) -> dict[str, str]:
            machine, local_rank = places[rank]  # noqa: B023
            return {
                **rank_environment(rank, size, store.port),  # noqa: B023
                **held[machine].variables,
                "GROUP_RANK": str(list(machines).index(machine)),  # noqa: B023
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(machines[machine]),  # noqa: B023
                "MACHINE": str(machine),
            }

        parts = run_ranks(train, size, *(strategy, folder, until), environment=environment)
        weights = {}
        for found, note in parts:
            weights |= found
            if number > 0:
                assert f"resumed from step {before} in memory" in note
        check_unused_areas(held, strategy, machines)
    for memory in held.values():
        memory.close()
    assert list(tmp_path.iterdir()) == []
    ((expected, _),) = run_ranks(train, 1, "single", folder, until, environment=alone)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)


# Ranks that are killed

KILLED = """
import hashlib, os, signal, sys
import torch, torch.nn.functional as F, lockstep
from torch.utils.data import DataLoader, TensorDataset
from lockstep.checkpoint import state_copier
from lockstep.checkpoint.memory_area import PAGE_BYTES, Area

random = torch.Generator().manual_seed(0)
data = TensorDataset(
    torch.randn(60, 8, generator=random), torch.randint(3, (60,), generator=random)
)
if sys.argv[3:]:  # as from a GPU
    state_copier.BACKGROUND_DEVICES = ("cpu",)
# In each attempt: the step in which the last rank ends, and how.
plan = [each.split(":") for each in sys.argv[1].split(",") if each]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
step, how = plan[attempt] if attempt < len(plan) else (-1, "")


def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


with lockstep.init(seed=0, device="cpu", precision=sys.argv[2]) as world:
    size = 16
    layers = [torch.nn.Linear(8, size), torch.nn.BatchNorm1d(size), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1), torch.nn.Linear(size, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15)
    workers = {"num_workers": 1, "multiprocessing_context": "fork"}
    loader = DataLoader(data, batch_size=12, shuffle=True, **workers)
    model, optimizer, schedule, loader = world.prepare(model, optimizer, schedule, loader)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    checkpoint = world.checkpoint("checkpoints", every=4, memory=True, **state)
    checkpoint.resume()
    for epoch in world.epochs(3):
        for x, y in loader:
            ends = world.step == int(step) and world.rank == world.size - 1
            if ends and how == "raises":
                raise RuntimeError("as the test wants it")
            world.backward(F.cross_entropy(model(x), y))
            if ends and how == "killed":
                killed()
            if ends and how == "copying":  # its part of this step is copied, and not sealed
                Area.set_seal = killed
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            checkpoint.step()
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(whole.numpy().tobytes())
    world.print("WEIGHTS", found.hexdigest())
"""


def steps_of(plan: str) -> list[int]:
    """The steps of a plan such as "5:killed,10:copying"."""
    return [int(each.partition(":")[0]) for each in plan.split(",") if each]


def run_killed(
    folder: Path, size: int, strategy: str, plan: str, *options: str
) -> tuple[str, list[str]]:
    """Returns a hash of the last weights, and what each attempt has resumed.

    Args:
        folder: where it runs.
        size: how many ranks there are.
        strategy: of the run.
        plan: the steps in which the last rank ends, in the order of the attempts, and how.
        options: of the script.
    """
    folder.mkdir()
    (folder / "script.py").write_text(KILLED)
    flags = [f"--nproc={size}", f"--strategy={strategy}", "--virtual-ranks=3", "--ledger=ledger"]
    restarts = f"--max-restarts={max(1, len(steps_of(plan)))}"
    done = launch(["run", *flags, restarts, "script.py", plan, *options], folder)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (weights,) = [line.split()[-1] for line in lines if "WEIGHTS" in line]
    resumed = [line.partition("resumed from ")[2] for line in lines if "resumed from" in line]
    notes = [line.partition(" (")[0] + line.partition(")")[2] for line in resumed]
    found = judge(folder / "ledger")
    assert found.findings == []
    # What is trained again is the step under way, if anything is.
    assert [each["first"] for each in found.attempts] == [0, *steps_of(plan)]
    return weights, notes


@pytest.mark.parametrize(
    ("size", "strategy", "plan", "options"),
    [
        (2, "ddp", "5:killed,5:copying", ["fp32"]),
        *(
            pytest.param(*given, marks=THOROUGH)
            for given in (
                (3, "fsdp", "2:killed,5:raises,5:copying,10:killed", ["fp32"]),
                (3, "ddp", "1:copying,4:killed,14:raises", ["bf16"]),
                (2, "ddp", "1:copying,4:killed,14:raises", ["fp16", "as from a GPU"]),
                (3, "fsdp", "1:copying,4:killed,14:raises", ["bf16", "as from a GPU"]),
            )
        ),
    ],
    ids=str,
)
def test_a_rank_that_is_lost_costs_the_step_under_way(
    tmp_path: Path, size: int, strategy: str, plan: str, options: list[str]
) -> None:
    """However it ends: the weights are equal in every bit to those of a run without failures."""
    lost, resumed = run_killed(tmp_path / "lost", size, strategy, plan, *options)
    on_disk = 0
    for note, step in zip(resumed, steps_of(plan), strict=True):
        # The disk has every fourth step, as the script wants it.
        on_disk = max(on_disk, 4 * (step // 4))
        disk = f"the last checkpoint on disk is of step {on_disk}"
        if on_disk == 0:
            disk = "there is no checkpoint on disk"
        assert note == f"step {step} in memory; {disk}"
    whole, resumed = run_killed(tmp_path / "whole", 1, "single", "", options[0])
    assert resumed == []
    assert lost == whole


# What changes while it is copied as from a GPU


def let_copies_wait_for_permission() -> threading.Event:
    """Makes threads copy the state, as from a GPU, while the event that is returned is set.

    It is set at first. Called in the process of a rank, which ends with its test.
    """
    state_copier.BACKGROUND_DEVICES = ("cpu",)
    may_copy = threading.Event()
    may_copy.set()

    def copy_when_allowed(places: list[Tensor], sources: list[Tensor]) -> None:
        assert may_copy.wait(timeout=60)
        copy_to_each(places, sources)

    background_copy.copy_to_each = copy_when_allowed
    return may_copy


def train_with_noise(folder: str) -> tuple[list[int], list[bool]]:
    """Changes a parameter between the steps of the optimizer, while it is copied.

    Returns:
        The steps in memory, and for each step whether the run had noticed it before.
    """
    changed = let_copies_wait_for_permission()
    changed.clear()
    with lockstep.init(seed=5, device="cpu") as world:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(torch.utils.data.TensorDataset(torch.ones(16, 4)), 4)
        checkpoint = world.checkpoint(folder, model=model, optimizer=optimizer, memory=True)
        checkpoint.resume()
        kept = checkpoint._kept
        assert kept is not None
        noticed = []
        for (x,) in loader:
            noticed.append(kept._copier.clones_every_source)
            with torch.no_grad():
                model.weight += 1
            changed.set()
            background = kept._copier._background
            background._thread and background._thread.join()
            with torch.no_grad():
                model.weight -= 1
            world.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            changed.clear()
        changed.set()
        kept._keeper.wait_for_copy()
        reports = [PartReport(**part) for part in kept.report()]
        steps = sorted(report.step for report in reports)
        chosen = choose_step(reports, [kept.folder])
        assert chosen is not None
        saved = read_all(chosen)
        assert torch.equal(saved["model"]["weight"], model.weight.detach())
        return steps, noticed


def test_what_has_changed_while_it_was_copied_is_not_kept(
    memory: dict[str, str], tmp_path: Path
) -> None:
    def environment(rank: int) -> dict[str, str]:
        return {**rank_environment(rank, 1, 1), **memory}

    ((steps, noticed),) = run_ranks(train_with_noise, 1, str(tmp_path), environment=environment)
    # The copy of step 1 is worthless. From then on all is copied before the next forward pass.
    assert noticed == [False, False, True, True]
    assert steps == [3, 4]


def change_a_shard_while_it_is_copied(folder: str) -> list[list[dict[str, Any]]]:
    """Keeps three steps of shards on two machines; rank 0 changes its shard while 2 is copied.

    Returns:
        What this machine has in memory after step 2, while step 3 is copied, and after step 3.
    """
    may_copy = let_copies_wait_for_permission()
    with lockstep.init("fsdp", seed=5, device="cpu") as world:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        checkpoint = world.checkpoint(folder, model=model, optimizer=optimizer, memory=True)
        checkpoint.resume()
        kept = checkpoint._kept
        assert kept is not None

        def train_and_begin_to_copy() -> None:
            world.backward(model(torch.ones(2, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            may_copy.clear()
            checkpoint.step()

        def finish_copy() -> None:
            may_copy.set()
            assert kept is not None
            assert kept._keeper is not None
            kept._keeper.finish()

        in_memory = []
        train_and_begin_to_copy()
        finish_copy()
        train_and_begin_to_copy()
        if world.rank == 0:
            with torch.no_grad():
                model.weight.to_local().add_(1)
        finish_copy()
        in_memory.append(kept.report())
        train_and_begin_to_copy()
        world.barrier()  # both ranks have begun to overwrite an area
        in_memory.append(kept.report())
        world.barrier()
        finish_copy()
        in_memory.append(kept.report())
        return in_memory


def test_the_partner_keeps_the_step_before_one_that_has_changed_while_it_was_copied(
    tmp_path: Path,
) -> None:
    """It used to wait without end for the rest of a step that its rank had thrown away."""
    held = [StepMemory(1), StepMemory(1)]
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def environment(rank: int) -> dict[str, str]:
        return {
            **rank_environment(rank, 2, store.port),
            **held[rank].variables,
            "GROUP_RANK": str(rank),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }

    of_ranks = run_ranks(
        change_a_shard_while_it_is_copied, 2, str(tmp_path), environment=environment
    )
    for memory_of_machine in held:
        memory_of_machine.close()
    for in_memory in of_ranks:  # of each machine: if it alone remains, it must have a whole step
        newest = []
        for parts in in_memory:
            chosen = choose_step([PartReport(**part) for part in parts], [str(tmp_path)])
            newest.append(None if chosen is None else chosen.step)
        assert newest == [1, 1, 3]


def go_back_while_a_step_is_copied(folder: str) -> list[int]:
    """Resumes from the disk while step 2 is being copied to memory.

    Returns:
        The steps in memory after that.
    """
    may_copy = let_copies_wait_for_permission()
    wait = background_copy.BackgroundCopy.wait

    def allow_and_wait(copy: background_copy.BackgroundCopy) -> bool:
        may_copy.set()
        return wait(copy)

    with lockstep.init(seed=5, device="cpu") as world:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        checkpoint = world.checkpoint(folder, model=model, optimizer=optimizer, memory=True)
        checkpoint.resume()
        kept = checkpoint._kept
        assert kept is not None
        kept._copier.clones_every_source = True  # so that loading does not change the sources
        for number in (1, 2):
            world.backward(model(torch.ones(2, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                checkpoint.save()
                checkpoint.wait()
            else:
                may_copy.clear()
            checkpoint.step()
        thread = kept._copier._background._thread
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(background_copy.BackgroundCopy, "wait", allow_and_wait)
            checkpoint.resume()
        may_copy.set()
        thread.join()
        assert world.step == 1
        return [part["step"] for part in kept.report()]


def test_a_step_that_was_being_copied_is_not_in_memory_after_going_back(
    memory: dict[str, str], tmp_path: Path
) -> None:
    """A restart would resume it otherwise, although the script has gone back to the disk."""

    def environment(rank: int) -> dict[str, str]:
        return {**rank_environment(rank, 1, 1), **memory}

    (steps,) = run_ranks(go_back_while_a_step_is_copied, 1, str(tmp_path), environment=environment)
    assert steps == []


# How often, and whether at all


class Brief(NamedTuple):
    """What a training of 24 steps has come to."""

    error: str
    kept: list[int]
    """The steps that were kept."""
    said: str
    held: int
    """How much memory the steps of this rank take at the end."""


class Clock:
    """A clock of a rank on which steps take 10 ms, and copies as long as it is told."""

    sleep = staticmethod(time.sleep)

    def __init__(self, copy_s: float) -> None:
        self.copy_s = copy_s
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def copy(self, places: list[Tensor], sources: list[Tensor]) -> None:
        copy_to_each(places, sources)
        self.now_s += self.copy_s

    def step(self, number: int) -> None:
        """In the middle of the training, copies get faster on all ranks."""
        self.now_s += 0.01
        if number == 100:
            self.copy_s /= 20


def train_briefly(
    folder: str, state: Any = None, clock: Clock | None = None, **options: Any
) -> Brief:
    """Trains on two ranks; ends early if a step cannot be kept."""
    kept: list[int] = []
    said: list[str] = []
    error = ""
    set_seal = Area.set_seal

    def note_step(area: Area, *given: Any) -> None:
        kept.append(given[2])
        set_seal(area, *given)

    with (
        pytest.MonkeyPatch.context() as patched,
        warnings.catch_warnings(record=True) as warned,
        lockstep.init(seed=5, device="cpu") as world,
    ):
        warnings.simplefilter("always")
        patched.setattr(Area, "set_seal", note_step)
        patched.setattr(lockstep.World, "print", lambda _, line: said.append(line))
        if clock is not None:
            patched.setattr(kept_steps, "time", clock)
            patched.setattr(step_keeper, "time", clock)
            patched.setattr(state_copier, "copy_to_each", clock.copy)
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net, optimizer = world.prepare(net, optimizer)
        samples = torch.ones(96 if clock is None else 800, 4)
        loader = world.loader(TensorDataset(samples), 4)
        more = {} if state is None else {"mine": state}
        checkpoint = world.checkpoint(folder, model=net, optimizer=optimizer, **more, **options)
        checkpoint.resume()
        try:
            for (x,) in loader:
                world.backward(net(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if clock is not None:
                    clock.step(world.step)
        except lockstep.errors.CheckpointError as raised:
            error = str(raised)
        held = 0
        if checkpoint._kept is not None:
            held = sum(area.file_bytes for area in checkpoint._kept.open().own)
    lines = [*said, *(str(each.message) for each in warned)]
    return Brief(error, kept, "\n".join(lines), held)


@pytest.mark.parametrize(
    ("every", "steps_for_cost", "steps_for_link", "expected"),
    [
        *((1, 0.7, 0.0, 1), (1, 1.1, 0.0, 2), (4, 7.2, 0.0, 8)),
        *((1, 22.5, 0.0, 2), (16, 22.5, 0.0, 23)),  # slowly
        (1, 0.2, 2500.0, 2500),  # at once
        *((2, 0.9, 0.0, 2), (2, 0.6, 0.0, 1), (23, 15.5, 0.0, 23), (23, 4.0, 0.0, 6)),
        (6, 0.5, 3.0, 5),
    ],
)
def test_how_often_changes(
    every: int, steps_for_cost: float, steps_for_link: float, expected: int
) -> None:
    assert choose_every(every, steps_for_cost, steps_for_link) == expected


class Odd:
    """Has a state that a checkpoint cannot hold, after so many uses."""

    def __init__(self, lasts: int) -> None:
        self.lasts = lasts

    def state_dict(self) -> dict[str, Any]:
        self.lasts -= 1
        return {"value": 1 if self.lasts >= 0 else {1, 2}}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def train_variants(folder: str) -> list[Brief]:
    found = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kept_steps, "available_memory", lambda: 2000)
        found.append(train_briefly(f"{folder}/0"))
        found.append(train_briefly(f"{folder}/1", memory=True))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(copy_interval, "choose_every", lambda *_: 5)
        found.append(train_briefly(f"{folder}/2"))
        found.append(train_briefly(f"{folder}/3", memory=True))
    found.append(train_briefly(f"{folder}/4", memory=False))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)
        found.append(train_briefly(f"{folder}/5"))
    # One rank alone gives up: the other goes on, and all decide together how often.
    state = Odd(lasts=3 if os.environ["RANK"] == "1" else 1000)
    found.append(train_briefly(f"{folder}/6", state))
    # Copies of one rank take 1 ms, then 0.05 ms.
    clock = Clock(0.001 if os.environ["RANK"] == "1" else 0.0001)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(copy_interval, "NUM_COPIES", 8)
        found.append(train_briefly(f"{folder}/7", clock=clock))
    return found


def test_how_often_steps_are_kept(memory: dict[str, str], tmp_path: Path) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def environment(rank: int) -> dict[str, str]:
        return {**rank_environment(rank, 2, store.port), **memory}

    by_rank = run_ranks(train_variants, 2, str(tmp_path), environment=environment)
    for short, fails, seldom, insists, off, out_of_reach, _, changing in by_rank:
        assert [each.error for each in (short, seldom, insists, off, out_of_reach)] == [""] * 5
        assert [each.kept for each in (short, fails, off, out_of_reach)] == [[]] * 4
        assert "keeping each step in memory" in fails.error
        assert "of memory on a machine, and 2.0 KiB are free" in fails.error
        assert seldom.kept == [1, 5, 10, 15, 20]
        assert insists.kept == list(range(1, 25))
        # Less often by and by; when copies get faster after step 100, each step is kept again.
        assert changing.kept[:7] == list(range(1, 8))
        assert changing.kept[7:] == [8, *range(12, 41, 4), *range(42, 132, 6), *range(132, 201)]
    short, _, seldom, insists, *_, changing = by_rank[0]
    assert "steps are not kept in memory: it takes" in short.said
    assert "every 5 steps, one is kept in memory from now on: keeping it takes" in seldom.said
    foretold = f"{format_bytes(insists.held)} for a rank at most"
    assert f"every step is kept in memory: two copies, {foretold}" in insists.said
    assert (
        "every 6 steps, one is kept in memory from now on: keeping it takes 1 ms" in changing.said
    )
    assert "every step is kept in memory from now on: keeping it takes 0.05 ms" in changing.said
    assert changing.said.count("from now on") == 2
    gave_up = by_rank[1][-2]
    assert gave_up.kept == [1, 2, 3]
    assert "steps are not kept in memory from here on" in gave_up.said


# What people use at the same time

TOGETHER = """
import os, signal, sys
import torch, torch.nn.functional as F, lockstep
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

kills = [int(each) for each in sys.argv[2].split(",") if each]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dies_at = kills[attempt] if attempt < len(kills) else -1
random = torch.Generator().manual_seed(0)
x = torch.randn(48, 8, generator=random, dtype=torch.float64)
y = torch.randint(3, (48,), generator=random)


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(x, y)


class Best:
    value, history = float("inf"), {}

    def state_dict(self):
        return {"value": self.value, "history": self.history}

    def load_state_dict(self, state):
        self.value, self.history = state["value"], state["history"]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.last = torch.nn.Linear(16, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls = self.calls + 1  # another tensor in each step
        return self.last(torch.tanh(self.first(x)))


with lockstep.init(seed=0, device="cpu", precision="fp64") as world:
    model = Net().double()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizers = [
        torch.optim.AdamW(model.first.parameters(), lr=0.01),
        torch.optim.SGD(model.last.parameters(), lr=0.05, momentum=0.9),
    ]
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.9)  # steps after each epoch
    model, *optimizers, schedule = world.prepare(model, *optimizers, schedule)
    if sys.argv[1] == "stream":
        loader = world.loader(Stream(), 12, num_micro_batches=2)
    else:
        loader = world.loader(TensorDataset(x, y), 12, shuffle=True, num_micro_batches=2)
    evaluated = world.loader(TensorDataset(x, y), 16)
    best = Best()
    checkpoint = world.checkpoint(
        "checkpoints", model=model, ema=ema, first=optimizers[0], last=optimizers[1],
        schedule=schedule, loader=loader, mine=best,
    )
    checkpoint.resume()
    for epoch in world.epochs(4):
        for a, b in loader:
            world.backward(F.cross_entropy(model(a), b))
            if world.step == dies_at and world.rank == world.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if world.is_last_micro_batch:
                ema.update_parameters(model.module if world.size > 1 else model)
                best.history[world.step] = epoch
                if world.step % 5 == 0:
                    checkpoint.save()
                if world.step == 11:
                    break  # the rest of this epoch is left out
        schedule.step()
        with torch.no_grad():
            losses = [F.cross_entropy(ema(a), b, reduction="sum") for a, b in evaluated]
            loss = float(world.sum(sum(losses)))
        best.value = min(best.value, loss)
    if world.is_main:
        state = {f"ema.{name}": value for name, value in ema.state_dict().items()}
        state.update(optimizers[1].state_dict()["state"][0])
        state["best"] = torch.tensor(best.value)
        state["history"] = torch.tensor(list(best.history.items()))
        state["rate"] = torch.tensor(schedule.get_last_lr())
        torch.save(state, "state.pt")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("data", ["map", "stream"])
def test_with_what_people_use_at_the_same_time(tmp_path: Path, data: str) -> None:
    """Two optimizers, micro-batches, an average of the weights, evaluation, saves, `break`."""
    states = []
    for folder, size, kills in (("whole", 1, ""), ("lost", 2, "2,4,11,12")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "script.py").write_text(TOGETHER)
        flags = [f"--nproc={size}", "--max-restarts=4", "--keep-in-memory"]
        done = launch(["run", *flags, "script.py", data, kills], tmp_path / folder)
        assert done.returncode == 0, done.stderr
        for step in kills.split(",") if kills else ():
            assert f"resumed from step {step} in memory" in done.stdout
        states.append(torch.load(tmp_path / folder / "state.pt"))
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-9, atol=1e-12, msg=name)


def train_without_loader(folder: str, *steps: int) -> list[tuple[int, str]]:
    """A loop that has its batches from elsewhere calls `checkpoint.step()`.

    It starts once for each of these numbers of steps, and trains until so many are done.
    """
    found = []
    for until in steps:
        with lockstep.init(seed=5, device="cpu") as world:
            net = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net, optimizer = world.prepare(net, optimizer)
            checkpoint = world.checkpoint(folder, model=net, optimizer=optimizer)
            checkpoint.resume()
            found.append((world.step, checkpoint.last_resume_note))
            while world.step < until:
                world.backward(net(torch.ones(2, 4)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                checkpoint.step()
    return found


@pytest.mark.thorough
def test_a_loop_without_a_loader_keeps_its_steps(memory: dict[str, str], tmp_path: Path) -> None:
    def environment(rank: int) -> dict[str, str]:
        return {**rank_environment(rank, 1, 1), **memory}

    ((first, second),) = run_ranks(
        train_without_loader, 1, str(tmp_path / "none"), 3, 6, environment=environment
    )
    assert first[0] == 0
    assert second[0] == 3
    assert second[1].startswith("resumed from step 3 in memory")


def test_memory_of_ranks_that_are_gone_is_given_back_after_other_steps(
    memory: dict[str, str], tmp_path: Path
) -> None:
    """Nothing was resumed from memory, so the steps in it protect nothing."""

    def environment(rank: int) -> dict[str, str]:
        return {**rank_environment(rank, 1, 1), **memory}

    areas_of_lost_ranks = areas_of(memory)[AREAS_PER_RANK:]
    for area in areas_of_lost_ranks:
        write(area, serial=1, value=7)
    run_ranks(train_without_loader, 1, str(tmp_path / "other"), 3, environment=environment)
    for area in areas_of_lost_ranks:
        assert os.stat(area.path).st_size == PAGE_BYTES


def what_is_announced(folder: str, *steps: int) -> list[str]:
    """Trains as `train_without_loader`; what is said of the memory that steps take."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lockstep.World, "print", lambda _, line: said.append(line))
        train_without_loader(folder, *steps)
    return [line for line in said if "is kept in memory: two copies" in line]


def test_memory_is_announced_again_after_a_restart_if_it_differs(
    memory: dict[str, str], tmp_path: Path
) -> None:
    said = []
    for size, steps in ((1, (3, 6)), (2, (9, 12))):
        store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        by_rank = run_ranks(
            *(what_is_announced, size, str(tmp_path / "none"), *steps),
            environment=lambda rank, s=size, p=store.port: {
                **rank_environment(rank, s, p),
                **memory,
            },
        )
        said.append(by_rank[0])
    # Once by one rank, and once by two, which take other amounts. Not again by as many ranks.
    (one,), (two,) = said
    assert one != two


def resume_and_train(
    folder: str, until: int, *, restarts: int, memory: bool | None, saved_steps: Sequence[int]
) -> str:
    """Resumes, trains until a step, and saves some steps; returns what it went on from."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
    with lockstep.init(seed=5, device="cpu") as world:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net, optimizer = world.prepare(net, optimizer)
        state = {"model": net, "optimizer": optimizer}
        checkpoint = world.checkpoint(folder, memory=memory, **state)
        checkpoint.resume()
        while world.step < until:
            world.backward(net(torch.ones(2, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
            if world.step in saved_steps:
                checkpoint.save()
        return checkpoint.last_resume_note


def train_after_losses(folder: str) -> list[str]:
    """Returns what each start has said of where it goes on from."""
    said: list[str] = []

    def start(until: int, restarts: int, memory: bool | None = None) -> None:
        note = resume_and_train(folder, until, restarts=restarts, memory=memory, saved_steps=[1])
        said.append(note)

    def lose() -> None:
        for path in os.environ["LOCKSTEP_STEP_MEMORY"].split():
            Area(path).break_seal()

    start(0, restarts=0, memory=False)
    start(0, restarts=1, memory=False)
    start(0, restarts=2)
    start(3, restarts=0)
    start(0, restarts=1, memory=False)
    start(0, restarts=2)
    lose()
    start(0, restarts=3)
    start(0, restarts=0)
    return said


def test_a_restart_says_why_it_goes_on_from_the_disk(
    memory: dict[str, str], tmp_path: Path
) -> None:
    def environment(rank: int) -> dict[str, str]:
        return {**rank_environment(rank, 1, 1), **memory}

    folder = tmp_path / "run"
    (said,) = run_ranks(train_after_losses, 1, str(folder), environment=environment)
    nothing = f"nothing to resume in {folder}"
    assert said[:3] == [
        nothing,
        f"{nothing}; no steps are kept in memory",
        f"{nothing}; no step of this run is in memory",
    ]
    assert said[3] == nothing
    on_disk = f"resumed {step_folder(folder, 1)} (epoch 0, step 1, strategy single, 1 rank)"
    assert said[4] == f"{on_disk}; no steps are kept in memory"
    assert said[5].startswith("resumed from step 3 in memory")
    assert said[6] == f"{on_disk}; no step of this run is in memory"
    assert said[7] == on_disk


def train_with_a_damaged_checkpoint(folder: str) -> list[str]:
    """Returns what each start has said. The newest checkpoint on disk is damaged after the second.

    Each start trains until a step, and saves it and step 1.
    """
    said: list[str] = []

    def start(until: int, memory: bool | None = None) -> None:
        saved_steps = [1] if until == 4 else [1, until]
        note = resume_and_train(
            folder, until, restarts=len(said), memory=memory, saved_steps=saved_steps
        )
        said.append(note)

    start(4)
    start(5, memory=False)  # memory still has step 4
    (weights,) = step_folder(Path(folder), 5).glob("model*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 4
    weights.write_bytes(content)
    start(5)  # also replaces the damaged checkpoint
    start(6, memory=False)
    start(6)
    return said


def test_a_damaged_checkpoint_on_disk_is_not_newer_than_memory(
    memory: dict[str, str], tmp_path: Path
) -> None:
    def environment(rank: int) -> dict[str, str]:
        return {**rank_environment(rank, 1, 1), **memory}

    folder = tmp_path / "run"
    (said,) = run_ranks(train_with_a_damaged_checkpoint, 1, str(folder), environment=environment)
    assert said[1].startswith(f"resumed {step_folder(folder, 1)} ")
    assert said[2].startswith("resumed from step 4 in memory ")
    assert "; the last checkpoint on disk is of step 1; passed over: step-000000005 (" in said[2]
    assert said[3].startswith(f"resumed {step_folder(folder, 5)} ")
    assert said[4].startswith(f"resumed {step_folder(folder, 6)} ")
    assert said[4].endswith("; it is newer than step 5 in memory")


def train_with_two_checkpoints(folder: str) -> list[tuple[int, str, str]]:
    """One of them has a model that the training begins with."""
    found = []
    for until in (3, 6):
        with lockstep.init(seed=5, device="cpu") as world:
            net = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net, optimizer = world.prepare(net, optimizer)
            loader = world.loader(TensorDataset(torch.ones(96, 4)), 4)
            begins_with = world.checkpoint(f"{folder}/a", model=net)
            begins_with.resume()
            checkpoint = world.checkpoint(f"{folder}/b", model=net, optimizer=optimizer)
            checkpoint.resume()
            notes = begins_with.last_resume_note, checkpoint.last_resume_note
            found.append((world.step, *notes))
            for (x,) in loader:
                if world.step == until:
                    break
                world.backward(net(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if until == 3:
                continue
            # It goes back to what is on disk, and memory must not lead forward again.
            checkpoint.resume()
            assert checkpoint._kept is not None
            assert checkpoint._kept.report() == []
            for again in (checkpoint, begins_with):
                again.resume()
                world.backward(net(torch.ones(2, 4)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                again.step()
                kept = again._kept
                assert kept is not None
                chosen = choose_step([PartReport(**part) for part in kept.report()], [kept.folder])
                assert chosen is not None
                assert chosen.step == world.step
                saved = read_all(chosen)
                assert torch.equal(saved["model"]["weight"], net.weight.detach())
                kept._step.number = 0
    return found


@pytest.mark.thorough
def test_of_two_checkpoints_the_last_that_is_resumed_is_kept(
    memory: dict[str, str], tmp_path: Path
) -> None:
    def environment(rank: int) -> dict[str, str]:
        return {**rank_environment(rank, 1, 1), **memory}

    ((first, second),) = run_ranks(
        train_with_two_checkpoints, 1, str(tmp_path), environment=environment
    )
    assert first[0] == 0
    assert second[0] == 3
    assert second[1].startswith("nothing to resume")
    assert second[2].startswith("resumed from step 3 in memory")
