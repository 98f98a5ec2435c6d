"""Process groups: each has the timeout of the run, and some have Gloo alone."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import in_gloo_group, run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.communication.groups import open_groups
from lockstep.strategies import HSDP, DiLoCo, Pipeline

pytestmark = pytest.mark.ranks

TIMEOUT_S = 77.0
STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "fsdp": lambda: "fsdp",
    "hsdp": lambda: HSDP(shard_size=2),
    "pipeline": lambda: Pipeline(stages=2, interleave=2, num_micro_batches=2),
    "pipeline, one copy": lambda: Pipeline(num_micro_batches=2),
    "diloco": lambda: DiLoCo(replicas=2, every=2, compress="int8"),
}


def timeouts_of_groups() -> dict[str, float]:
    """The timeout of each open group of this rank, by its description and its name."""
    found = {}
    for group, name in dist.distributed_c10d._world.pg_names.items():
        backend = group._get_backend(torch.device("cpu"))
        found[f"{group.group_desc}: {name}"] = backend.options._timeout.total_seconds()
    return found


def groups_of_all_strategies() -> dict[str, Any]:
    """The groups that are open while each strategy trains, on two made-up machines."""
    rank = int(os.environ["RANK"])
    os.environ["GROUP_RANK"] = str(rank // 2)
    os.environ["LOCAL_RANK"] = str(rank % 2)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found = {}
    for name, make in STRATEGIES.items():
        options: dict[str, Any] = {"collective_timeout": TIMEOUT_S, "measure_link": False}
        with lockstep.init(make(), **options) as world:
            model: Any = nn.Sequential(
                nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)
            )
            if name == "pipeline, one copy":
                model[1] = lockstep.SyncBatchNorm(4)
            data = TensorDataset(torch.randn(16, 4))
            loader: Any = DataLoader(data, 8)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = world.prepare(model, optimizer, loader)
            for (x,) in loader:
                world.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
            found[name] = timeouts_of_groups()
    return found


def test_every_group_of_every_strategy_has_the_timeout_of_the_run():
    for found in run_ranks(groups_of_all_strategies, 4):
        for name, groups in found.items():
            assert {"default_pg", "between machines"} <= {name_of(group) for group in groups}
            for group, timeout in groups.items():
                assert timeout == TIMEOUT_S, (name, group)
        messages = {"activations of model 0", "gradients 0 of model 0"}
        for name, expected in (
            ("hsdp", {"replicate", "shard"}),
            ("pipeline", {*messages, "gradients 1 of model 0", "pipelines"}),
            ("pipeline, one copy", {*messages, "alone"}),
            ("diloco", {"replica", "across replicas"}),
        ):
            assert expected <= {name_of(group) for group in found[name]}, name


def name_of(group: str) -> str:
    return group.rpartition(": ")[0]


@in_gloo_group
def opened_beside_a_gpu() -> dict[str, Any]:
    """Two groups of two ranks, where the default group has a device as over NCCL."""
    default: Any = dist.group.WORLD
    default.bound_device_id = torch.device("cuda:0")
    try:
        with mock.patch.object(dist, "new_group", wraps=dist.new_group) as opened:
            group = open_groups(
                [[0, 2], [1, 3]], "here", timeout=timedelta(seconds=9), cpu_tensors_only=True
            )
        numbers = torch.tensor([dist.get_rank()])
        dist.all_reduce(numbers, group=group)
        # Gloo, which stands for NCCL here, has no such split: what asks for it fails.
        try:
            dist.new_group([0], backend="gloo")
            split = ""
        except AttributeError as error:
            split = str(error)
        found = {
            "ranks": dist.get_process_group_ranks(group),
            "backends": [call.kwargs["backend"] for call in opened.call_args_list],
            "sum": int(numbers),
            "split": split,
        }
        dist.destroy_process_group(group)
    finally:
        default.bound_device_id = None
    return found


def test_a_group_of_cpu_tensors_splits_no_communicator():
    """A rank outside of a Gloo group would take part in a split that its members do not make."""
    for rank, found in enumerate(run_ranks(opened_beside_a_gpu, 4)):
        own_ranks = [0, 2] if rank in (0, 2) else [1, 3]
        assert found["ranks"] == own_ranks
        assert found["backends"] == ["gloo"]
        assert found["sum"] == sum(own_ranks)
        assert ("perform_nocolor_split" in found["split"]) == (rank != 0)
