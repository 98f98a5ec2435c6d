"""The norm of a gradient that is on several ranks, of which some hold nothing."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.strategies import Pipeline, replication
from lockstep.strategies.pipeline import strategy as pipeline_strategy

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("norm_type", "neutral"), [(2.0, 0.0), (math.inf, 0.0), (-2.0, math.inf)])
def test_a_rank_without_elements_makes_its_number_where_it_is_sent_from(
    norm_type: float, neutral: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that was made on the CPU would be copied to the GPU, which waits."""
    monkeypatch.setattr(replication, "carrier_device", lambda device, group: device)
    sent: list[Tensor] = []
    monkeypatch.setattr(
        replication.routing, "all_reduce", lambda number, *_, **__: sent.append(number)
    )
    empty = [torch.empty(0), torch.empty(0, 3)]
    made = torch.full
    devices: list[Any] = []

    def full(*args: Any, device: Any, **kwargs: Any) -> Tensor:
        devices.append(device)
        return made(*args, device="cpu", **kwargs)

    monkeypatch.setattr(torch, "full", full)
    norm = replication.norm_over_ranks(empty, norm_type, torch.device("cpu", 0))
    assert devices == [torch.device("cpu", 0)]
    assert len(sent) == 1
    assert norm == neutral


def test_a_rank_without_the_clipped_part_sends_from_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It sent from the CPU, over Gloo, while the other ranks waited for it over NCCL."""
    gpu = torch.device("cuda", 1)
    devices: list[torch.device] = []

    def note_device(gradients: Any, norm_type: float, device: torch.device, **_: Any) -> Tensor:
        devices.append(device)
        return torch.tensor(1.0)

    monkeypatch.setattr(pipeline_strategy, "norm_over_ranks", note_device)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    elsewhere = [nn.Parameter(torch.empty(3, device="meta"))]

    for bound, expected in ((gpu, gpu), (None, torch.device("cpu"))):
        group = SimpleNamespace(bound_device_id=bound)
        monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", group)
        Pipeline().total_norm(elsewhere, 2.0)
        assert devices.pop() == expected
