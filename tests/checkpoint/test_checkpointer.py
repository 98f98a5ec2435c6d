from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import in_gloo_group, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.checkpoint import checkpointer, layout, storage
from lockstep.checkpoint.checkpointer import Checkpoint
from lockstep.checkpoint.find_latest import read_manifest_of
from lockstep.checkpoint.health import examine
from lockstep.checkpoint.random_states import RandomStates
from lockstep.checkpoint.schedule import Policy
from lockstep.checkpoint.training_state import TrainingState
from lockstep.checkpoint.weights import load_weights
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.process_group import Run
from lockstep.errors import CheckpointError, LockstepWarning, SettingError, UsageError
from lockstep.machine.topology import Topology
from lockstep.session.step import Step
from lockstep.settings import Settings

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")


class World:
    """The run's own state, as far as a checkpoint knows it."""

    strategy = "by hand"

    def __init__(self) -> None:
        self.step = 0
        self.epoch = 0
        self.said: list[str] = []
        self.run: Run | None = None

    def print(self, *values: object) -> None:
        self.said += map(str, values)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.epoch = state["step"], state["epoch"]
        if self.run is not None:
            self.run.step.number = self.step


def run_of(collectives: Collectives) -> Run:
    return Run(
        topology=collectives.topology,
        device=CPU,
        backend="",
        collectives=collectives,
        step=Step(),
        settings=Settings(),
        joined=None,
    )


def checkpoint_of(folder: Path, state: dict[str, Any], **policy: Any) -> Checkpoint:
    """On one process; written before `save` returns."""
    run = run_of(Collectives(Topology(), CPU))
    return Checkpoint(folder, run, Policy(asynchronous=False, **policy), state, world=World())


def test_facts_have_the_present_number_of_threads_also_of_steps_in_memory() -> None:
    """`resume` and scripts change it, and a run that goes on from memory sets it again."""
    collectives = Collectives(Topology(), CPU)
    world = World()
    state = TrainingState(
        {"model": nn.Linear(2, 2)},
        world=world,
        world_state_without_checks=world.state_dict,
        replicas=None,
        random_states=RandomStates(collectives, None),
        settings=Settings(virtual_ranks=2),
        collectives=collectives,
    )
    threads_before = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            assert state.facts(state.collect())["threads"] == number
            facts_in_memory, _ = state.collect_sections()
            assert facts_in_memory["threads"] == number
    finally:
        torch.set_num_threads(threads_before)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x).relu())
        return out


class Training:
    """A plain training, on one process or under DDP."""

    def __init__(
        self,
        folder: Path,
        collectives: Collectives | None = None,
        policy: Policy | None = None,
        **more: Any,
    ) -> None:
        collectives = collectives or Collectives(Topology(), CPU)
        torch.manual_seed(0)
        net = Net()
        self.model: nn.Module = net if collectives.single_process else DistributedDataParallel(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=50)
        self.world = World()
        state = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.run = self.world.run = run_of(collectives)
        self.checkpoint = Checkpoint(
            folder,
            self.run,
            policy or Policy(asynchronous=False),
            {**state, **more},
            world=self.world,
        )
        torch.manual_seed(collectives.topology.rank)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            noise = float(np.random.normal()) + random.gauss(0, 1)
            loss = self.model(torch.randn(6, 4) + noise).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.world.step += 1
            self.run.step.number += 1

    def end(self, failed: bool = False) -> None:
        """What the end of the run does."""
        self.run.extensions.close(failed)

    def values(self) -> list[torch.Tensor]:
        moments = [t for s in self.optimizer.state_dict()["state"].values() for t in s.values()]
        return [t.clone() for t in [*self.model.state_dict().values(), *moments]]


def all_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(tmp_path: Path) -> None:
    np.random.seed(1)
    random.seed(1)
    whole = Training(tmp_path / "unused")
    whole.train(9)

    np.random.seed(1)
    random.seed(1)
    first = Training(tmp_path / "run")
    assert first.checkpoint.resume() is False
    assert first.checkpoint.last_resume_note == f"nothing to resume in {tmp_path / 'run'}"
    first.train(5)
    first.world.epoch = 1
    assert first.checkpoint.save() == tmp_path / "run" / "step-000000005"
    first.checkpoint.wait()

    np.random.seed(99)
    random.seed(99)
    second = Training(tmp_path / "run")
    torch.manual_seed(99)
    assert second.checkpoint.resume() is True
    assert (second.world.step, second.world.epoch) == (5, 1)
    assert second.checkpoint.last_resume_note == (
        f"resumed {tmp_path / 'run' / 'step-000000005'} (epoch 1, step 5, strategy by hand, 1 rank)"
    )
    assert second.world.said == [second.checkpoint.last_resume_note]
    second.train(4)
    assert all_equal(whole.values(), second.values())
    assert whole.scheduler.state_dict() == second.scheduler.state_dict()


def test_a_resumed_run_does_not_need_the_files(tmp_path: Path) -> None:
    first = Training(tmp_path)
    first.train(2)
    first.checkpoint.save()
    second = Training(tmp_path)
    second.checkpoint.resume()
    with open("/proc/self/maps") as maps:
        assert str(tmp_path) not in maps.read()
    shutil.rmtree(tmp_path / "step-000000002")
    second.train(2)


def test_saving_many_times_keeps_the_newest(tmp_path: Path) -> None:
    run = Training(tmp_path)
    for _ in range(4):
        run.train(1)
        run.checkpoint.save()
    assert [layout.step_of(p) for p in layout.list_checkpoints(tmp_path)] == [3, 4]


def test_a_step_of_another_training_is_not_replaced(tmp_path: Path) -> None:
    first = Training(tmp_path)
    first.train(1)
    path = first.checkpoint.save()
    assert first.checkpoint.save() == path, "its own step may be replaced"

    other = Training(tmp_path)
    other.train(1)
    before = layout.read_manifest(tmp_path / "step-000000001")["id"]
    with pytest.warns(
        LockstepWarning, match=r"without resume\(\)\n  found: step-000000001 is there"
    ):
        other.run.extensions.step_finished(1)
    with pytest.raises(CheckpointError, match="step-000000001 is there already, from a run that"):
        other.checkpoint.save()
    assert layout.read_manifest(tmp_path / "step-000000001")["id"] == before

    resumed = Training(tmp_path)
    assert resumed.checkpoint.resume()
    resumed.run.extensions.step_finished(1)  # without a warning
    assert resumed.checkpoint.save() == path


def test_the_random_state_is_mentioned_only_if_it_was_drawn_from() -> None:
    states = RandomStates(Collectives(Topology(), CPU), common_stream=None)
    saved = {"manifest": {"world_size": 2}, "random": [states.state(), states.state()]}
    assert states.restore(saved) == ""
    torch.rand(())  # what dropout does
    saved["random"] = [states.state(), states.state()]
    torch.manual_seed(0)
    assert "saved by 2 processes, resumed on 1: dropout" in states.restore(saved)


def test_resume_names_incomplete_checkpoints(tmp_path: Path) -> None:
    run = Training(tmp_path)
    for _ in range(2):
        run.train(1)
        run.checkpoint.save()
    (tmp_path / "step-000000002" / "manifest.json").unlink()
    assert run.checkpoint.resume()
    assert run.world.step == 1
    assert run.checkpoint.last_resume_note.endswith("; passed over: step-000000002 (incomplete)")


@pytest.mark.parametrize("manifest_is_read_first", [False, True])
def test_a_checkpoint_that_another_run_removes_meanwhile_is_said_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manifest_is_read_first: bool
) -> None:
    run = Training(tmp_path)
    run.train(1)
    run.checkpoint.save()

    def read_and_remove(path: Path, checkpoint_id: str) -> Any:
        """Another run removes the checkpoint before or after its manifest is read."""
        if not manifest_is_read_first:
            shutil.rmtree(path)
        manifest = read_manifest_of(path, checkpoint_id)
        shutil.rmtree(path)
        return manifest

    monkeypatch.setattr(checkpointer, "read_manifest_of", read_and_remove)
    with pytest.raises(CheckpointError, match="it was removed after it had been found") as caught:
        run.checkpoint.resume()
    assert "folder of its own" in caught.value.do


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x01
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "manifest.json"])
def test_a_flipped_bit_is_found_and_passed_over(tmp_path: Path, name: str) -> None:
    run = Training(tmp_path)
    for _ in range(2):
        run.train(2)
        run.checkpoint.save()
    damaged = tmp_path / "step-000000004"
    epoch = (damaged / name).read_bytes().find(b'"epoch": 0')
    flip(damaged / name, epoch + len('"epoch": ') if epoch > 0 else -5)
    assert layout.is_complete(damaged), "or sizes are enough to see it"
    note = f"passed over: step-000000004 ({name} is damaged: its checksum differs)"
    # It neither forbids an earlier step, nor takes the place of a good one, nor is taken up.
    for step in (2, 3):
        again = Training(tmp_path)
        assert again.checkpoint.resume()
        assert again.world.step == step
        assert note in again.checkpoint.last_resume_note
        assert again.world.said == [again.checkpoint.last_resume_note]
        again.train(1)
        again.checkpoint.save()
    assert not examine(damaged, values=True).problems, "it was replaced by that of the same step"
    assert [layout.step_of(path) for path in layout.list_checkpoints(tmp_path)] == [3, 4]


def test_a_change_of_any_byte_of_a_manifest_is_found(tmp_path: Path) -> None:
    """No change of one goes unseen."""
    path = checkpoint_of(tmp_path, {"own": Counter({"lr": 0.125, "name": "a"})}).save()
    assert path is not None
    file = path / "manifest.json"
    good = file.read_bytes()
    for place in range(len(good)):
        data = bytearray(good)
        data[place] ^= 1 << place % 7
        file.write_bytes(data)
        assert not layout.is_complete(path) or examine(path, values=True).problems, f"byte {place}"
    file.write_bytes(good)
    assert not examine(path, values=True).problems


def test_the_folder_of_one_checkpoint_is_not_that_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Training(tmp_path).checkpoint.save()
    path = tmp_path / "step-000000000"
    (tmp_path / "latest").symlink_to(path)
    monkeypatch.chdir(path)
    for folder in (path, tmp_path / "latest", Path(".")):
        with pytest.raises(SettingError, match="the folder of one checkpoint") as caught:
            Training(folder)
        assert f"the folder of the run, {tmp_path}:" in caught.value.do
    (path / "manifest.json").unlink()  # it is damaged
    with pytest.raises(SettingError, match="the folder of one checkpoint"):
        Training(path)


def test_resume_raises_if_no_checkpoint_is_sound(tmp_path: Path) -> None:
    run = Training(tmp_path)
    for _ in range(2):
        run.train(1)
        run.checkpoint.save()
    flip(tmp_path / "step-000000001" / "model.safetensors", -1)
    (tmp_path / "step-000000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of its checkpoints is sound") as caught:
        run.checkpoint.resume()
    assert "step-000000002 (incomplete), step-000000001 (model" in caught.value.found
    assert "checkpoint repair" in caught.value.do


def test_a_schedule_of_another_length_is_refused_or_reported(tmp_path: Path) -> None:
    def schedules(steps: int) -> dict[str, Any]:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps // 10)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [steps // 10])
        return {"cycle": cycle, "schedule": schedule}

    checkpoint_of(tmp_path, schedules(50)).save()
    longer = schedules(80)
    before = longer["cycle"].state_dict()
    with pytest.raises(CheckpointError, match="total_steps=50 and is built with total_steps=80"):
        checkpoint_of(tmp_path, longer).resume()
    assert longer["cycle"].state_dict() == before
    mixed = checkpoint_of(tmp_path, {**schedules(50), "schedule": longer["schedule"]})
    assert mixed.resume()
    assert "T_max=50 as saved, not 80 as built" in mixed.last_resume_note
    assert "total_iters=5 as saved, not 8 as built" in mixed.last_resume_note


def test_a_compiled_model_is_saved_bare(tmp_path: Path) -> None:
    net = torch.compile(Net(), backend="eager")
    checkpoint = checkpoint_of(tmp_path, {"net": net})
    path = checkpoint.save()
    bare = Net()
    load_weights(bare, path / "net.safetensors")
    assert torch.equal(bare.head.weight, net.head.weight)
    with torch.no_grad():
        net.head.weight.zero_()
    checkpoint.resume()
    assert torch.equal(bare.head.weight, net.head.weight)


class Counter:
    """A user's own object."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_objects_with_a_state_dict_are_saved(tmp_path: Path) -> None:
    state = {"best": float("-inf"), "seen": {3: (1, None)}, "mean": torch.ones(2)}
    Training(tmp_path, own=Counter(state)).checkpoint.save()
    other = Counter()
    Training(tmp_path, own=other).checkpoint.resume()
    assert other.state.keys() == state.keys()
    assert other.state["seen"] == {3: (1, None)}


def test_why_a_loader_refuses_its_state_is_one_message(tmp_path: Path) -> None:
    def checkpoint_with(batch_size: int) -> Checkpoint:
        dataset = torch.utils.data.TensorDataset(torch.ones(16, 2))
        return world.checkpoint(tmp_path, loader=world.loader(dataset, batch_size))

    with lockstep.init(seed=0) as world:
        checkpoint_with(batch_size=8).save()
    with lockstep.init(seed=0) as world, pytest.raises(CheckpointError) as caught:
        checkpoint_with(batch_size=4).resume()

    assert caught.value.was_set.startswith(f"resuming loader from {tmp_path}")
    assert caught.value.found == (
        "resuming a loader whose batch size is 4: in the checkpoint it is 8: the position means "
        "other samples"
    )
    assert caught.value.do.startswith("continue with the same data, batch size")
    assert str(caught.value).count("found:") == 1


def test_other_names_than_were_saved_are_refused(tmp_path: Path) -> None:
    Training(tmp_path, ema=Counter(1)).checkpoint.save()
    with pytest.raises(CheckpointError) as caught:
        Training(tmp_path, scaler=Counter(1)).checkpoint.resume()
    assert caught.value.found == ("not in the checkpoint: scaler; in the checkpoint alone: ema")
    with pytest.raises(CheckpointError) as caught:
        Training(tmp_path).checkpoint.resume()
    assert caught.value.found == "in the checkpoint alone: ema"


def test_a_model_that_does_not_fit_leaves_everything_unchanged(tmp_path: Path) -> None:
    Training(tmp_path).checkpoint.save()
    run = Training(tmp_path)
    run.model.head = nn.Linear(8, 5)
    before = run.values()
    with pytest.raises(CheckpointError) as caught:
        run.checkpoint.resume()
    assert "head.weight: [2, 8] in the file, [5, 8] in the model" in caught.value.found
    run.model.head = nn.Identity()
    with pytest.raises(CheckpointError, match=r"2 unexpected \(head.weight, head.bias\)"):
        run.checkpoint.resume()
    run.model.head = nn.Linear(8, 5)
    assert all_equal(before[:5], run.values()[:5])


def test_an_optimizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    Training(tmp_path).checkpoint.save()
    run = Training(tmp_path)
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(CheckpointError, match="resuming optimizer from") as caught:
        run.checkpoint.resume()
    assert "parameter groups" in caught.value.found


def test_a_module_and_another_object_do_not_replace_each_other(tmp_path: Path) -> None:
    Training(tmp_path, ema=Net()).checkpoint.save()
    with pytest.raises(CheckpointError, match=r"ema was a module .* and is a Counter now"):
        Training(tmp_path, ema=Counter(1)).checkpoint.resume()
    shutil.rmtree(tmp_path / "step-000000000")
    Training(tmp_path, ema=Counter(1)).checkpoint.save()
    with pytest.raises(CheckpointError, match=r"ema was not a module .* and is a Net now"):
        Training(tmp_path, ema=Net()).checkpoint.resume()


def test_a_state_that_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    run = Training(tmp_path, own=Counter({"f": [len]}))
    with pytest.raises(CheckpointError) as caught:
        run.checkpoint.save()
    assert caught.value.found == "own.f[0] is a builtin_function_or_method"
    run.end()
    assert not list(tmp_path.iterdir())


def test_no_pickle_is_read_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    run = Training(tmp_path)
    run.train(1)
    path = run.checkpoint.save()
    assert run.checkpoint.resume()
    assert {p.suffix for p in path.iterdir()} == {".safetensors", ".json"}
    assert json.loads((path / "manifest.json").read_text())["world_size"] == 1


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, None])
def test_keep_must_be_a_count(keep: Any) -> None:
    with pytest.raises(SettingError, match="keep="):
        Policy(keep=keep)


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({}, "only the folder was given"),
        ({"best": {"a": 1}}, "a dict has no state_dict()"),
        ({"best": 3}, "an int has no state_dict()"),
        ({"world": Counter()}, "the name is taken"),
        ({"training": Counter()}, "the name is taken"),
        ({"../x": Counter()}, "no plain word"),
        ({"Net": Counter(), "net": Counter()}, "upper and lower case"),
    ],
)
def test_objects_that_cannot_be_saved_are_refused(
    tmp_path: Path, state: dict[str, Any], found: str
) -> None:
    with pytest.raises(UsageError) as caught:
        checkpoint_of(tmp_path, state)
    assert found in caught.value.found


def test_an_object_without_a_name_is_refused(tmp_path: Path) -> None:
    """Python said that World.checkpoint takes 2 positional arguments, which helped nobody."""
    with lockstep.init() as world, pytest.raises(UsageError) as caught:
        world.checkpoint(tmp_path, {"weight": 1.0})
    assert caught.value.was_set == "world.checkpoint with a dict behind the folder"
    assert "model=model" in caught.value.do


def test_save_and_resume_are_refused_in_an_evaluation_loop(tmp_path: Path) -> None:
    collectives = Collectives(Topology(), CPU)
    run = Training(tmp_path, collectives)
    collectives.blocked_reason = "the ranks may have different numbers of batches"
    for method in (run.checkpoint.save, run.checkpoint.resume):
        with pytest.raises(UsageError, match="in the body of an evaluation loop"):
            method()


# --- several processes


def joined() -> Collectives:
    return Collectives(Topology(rank=dist.get_rank(), size=dist.get_world_size()), CPU)


def streams() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


@in_gloo_group
def save_on_many(folder: str) -> tuple[list[Any], list[float]]:
    collectives = joined()
    np.random.seed(collectives.topology.rank)
    random.seed(collectives.topology.rank)
    run = Training(Path(folder), collectives)
    run.train(3)
    path = run.checkpoint.save()
    run.checkpoint.wait()
    assert layout.latest(Path(folder)) == path
    return [t.tolist() for t in run.values()], streams()


@in_gloo_group
def resume_on_many(folder: str) -> tuple[list[Any], list[float], str]:
    collectives = joined()
    run = Training(Path(folder), collectives)
    assert run.checkpoint.resume()
    assert run.world.step == 3
    drawn = streams()
    result = [t.tolist() for t in run.values()], drawn, run.checkpoint.last_resume_note
    run.train(1)
    return result


def test_saved_on_two_resumed_on_two_one_and_three(tmp_path: Path) -> None:
    saved = run_ranks(save_on_many, 2, str(tmp_path))
    values = saved[0][0]
    assert saved[0][1] != saved[1][1], "the ranks' random streams differ, or this shows nothing"

    on_two = run_ranks(resume_on_many, 2, str(tmp_path))
    assert [r[0] for r in on_two] == [values, values]
    assert [r[1] for r in on_two] == [s[1] for s in saved]
    assert "processes" not in on_two[0][2]

    on_three = run_ranks(resume_on_many, 3, str(tmp_path))
    assert [r[0] for r in on_three] == [values] * 3
    assert all("saved by 2 processes, resumed on 3" in r[2] for r in on_three)

    alone = Training(tmp_path)
    assert alone.checkpoint.resume()
    assert [t.tolist() for t in alone.values()] == values
    assert "saved by 2 processes, resumed on 1" in alone.checkpoint.last_resume_note


def caught(action: Any) -> tuple[str, str]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, getattr(error, "found", str(error))
    return "nothing", ""


@in_gloo_group
def failing(folder: str) -> list[tuple[str, str]]:
    """Every way in which one rank alone fails; the others must hear of it."""
    collectives = joined()
    rank = collectives.topology.rank
    own = Counter(1)
    run = Training(Path(folder) / "a", collectives, own=own)
    seen = []

    original, full = storage.write, OSError(28, "No space left on device")

    def no_space(*_: Any, **__: Any) -> None:
        raise full

    if rank == 0:
        storage.write = no_space
    seen.append(caught(run.checkpoint.save))
    storage.write = original

    if rank == 1:
        own.state_dict = lambda: 1 / 0  # type: ignore[method-assign]
    seen.append(caught(run.checkpoint.save))
    own.__dict__.pop("state_dict", None)

    run.checkpoint.save()
    if rank == 1:
        own.load_state_dict = lambda _: 1 / 0  # type: ignore[method-assign]
    seen.append(caught(run.checkpoint.resume))

    # Rank 1 on another machine: it sees an empty folder, or another checkpoint of that name.
    elsewhere = Training(Path(folder) / ("a" if rank == 0 else "b"), collectives, own=Counter(1))
    seen.append(caught(elsewhere.checkpoint.resume))
    if rank == 1:
        alone = Training(Path(folder) / "b", own=Counter(1))
        alone.checkpoint.save()
    collectives.barrier()
    seen.append(caught(elsewhere.checkpoint.resume))
    other_way = Training(Path(folder) / ("c" if rank == 0 else "b"), collectives, own=Counter(1))
    seen.append(caught(other_way.checkpoint.resume))
    return seen


def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    zero, one = run_ranks(failing, 2, str(tmp_path))
    space = "no space is left for it ([Errno 28] No space left on device)"
    assert zero[0] == ("CheckpointError", space)
    assert one[0] == ("CheckpointError", f"rank 0: {space}")
    assert one[1] == ("ZeroDivisionError", "division by zero")
    assert zero[1] == ("CheckpointError", "rank 1: ZeroDivisionError: division by zero")
    assert one[2] == ("CheckpointError", "ZeroDivisionError: division by zero")
    assert zero[2] == ("CheckpointError", "rank 1: ZeroDivisionError: division by zero")
    assert "this rank does not see it" in one[3][1]
    assert zero[3][1] == f"rank 1: {one[3][1]}"
    assert "another checkpoint under that name" in one[4][1]
    assert zero[4][1] == f"rank 1: {one[4][1]}"
    assert one[5] == zero[5]
    assert zero[5][1] == "rank 1 sees a complete checkpoint there, rank 0 sees none"
    assert sorted(os.listdir(tmp_path / "a")) == [".lock", "step-000000000"]
