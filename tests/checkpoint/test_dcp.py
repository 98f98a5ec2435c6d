"""Folders of torch's distributed checkpoint: read without unpickling, a piece at a time."""

from __future__ import annotations

import pickletools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from ranks import in_gloo_group, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lockstep.checkpoint.contents import open_contents
from lockstep.checkpoint.formats.dcp import read_dcp, tensors_in
from lockstep.checkpoint.formats.dcp_metadata import ALLOWED_NAMES, DTYPE_OF_PICKLED_NAME
from lockstep.checkpoint.modules import plain_state_dict
from lockstep.checkpoint.shards import TensorInShards
from lockstep.checkpoint.weights import load_weights
from lockstep.cli.checkpoint import command
from lockstep.errors import CheckpointError

pytestmark = pytest.mark.ranks


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    made = model(1)
    optimizer = torch.optim.AdamW(made.parameters())
    made(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return made, optimizer


def write(state: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is alone
        dcp.save(state, checkpoint_id=folder)
    return folder


def equal(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_states_saved_in_the_usual_ways_are_read(tmp_path: Path) -> None:
    saved, optimizer = trained()
    state = saved.state_dict()
    prefixed = {f"module.{name}": value for name, value in state.items()}
    forms: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "plain": (dict(state), ()),
        "model": ({"model": state, "optim": optimizer.state_dict(), "epoch": 3}, ("model",)),
        "wrapped": ({"state_dict": prefixed}, ("state_dict",)),
        "twice": ({"app": 1, "model": {"module": state}}, ("model", "module")),
    }
    for name, (form, place) in forms.items():
        folder = write(form, tmp_path / name)
        fresh = model()
        assert not equal(fresh, saved)
        report = load_weights(fresh, folder)
        assert equal(fresh, saved), name
        read = "".join(f"[{part!r}]" for part in place)
        assert (report.changes[:1] == (f"read {read}",)) is bool(place)


def test_torch_writes_no_other_names_into_the_metadata(tmp_path: Path) -> None:
    """Tells when torch writes its metadata in another way: `ALLOWED_NAMES` has to follow then."""
    saved, optimizer = trained()
    folder = write({"model": saved.state_dict(), "optim": optimizer.state_dict()}, tmp_path)
    texts: list[str] = []
    used = set()
    for operation, value, _ in pickletools.genops((folder / ".metadata").read_bytes()):
        if operation.name == "STACK_GLOBAL":
            used.add(texts[-1])
        elif isinstance(value, str):
            texts.append(value)
    last = {name.rpartition(".")[2] for name in ALLOWED_NAMES}
    assert {"Metadata", "_StorageInfo", "MetadataIndex", "Size"} <= used <= last


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_tensors_of_every_dtype_and_layout_are_read(tmp_path: Path) -> None:
    state: dict[str, torch.Tensor] = {}
    for name, dtype in DTYPE_OF_PICKLED_NAME.items():
        bits = torch.arange(24, dtype=torch.uint8) % 2
        state[name] = bits.repeat(dtype.itemsize).view(dtype).reshape(4, 6)
    state["turned"] = torch.arange(12.0).reshape(3, 4).t()
    state["channels"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state["part"] = torch.arange(100.0)[10:20]
    state["every second"] = torch.arange(20.0)[::2]
    state["expanded"] = torch.ones(1, 3).expand(4, 3)
    state["scalar"] = torch.tensor(2.5)
    state["empty"] = torch.zeros(3, 0)
    found = read_dcp(write(state, tmp_path / "saved"))
    assert found.keys() == state.keys()
    for name, value in state.items():
        stored = found[name]
        assert isinstance(stored, TensorInShards)
        assert (stored.dtype, stored.shape) == (value.dtype, tuple(value.shape))
        whole = stored.read()
        assert torch.equal(as_bytes(whole), as_bytes(value)), name
        parts = [
            stored.read_range(at, min(at + 5, value.numel())) for at in range(0, value.numel(), 5)
        ]
        assert not parts or torch.equal(as_bytes(torch.cat(parts)), as_bytes(value)), name


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    flat = value.contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


SHAPES = {"rows": (7, 3), "columns": (4, 5), "both": (6, 4, 3), "whole": (5,), "few": (2, 3)}


@in_gloo_group
def write_sharded(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (3,))
    placed = {"rows": Shard(0), "columns": Shard(1), "both": Shard(2), "few": Shard(0)}
    state = {
        name: distribute_tensor(values(name), mesh, [placed.get(name, Replicate())])
        for name in SHAPES
    }
    dcp.save({"model": state}, checkpoint_id=folder / "one")
    writer = dcp.FileSystemWriter(folder / "threads", thread_count=2, single_file_per_rank=False)
    dcp.save({"model": state}, storage_writer=writer)


def values(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(SHAPES[name], generator=generator)


def test_shards_of_three_ranks_are_joined(tmp_path: Path) -> None:
    run_ranks(write_sharded, 3, tmp_path)
    for which in ("one", "threads"):
        found = dict(tensors_in(read_dcp(tmp_path / which)))
        assert found.keys() == {f"model.{name}" for name in SHAPES}
        for name in SHAPES:
            entry = found[f"model.{name}"]
            expected = values(name)
            assert torch.equal(entry.read(), expected), name
            for begin in range(0, expected.numel(), 4):
                end = min(begin + 7, expected.numel())
                assert torch.equal(entry.read_range(begin, end), expected.reshape(-1)[begin:end])


class WithExtra(nn.Linear):
    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_is_read(tmp_path: Path) -> None:
    saved, fresh = WithExtra(2, 2), WithExtra(2, 2)
    saved.extra = {"scale": 3}
    load_weights(fresh, write({"model": saved.state_dict()}, tmp_path / "saved"))
    assert fresh.extra == {"scale": 3}


def test_the_commands_read_a_folder_of_dcp(tmp_path: Path) -> None:
    saved, optimizer = trained()
    state = {"model": saved.state_dict(), "optim": optimizer.state_dict()}
    folder = write(state, tmp_path / "saved")
    run = CliRunner().invoke
    shown = run(command, ["inspect", str(folder)], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "a folder of torch.distributed.checkpoint" in shown.output
    assert "0.weight" in shown.output
    assert "training state: 18 tensors" in shown.output
    out = tmp_path / "w.safetensors"
    assert run(command, ["convert", str(folder), str(out)], catch_exceptions=False).exit_code == 0
    assert run(command, ["diff", str(folder), str(out)], catch_exceptions=False).exit_code == 0
    optim = open_contents(folder, training=True).training
    assert optim["optim.state.0.exp_avg"].read().shape == (7, 5)


def test_a_damaged_shard_leaves_the_model_unchanged(tmp_path: Path) -> None:
    saved, _ = trained()
    folder = write({"model": saved.state_dict()}, tmp_path / "saved")
    file = folder / "__0_0.distcp"
    content = file.read_bytes()
    last = content.rindex(b"PK\x05\x06")  # of the last piece
    file.write_bytes(content[:last] + b"XX" + content[last + 2 :])
    fresh, before = model(), model()
    with pytest.raises(CheckpointError, match=r"no archive of torch\.save"):
        load_weights(fresh, folder)
    assert plain_state_dict(fresh).keys() == plain_state_dict(before).keys()
    assert equal(fresh, before)
