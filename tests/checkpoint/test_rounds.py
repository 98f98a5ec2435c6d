"""The last round of replicas outlives their ranks: in files that this process holds for them."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import difference, mean_loss, mlp, tensors, weights
from ranks import rank_environment, run_ranks
from torch import Tensor

import lockstep
from lockstep.batch.plan import plan_epoch
from lockstep.checkpoint import rounds, storage
from lockstep.checkpoint.rounds import Rounds, choose_round
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.topology import Topology
from lockstep.run.start.round_memory import RoundMemory
from lockstep.strategies import DiLoCo

pytestmark = pytest.mark.launcher

BATCH, STEPS, LOST_AT = 16, 10, 6
OPTIONS = DiLoCo(replicas=4, every=4)
Memory = Sequence[dict[str, str]]


@pytest.fixture
def memory() -> Iterator[Memory]:
    """Of four ranks."""
    with closing(RoundMemory(4)) as held:
        yield [held.variables(rank) for rank in range(4)]


# What is chosen


def report(machine: int, *kept: tuple[int, Sequence[int]], size: int = 3) -> dict[str, Any]:
    """A rank that is alone on its machine, with rounds: steps, and replicas."""
    of_all = {"rank": machine, "world_size": size, "shared": True, "random": f"of {machine}"}
    found = [
        {"step": step, "replicas": list(own), "file": f"{machine}-{step}", **of_all}
        for step, own in kept
    ]
    return {"machine": machine, "rounds": found}


def test_the_latest_complete_round_is_chosen() -> None:
    reports = [report(0, (4, [0]), (8, [0])), report(1, (4, [1]), (8, [1])), report(2, (4, [2]))]
    chosen = choose_round(reports, 3)
    assert chosen is not None
    assert (chosen.step, chosen.lost) == (4, [])
    assert chosen.shared_files == {0: "0-4", 1: "1-4", 2: "2-4"}
    assert chosen.rng_states == ["of 0", "of 1", "of 2"]


def test_without_a_machine_the_latest_round_of_the_others_is_chosen() -> None:
    chosen = choose_round([report(0, (4, [0]), (8, [0])), report(2, (4, [2]), (8, [2]))], 3)
    assert chosen is not None
    assert (chosen.step, chosen.lost, chosen.substitutes[1]) == (8, [1], 2)
    assert chosen.rng_states is None
    assert choose_round([report(0), report(1)], 3) is None


def alone(memory: Memory, folder: str) -> Rounds:
    files = tuple(memory[0]["LOCKSTEP_MEMORY"].split())
    return Rounds(Path(folder), Collectives(Topology(round_memory=files), torch.device("cpu")))


def keep(kept: Rounds, step: int) -> None:
    value = torch.full((3,), float(step))
    kept.store({"step": step, "random": ""}, {"value": value}, {0: {"its": value}})


def steps(kept: Rounds) -> list[int]:
    return sorted(each["step"] for each in kept.report()["rounds"])


def test_a_rank_that_is_killed_while_it_writes_leaves_the_round_before(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = alone(memory, "a")
    keep(kept, 4)
    keep(kept, 8)
    assert steps(kept) == [4, 8]
    real = storage.write
    for last in count():  # it is killed before each of its operations
        done = iter(range(last))

        def write(*given: Any, done: Iterator[int] = done) -> None:
            next(done)
            real(*given)

        monkeypatch.setattr(rounds.storage, "write", write)
        try:
            keep(kept, 12)
        except StopIteration:
            assert steps(kept) == [8]
        else:
            break
    assert last > 1
    assert steps(kept) == [8, 12]
    chosen = choose_round([kept.report()], 1)
    assert chosen is not None
    shared, replicas = kept.read(chosen, [0], [[0]])
    assert torch.equal(shared["value"], torch.full((3,), 12.0))
    assert torch.equal(replicas[0]["its"], shared["value"])


def test_rounds_of_another_folder_are_ignored(memory: Memory) -> None:
    keep(alone(memory, "a"), 4)
    other = alone(memory, "b")
    assert steps(other) == []
    keep(other, 2)
    keep(other, 6)
    assert steps(other) == [2, 6]
    other.forget_after(2)
    assert steps(other) == [2]


# What the ranks do


def train(options: DiLoCo, folder: str, steps: int) -> tuple[dict[str, Tensor], str]:
    """From the last round, if there is one, to so many steps; never saves."""
    with lockstep.init(options, seed=5, device="cpu") as world:
        net = mlp(batch_norm=True)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        net, optimizer, schedule = world.prepare(net, optimizer, schedule)
        loader = world.loader(tensors(48), BATCH, shuffle=True)
        state = {"model": net, "optimizer": optimizer, "schedule": schedule, "loader": loader}
        checkpoint = world.checkpoint(folder, **state)
        checkpoint.resume()
        while world.step < steps:
            for batch in loader:
                world.backward(mean_loss(net, batch))
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                checkpoint.step()
                if world.step == steps and world.is_last_micro_batch:
                    break
        return weights(net), checkpoint.last_resume_note


def train_on_machines(held: Sequence[dict[str, str]], *given: Any) -> list[Any]:
    """On a machine for each of these, with what lies in its memory."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def environment(rank: int) -> dict[str, str]:
        place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
        return {**rank_environment(rank, len(held), store.port), **place, **held[rank]}

    return run_ranks(train, len(held), *given, environment=environment)


def by_hand(steps: int, instead: dict[int, int]) -> dict[str, Tensor]:
    """Four replicas; after the first round some have the optimizer state of another."""
    shared = mlp(batch_norm=True)
    nets = [copy.deepcopy(shared) for _ in range(4)]
    inner = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(steps):
        epoch, position = divmod(step, 3)
        batch = plan_epoch(48, BATCH, seed=5, epoch=epoch)[position]
        for replica, (net, optimizer) in enumerate(zip(nets, inner, strict=True)):
            mean_loss(net, tensors(48)[batch[4 * replica : 4 * replica + 4]]).backward()
            optimizer.param_groups[0]["lr"] = 0.01 * 0.5 ** (step // 3)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % 4 == 0:
            of_all = zip(shared.parameters(), *(net.parameters() for net in nets), strict=True)
            for mean, *own in of_all:
                mean.grad = mean.detach() - sum(p.detach() for p in own) / 4
            outer.step()
            for name, buffer in shared.named_buffers():
                values = [net.get_buffer(name) for net in nets]
                buffer.copy_(sum(values) / 4 if buffer.is_floating_point() else values[0])
            for net in nets:
                net.load_state_dict(shared.state_dict())
        if step == 3:
            for replica, other in instead.items():
                state = copy.deepcopy(inner[other].state_dict())
                inner[replica].load_state_dict(state)
    return weights(shared)


@pytest.mark.parametrize("places", [(2, 0, 3, 1), (2, 0, 3)], ids=str)
def test_every_rank_gets_the_states_of_its_virtual_ranks(
    memory: Memory, tmp_path: Path, places: Sequence[int]
) -> None:
    """The machines come back in another order, or one does not: its replica is lost."""
    train_on_machines(memory, OPTIONS, str(tmp_path), LOST_AT)
    again = train_on_machines([memory[i] for i in places], OPTIONS, str(tmp_path), STEPS)
    lost = {1: 2} if len(places) == 3 else {}
    expected = by_hand(STEPS, lost)
    for found, note in again:
        assert difference(expected, found) < 1e-9
        assert "resumed the last round, from memory (epoch 1, step 4" in note
        for replica, other in lost.items():
            assert f"replica {replica} was lost with its machine, and begins" in note
            assert f"the optimizer state of replica {other}" in note
    assert os.listdir(tmp_path) == []


def test_a_machine_that_joins_takes_the_round_from_another(memory: Memory, tmp_path: Path) -> None:
    options = DiLoCo(replicas=4, every=4, fragments=2, delay=1, compress="int8")
    expected = train_on_machines([{}], options, str(tmp_path), STEPS)[0][0]
    train_on_machines(memory[:1], options, str(tmp_path), LOST_AT)
    for found, note in train_on_machines([memory[1], memory[0]], options, str(tmp_path), STEPS):
        assert difference(expected, found) < 1e-9
        assert "step 5" in note
        assert "lost" not in note
