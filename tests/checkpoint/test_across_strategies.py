"""A training that goes on under another strategy on another number of ranks, in mid-epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoint.modules import plain_state_dict
from lockstep.checkpoint.whole import gathered
from lockstep.strategies import DP, HSDP, Pipeline

BATCH, SAMPLES = 12, 40
STRATEGIES: dict[str, Any] = {
    "single": None,
    "dp": DP(replicas=2),
    "ddp": "ddp",
    "fsdp": "fsdp",
    "hsdp": HSDP(shard_size=1),
    "pipeline": Pipeline(micro_batches=3),
}
CHAIN = [
    ("fsdp", 2, 2), ("pipeline", 2, 3), ("single", 1, 5), ("pipeline", 3, 7), ("dp", 1, 8),
    ("hsdp", 2, 9), ("ddp", 3, 11),
]  # fmt: skip
"""Strategy, ranks, and the step to go to."""


def model() -> nn.Module:
    torch.manual_seed(2)
    norm = nn.BatchNorm1d(8).eval()  # statistics that stay, and would be missed
    for statistics in (norm.running_mean, norm.running_var):
        assert statistics is not None
        statistics.uniform_(0.5, 1.5)
    first = [nn.Linear(5, 8), norm, nn.Tanh()]
    return nn.Sequential(*first, nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 3)).double()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (SAMPLES,), generator=generator))


def train(strategy: str, folder: Path | None, end: int) -> dict[str, Tensor]:
    """Goes on from the folder's checkpoint to step `end`, and saves another."""
    with lockstep.init(STRATEGIES[strategy], seed=5) as world:
        made = model()
        groups = [{"params": list(made[:2].parameters())}, {"params": list(made[2:].parameters())}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        prepared, optimizer, scheduler = world.prepare(made, optimizer, scheduler)
        loader = world.loader(data(), BATCH, shuffle=True)
        state = {"model": prepared, "optimizer": optimizer, "scheduler": scheduler}
        if folder is not None:
            checkpoint = world.checkpoint(folder, **state, loader=loader)
            checkpoint.resume()
        for _epoch in world.epochs(3):
            for x, y in loader:
                world.backward(F.cross_entropy(prepared(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if world._run.step.number == end:
                    if folder is not None:
                        checkpoint.save()
                    whole = gathered(plain_state_dict(prepared))
                    return {n: v.detach().clone() for n, v in whole.items() if not v.is_meta}
    raise AssertionError("the loop has ended early")


def test_it_goes_on_where_it_was(tmp_path):
    expected = run_ranks(train, 1, "single", None, CHAIN[-1][2])[0]
    for strategy, size, end in CHAIN:
        found: dict[str, Tensor] = {}
        for of_rank in run_ranks(train, size, strategy, tmp_path, end):
            found |= of_rank
        assert found.keys() == expected.keys(), strategy
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
    bare = model()
    lockstep.load_weights(bare, tmp_path)
    for name, value in expected.items():
        torch.testing.assert_close(bare.state_dict()[name], value, rtol=1e-9, atol=1e-12)
