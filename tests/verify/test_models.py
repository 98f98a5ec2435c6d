from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.verify import patches, recorder
from lockstep.verify.recorder import Models


def test_what_was_recorded_can_be_freed() -> None:
    gathered = torch.ones(3, dtype=torch.float64)
    patches.digest(gathered)
    arrays = recorder._arrays([("weight", gathered)])
    gathered.untyped_storage().resize_(0)  # as FSDP does
    assert arrays["weight"].tolist() == [1.0, 1.0, 1.0]


def test_names_of_modules_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, alone = nn.BatchNorm1d(4), nn.BatchNorm1d(2)
    wrapped = nn.DataParallel(nn.Sequential(nn.Linear(4, 4), nn.Sequential(norm)))
    models = Models()
    models.add(wrapped)
    models.add(alone)
    assert models.name_of(norm) == "1.0"  # without the wrapper's name
    walks = 0
    walk = nn.Module.named_modules

    def counted(module: nn.Module, *args: object, **kwargs: object) -> object:
        nonlocal walks
        walks += 1
        return walk(module, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    assert [models.name_of(norm), models.name_of(alone)] == ["1.0", "BatchNorm1d"]
    assert walks == 0
    late = nn.BatchNorm1d(3)
    wrapped.module.append(late)
    assert models.name_of(late) == "2"
    assert walks > 0
