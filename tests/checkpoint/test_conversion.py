from __future__ import annotations

import mmap
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved import checkpoint
from torch import Tensor, nn

from lockstep.checkpoint.contents import open_contents
from lockstep.checkpoint.conversion import convert
from lockstep.checkpoint.weights import load_weights
from lockstep.errors import CheckpointError, SettingError

pytestmark = pytest.mark.unit


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.register_buffer("count", torch.tensor(7))
        if tie:
            self.out.weight = self.embedding.weight


class WithExtra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"scale": torch.tensor(3.0), "kind": "a"}

    def set_extra_state(self, state: Any) -> None:
        pass


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_every_form_is_converted_into_every_other(tmp_path: Path) -> None:
    model = Tied()
    state = model.state_dict()
    sources = {
        "torch": tmp_path / "in.pt",
        "old torch": tmp_path / "old.pth",
        "nested": tmp_path / "nested.ckpt",
        "safetensors": tmp_path / "in.safetensors",
        "checkpoint": checkpoint(tmp_path / "run", model=model),
        "run": tmp_path / "run",
    }
    torch.save(state, sources["torch"])
    torch.save(state, sources["old torch"], _use_new_zipfile_serialization=False)
    torch.save({"epoch": 3, "state_dict": state}, sources["nested"])
    save_file({n: v.clone() for n, v in state.items()}, sources["safetensors"])
    for kind, source in sources.items():
        for shards in (10**9, 50):
            out = tmp_path / f"{kind}-{shards}.safetensors"
            done = convert(open_contents(source), out, shard_bytes=shards)
            assert (len(done.files) > 1) == (shards == 50)
            held = {}
            for file in done.files[len(done.files) > 1 :]:
                held |= load_file(file)
            assert same(held, state), kind
            # Once more, from what was written, whatever it is.
            for ending in (".pt", ".bin"):
                again = tmp_path / f"again-{kind}{shards}{ending}"
                convert(open_contents(done.files[0]), again)
                assert same(torch.load(again), state), kind
        out = tmp_path / f"{kind}.pth"
        convert(open_contents(source), out)
        held = torch.load(out)
        assert same(held, state)
        tied = held["embedding.weight"].data_ptr() == held["out.weight"].data_ptr()
        assert tied == (kind != "safetensors"), kind  # which cannot say so
        assert out.stat().st_size < 4000
        other = Tied()
        load_weights(other, out)
        assert same(other.state_dict(), state)


def test_only_the_values_of_a_view_are_written(tmp_path: Path) -> None:
    large = torch.arange(100_000.0).reshape(100, 1000)
    state = {"row": large[3], "column": large[:, 3], "t": large[:4, :4].t(), "none": large[:0]}
    torch.save(state, tmp_path / "in.pt")
    for name in ("out.pt", "out.safetensors"):
        convert(open_contents(tmp_path / "in.pt"), tmp_path / name)
        assert (tmp_path / name).stat().st_size < 20_000
    assert same(torch.load(tmp_path / "out.pt"), state)
    assert same(load_file(tmp_path / "out.safetensors"), state)


def test_convert_casts_floats_of_16_bits_and_more(tmp_path: Path) -> None:
    state = {
        "fp32": torch.randn(3),
        "fp64": torch.randn(3, dtype=torch.float64),
        "fp16": torch.randn(3).half(),
        "fp8": torch.randn(3).to(torch.float8_e4m3fn),
        "int": torch.arange(3),
        "bool": torch.tensor([True, False]),
    }
    torch.save(state, tmp_path / "in.pt")
    contents = open_contents(tmp_path / "in.pt")
    for out in (tmp_path / "o.safetensors", tmp_path / "o.pt"):
        done = convert(contents, out, dtype=torch.bfloat16)
        held = load_file(out) if out.suffix == ".safetensors" else torch.load(out)
        assert done.num_cast == 3
        for name, value in state.items():
            wanted = value.bfloat16() if name in ("fp32", "fp64", "fp16") else value
            assert held[name].dtype is wanted.dtype
            assert torch.equal(held[name].view(torch.uint8), wanted.view(torch.uint8))
    torch.save({"w": torch.tensor([1.0, -7e4])}, tmp_path / "large.pt")
    large = open_contents(tmp_path / "large.pt")
    with pytest.raises(CheckpointError, match=r"converting w to float16\n.*7e\+04 is beyond"):
        convert(large, tmp_path / "large.safetensors", dtype=torch.float16)
    assert not list(tmp_path.glob("*large.safetensors*"))


def test_convert_removes_and_adds_prefixes(tmp_path: Path) -> None:
    names = ["module.a._orig_mod.w", "module.b_orig_mod.w", "module.module.c"]
    save_file(
        {n: torch.full((1,), float(i)) for i, n in enumerate(names)}, tmp_path / "i.safetensors"
    )
    contents = open_contents(tmp_path / "i.safetensors")

    def written(**options: Any) -> list[str]:
        convert(contents, tmp_path / "o.safetensors", **options)
        return [
            n
            for n, _ in sorted(
                load_file(tmp_path / "o.safetensors").items(), key=lambda p: p[1].item()
            )
        ]

    assert written() == names
    assert written(add_prefix="net.") == [f"net.{n}" for n in names]
    assert written(remove_prefixes=["module."]) == ["a._orig_mod.w", "b_orig_mod.w", "module.c"]
    assert written(remove_prefixes=["module.", "_orig_mod."], add_prefix="x.") == [
        "x.a.w",
        "x.b_orig_mod.w",
        "x.module.c",
    ]
    with pytest.raises(SettingError, match="no name begins with it"):
        written(remove_prefixes=["model."])
    save_file({"module.w": torch.ones(1), "w": torch.ones(1)}, tmp_path / "i.safetensors")
    contents = open_contents(tmp_path / "i.safetensors")
    with pytest.raises(SettingError, match="two names would become one"):
        written(remove_prefixes=["module."])


def test_convert_takes_one_of_several_models(tmp_path: Path) -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    step = checkpoint(tmp_path / "run", generator=a, critic=b)
    with pytest.raises(CheckpointError, match="it holds 2 modules: generator, critic"):
        open_contents(step)
    with pytest.raises(SettingError, match="the file has the names generator, critic"):
        open_contents(step, name="model")
    convert(open_contents(step, name="critic"), tmp_path / "critic.pt")
    assert same(torch.load(tmp_path / "critic.pt"), dict(b.state_dict()))
    both = open_contents(step, everything=True)
    assert list(both.tensors) == [
        "generator.weight",
        "generator.bias",
        "critic.weight",
        "critic.bias",
    ]
    torch.save({"model": a.state_dict(), "net": b.state_dict()}, tmp_path / "two.pt")
    convert(open_contents(tmp_path / "two.pt", name="net"), tmp_path / "net.pt")
    assert same(torch.load(tmp_path / "net.pt"), dict(b.state_dict()))
    with pytest.raises(SettingError, match=r"the file has the names \['model'\], \['net'\]"):
        open_contents(tmp_path / "two.pt", name="ema")


def test_extra_state_is_written_to_torch_files_only(tmp_path: Path) -> None:
    step = checkpoint(tmp_path / "run", model=WithExtra(2, 2))
    contents = open_contents(step)
    with pytest.raises(CheckpointError, match="_extra_state is no tensor"):
        convert(contents, tmp_path / "o.safetensors")
    convert(contents, tmp_path / "o.pt")
    extra = torch.load(tmp_path / "o.pt")["_extra_state"]
    assert extra == {"scale": torch.tensor(3.0), "kind": "a"}


def test_outputs_that_would_overwrite_the_input_are_refused(tmp_path: Path) -> None:
    step = checkpoint(tmp_path / "run", model=nn.Linear(2, 2))
    contents = open_contents(step)
    for out, found in (
        (step / "model.safetensors", "among the files that are read"),
        (step / "other.safetensors", "its folder is a checkpoint"),
        (tmp_path / "w.onnx", "its ending says nothing"),
        (tmp_path / "w", "its ending says nothing"),
    ):
        with pytest.raises(SettingError, match=found):
            convert(contents, out)
    (tmp_path / "w.pt").mkdir()
    with pytest.raises(CheckpointError, match="is a folder"):
        convert(contents, tmp_path / "w.pt")


def test_convert_needs_the_memory_of_one_file(tmp_path: Path) -> None:
    """Python's own memory, which is where parts of files are read to."""
    save_file({f"t{i}": torch.zeros(1_000_000) for i in range(8)}, tmp_path / "i.safetensors")
    tracemalloc.start()
    try:
        convert(
            open_contents(tmp_path / "i.safetensors"),
            tmp_path / "o.safetensors",
            shard_bytes=8_000_000,
        )
        assert 4_000_000 < tracemalloc.get_traced_memory()[1] < 14_000_000
    finally:
        tracemalloc.stop()


def archive(path: Path, tensors: Any, change: Any, packed: bool = False) -> Path:
    """A file of torch.save with its pickle changed."""
    torch.save(tensors, path)
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as new:
        for name, data in members.items():
            new.writestr(name, change(data) if name.endswith("data.pkl") else data)
    return path


def test_hostile_torch_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    four = {"w": torch.zeros(4)}
    # Its shape becomes 2**40, above the four values that are there.
    huge = b"\x8a\x06\x00\x00\x00\x00\x00\x01\x85"
    archive(path, four, lambda text: text.replace(b"K\x04\x85", huge, 1))
    with pytest.raises(CheckpointError, match=r"torch\.load cannot read it"):
        open_contents(path)
    archive(path, {"w": torch.zeros(4_000_000)}, lambda text: text, packed=True)
    assert path.stat().st_size < 100_000
    with pytest.raises(CheckpointError, match="an archive with packed contents"):
        open_contents(path)
    with pytest.raises(CheckpointError, match="an archive with packed contents"):
        load_weights(nn.Linear(2, 2), path)
    torch.save({"w": torch.zeros(1).expand(2**40)}, path)
    with pytest.raises(CheckpointError, match="w claims 4398046511104 bytes and has 4"):
        open_contents(path)
    torch.save({"w": torch.zeros(2, 2, device="meta")}, path)
    with pytest.raises(CheckpointError, match="w is a tensor on the meta device"):
        open_contents(path)
    whole = (tmp_path / "whole.pt", torch.save(four, tmp_path / "whole.pt"))[0].read_bytes()
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="reading weights from"):
            open_contents(path)
    torch.save(nn.Linear(2, 2), path)
    with pytest.raises(CheckpointError, match="more than tensors in it"):
        open_contents(path)
    assert list(open_contents(path, trust=True).tensors) == ["weight", "bias"]


def test_a_torch_file_larger_than_memory_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A private one is refused by the kernel; a shared one is taken, and nothing is written."""
    path = tmp_path / "w.pt"
    torch.save({"w": torch.ones(4)}, path)
    before, load, refused = path.read_bytes(), torch.load, []

    def limited(*arguments: Any, **options: Any) -> Any:
        if torch.serialization.get_default_mmap_options() != mmap.MAP_SHARED:
            refused.append(options["mmap"])
            raise RuntimeError("unable to mmap 99 bytes from file: Cannot allocate memory (12)")
        return load(*arguments, **options)

    monkeypatch.setattr(torch, "load", limited)
    contents = open_contents(path)
    convert(contents, tmp_path / "o.safetensors", dtype=torch.float16)
    assert torch.equal(load_file(tmp_path / "o.safetensors")["w"], torch.ones(4).half())
    assert refused == [True]
    assert path.read_bytes() == before
    assert torch.serialization.get_default_mmap_options() == mmap.MAP_PRIVATE
