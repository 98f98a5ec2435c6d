from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.errors import CheckpointError, SettingError, UnknownArgumentError, UsageError
from lockstep.file_paths import check_path_of_this_system

pytestmark = pytest.mark.unit

LAYER = torch.nn.Linear(2, 1)


@pytest.mark.parametrize(
    ("call", "keyword", "meant"),
    [
        (lockstep.init, "seeds", "did you mean 'seed'?"),
        (lockstep.init, "precison", "did you mean 'precision'?"),
        (lockstep.init, "mixed_precision", "did you mean 'precision'?"),
        (lockstep.init, "xyzzy", "its arguments are backend, check_devices, "),
        (lockstep.launch, "nprocs", "did you mean 'nproc'?"),
        (lockstep.load_weights, "pth", "did you mean 'path'?"),
        (lockstep.World.clip_grad_norm_, "maxnorm", "did you mean 'max_norm'?"),
        (lockstep.World.barrier, "group", "leave it out"),
        (lockstep.strategies.DDP, "bucket_cap", "did you mean 'bucket_cap_mb'?"),
        (lockstep.strategies.DiLoCo, "evry", "did you mean 'every'?"),
        (lockstep.optim.LARS, "learning_rate", "did you mean 'lr'?"),
    ],
)
def test_a_misspelt_argument(call: Any, keyword: str, meant: str) -> None:
    with pytest.raises(UnknownArgumentError, match=f"{keyword}=...\\)\n  found:") as raised:
        call(**{keyword: 0})
    assert isinstance(raised.value, TypeError), "as Python's own error is"
    assert raised.value.do.startswith(meant)


def test_a_norm_of_type_0_is_refused() -> None:
    with lockstep.init() as world, pytest.raises(UsageError, match="no norm of type 0"):
        world.clip_grad_norm_(world.prepare(torch.nn.Linear(2, 1)), 1.0, norm_type=0)


def test_a_model_in_bf16_is_not_advised_to_be_in_bf16(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    source = torch.nn.Linear(1, 1, bias=False)
    source.weight.data.fill_(torch.finfo(torch.float32).max)
    lockstep.save_weights(source, path)
    for dtype, names_bf16 in ((torch.bfloat16, False), (torch.float16, True)):
        with pytest.raises(CheckpointError, match="beyond what the model's dtype") as raised:
            lockstep.load_weights(torch.nn.Linear(1, 1, bias=False).to(dtype), path)
        assert ("in bf16" in raised.value.do) is names_bf16


def test_signatures_are_those_of_the_functions() -> None:
    assert "seed" in inspect.signature(lockstep.init).parameters
    assert "max_norm" in inspect.signature(lockstep.World.clip_grad_norm_).parameters


def test_a_misspelt_option_of_a_checkpoint(tmp_path: Path) -> None:
    with lockstep.init() as world:
        with pytest.raises(UsageError, match="did you mean 'keep'"):
            world.checkpoint(tmp_path, model=LAYER, kept=3)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="pass modules"):
            world.checkpoint(tmp_path, number=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["D:\\runs", "d:/runs", "\\\\server\\runs", "runs\\first"])
def test_a_path_of_windows_is_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match="a path of Windows"):
        check_path_of_this_system("a folder", path)
    with pytest.raises(SettingError, match="a path of Windows"):
        lockstep.init(report=path)
    with lockstep.init() as world, pytest.raises(SettingError, match="a path of Windows"):
        world.checkpoint(path, model=LAYER)
    with pytest.raises(SettingError, match="a path of Windows"):
        lockstep.save_weights(LAYER, path)
    assert not list(tmp_path.iterdir())


def test_other_paths_are_not(tmp_path: Path) -> None:
    for path in ("runs/a:b", "a:b", "D:", ".", "runs/odd\\name", tmp_path):
        check_path_of_this_system("a folder", path)
    odd = tmp_path / "odd\\name"
    odd.mkdir()
    check_path_of_this_system("a folder", odd)
