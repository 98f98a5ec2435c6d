"""`check_devices` finds devices that compute wrongly: bits are flipped on purpose."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from digests import digest_of
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, IterableDataset

import lockstep
from lockstep.errors import SettingError, UsageError, WrongDeviceError
from lockstep.extensions.ledger.judge import judge
from lockstep.settings import VERIFY_VARIABLE, resolve_settings

pytestmark = pytest.mark.ranks

EVERY = 4
BATCH = 30


class Noisy(Dataset[Any]):
    """Samples with augmentation, of lengths that differ."""

    def __len__(self) -> int:
        return 80  # the last global batch is short

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        row = torch.randn(10, generator=generator)
        noise = torch.randn(10) + float(np.random.rand())  # drawn from the sample's own streams
        return row + 0.1 * noise, index % 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(10, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 3)
        self.logit_scale = nn.Parameter(torch.tensor(0.2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        features = F.dropout(F.relu(self.norm(self.hidden(rows))), 0.2, self.training)
        output: torch.Tensor = self.head(features)
        return output * self.logit_scale.exp()


def flip_bit(tensor: torch.Tensor, bit: int = 12) -> None:
    """Flips a bit of the first element of a tensor of float32."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    with torch.no_grad():
        values = local.detach()
        flipped = values.reshape(-1)[:1].clone().view(torch.int32) ^ (1 << bit)
        values.data.view(-1)[:1] = flipped.view(torch.float32)


def flip_gradient(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    """A forward hook after which a bit of the gradient of the output is flipped."""

    def flip(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        if len(gradient):
            flip_bit(gradient)
        return gradient

    output.register_hook(flip)


@contextmanager
def wrong_products(is_wrong: Callable[[], bool]) -> Iterator[None]:
    """Flips a bit of the result of each matrix product for which `is_wrong` returns True."""
    linear = F.linear

    def wrong_linear(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = linear(*args, **kwargs)
        if len(result) and is_wrong():
            flip_bit(result)
        return result

    F.linear = wrong_linear
    try:
        yield
    finally:
        F.linear = linear


class Flips:
    """Flips bits on one rank of a run.

    Args:
        world: of this process.
        kind: what is flipped: "product", "product once", "gradient", "statistics" (those that a
            virtual rank leaves), "weight", "state", "state of a scalar", "buffer" or "".
        rank: where.
    """

    def __init__(self, world: Any, kind: str, rank: int) -> None:
        self._world = world
        self._kind = kind if world.rank == rank else ""
        self._num_flips = 0

    def product_is_wrong(self) -> bool:
        if self._kind == "product":
            return self._world.step >= 2
        is_checked = (self._world.step + 1) % EVERY == 0
        if self._kind == "product once" and is_checked and self._num_flips == 0:
            self._num_flips += 1
            return True
        return False

    def prepared(self, model: nn.Module) -> None:
        if self._kind == "gradient":
            layer: Any = getattr(model, "module", model).head
            layer.register_forward_hook(flip_gradient)
        if self._kind == "statistics":
            norm: Any = getattr(model, "module", model).norm
            norm.register_forward_hook(lambda layer, *_: flip_bit(layer.running_mean))

    def stepped(self, model: nn.Module, optimizer: Any) -> None:
        """Called after each step of the optimizer."""
        net: Any = getattr(model, "module", model)
        parameter = net.hidden.weight
        if self._kind == "weight" and self._world.step == EVERY + 1:
            flip_bit(parameter)
        # The step that would use it is the one that is checked.
        if self._kind == "state" and self._world.step == 2 * EVERY - 1:
            flip_bit(optimizer.state[parameter]["exp_avg"])
        if self._kind == "state of a scalar" and self._world.step == 2 * EVERY - 1:
            flip_bit(optimizer.state[net.logit_scale]["exp_avg"])
        if self._kind == "buffer" and self._world.step == 2 * EVERY - 1:
            flip_bit(net.norm.running_var)


def steps_with(world: Any, flips: Flips, steps: int, checkpoints: str = "", **options: Any) -> Any:
    """Trains for some steps; returns a digest of the model, losses, means and counted rows."""
    means = []
    torch.manual_seed(0)
    model: Any = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = world.prepare(model, optimizer)
    loader = world.loader(Noisy(), batch_size=BATCH, shuffle=True, **options)
    checkpoint = None
    if checkpoints:
        checkpoint = world.checkpoint(checkpoints, every=1, keep=9, model=model)
    flips.prepared(model)
    losses = []
    rows_counted = 0
    with wrong_products(flips.product_is_wrong):
        while world.step < steps:
            for rows, labels in world.progress(loader):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(rows), labels)
                world.backward(loss)
                optimizer.step()
                world.log(loss=loss)
                if not world.is_repeated_micro_batch:
                    rows_counted += len(rows)
                if world.is_last_micro_batch:
                    losses.append(world.loss())
                    flips.stepped(model, optimizer)
                    if checkpoint is not None:
                        checkpoint.step()
                if world.step == steps:
                    break
            means.append(round(world.means()["loss"], 4))
    return digest_of(model), losses, means, world.sum(rows_counted)


def train_honestly(steps: int, check_devices: int | None, options: dict[str, Any]) -> Any:
    with lockstep.init(virtual_ranks=5, check_devices=check_devices) as world:
        return steps_with(world, Flips(world, "", 0), steps, **options)


def weigh(batch: Any) -> torch.Tensor:
    rows: torch.Tensor = batch[0]
    return rows[:, 0].abs().sum()


OPTIONS: dict[str, Any] = {"weight": weigh, "micro_batch_size": 3}


@pytest.mark.parametrize(
    ("size", "strategy"), [(2, "ddp"), pytest.param(3, "fsdp", marks=pytest.mark.thorough)]
)
def test_checks_change_no_bits(size: int, strategy: str, tmp_path: Path) -> None:
    (alone,) = run_ranks(train_honestly, 1, 10, None, OPTIONS)
    env = {"LOCKSTEP_STRATEGY": strategy, "LOCKSTEP_LEDGER": str(tmp_path)}
    assert run_ranks(train_honestly, size, 10, 2, OPTIONS, env=env) == [alone] * size
    assert judge(tmp_path).findings == []


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_200_steps_raise_no_false_alarm(size: int, strategy: str) -> None:
    (alone,) = run_ranks(train_honestly, 1, 200, None, {})
    env = {"LOCKSTEP_STRATEGY": strategy}
    assert run_ranks(train_honestly, size, 200, 1, {}, env=env) == [alone] * size


def keep_few(batch: list[tuple[torch.Tensor, int]]) -> Any:
    """A collate function that leaves most samples out, so that virtual ranks have no rows."""
    kept = [sample for sample in batch if sample[0][0] > 0.8]
    return torch.utils.data.default_collate(kept) if kept else None


def train_without_rows(check_devices: int | None) -> str:
    with lockstep.init(virtual_ranks=7, check_devices=check_devices) as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(Noisy(), batch_size=16, collate_fn=keep_few)
        for rows, labels in loader:
            train_on(world, model, optimizer, rows, labels)
        return digest_of(model)


@pytest.mark.thorough
def test_virtual_ranks_without_rows_raise_no_false_alarm() -> None:
    """Their gradients are zeros, whose signs depend on the process."""
    (alone,) = run_ranks(train_without_rows, 1, None)
    assert run_ranks(train_without_rows, 3, 1) == [alone] * 3


def messages_of(*kinds: str, checkpoints: str = "") -> list[str]:
    """Returns the message of the error that each kind of flipped bits on rank 1 leads to."""
    messages = []
    for kind in kinds:
        with (
            pytest.raises(WrongDeviceError) as error,
            lockstep.init(virtual_ranks=5, check_devices=EVERY) as world,
        ):
            folder = f"{checkpoints}/{kind}" if checkpoints else ""
            steps_with(world, Flips(world, kind, rank=1), 2 * EVERY, folder)
        messages.append(error.value.message)
    return messages


DEVICE = rf"rank 1 \(cpu of {re.escape(socket.gethostname())}\)"


def test_flipped_bits_are_found_on_three_processes() -> None:
    kinds = ("product", "product once", "gradient", "statistics", "weight", "state", "buffer")
    results = run_ranks(messages_of, 3, *kinds)
    assert results[0] == results[1] == results[2]
    product, product_once, gradient, statistics, weight, state, buffer = results[0]
    always = (
        rf"step 4, virtual rank \d: all ranks computed it again, and {DEVICE} got different bits"
    )
    assert re.search(always, product)
    assert re.search(always, gradient)
    assert re.search(always, statistics)
    assert "agree; the buffers that differ: norm.running_mean\n" in statistics
    assert re.search(
        rf"step 4, virtual rank \d: {DEVICE} got different bits than all", product_once
    )
    assert re.search(
        rf"before step 8, in the parameters hidden.weight: {DEVICE} has different", weight
    )
    assert re.search(
        rf"before step 8, in the optimizer state exp_avg of hidden.weight: {DEVICE} has", state
    )
    assert re.search(rf"before step 8, in the buffers norm.running_var: {DEVICE} has", buffer)


def messages_with_checkpoints(folder: str) -> list[str]:
    return messages_of("product once", "gradient", "weight", checkpoints=folder)


def test_flipped_bits_are_found_on_two_processes(tmp_path: Path) -> None:
    product_once, gradient, weight = run_ranks(messages_with_checkpoints, 2, str(tmp_path))[0]
    # Three of four results agree.
    assert re.search(
        rf"step 4, virtual rank \d: {DEVICE} got different bits than all", product_once
    )
    assert re.search(rf"rank 0 \(.*\) and {DEVICE} got different bits, each the same", gradient)
    assert "this is the first check since the run was started" in gradient
    assert "rank 0" in weight
    assert re.search(rf"{DEVICE} have different bits, and one of the two is wrong", weight)
    assert f"resume from a checkpoint that is older, {tmp_path}/weight/step-000000003" in weight


@pytest.mark.thorough
def test_flipped_bits_are_found_with_shards() -> None:
    kinds = ("product", "product once", "gradient", "statistics")
    for message in run_ranks(messages_of, 3, *kinds, env={"LOCKSTEP_STRATEGY": "fsdp"})[2]:
        assert re.search(rf"step 4, virtual rank \d: .*{DEVICE} got different bits", message)
    kinds = ("weight", "state", "state of a scalar")
    env = {"LOCKSTEP_STRATEGY": "hsdp:shard_size=2"}
    *of_shards, of_scalar = run_ranks(messages_of, 4, *kinds, env=env)[2]
    # All ranks have the same scalar, and only two of them the same shard.
    assert re.search(
        rf"exp_avg of logit_scale: {DEVICE} has different bits than 3 ranks", of_scalar
    )
    for message in of_shards:
        assert re.search(rf"before step 8, .*: {DEVICE} and rank 3 .* have different bits", message)


def other_loops() -> list[str]:
    """Returns what is told of a loop that gets batches ahead, and of loops that skip repeats."""
    with (
        pytest.raises(WrongDeviceError) as error,
        lockstep.init(virtual_ranks=2, check_devices=2) as world,
    ):
        model, optimizer, loader = small_training(world)
        with wrong_products(lambda: world.rank == 1):
            batches = iter(loader)
            next_batch = next(batches)
            while next_batch is not None:
                batch = next_batch
                next_batch = next(batches, None)
                train_on(world, model, optimizer, *batch)
    messages = [error.value.message]
    for virtual_ranks in (2, 4):
        with (
            pytest.raises(UsageError) as skipped,
            lockstep.init(virtual_ranks=virtual_ranks, check_devices=2) as world,
        ):
            model, optimizer, loader = small_training(world)
            for _ in range(3):
                for images, labels in loader:
                    if world.is_repeated_micro_batch:
                        continue
                    train_on(world, model, optimizer, images, labels)
        messages.append(skipped.value.message)
    return messages


def small_training(world: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(10, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = world.loader(Noisy(), batch_size=20)
    return (*world.prepare(model, optimizer), loader)


def train_on(world: Any, model: Any, optimizer: Any, rows: Any, labels: Any) -> None:
    optimizer.zero_grad()
    world.backward(F.cross_entropy(model(rows), labels))
    optimizer.step()


def test_loops_that_get_batches_ahead_or_skip_repeats() -> None:
    ahead, skipped, skipped_between = run_ranks(other_loops, 2)[0]
    assert "as the training loop gets batches ahead they could not be computed again" in ahead
    assert "check_devices=2 in a loop that skips micro-batches" in skipped
    assert skipped == skipped_between


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for index in range(60):
            yield torch.full((10,), float(index)), index % 3


def with_a_stream() -> str:
    with (
        pytest.raises(WrongDeviceError) as error,
        lockstep.init(virtual_ranks=2, check_devices=4) as world,
    ):
        model, optimizer, _ = small_training(world)
        for images, labels in world.loader(Stream(), batch_size=10):
            train_on(world, model, optimizer, images, labels)
            if world.step == 3 and world.rank == 0:
                flip_bit(next(iter(model.parameters())))
    return error.value.message


@pytest.mark.thorough
def test_the_state_is_compared_with_a_stream() -> None:
    assert "in the parameters weight: " in run_ranks(with_a_stream, 2)[1]


@pytest.mark.unit
def test_bits_can_be_compared_with_virtual_ranks_only() -> None:
    with pytest.raises(SettingError, match="check_devices=500 without virtual_ranks"):
        resolve_settings({"LOCKSTEP_CHECK_DEVICES": "500"})
    with pytest.raises(SettingError, match="check_devices=0"):
        resolve_settings({}, check_devices=0, virtual_ranks=2)
    assert resolve_settings({}, check_devices=5, virtual_ranks=2).check_devices == 5
    under_verify = resolve_settings({VERIFY_VARIABLE: "{}"}, check_devices=5, virtual_ranks=2)
    assert under_verify.check_devices is None
