from __future__ import annotations

import errno
import json
import os
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import saved
import torch
from hypothesis import given, settings, strategies as st
from ranks import in_gloo_group, run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_checkpointer import checkpoint_of as session_of
from torch import nn

import lockstep
from lockstep.checkpoint.contents import open_contents
from lockstep.checkpoint.conversion import convert
from lockstep.checkpoint.encoding import encode
from lockstep.checkpoint.modules import plain_state_dict, unwrap
from lockstep.checkpoint.name_matching import match_names
from lockstep.checkpoint.weights import load_weights, save_weights
from lockstep.errors import CheckpointError, LockstepWarning

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 2)


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        if tie:
            self.out.weight = self.embedding.weight


class Around(nn.Module):
    """A user's own class around a model, as people write it."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.add_module(name, inner)


def compiled(module: nn.Module) -> nn.Module:
    # The wrapper alone: nothing is compiled before the first call.
    wrapped = torch.compile(module, backend="eager")
    assert isinstance(wrapped, nn.Module)
    return wrapped


def equal(a: nn.Module, b: nn.Module) -> bool:
    one, other = plain_state_dict(unwrap(a)), plain_state_dict(unwrap(b))
    return list(one) == list(other) and all(torch.equal(one[k], other[k]) for k in one)


def prefixed(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {prefix + name: value for name, value in state.items()}


def test_saved_weights_are_loaded(tmp_path: Path) -> None:
    model, other = Net(), Net()
    path = tmp_path / "deep" / "er" / "net.safetensors"
    save_weights(model, path)
    assert sorted(p.name for p in path.parent.iterdir()) == ["net.safetensors"]
    assert load_file(path).keys() == model.state_dict().keys()
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    report = load_weights(other, path)
    assert equal(model, other)
    assert report.matched == tuple(model.state_dict())
    assert report.missing == report.unexpected == report.mismatched == report.changes == ()


def test_weights_are_loaded_whatever_their_file_is_called(tmp_path: Path) -> None:
    """Whoever is used to torch.save calls the file "net.pth", though it is safetensors."""
    torch.manual_seed(0)
    saved, loaded = nn.Linear(3, 2), nn.Linear(3, 2)
    with pytest.warns(LockstepWarning, match=r"written as safetensors, and \.pth is the ending"):
        lockstep.save_weights(saved, tmp_path / "net.pth")
    lockstep.load_weights(loaded, tmp_path / "net.pth")
    assert torch.equal(loaded.weight, saved.weight)


def test_tied_weights_are_written_under_every_name(tmp_path: Path) -> None:
    model = Tied()
    save_weights(model, tmp_path / "w.safetensors")
    other = Tied(tie=False)
    other.load_state_dict(load_file(tmp_path / "w.safetensors"))
    assert torch.equal(other.out.weight, model.out.weight)


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        compiled,
        lambda m: nn.DataParallel(compiled(m)),
        lambda m: compiled(nn.DataParallel(m)),
        lambda m: compiled(nn.DataParallel(compiled(m))),
    ],
)
def test_wrappers_leave_no_trace_in_names(
    tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    model = Net()
    wrapped = wrap(model)
    assert unwrap(wrapped) is model
    save_weights(wrapped, tmp_path / "w.safetensors")
    assert load_file(tmp_path / "w.safetensors").keys() == model.state_dict().keys()
    other = wrap(Net())
    load_weights(other, tmp_path / "w.safetensors")
    assert equal(other, model)
    torch.save(wrapped.state_dict(), tmp_path / "w.pt")
    third = Net()
    assert not equal(third, model)
    load_weights(third, tmp_path / "w.pt")
    assert equal(third, model)


def test_wrapped_parts_leave_no_trace_in_names(tmp_path: Path) -> None:
    model = Net()
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    model.body[0] = compiled(model.body[0])
    assert "body.0._orig_mod.weight" in model.state_dict()
    save_weights(model, tmp_path / "w.safetensors")
    assert load_file(tmp_path / "w.safetensors").keys() == plain.keys()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    for name in ("w.safetensors", "w.pt"):
        bare, wrapped = Net(), Net()
        wrapped.body[0] = compiled(wrapped.body[0])
        load_weights(bare, tmp_path / name)
        load_weights(wrapped, tmp_path / name)
        assert equal(bare, model)
        assert equal(wrapped, model)


def test_a_module_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    model = Around(Net(), "module")
    assert unwrap(model) is model
    save_weights(model, tmp_path / "w.safetensors")
    assert all(name.startswith("module.") for name in load_file(tmp_path / "w.safetensors"))
    other = Around(Net(), "module")
    assert load_weights(other, tmp_path / "w.safetensors").changes == ()
    assert equal(other, model)


PREFIXES = [
    "module.",
    "_orig_mod.",
    "model.",
    "net.",
    "module._orig_mod.",
    "_orig_mod.module.",
    "module.model.net.",
    "model.module._orig_mod.net.",
]


@pytest.mark.parametrize("ours", ["", "model", "net", "module"])
@pytest.mark.parametrize("prefix", ["", *PREFIXES])
@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_prefixes_are_removed_and_added(tmp_path: Path, prefix: str, ours: str, kind: str) -> None:
    saved, inner = Net(), Net()
    state = prefixed(saved.state_dict(), prefix)
    path = tmp_path / f"w.{kind}"
    torch.save(state, path) if kind == "pt" else save_file(state, path)
    report = load_weights(Around(inner, ours) if ours else inner, path)
    assert equal(saved, inner)
    assert bool(report.changes) == (prefix != (f"{ours}." if ours else ""))


def test_orig_mod_in_the_middle_of_names_is_removed(tmp_path: Path) -> None:
    saved, model = Net(), Net()
    state = {
        name.replace("body.", "body._orig_mod."): value
        for name, value in saved.state_dict().items()
    }
    torch.save(prefixed(state, "module."), tmp_path / "w.pth")
    report = load_weights(model, tmp_path / "w.pth")
    assert equal(saved, model)
    assert report.changes == ("removed every '_orig_mod.'", "removed the prefix 'module.'")


def test_names_are_never_stripped_blindly() -> None:
    """A model that has both `net.w` and `w`: stripping would make them one."""
    model = {"net.w": (2,), "w": (2,)}
    match = match_names({"module.net.w": (2,), "module.w": (2,)}, model)
    assert match.name_pairs == {"module.net.w": "net.w", "module.w": "w"}
    assert match_names(model, model).changes == ()
    assert match_names({"module.w": (2,), "w": (2,)}, {"w": (2,)}).name_pairs == {"w": "w"}


parts = st.sampled_from(["a", "b", "module", "model", "net", "_orig_mod", "weight"])
keys = st.lists(parts, min_size=1, max_size=4).map(".".join)


@settings(deadline=None)
@given(st.sets(keys, max_size=8), st.sets(keys, max_size=8))
def test_two_names_never_become_one(file: set[str], model: set[str]) -> None:
    names = match_names(dict.fromkeys(file), dict.fromkeys(model)).name_pairs
    assert set(names) <= file
    assert set(names.values()) <= model
    assert len(set(names.values())) == len(names)


@settings(deadline=None)
@given(st.sets(keys, min_size=1, max_size=8), st.sampled_from(["", *PREFIXES]))
def test_a_common_prefix_is_always_found(model: set[str], prefix: str) -> None:
    file = dict.fromkeys(prefix + name for name in model)
    names = match_names(file, dict.fromkeys(model)).name_pairs
    assert len(names) == len(model)


@pytest.mark.parametrize("name", ["state_dict", "model_state_dict", "model", "net", "weights"])
@pytest.mark.parametrize("ending", ["pt", "pth", "bin", "ckpt"])
def test_states_under_the_usual_keys_are_found(tmp_path: Path, name: str, ending: str) -> None:
    saved, model = Net(), Net()
    content = {
        "epoch": 3,
        "best": torch.tensor(0.5),
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}},
        name: prefixed(saved.state_dict(), "module."),
    }
    torch.save(content, tmp_path / f"w.{ending}")
    report = load_weights(model, tmp_path / f"w.{ending}")
    assert equal(saved, model)
    assert report.changes[0] == f"read [{name!r}]"


def test_a_state_under_two_keys_in_the_old_format_is_found(tmp_path: Path) -> None:
    saved, model = Net(), Net()
    content = {"model": {"state_dict": OrderedDict(saved.state_dict())}}
    torch.save(content, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    load_weights(model, tmp_path / "w.pt")
    assert equal(saved, model)


def checkpoint_of(folder: Path, **modules: nn.Module) -> Path:
    trees, files = {}, {"training.safetensors": {}}
    for name, module in modules.items():
        trees[name], files[f"{name}.safetensors"], _ = encode(plain_state_dict(module))
    manifest = {"modules": trees, "training": {}}
    return saved.write(folder, 5, files, manifest, keep=1)


@pytest.mark.parametrize("which", ["step", "folder"])
def test_weights_are_loaded_from_a_checkpoint(tmp_path: Path, which: str) -> None:
    saved = Tied()
    step = checkpoint_of(tmp_path, generator=saved)
    for model in (Tied(), Tied(tie=False)):
        report = load_weights(model, step if which == "step" else tmp_path)
        assert torch.equal(model.out.weight, saved.out.weight)
        assert torch.equal(model.embedding.weight, saved.out.weight)
        assert report.changes == ("read generator of step-000000005",)


def test_one_of_several_modules_of_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    generator, critic, model = Net(), Net(), Net()
    step = checkpoint_of(tmp_path, generator=generator, critic=critic)
    with pytest.raises(CheckpointError, match="it holds 2 modules: generator, critic"):
        load_weights(model, step)
    load_weights(model, step / "critic.safetensors")
    assert equal(model, critic)


def test_tied_weights_that_were_saved_once_are_loaded(tmp_path: Path) -> None:
    weight = torch.rand(5, 3)
    save_file({"embedding.weight": weight}, tmp_path / "w.safetensors")
    model = Tied()
    report = load_weights(model, tmp_path / "w.safetensors")
    assert torch.equal(model.out.weight, weight)
    assert report.missing == ()
    with pytest.raises(CheckpointError, match=r"1 missing\n +missing +out.weight"):
        load_weights(Tied(tie=False), tmp_path / "w.safetensors")


def test_tied_weights_that_differ_in_the_file_are_refused(tmp_path: Path) -> None:
    save_weights(Tied(tie=False), tmp_path / "w.safetensors")
    for strict in (True, False):
        with pytest.raises(CheckpointError, match="one tensor in the model, and differ"):
            load_weights(Tied(), tmp_path / "w.safetensors", strict=strict)


def altered(change: Callable[[dict[str, Any]], object], path: Path) -> Net:
    saved = Net()
    state = dict(saved.state_dict())
    change(state)
    torch.save(state, path)
    return saved


def test_strict_says_what_does_not_fit_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"

    def change(state: dict[str, Any]) -> None:
        del state["body.0.weight"], state["body.0.bias"]
        state["body.0.wieght"] = torch.zeros(1)
        state["head.weight"] = torch.zeros(7, 3)

    altered(change, path)
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, path)
    assert caught.value.found == (
        "of the model's 9 names 6 fit; 2 missing, 1 unexpected, 1 of another shape\n"
        "    missing      body.0.weight  [3, 4]  nearest in the file: body.0.wieght\n"
        "    missing      body.0.bias    [3]\n"
        "    unexpected   body.0.wieght  [1]  nearest in the model: body.0.weight\n"
        "    other shape  head.weight    [7, 3] in the file, [2, 3] in the model"
    )
    assert "strict=False" in caught.value.do
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    report = load_weights(model, path, strict=False)
    assert report.missing == ("body.0.weight", "body.0.bias")
    assert report.unexpected == ("body.0.wieght",)
    assert len(report.mismatched) == 1
    assert len(report.matched) == 6
    assert torch.equal(model.head.weight, before["head.weight"])


@pytest.mark.parametrize("strict", [True, False])
def test_a_file_that_fits_nothing_is_refused(tmp_path: Path, strict: bool) -> None:
    path = tmp_path / "w.pt"
    torch.save(prefixed(Net().state_dict(), "encoder."), path)
    with pytest.raises(CheckpointError, match=r"9 names 0 fit; .*9 unexpected\n"):
        load_weights(Net(), path, strict=strict)


def test_without_strict_half_of_the_names_must_fit(tmp_path: Path) -> None:
    names = list(Net().state_dict())

    def keep(count: int) -> Callable[[dict[str, Any]], object]:
        return lambda state: [state.pop(name) for name in names[count:]]

    altered(keep(4), tmp_path / "few.pt")
    altered(keep(7), tmp_path / "many.pt")
    with pytest.raises(CheckpointError, match="names"):
        load_weights(Net(), tmp_path / "few.pt", strict=False)
    assert len(load_weights(Net(), tmp_path / "many.pt", strict=False).matched) == 7


def test_a_missing_count_of_batches_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    saved = altered(lambda state: state.pop("body.1.num_batches_tracked"), path)
    model = Net()
    load_weights(model, path)
    assert equal(saved, model)


def test_conversions_of_dtypes_are_reported(tmp_path: Path) -> None:
    saved, model = Net().half(), Net()
    save_weights(saved, tmp_path / "w.safetensors")
    report = load_weights(model, tmp_path / "w.safetensors")
    assert report.changes == ("converted 8 tensors from torch.float16 to torch.float32",)
    assert torch.equal(model.head.weight, saved.head.weight.float())


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_pickle_is_not_run(tmp_path: Path, zipped: bool) -> None:
    touched = tmp_path / "touched"
    content = {"state_dict": Net().state_dict(), "args": Evil(touched)}
    path = tmp_path / "w.pt"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="runs whatever code its author put there") as caught:
        load_weights(Net(), path)
    assert "trust=True" in caught.value.do
    assert not touched.exists()
    load_weights(Net(), path, trust=True)
    assert touched.exists()


def test_a_plain_pickle_is_not_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    (tmp_path / "w.bin").write_bytes(pickle.dumps(Evil(touched)))
    with pytest.raises(CheckpointError):
        load_weights(Net(), tmp_path / "w.bin")
    assert not touched.exists()


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, lambda m: {"model": m}])
def test_a_pickled_model_needs_trust(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    saved, model = Net(), Net()
    torch.save(wrap(saved), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"with more than tensors in it \(.*Net"):
        load_weights(model, tmp_path / "w.pt")
    load_weights(model, tmp_path / "w.pt", trust=True)
    assert equal(saved, model)


def elsewhere(path: Path, device: str) -> None:
    """Rewrites a torch file so that its tensors were on another device when it was saved."""
    with zipfile.ZipFile(path) as archive:
        members = {m.filename: archive.read(m) for m in archive.infolist()}
    old, new = (struct.pack("<BI", ord("X"), len(n)) + n.encode() for n in ("cpu", device))
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content.replace(old, new) if name.endswith(".pkl") else content)


@in_gloo_group
def save_in_ddp(folder: Path) -> None:
    torch.manual_seed(0)
    torch.save({"model": nn.parallel.DistributedDataParallel(Net())}, folder / "w.pt")


@pytest.mark.parametrize("wrap", ["bare", "DataParallel", "DDP"])
def test_a_pickled_model_from_missing_devices_is_loaded(tmp_path: Path, wrap: str) -> None:
    torch.manual_seed(0)
    saved, model, path = Net(), Net(), tmp_path / "w.pt"
    if wrap == "DDP":
        run_ranks(save_in_ddp, 1, tmp_path)
    else:
        wrapped = nn.DataParallel(saved) if wrap == "DataParallel" else saved
        if wrap == "DataParallel":
            wrapped.device_ids, wrapped.src_device_obj = [7, 9], torch.device("cuda:7")
        torch.save(wrapped, path)
    elsewhere(path, "cuda:7")
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(path, weights_only=False)
    load_weights(model, path, trust=True)
    assert equal(saved, model)


@pytest.mark.parametrize("both", [False, True])
def test_an_index_of_torch_files_is_loaded(tmp_path: Path, both: bool) -> None:
    saved, model = Net(), Net()
    state = saved.state_dict()
    names = list(state)
    parts = {"pytorch_model-00001-of-00002.bin": names[:4], "pytorch_model-00002.bin": names[4:]}
    for file, part in parts.items():
        torch.save({name: state[name] for name in part}, tmp_path / file)
    places = {name: file for file, part in parts.items() for name in part}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    load_weights(model, index)
    assert equal(saved, model)
    if both:  # the same in the other form, which is preferred
        save_weights(Net(), tmp_path / "model.safetensors", shard_size="40B")
    model = Net()
    load_weights(model, tmp_path)
    assert equal(saved, model) is not both
    places[names[0]] = "pytorch_model-00002.bin"
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointError, match="which does not hold it"):
        load_weights(Net(), index)


def test_a_folder_with_one_torch_file_is_loaded(tmp_path: Path) -> None:
    saved, model = Net(), Net()
    torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    load_weights(model, tmp_path)
    assert equal(saved, model)


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors", "w.bin"])
@pytest.mark.parametrize("trust", [True, False])
def test_unreadable_files_are_reported(tmp_path: Path, name: str, trust: bool) -> None:
    path = tmp_path / name
    with pytest.raises(CheckpointError, match="it is not there"):
        load_weights(Net(), path, trust=trust)
    path.write_bytes(b"\x80garbage that is nothing at all")
    with pytest.raises(CheckpointError, match="reading weights from") as caught:
        load_weights(Net(), path, trust=trust)
    assert "runs whatever code" not in caught.value.found
    torch.save(Net().state_dict(), tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="reading weights from"):
        load_weights(Net(), path, trust=trust)


def test_a_file_without_weights_is_refused(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "model": {"lr": 0.1}}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="it holds a dict with 'epoch', 'model'"):
        load_weights(Net(), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="without a complete checkpoint"):
        load_weights(Net(), tmp_path)


def test_a_model_on_the_meta_device_is_read_when_it_is_prepared(tmp_path: Path) -> None:
    saved = Net()
    save_weights(saved, tmp_path / "w.safetensors")
    with torch.device("meta"):
        model = Net()
    report = load_weights(model, tmp_path / "w.safetensors")
    assert set(report.matched) == set(saved.state_dict())
    assert all(value.is_meta for value in model.state_dict().values())
    with lockstep.init("single") as world:
        loaded = world.prepare(model).state_dict()
    for name, value in saved.state_dict().items():
        assert torch.equal(loaded[name], value), name


def test_lazy_parameters_get_their_shapes_from_the_file(tmp_path: Path) -> None:
    saved, model = nn.Linear(4, 2), nn.LazyLinear(2)
    save_weights(saved, tmp_path / "w.safetensors")
    load_weights(model, tmp_path / "w.safetensors")
    assert torch.equal(model.weight, saved.weight)


class WithExtra(nn.Linear):
    extra: Any = "some"

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_values_that_the_model_cannot_hold_are_refused(tmp_path: Path) -> None:
    """Nothing is copied: neither what is beyond the range of its dtype, nor a sparse tensor."""
    path = tmp_path / "w.pt"
    large = nn.Linear(2, 2).state_dict() | {"weight": torch.full((2, 2), -1e6)}
    infinite = nn.Linear(2, 2).state_dict() | {"weight": torch.full((2, 2), torch.inf)}
    huge = large | {"bias": torch.full((2,), 1e60, dtype=torch.float64)}
    sparse = large | {"weight": torch.eye(2).to_sparse()}
    for dtype, values, found in (
        (torch.float16, large, "the largest value of weight is 1e+06, beyond"),
        (torch.float32, huge, "the largest value of bias is 1e+60, beyond"),
        (torch.float32, sparse, "weight is a tensor of layout torch.sparse_coo in the file"),
    ):
        torch.save(values, path)
        model = nn.Linear(2, 2).to(dtype)
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(CheckpointError, match=re.escape(found)):
            load_weights(model, path)
        assert all(map(torch.equal, before, model.parameters()))
    torch.save(large, path)
    load_weights(nn.Linear(2, 2).bfloat16(), path)
    torch.save(infinite, path)
    load_weights(nn.Linear(2, 2).half(), path)


def test_extra_state_is_loaded_and_not_saved_as_safetensors(tmp_path: Path) -> None:
    saved, model = WithExtra(2, 2), WithExtra(2, 2)
    saved.extra = {"scale": 3}
    with pytest.raises(CheckpointError, match="_extra_state is a dict"):
        save_weights(saved, tmp_path / "w.safetensors")
    torch.save(prefixed(saved.state_dict(), "module."), tmp_path / "w.pt")
    load_weights(model, tmp_path / "w.pt")
    assert model.extra == {"scale": 3}
    model.extra = None
    load_weights(model, checkpoint_of(tmp_path / "c", model=saved))
    assert model.extra == {"scale": 3}


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32, torch.float4_e2m1fn_x2])
def test_a_dtype_that_safetensors_cannot_hold_is_refused(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """No file is written that nothing can open; a checkpoint and a file of torch hold it."""

    def model(first: int) -> nn.Module:
        made = nn.Linear(2, 2)
        values = torch.arange(first, first + 2 * dtype.itemsize, dtype=torch.uint8)
        made.register_buffer("table", values.view(dtype))
        return made

    def as_bytes(module: nn.Module) -> list[int]:
        return module.table.view(torch.uint8).tolist()

    saved = model(1)
    with pytest.raises(CheckpointError, match=f"table has the dtype {dtype}") as caught:
        save_weights(saved, tmp_path / "w.safetensors")
    assert ("such as torch.complex64" in str(caught.value)) is dtype.is_complex
    torch.save(saved.state_dict(), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=f"table has the dtype {dtype}"):
        convert(open_contents(tmp_path / "w.pt"), tmp_path / "w.safetensors")
    assert not (tmp_path / "w.safetensors").exists()
    session_of(tmp_path / "c", {"model": saved}).save()
    resumed = model(3)
    assert session_of(tmp_path / "c", {"model": resumed}).resume()
    assert as_bytes(resumed) == as_bytes(saved)
    for source in ("w.pt", "c"):
        loaded = model(3)
        load_weights(loaded, tmp_path / source)
        assert as_bytes(loaded) == as_bytes(saved), source


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.safetensors"
    model = Net()
    save_weights(model, path)
    old = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(CheckpointError, match="no space is left"):
                save_weights(Net(), path)
        assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]
        assert path.read_bytes() == old
    with pytest.raises(CheckpointError, match="is a folder"):
        save_weights(model, tmp_path)
    with pytest.raises(CheckpointError, match="a file is where a folder should be"):
        save_weights(model, path / "below.safetensors")
