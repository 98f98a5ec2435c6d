from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lockstep.checkpoint.formats.safetensors_files import (
    largest_lost_value,
    parse_shard_size,
    write_weights,
)
from lockstep.checkpoint.lazy_tensor import TensorInMemory
from lockstep.checkpoint.modules import plain_state_dict
from lockstep.checkpoint.weights import load_weights, save_weights
from lockstep.errors import CheckpointError, SettingError

pytestmark = pytest.mark.unit


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 2))


def equal(a: nn.Module, b: nn.Module) -> bool:
    one, other = plain_state_dict(a), plain_state_dict(b)
    return all(torch.equal(one[name], other[name]) for name in one)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_weights_are_saved_to_several_files_and_loaded(tmp_path: Path) -> None:
    model, path = net(), tmp_path / "deep" / "w.safetensors"
    save_weights(model, path, shard_size=300)
    index = path.with_name("w.safetensors.index.json")
    content = json.loads(index.read_text())
    assert content["metadata"] == {"total_size": sum(v.nbytes for v in model.state_dict().values())}
    assert content["weight_map"].keys() == model.state_dict().keys()
    files = sorted(set(content["weight_map"].values()))
    assert files == [f"w-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert names(path.parent) == [*files, index.name]
    for file in files:  # as every reader of the common form finds them
        held = load_file(path.parent / file)
        assert held.keys() == {n for n, f in content["weight_map"].items() if f == file}
        assert sum(v.nbytes for v in held.values()) <= 300
    for source in (path, index, path.parent):
        other = net()
        assert not equal(model, other)
        load_weights(other, source)
        assert equal(model, other)


def test_new_weights_replace_the_former_files(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    (tmp_path / "w-other.safetensors").write_bytes(b"not ours")
    for size, count in ((None, 1), (300, 3), (150, 5), (300, 3), (None, 1)):
        model, other = net(), net()
        save_weights(model, path, shard_size=size)
        assert len(names(tmp_path)) - 1 == count
        load_weights(other, path)
        assert equal(model, other)
    assert names(tmp_path) == ["w-other.safetensors", "w.safetensors"]


def test_a_save_stopped_at_any_rename_leaves_old_or_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old weights or the new ones, and never a mixture."""
    path, old, new = tmp_path / "w.safetensors", net(), net()
    save_weights(old, path, shard_size=300)
    before = names(tmp_path)
    replace = os.replace
    for allowed in range(4):
        left = [allowed]

        def limited(*arguments: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(28, "No space left on device")
            replace(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", limited)
            if allowed < 3:
                with pytest.raises(CheckpointError, match="no space is left"):
                    save_weights(new, path, shard_size=300)
                assert names(tmp_path) == before
            else:
                save_weights(new, path, shard_size=300)
        other = net()
        load_weights(other, path)
        assert equal(other, new if allowed == 3 else old)


def test_leftovers_of_a_killed_save_of_weights_do_no_harm(tmp_path: Path) -> None:
    """Nothing cleans up after a kill; what is left over is in nobody's way."""
    path, old = tmp_path / "w.safetensors", net()
    save_weights(old, path, shard_size=300)
    (tmp_path / "w-v2-00001-of-00002.safetensors").write_bytes(b"half of the new")
    model, other = net(), net()
    load_weights(other, path)
    assert equal(old, other)
    save_weights(model, path, shard_size=300)
    load_weights(other, path)
    assert equal(model, other)


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("../secret.safetensors", "not a name within its folder"),
        ("/etc/secret.safetensors", "not a name within its folder"),
        ("below/secret.safetensors", "not a name within its folder"),
        ("..\\secret.safetensors", "not a name within its folder"),
        ("c:secret.safetensors", "not a name within its folder"),
        ("..", "not a name within its folder"),
        ("w.txt", "not a name within its folder"),
        ("w.pt", "it is not there"),
        ("a\0.safetensors", "not a name within its folder"),
        (7, "not a name within its folder"),
        ("absent.safetensors", "it is not there"),
        ("other.safetensors", "does not hold it"),
    ],
)
def test_an_index_of_files_elsewhere_is_refused(tmp_path: Path, place: object, found: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "secret.safetensors")
    save_file({"another": torch.ones(2)}, folder / "other.safetensors")
    index = folder / "w.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": place}}))
    with pytest.raises(CheckpointError, match=found):
        load_weights(nn.Linear(2, 2), index)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', "[" * 100_000, "\udcff"])
def test_a_file_that_is_no_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "w.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match="it is no index of weights"):
        load_weights(nn.Linear(2, 2), tmp_path / "w.json")


def test_an_index_that_leaves_tensors_out_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2), "more": torch.ones(1)}, tmp_path / "a.safetensors")
    (tmp_path / "w.json").write_text(json.dumps({"weight_map": {"weight": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"does not name 1 tensors of its files \(more\)"):
        load_weights(nn.Linear(2, 2, bias=False), tmp_path / "w.json")


def test_the_tensors_of_one_file_are_in_memory_at_a_time(tmp_path: Path) -> None:
    """Each file is written before the tensors of the next are asked for."""
    seen: list[int] = []

    def get() -> torch.Tensor:
        seen.append(len(list(tmp_path.glob("w-*"))))
        return torch.ones(4)

    class Counted(TensorInMemory):
        def read_range(self, begin: int, end: int) -> torch.Tensor:
            return get()

    pieces = {f"t{i}": Counted(torch.ones(4)) for i in range(6)}
    write_weights(tmp_path / "w.safetensors", pieces, 32)
    assert seen == [0, 0, 1, 1, 2, 2]
    with pytest.raises(CheckpointError, match="is a folder"):
        write_weights(tmp_path, pieces, None)


def test_sizes_of_shards_are_parsed() -> None:
    for text, size in {
        "5GB": 5 * 10**9,
        "1.5 MiB": 1572864,
        "70": 70,
        "500B": 500,
        "2kb": 2000,
    }.items():
        assert parse_shard_size(text) == size
    for wrong in ("", "much", "0", "-5GB", "5 XB", "0.1"):
        with pytest.raises(SettingError, match="a shard size of"):
            parse_shard_size(wrong)


def test_weights_are_saved_in_another_dtype(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    save_weights(model, path, dtype=torch.bfloat16)
    saved = load_file(path)
    assert saved["0.weight"].dtype is torch.bfloat16
    assert saved["1.num_batches_tracked"].dtype is torch.int64
    assert torch.equal(saved["0.weight"], model[0].weight.bfloat16())
    with torch.no_grad():
        model[0].bias[0] = 1e6
    with pytest.raises(CheckpointError, match="its largest value 1e\\+06 is beyond"):
        save_weights(model, path, dtype=torch.float16)
    assert load_file(path).keys() == saved.keys()
    with torch.no_grad():
        model[0].bias[0] = float("inf")  # which it was before too
    save_weights(model, path, dtype=torch.float16)
    with pytest.raises(SettingError, match="holds no fractions"):
        save_weights(model, path, dtype=torch.int8)
    with pytest.raises(SettingError, match="does not convert weights to it"):
        save_weights(model, path, dtype=torch.float8_e8m0fnu)


def test_weights_are_saved_in_8_bits(tmp_path: Path) -> None:
    """One of the two dtypes has no infinity: torch replaces what is beyond its range."""
    path = tmp_path / "w.safetensors"
    model = nn.Linear(2, 2)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        save_weights(model, path, dtype=dtype)
        saved = load_file(path)["weight"]
        assert saved.dtype is dtype
        assert torch.equal(saved.float(), model.weight.to(dtype).float())
    without_infinity = torch.float8_e4m3fn
    for value, dtypes in ((1e6, (dtype, without_infinity)), (torch.inf, (without_infinity,))):
        with torch.no_grad():
            model.bias[0] = value
        found = re.escape(f"its largest value {value:.3g} is beyond")
        for dtype in dtypes:
            with pytest.raises(CheckpointError, match=found):
                save_weights(model, path, dtype=dtype)


NARROW = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2)


@given(
    values=st.lists(
        st.one_of(
            st.floats(width=64),
            *(
                st.sampled_from([torch.finfo(dtype).max, -torch.finfo(dtype).max])
                for dtype in NARROW
            ),
            st.sampled_from([65519.9, 65520.0, 3.3961775e38, -3.3895e38, 61440.0, 61439.0]),
        ),
        max_size=5,
    ),
    own=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    dtype=st.sampled_from(NARROW),
)
def test_a_lost_value_is_one_that_becomes_infinite(
    values: list[float], own: torch.dtype, dtype: torch.dtype
) -> None:
    """Also those just beyond the largest value of a dtype, of which some are rounded to it."""
    tensor = torch.tensor(values, dtype=torch.float64).to(own)
    lost = []
    for value in tensor.double().tolist():
        converted = float(torch.tensor(value, dtype=own).to(dtype).float())
        if math.isinf(converted) and not math.isinf(value):
            lost.append(abs(value))
    assert largest_lost_value(tensor, dtype) == (max(lost) if lost else None)


def test_looking_for_lost_values_makes_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of a whole model are looked at before any is loaded."""

    def no_copy(*_: object) -> Tensor:
        raise AssertionError("the tensor was converted, or compared element by element")

    tensor = torch.tensor([1.0, -2.0, 60000.0])
    for name in ("to", "isinf", "abs"):
        monkeypatch.setattr(Tensor, name, no_copy)
    assert largest_lost_value(tensor, torch.float16) is None
    assert largest_lost_value(tensor, torch.bfloat16) is None
