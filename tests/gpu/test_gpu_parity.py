"""Every strategy computes on a GPU, in float64, what one process computes on the CPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_devices import GPU, run_on, settings
from problems import CLASSES, FEATURES, Augmented, difference, mean_loss
from ranks import RankFailed, in_gloo_group
from saved import full_state_dict
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import lockstep
from lockstep.strategies import DP, FSDP, HSDP, Pipeline

pytestmark = pytest.mark.ranks

BATCH, PIECES = 16, 2
SHARDED = {"blocks": nn.Linear}
STRATEGIES: dict[str, tuple[int, Any, str | None]] = {
    "single": (1, "single", None),
    "dp": (1, DP(device_ids=[0]), None),
    "ddp": (2, "ddp", None),
    "ddp, uneven shares": (2, "ddp", "1:3"),
    "pipeline": (2, Pipeline(split=["4"], num_micro_batches=PIECES), None),
    "fsdp": (2, FSDP(**SHARDED), None),
    "fsdp, offloaded": (2, FSDP(**SHARDED, cpu_offload=True), None),
    "hsdp": (2, HSDP(**SHARDED, shard_size=2), None),
    "hsdp, offloaded": (2, HSDP(**SHARDED, shard_size=2, cpu_offload=True), None),
}
# What Gloo or torch's mesh of devices may say where it does not serve GPUs.
NOT_SERVED = re.compile(r"[^\n]*(?:unsupported device|Duplicate GPU|No backend type)[^\n]*")


class Scaled(nn.Module):
    """Multiplies by a parameter without dimensions, which no strategy can shard."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.LayerNorm(16),
        nn.Linear(16, 16), nn.GELU(), Scaled(), nn.BatchNorm1d(16), nn.Linear(16, CLASSES),
    ).double()  # fmt: skip


def train(device: str, strategy: Any, shares: str | None) -> dict[str, Tensor]:
    """Two epochs of micro-batches, clipped, with a short batch at the end of each."""
    with lockstep.init(strategy, seed=5, shares=shares, **settings(device)) as world:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = world.prepare(model, optimizer)
        micro = None
        if world.strategy != "pipeline":  # which has said how many
            micro = -(-BATCH * max(world._plan.shares) // (PIECES * sum(world._plan.shares)))
        loader = world.loader(Augmented(44), BATCH, shuffle=True, micro_batch_size=micro)
        assert loader.micro_batches == PIECES
        for _ in world.epochs(2):
            for x, y in loader:
                assert x.device.type == device
                world.backward(mean_loss(model, (x, y)))
                world.clip_grad_norm_(model, 0.5)
                optimizer.step()
                optimizer.zero_grad()
        home_of_shards = "cpu" if getattr(strategy, "cpu_offload", False) else device
        for parameter in model.parameters():
            at_home = home_of_shards if parameter.dim() else device  # scalars are not sharded
            assert parameter.device.type in (at_home, "meta")
        whole = full_state_dict(model.state_dict())
        return {
            name.removeprefix("module."): value.detach().cpu().clone()
            for name, value in whole.items()
            if not value.is_meta
        }


@in_gloo_group
def backends_of_a_mesh(device: str, shape: tuple[int, ...]) -> list[str]:
    """What torch opens for a mesh of GPUs in a run under Gloo; nothing is sent yet."""
    if device == "cuda":  # else torch takes the GPU of the local rank, which need not be there
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    found = [dist.get_backend_config(mesh.get_group(name)) for name in names]
    getattr(mesh, "_pg_registry", {}).clear()
    return found


@pytest.mark.parametrize(
    ("device", "strategy"),
    [
        pytest.param("cpu", "ddp, uneven shares"),
        pytest.param("cpu", "pipeline"),
        pytest.param("cpu", "fsdp"),
        *[pytest.param(*GPU.values, name, marks=GPU.marks) for name in STRATEGIES],
    ],
)
def test_it_computes_what_one_process_computes_on_the_cpu(device: str, strategy: str) -> None:
    size, options, shares = STRATEGIES[strategy]
    if "sdp" in strategy:
        skip_where_nccl_is_opened(device, (2,) if strategy.startswith("fsdp") else (1, 2))
    [expected] = run_on(train, 1, "cpu", "single", None)
    try:
        ranks = run_on(train, size, device, options, shares)
    except RankFailed as error:
        refused = "sdp" in strategy and NOT_SERVED.search(str(error))
        if not refused:
            raise
        pytest.skip(f"Gloo does not do on CUDA tensors what torch asks of it: {refused[0]}")
    found: dict[str, Tensor] = {}
    for rank in ranks:
        found |= rank
    assert difference(expected, found) < 1e-9


def skip_where_nccl_is_opened(device: str, shape: tuple[int, ...]) -> None:
    opened = run_on(backends_of_a_mesh, 2, device, shape)[0]
    if device == "cuda" and torch.cuda.device_count() == 1 and any("nccl" in b for b in opened):
        pytest.skip(
            f"torch {torch.__version__} opens {opened} for a mesh of GPUs in a run under Gloo, and "
            "NCCL refuses two ranks on one GPU"
        )
