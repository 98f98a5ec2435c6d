"""A training that goes on under another strategy on another number of ranks, again and again.

One training is cut into pieces of two steps. Every piece resumes what another strategy, or another
number of ranks, has saved: each strategy on each number of ranks once in the middle of an epoch and
once at its end. The losses, the weights and the record of which sample was trained in which step
are those of a training that was never interrupted.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import Scale
from ranks import HANG_S, run_ranks
from saved import full_state_dict
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoint.modules import plain_state_dict
from lockstep.distributed import process_group
from lockstep.session.extension import Extension, Place
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies import DP, HSDP, Pipeline

pytestmark = pytest.mark.ranks

BATCH, SAMPLES, STEPS_A_PIECE = 12, 40, 2
STEPS_AN_EPOCH = 4
STRATEGIES: dict[str, Any] = {
    "single": "single",
    "dp": DP(replicas=2),
    "ddp": "ddp",
    "fsdp": "fsdp",
    "hsdp": HSDP(shard_size=1),
    "pipeline": Pipeline(num_micro_batches=3),
}
COMBINATIONS = [
    ("fsdp", 3), ("pipeline", 2), ("single", 1), ("ddp", 3), ("hsdp", 2), ("pipeline", 1),
    ("hsdp", 3), ("fsdp", 2), ("ddp", 1), ("pipeline", 3), ("ddp", 2), ("dp", 1), ("fsdp", 1),
    ("hsdp", 1),
]  # fmt: skip
# Each twice; turned by one, so that who resumed at an epoch's end resumes in its middle then.
PIECES = [*COMBINATIONS, *COMBINATIONS[1:], COMBINATIONS[0]]
STEPS = len(PIECES) * STEPS_A_PIECE


class Record(Extension):
    """What happens on one rank: a watcher of its steps."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, int, list[int]]] = []
        """Step, epoch, and the samples that count."""
        self.losses: dict[int, float] = defaultdict(float)
        self.step = 0

    def delivered(self, handed: Any) -> None:
        self.counts = handed.counts  # not on the ranks of a pipeline that have no loss
        if self.counts:
            self.samples.append((self.step, handed.epoch, handed.samples.tolist()))

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        if self.counts and micro_batch.scale:
            self.losses[self.step] += float(weighted_loss.detach())

    def step_finished(self, number: int) -> None:
        assert number == self.step
        self.step += 1


def model() -> nn.Module:
    torch.manual_seed(2)
    norm = nn.BatchNorm1d(8).eval()  # statistics that stay, and would be missed
    for statistics in (norm.running_mean, norm.running_var):
        assert statistics is not None
        statistics.uniform_(0.5, 1.5)
    first = [nn.Linear(5, 8), norm, nn.Tanh()]
    last = [nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 3), Scale()]
    return nn.Sequential(*first, *last).double()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (SAMPLES,), generator=generator))


def train(world: lockstep.World, folder: Path | None, end: int) -> tuple[Record, dict[str, Tensor]]:
    """Goes on from the folder's checkpoint to step `end`, and saves another."""
    made, record = model(), Record()
    world._run.extensions.add(record, Place.OBSERVER)
    # Every second piece gives the optimizer the parameters of each group in reverse.
    order = -1 if end // STEPS_A_PIECE % 2 else 1
    first = list(made[:2].parameters())[::order]
    second = list(made[2:].parameters())[::order]
    groups = [{"params": first}, {"params": second}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
    prepared, optimizer, scheduler = world.prepare(made, optimizer, scheduler)
    loader = world.loader(data(), BATCH, shuffle=True)
    state = {"model": prepared, "optimizer": optimizer, "scheduler": scheduler}
    if folder is not None:
        checkpoint = world.checkpoint(folder, **state, loader=loader)
        assert checkpoint.resume() is (end > STEPS_A_PIECE)
    record.step = world._run.step.number
    for _epoch in world.epochs(STEPS):
        for x, y in loader:
            world.backward(F.cross_entropy(prepared(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if record.step == end:
                if folder is not None:
                    checkpoint.save()
                whole = full_state_dict(plain_state_dict(prepared))
                return record, {n: v.detach().clone() for n, v in whole.items() if not v.is_meta}
    raise AssertionError("the loop has ended early")


def train_alone() -> tuple[Record, dict[str, Tensor]]:
    with lockstep.init(seed=5) as world:
        return train(world, None, STEPS)


def train_in_pieces(folder: Path) -> list[tuple[Record, dict[str, Tensor]] | None]:
    """This rank's part of every piece; None where a piece has fewer ranks."""
    rank = int(os.environ["TEST_RANK"])
    parts: list[tuple[Record, dict[str, Tensor]] | None] = []
    for piece, (strategy, size) in enumerate(PIECES):
        if rank >= size:
            parts.append(None)
            continue
        process_group._num_joins = (
            piece  # all ranks of a run have joined as often, and here they have not
        )
        place = {} if size == 1 else {"rank": rank, "world_size": size}
        if size > 1:
            place["init_method"] = f"file://{folder}/meet-{piece}"
        with lockstep.init(STRATEGIES[strategy], seed=5, join_timeout=60, **place) as world:
            parts.append(train(world, folder / "run", (piece + 1) * STEPS_A_PIECE))
    return parts


def test_any_strategy_resumes_the_checkpoint_of_any_other(tmp_path: Path) -> None:
    ((alone, expected),) = run_ranks(train_alone, 1)
    by_rank = run_ranks(
        train_in_pieces,
        3,
        tmp_path,
        environment=lambda rank: {"TEST_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
        timeout=HANG_S,
    )
    trained: list[list[int]] = [[] for _ in range(STEPS)]
    for piece, (strategy, size) in enumerate(PIECES):
        parts = [part for rank in by_rank if (part := rank[piece]) is not None]
        assert len(parts) == size
        weights: dict[str, Tensor] = {}
        for record, of_rank in parts:
            weights |= of_rank
            for step, epoch, samples in record.samples:
                assert epoch == step // STEPS_AN_EPOCH
                trained[step] += samples
        assert weights.keys() == expected.keys(), strategy
        for step in range(piece * STEPS_A_PIECE, (piece + 1) * STEPS_A_PIECE):
            losses = [record.losses[step] for record, _ in parts if record.counts]
            assert abs(sum(losses) / len(losses) - alone.losses[step]) < 1e-9, (
                strategy,
                size,
                step,
            )
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)
    for step, _, samples in alone.samples:
        assert sorted(trained[step]) == sorted(samples), step
    for begin in range(0, STEPS, STEPS_AN_EPOCH):
        epoch = sum(trained[begin : begin + STEPS_AN_EPOCH], [])
        assert sorted(epoch) == list(range(SAMPLES))


def test_load_weights_reads_the_checkpoint_of_any_strategy(tmp_path: Path) -> None:
    ((_, expected),) = run_ranks(save_alone, 1, tmp_path)
    bare = model()
    lockstep.load_weights(bare, tmp_path)
    for name, value in expected.items():
        assert torch.equal(bare.state_dict()[name], value)


def save_alone(folder: Path) -> tuple[Record, dict[str, Tensor]]:
    with lockstep.init(seed=5) as world:
        return train(world, folder, STEPS_A_PIECE)
