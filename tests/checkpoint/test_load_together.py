"""Weights into models that were prepared: on all ranks or on none, and in little memory."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from safetensors.torch import load_file
from saved import full_state_dict
from torch import Tensor, nn

import lockstep
from lockstep.checkpoint import weights
from lockstep.checkpoint.formats.reading import read_source
from lockstep.checkpoint.modules import load_plain, plain_state_dict
from lockstep.checkpoint.weights import load_weights, save_weights
from lockstep.errors import CheckpointError, LockstepError
from lockstep.strategies import HSDP, Pipeline

pytestmark = pytest.mark.ranks

FORMS = ("w.safetensors", "w.pt", "old.pt", "dcp")
STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "hsdp": HSDP(shard_size=1),
    "pipeline": Pipeline(num_micro_batches=2),
}


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))


def write_forms(folder: Path) -> dict[str, Tensor]:
    saved = net(1)
    save_weights(saved, folder / "w.safetensors")
    torch.save({"model": saved.state_dict()}, folder / "w.pt")
    torch.save(saved.state_dict(), folder / "old.pt", _use_new_zipfile_serialization=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is alone
        dcp.save({"model": saved.state_dict()}, checkpoint_id=folder / "dcp")
    return saved.state_dict()


def load_all(folder: Path) -> list[tuple[str, str, dict[str, Tensor]]]:
    found = []
    for name, strategy in STRATEGIES.items():
        for form in FORMS:
            with lockstep.init(strategy) as world:
                model = world.prepare(net(world.rank))
                load_weights(model, folder / form)
                whole = full_state_dict(plain_state_dict(model))
                here = {key: value.clone() for key, value in whole.items() if not value.is_meta}
                found.append((name, form, here))
    return found


def test_every_strategy_loads_every_form(tmp_path: Path) -> None:
    expected = write_forms(tmp_path)
    for ranks in zip(*run_ranks(load_all, 2, tmp_path), strict=True):
        together: dict[str, Tensor] = {}
        for strategy, form, values in ranks:
            for name, value in values.items():
                assert torch.equal(value, expected[name]), (strategy, form, name)
            together |= values
        assert together.keys() == expected.keys()


class Tied(nn.Module):
    """Words in and out by one matrix, a buffer, and a block that is repeated."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.bfloat16) for _ in range(2)))
        self.blocks.requires_grad_(False)  # shards of a unit that are trained have one dtype
        self.register_buffer("count", torch.tensor(seed))


def save_all(folder: Path) -> list[str]:
    """Every rank calls it, with the model of rank 0's weights; and what cannot be written."""
    said = []
    for name, strategy in STRATEGIES.items():
        with lockstep.init(strategy) as world:
            model = world.prepare(net(1 + world.rank))
            save_weights(model, folder / f"{name}.safetensors")
            save_weights(model, folder / name / "small.safetensors", dtype=torch.bfloat16)
            if strategy == "ddp":
                if world.is_main:  # nothing of it is a matter of the others
                    save_weights(model, folder / "alone.safetensors")
                continue
            try:
                save_weights(model, folder)
            except CheckpointError as error:
                said.append(error.found)
            if strategy == "fsdp":
                tied = world.prepare(Tied(1 + world.rank))
                save_weights(tied, folder / "tied.safetensors")
    return said


@pytest.mark.parametrize("size", [2, 3])
def test_every_strategy_saves_the_whole_model(tmp_path: Path, size: int) -> None:
    for rank, said in enumerate(run_ranks(save_all, size, tmp_path)):
        assert len(said) == 3, "all but ddp"
        assert all(text.startswith("rank 0: ") is bool(rank) for text in said)
    expected = net(1).state_dict()
    for name in (*STRATEGIES, "alone"):
        found = load_file(tmp_path / f"{name}.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
        if name != "alone":
            small = load_file(tmp_path / name / "small.safetensors")
            assert all(torch.equal(small[n], v.bfloat16()) for n, v in expected.items())
    tied = load_file(tmp_path / "tied.safetensors")
    for name, value in Tied(1).state_dict().items():
        assert tied[name].dtype == value.dtype
        assert torch.equal(tied[name], value), name


def load_what_is_missing(folder: Path) -> list[tuple[str, str, bool]]:
    """One rank sees no file; then one sees a broken one; then a model is loaded by one rank."""
    found = []
    for strategy in ("ddp", "fsdp"):
        with lockstep.init(strategy) as world:
            model = world.prepare(net(0))
            before = {n: v.clone() for n, v in full_state_dict(plain_state_dict(model)).items()}
            own = folder / str(world.rank)
            for name in ("absent.pt", "broken.pt"):
                try:
                    load_weights(model, own / name)
                    said = "nothing"
                except LockstepError as error:
                    said = error.found
                now = full_state_dict(plain_state_dict(model))
                found.append((name, said, all(torch.equal(now[n], v) for n, v in before.items())))
            if world.is_main:  # a bare model is no matter of the others
                load_weights(net(0), own / "absent.pt")
    return found


def test_a_file_that_one_rank_cannot_read_is_loaded_by_none(tmp_path: Path) -> None:
    for rank in "012":
        (tmp_path / rank).mkdir()
        write_forms(tmp_path / rank)
        content = (tmp_path / rank / "w.pt").read_bytes()
        if rank != "1":
            (tmp_path / rank / "absent.pt").write_bytes(content)
        (tmp_path / rank / "broken.pt").write_bytes(content[: None if rank != "2" else 900])
    results = run_ranks(load_what_is_missing, 3, tmp_path)
    for rank, found in enumerate(results):
        for name, said, untouched in found:
            culprit, why = (1, "not there") if name == "absent.pt" else (2, "cannot read it")
            assert untouched
            assert why in said
            assert said.startswith(f"rank {culprit}: ") is (rank != culprit)


def anonymous() -> int:
    """Bytes of memory of this process's own that no file stands behind."""
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"Anonymous:\s+(\d+) kB", text)
    assert found
    return int(found[1]) * 1024


SIZE = 2**25


def read_large(folder: Path) -> dict[str, int]:
    grown = {}
    for form in ("w.safetensors", "w.pt", "pytorch_model.bin.index.json"):
        before = anonymous()
        (found,) = read_source(folder / form, trust=False).states
        assert float(sum(value.sum() for value in found.state.values())) == SIZE // 4
        grown[form] = anonymous() - before
        del found
    return grown


def test_loading_a_mapped_file_copies_nothing(tmp_path: Path) -> None:
    """Each rank maps the file, so that it is in a machine's memory once."""
    state = {"a": torch.ones(SIZE // 8), "b": torch.ones(SIZE // 8)}
    weights.save_weights(Holder(state), tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "w.pt")
    index = '{"weight_map": {"a": "w.pt", "b": "w.pt"}}'
    (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    for form, grown in run_ranks(read_large, 1, tmp_path)[0].items():
        assert grown < SIZE // 4, form


class Holder(nn.Module):
    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in state.items():
            part = nn.Module()
            part.register_buffer("value", value)
            self.add_module(name, part)


def test_a_folder_of_dcp_is_read_a_few_tensors_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Holder({f"p{i}": torch.full((100,), float(i)) for i in range(10)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path / "saved")
    sizes = []

    def load(module: nn.Module, state: dict[str, Tensor], *, strict: bool) -> None:
        sizes.append(sum(value.nbytes for value in state.values()))
        load_plain(module, state, strict=strict)

    monkeypatch.setattr(weights, "load_plain", load)
    monkeypatch.setattr(weights, "MAX_BYTES_IN_MEMORY", 1200)
    fresh = Holder({f"p{i}": torch.zeros(100) for i in range(10)})
    load_weights(fresh, tmp_path / "saved")
    assert sizes == [1200, 1200, 1200, 400]
    assert all(torch.equal(v, saved.state_dict()[n]) for n, v in fresh.state_dict().items())


def test_a_model_on_the_meta_device_is_read_when_it_is_prepared(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = net(0)
    saved = write_forms(tmp_path)
    load_weights(model, tmp_path / "dcp")
    with lockstep.init("single") as world:
        loaded = world.prepare(model).state_dict()
    for name, value in saved.items():
        assert torch.equal(loaded[name], value), name
