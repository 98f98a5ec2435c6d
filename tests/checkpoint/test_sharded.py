"""Checkpoints of states that are sharded over ranks: each rank writes and reads its own."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from saved import full_state_dict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lockstep
from lockstep.checkpoint import layout, save, storage
from lockstep.checkpoint.formats.safetensors import read_header
from lockstep.checkpoint.health import examine
from lockstep.checkpoint.modules import plain_state_dict
from lockstep.errors import CheckpointError
from lockstep.strategies import HSDP, Pipeline

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    """With a tied weight, a buffer, and a parameter of which only rank 0 has a row."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 7), nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(7)
        self.tied = nn.Linear(5, 7)
        self.tied.weight = self.one.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.one(x)).tanh()
        out: Tensor = self.tied(self.two(hidden)) * self.scale
        return out


class Setup:
    def __init__(self, world: lockstep.World, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        net = Net() if world.strategy != "pipeline" else layers()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        self.model, self.optimizer = world.prepare(net, optimizer)
        self.world, self.rank = world, world.rank
        self.checkpoint = world.checkpoint(
            folder, model=self.model, optimizer=self.optimizer, **options
        )

    def train(self) -> None:
        torch.manual_seed(9)
        self.world.backward(self.model(torch.randn(6, 5)).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        full = full_state_dict(plain_state_dict(self.model))
        return {name: value.clone() for name, value in full.items() if not value.is_meta}

    def moments(self) -> list[Tensor]:
        state = self.optimizer.state_dict()["state"]
        return [v.clone() for n in sorted(state) for v in full_state_dict(state[n]).values()]


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def refuse(*_: Any) -> None:
    raise AssertionError("a tensor is gathered")


def save_and_resume(folder: Path, strategy: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    with lockstep.init(strategy, device="cpu") as world:
        run = Setup(world, folder)
        run.train()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DTensor, "full_tensor", refuse)
            run.checkpoint.save()
            run.checkpoint.wait()
        weights, moments = run.weights(), run.moments()
        run.train()
        assert not equal(list(run.weights().values()), list(weights.values()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DTensor, "full_tensor", refuse)
            assert run.checkpoint.resume()
        assert equal(list(run.weights().values()), list(weights.values()))
        assert equal(run.moments(), moments)
    return weights, moments


def test_each_rank_writes_and_reads_its_shards(tmp_path: Path) -> None:
    (weights, moments), _ = run_ranks(save_and_resume, 2, tmp_path, "fsdp")
    (path,) = layout.list_checkpoints(tmp_path)
    manifest = layout.read_manifest(path)
    assert {*manifest["files"]} == {
        f"{name}{rank}.safetensors"
        for name in ("model", "training")
        for rank in ("", "-rank-00001")
    }
    rows = [read_header(path / file)["one.weight"].shape[0] for file in sorted(manifest["files"])
            if file.startswith("model")]  # fmt: skip
    assert sorted(rows) == [3, 4]
    other = read_header(path / "model-rank-00001.safetensors")
    assert "norm.num_batches_tracked" not in other, "rank 0 has what is alike everywhere"
    assert "tied.weight" not in other
    ((whole, whole_moments),) = run_ranks(resume_alone, 1, tmp_path)
    assert whole.keys() == weights.keys()
    assert all(torch.equal(whole[name], weights[name]) for name in weights)
    assert equal(whole_moments, moments)
    bare = Net()
    lockstep.load_weights(bare, tmp_path)
    assert all(torch.equal(value, weights[name]) for name, value in bare.state_dict().items())
    with pytest.raises(CheckpointError, match="shards of one rank"):
        lockstep.load_weights(bare, path / "model.safetensors")


def resume_alone(folder: Path) -> tuple[dict[str, Tensor], list[Tensor]]:
    with lockstep.init(device="cpu") as world:
        run = Setup(world, folder)
        assert run.checkpoint.resume()
        return run.weights(), run.moments()


def test_replicated_shards_are_written_once(tmp_path: Path) -> None:
    run_ranks(save_and_resume, 2, tmp_path, HSDP(shard_size=1))
    (path,) = layout.list_checkpoints(tmp_path)
    assert {*layout.read_manifest(path)["files"]} == {"model.safetensors", "training.safetensors"}


def test_each_stage_of_a_pipeline_writes_its_layers(tmp_path: Path) -> None:
    run_ranks(save_and_resume, 2, tmp_path, Pipeline(num_micro_batches=2))
    (path,) = layout.list_checkpoints(tmp_path)
    names = [set(read_header(path / f"model{rank}.safetensors")) for rank in ("", "-rank-00001")]
    assert names[0]
    assert names[1]
    assert not names[0] & names[1]
    assert names[0] | names[1] == set(layers().state_dict())


def fail_on_rank_1(folder: Path) -> tuple[str, list[str]]:
    with lockstep.init("fsdp", device="cpu") as world:
        run = Setup(world, folder)
        run.checkpoint.save()
        run.train()
        run.checkpoint.wait()
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 1:

                def full(*_: Any) -> None:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

                patch.setattr(storage, "write", full)
            run.checkpoint.save()
            with pytest.raises(CheckpointError) as error:
                run.checkpoint.wait()
        left = sorted(os.listdir(folder))
        run.checkpoint.save()
        run.checkpoint.wait()
        return str(error.value.found), left


def test_all_ranks_raise_the_error_of_one_that_cannot_write(tmp_path: Path) -> None:
    (zero, left), (one, _) = run_ranks(fail_on_rank_1, 2, tmp_path)
    assert one.startswith("no space is left for it")
    assert zero == f"rank 1: {one}"
    assert left == [".lock", "step-000000000"]
    assert [layout.step_of(path) for path in layout.list_checkpoints(tmp_path)] == [0, 1]


def test_rank_0_does_not_wait_for_ever_for_a_rank_that_is_gone(monkeypatch: Any) -> None:
    class Store:
        def check(self, keys: list[str]) -> bool:
            assert keys == ["lockstep/checkpoint/.step/1"]
            return False

    class Joined:
        store = Store()

    monkeypatch.setattr(save, "MAX_WAIT_AFTER_FAILURE_S", 0.1)
    joined: Any = Joined()
    with pytest.raises(CheckpointError, match="not all ranks have written their shards"):
        save.RankReports(joined, ".step", [1]).wait(lambda: True)


def test_reports_of_ranks_do_not_stay_in_the_store() -> None:
    joined: Any = SimpleNamespace(store=dist.HashStore())
    told = save.RankReports(joined, ".step", [1, 2])
    told.send(2, None)
    told.send(1, {"files": {}})
    assert told.wait(lambda: False) == {1: {"files": {}}, 2: None}
    assert not joined.store.check(["lockstep/checkpoint/.step/1"])
    assert not joined.store.check(["lockstep/checkpoint/.step/2"])


def test_a_damaged_or_missing_shard_is_found(tmp_path: Path) -> None:
    run_ranks(save_and_resume, 2, tmp_path, "fsdp")
    (path,) = layout.list_checkpoints(tmp_path)
    file = path / "training-rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert examine(path, values=True).problems == (f"{file.name} is damaged: its checksum differs",)
    file.unlink()
    assert layout.list_checkpoints(tmp_path) == []


def test_files_that_rank_0_does_not_see_are_reported(tmp_path: Path) -> None:
    temporary = layout.temporary_folder(tmp_path, 3)
    save.begin_checkpoint(temporary)
    report = {"files": {"model-rank-00001.safetensors": [8, "crc32:0"]}, "boxes": {}, "entries": {}}
    with pytest.raises(CheckpointError, match="is not to be seen from rank 0"):
        save.write_checkpoint(
            temporary,
            save.RankPart({}),
            {"step": 3, "modules": {}, "training": {}, "optimizers": {}},
            keep=1,
            wait_for_others=lambda: {1: json.loads(json.dumps(report))},
        )
    assert os.listdir(tmp_path) == []
