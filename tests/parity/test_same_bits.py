"""With virtual ranks the results have the same bits on any number of processes."""

from __future__ import annotations

import builtins
import functools
import gc
import math
import operator
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from digests import digest_of
from ranks import RankFailed, in_gloo_group, run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lockstep
from lockstep.errors import SettingError, UsageError
from lockstep.strategies.virtual_ranks import gradients_of_bucket

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    """Convolution, BatchNorm, dropout and attention, so that all that may differ is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.1, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(8, 3)
        self.logit_scale = nn.Parameter(torch.tensor(0.2))  # fsdp cannot shard it

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.norm(self.convolution(images)))
        tokens = features.flatten(2).transpose(1, 2)
        output: torch.Tensor = self.head(self.attention(tokens).mean(1))
        return output * self.logit_scale.exp()


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(count, 2, 6, 6, generator=generator)
    return TensorDataset(images, torch.randint(0, 3, (count,), generator=generator))


def train(virtual_ranks: int = 5, **options: Any) -> tuple[str, list[float]]:
    """Two epochs of three global batches, the last of them short; weights and losses."""
    micro_batch_size = options.pop("micro_batch_size", None)
    with lockstep.init(seed=3, virtual_ranks=virtual_ranks, **options) as world:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        model, optimizer, scheduler = world.prepare(model, optimizer, scheduler)
        loader = world.loader(
            samples(35), batch_size=16, shuffle=True, micro_batch_size=micro_batch_size
        )
        losses = []
        for _ in world.epochs(2):
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                world.backward(loss)
                world.clip_grad_norm_(model, 0.5)
                optimizer.step()
                scheduler.step()
                mean = world.loss()
                if mean is not None:
                    losses.append(mean)
        return digest_of(model), losses


def compensated_sum(values: Iterable[Any], start: Any = 0) -> Any:
    """Adds up as `sum` does from Python 3.12 on, which compensates for the rounding of floats."""
    summands = list(values)
    if summands and all(type(summand) is float for summand in summands):
        return math.fsum(summands)
    return functools.reduce(operator.add, summands, start)


def loss_with_compensated_sum() -> float | None:
    """Returns the loss of 4 virtual ranks, whose sum depends on how it is rounded."""
    builtins.sum = compensated_sum  # type: ignore[assignment]
    with lockstep.init(virtual_ranks=4) as world:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
        rows = TensorDataset(torch.tensor([[1e16], [1.0], [-1e16], [1.0]]))
        model, optimizer, loader = world.prepare(model, optimizer, DataLoader(rows, batch_size=4))
        for (batch,) in loader:
            world.backward(model(batch).mean())
            optimizer.step()
        return world.loss()


def test_the_version_of_python_does_not_change_the_loss() -> None:
    assert run_ranks(loss_with_compensated_sum, 1) == [0.25]


@pytest.fixture(scope="module")
def on_one_process() -> tuple[str, list[float]]:
    (result,) = run_ranks(train, 1)
    return result


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_bits_do_not_depend_on_the_processes(
    strategy: str, size: int, on_one_process: tuple[str, list[float]]
) -> None:
    results = run_ranks(train, size, env={"LOCKSTEP_STRATEGY": strategy})
    assert results == [on_one_process] * size


@pytest.mark.thorough
@pytest.mark.parametrize(
    "env",
    [
        {"LOCKSTEP_STRATEGY": "hsdp:shard_size=2"},
        {"LOCKSTEP_SHARES": "1:2:1:1"},
        {"LOCKSTEP_STRATEGY": "fsdp", "LOCKSTEP_SHARES": "2:1:1:1"},
    ],
)
def test_bits_do_not_depend_on_shares_or_shards(
    env: dict[str, str], on_one_process: tuple[str, list[float]]
) -> None:
    assert run_ranks(train, 4, env=env) == [on_one_process] * 4


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp:shard_size=3"])
def test_bits_on_six_processes(strategy: str) -> None:
    """Of 10 virtual ranks, 5 and 6 are on one of them: these are in no subtree of their own."""
    (alone,) = run_ranks(train, 1, 10)
    assert run_ranks(train, 6, 10, env={"LOCKSTEP_STRATEGY": strategy}) == [alone] * 6


def train_with(precision: str, micro_batch_size: int | None) -> tuple[str, list[float]]:
    return train(precision=precision, micro_batch_size=micro_batch_size)


@pytest.mark.parametrize(("precision", "micro_batch_size"), [("bf16", 2), ("fp16", None)])
def test_bits_in_half_precision_and_with_micro_batches(
    precision: str, micro_batch_size: int | None
) -> None:
    (alone,) = run_ranks(train_with, 1, precision, micro_batch_size)
    assert run_ranks(train_with, 2, precision, micro_batch_size) == [alone] * 2


BATCH = 16


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 16), nn.ReLU(), nn.Linear(16, 3))


@in_gloo_group
def stock_ddp() -> str:
    """A loop with torch's DDP alone."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    torch.set_num_threads(1)
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for start in range(0, 3 * BATCH, BATCH):
        part = BATCH // size
        rows = range(start + rank * part, start + (rank + 1) * part)
        batch = [samples(3 * BATCH)[row] for row in rows]
        images = torch.stack([image for image, _ in batch])
        labels = torch.stack([label for _, label in batch])
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return digest_of(model.module)


def two_virtual_ranks() -> str:
    with lockstep.init(virtual_ranks=2) as world:
        torch.set_num_threads(1)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(samples(3 * BATCH), batch_size=BATCH)
        model, optimizer, loader = world.prepare(model, optimizer, loader)
        for images, labels in loader:
            optimizer.zero_grad()
            world.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
        return digest_of(model)


def test_one_process_has_the_bits_of_stock_ddp_on_two() -> None:
    (alone,) = run_ranks(two_virtual_ranks, 1)
    assert run_ranks(stock_ddp, 2) == [alone] * 2


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "LARS":
        return lockstep.optim.LARS(parameters, lr=0.1, momentum=0.9)
    if name == "LAMB":
        return lockstep.optim.LAMB(parameters, lr=0.01, weight_decay=0.01)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def train_with_optimizers() -> list[str]:
    digests = []
    for name in ("SGD", "LARS", "LAMB"):
        with lockstep.init(virtual_ranks=4) as world:
            model = mlp()
            average = torch.optim.swa_utils.AveragedModel(
                model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            )
            optimizer = optimizer_of(name, model.parameters())
            loader = DataLoader(samples(40), batch_size=BATCH, shuffle=True)
            model, optimizer, loader = world.prepare(model, optimizer, loader)
            if world.strategy == "fsdp":  # its averages are sharded as the model is
                average = world.prepare(average)
            for images, labels in loader:
                optimizer.zero_grad()
                world.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
                if world.is_last_micro_batch:
                    average.update_parameters(model)
            digests += [digest_of(model), digest_of(average)]
    return digests


def test_bits_with_norms_of_layers_and_averages_of_weights() -> None:
    (alone,) = run_ranks(train_with_optimizers, 1)
    assert run_ranks(train_with_optimizers, 2, env={"LOCKSTEP_STRATEGY": "fsdp"}) == [alone] * 2
    (on_dp,) = run_ranks(train_with_optimizers, 1, env={"LOCKSTEP_STRATEGY": "dp"})
    assert on_dp == alone


class Stream(IterableDataset[Any]):
    """The same samples, one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return iter(samples(16))


def refusals() -> list[str]:
    """Returns what is refused with virtual ranks, on two processes."""
    messages = []
    for options in (
        {"strategy": "pipeline"},
        {"strategy": "diloco"},
        {"strategy": "ddp:find_unused_parameters=true"},
        {"strategy": "fsdp:find_unused_parameters=true"},
        {"strategy": "ddp:compress=bf16"},
        {"strategy": "fsdp:accumulate_shards=true"},
        {"strategy": lockstep.strategies.HSDP(shard_size=1)},
        {"virtual_ranks": 1},
        {"shares": "9:1"},
        {"shares": "auto"},
        {"micro_batch_size": "auto"},
    ):
        with pytest.raises(SettingError) as error:
            lockstep.init(**{"virtual_ranks": 4, **options})
        messages.append(str(error.value).splitlines()[0])
    with lockstep.init(virtual_ranks=4) as world:
        with pytest.raises(SettingError) as split_stream:
            world.loader(Stream(), 8, shard=False)
        messages.append(str(split_stream.value).splitlines()[0])
        loader = DataLoader(samples(16), batch_size=8)
        model = mlp()
        optimizer = torch.optim.LBFGS(model.parameters())
        model, optimizer, loader = world.prepare(model, optimizer, loader)
        for images, labels in loader:

            def closure(images: Any = images, labels: Any = labels) -> Any:
                return F.cross_entropy(model(images), labels)

            with pytest.raises(UsageError) as usage:
                optimizer.step(closure)
            messages.append(str(usage.value).splitlines()[0])
            world.backward(closure())
            with pytest.raises(UsageError) as twice:
                world.backward(closure())
            messages.append(str(twice.value).splitlines()[0])
            break
    return messages


def test_what_cannot_have_the_same_bits_is_refused() -> None:
    assert run_ranks(refusals, 2)[0] == [
        "virtual_ranks=4 with strategy='pipeline'",
        "virtual_ranks=4 with strategy='diloco'",
        "virtual_ranks=4 with strategy='ddp:find_unused_parameters=true'",
        "virtual_ranks=4 with strategy='fsdp:find_unused_parameters=true'",
        "virtual_ranks=4 with strategy='ddp:compress=bf16'",
        "virtual_ranks=4 with strategy='fsdp:accumulate_shards=true'",
        "virtual_ranks=4 with strategy='hsdp:shard_size=1'",
        "virtual_ranks=1",
        "virtual_ranks=4",
        "virtual_ranks=4 with shares='auto'",
        "virtual_ranks=4 with micro_batch_size='auto'",
        "virtual_ranks for a stream with shard=",
        "optimizer.step(closure) with virtual_ranks",
        "several backward passes of a batch with virtual_ranks",
    ]


def single_samples_before_batchnorm() -> None:
    with lockstep.init(virtual_ranks=4) as world:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        loader = DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=6)
        model, loader = world.prepare(model, loader)
        for (rows,) in loader:
            world.backward(model(rows).sum())


def test_a_single_sample_before_batchnorm_is_explained() -> None:
    with pytest.raises(RankFailed, match=r"virtual rank 1 has one of the 6 samples of this batch"):
        run_ranks(single_samples_before_batchnorm, 1)


def accumulate_by_hand(virtual_ranks: int | None) -> torch.Tensor:
    """Steps after every second global batch only; returns the weights."""
    with lockstep.init(virtual_ranks=virtual_ranks) as world:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(72, 3))
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
        model, optimizer = world.prepare(net, optimizer)
        num_batches = 0
        for images, labels in world.loader(samples(80), 16):
            world.backward(F.cross_entropy(model(images), labels))
            if num_batches % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
            if world.is_last_micro_batch:
                num_batches += 1
        weight = net[1].weight.detach()
        return weight.full_tensor() if isinstance(weight, DTensor) else weight


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.thorough)])
def test_gradients_of_several_global_batches_add_up(strategy: str) -> None:
    (plain,) = run_ranks(accumulate_by_hand, 1, None)
    (alone,) = run_ranks(accumulate_by_hand, 1, 4)
    torch.testing.assert_close(alone, plain)
    for weight in run_ranks(accumulate_by_hand, 2, 4, env={"LOCKSTEP_STRATEGY": strategy}):
        assert torch.equal(weight, alone)


def train_fetched_ahead() -> str:
    """A loop that has fetched the next batch before it trains one, in two pieces a virtual rank."""
    with lockstep.init(virtual_ranks=4, micro_batch_size=2) as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(72, 16), nn.Dropout(0.3), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(samples(32), batch_size=BATCH)
        model, optimizer, loader = world.prepare(model, optimizer, loader)
        batches = iter(loader)
        following = next(batches)
        while following is not None:
            images, labels = following
            following = next(batches, None)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            world.backward(loss)
            optimizer.step()
        return digest_of(model)


def test_bits_of_a_loop_that_fetches_ahead() -> None:
    (alone,) = run_ranks(train_fetched_ahead, 1)
    assert run_ranks(train_fetched_ahead, 2) == [alone] * 2


def leave_a_step_out(case: str) -> list[str]:
    """The weights and buffers after each of three epochs of three global batches.

    In the second epoch, all ranks leave out the step of the second global batch, as `case` says.
    """
    digests = []
    with lockstep.init(virtual_ranks=4) as world:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(72, 3), nn.BatchNorm1d(3))
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
        model, optimizer = world.prepare(net, optimizer)
        loader = world.loader(samples(48), 16)
        for epoch in range(3):
            number = 0
            for images, labels in loader:
                is_last = world.is_last_micro_batch
                leaves_out = epoch == 1 and number == 1
                if is_last:
                    number += 1
                loss = F.cross_entropy(model(images), labels)
                if leaves_out and case == "continue":
                    continue
                if leaves_out and case == "break after forward":
                    break
                world.backward(loss)
                if leaves_out and is_last and case in ("break", "step after the loop"):
                    break
                optimizer.step()
                optimizer.zero_grad()
                if leaves_out and is_last and case == "break after the step":
                    break
            if epoch == 1 and case == "step after the loop":
                digests.append(digest_of(net))
                optimizer.step()
            optimizer.zero_grad()
            digests.append(digest_of(net))
    return digests


CASES_WITHOUT_STEP = (
    *("break", "break after forward", "continue"),
    *("step after the loop", "break after the step"),
)


def leave_steps_out() -> dict[str, list[str]]:
    return {case: leave_a_step_out(case) for case in CASES_WITHOUT_STEP}


def test_bits_of_loops_that_leave_a_step_out() -> None:
    """The buffers after such a loop are those of no virtual rank, which each process has others."""
    (alone,) = run_ranks(leave_steps_out, 1)
    assert alone["break after forward"] == alone["break"]
    without_step, *with_step = alone["step after the loop"][1:]
    assert without_step == alone["break"][1]
    assert with_step == alone["break after the step"][1:]
    assert run_ranks(leave_steps_out, 2) == [alone] * 2


class TwiceNormalised(nn.Module):
    """Normalises some batches twice, so that virtual ranks count other numbers of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(72, 3)
        self.norm = nn.BatchNorm1d(72, affine=False, momentum=None)
        self.norm_in_float64 = nn.BatchNorm1d(3, affine=False, dtype=torch.float64)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.norm(images.flatten(1))
        if images.sum() > 0:
            features = self.norm(features)
        output: torch.Tensor = self.norm_in_float64(self.linear(features).double()).float()
        return output


def counts_of_batchnorm() -> tuple[str, int, int]:
    """Trains; returns the bits, the number of batches that were counted, and how many of a plain
    loop over the parts of virtual rank 0 would have been."""
    with lockstep.init(seed=3, virtual_ranks=3) as world:
        model = TwiceNormalised()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        expected = 0.0
        for images, labels in world.loader(samples(36), batch_size=12, micro_batch_size=2):
            if world._run.step.micro_batch.virtual_rank_number == 0:
                expected += 2 if images.sum() > 0 else 1
            world.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        plain = getattr(model, "module", model)
        assert plain.norm_in_float64.running_mean.dtype is torch.float64
        counted = int(plain.norm.num_batches_tracked)
        return digest_of(plain), counted, int(world.sum(expected))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_batchnorm_counts_the_batches_of_virtual_rank_0(size: int) -> None:
    (alone,) = run_ranks(counts_of_batchnorm, 1)
    _, counted, expected = alone
    assert counted == expected
    assert run_ranks(counts_of_batchnorm, size) == [alone] * size


class WithNegativeZeros(nn.Module):
    """Has parameters whose gradients are zeros of either sign, and refuses a batch without rows."""

    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.scales = nn.Parameter(torch.ones(3))
        self.refuses = refuses

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.refuses and not len(rows):
            raise ValueError("there are no rows")
        output: torch.Tensor = self.linear(rows)
        return output + (self.scales * torch.tensor([0.0, -0.0, 1.0])).sum()


def without_row_8(rows: list[tuple[torch.Tensor]]) -> torch.Tensor:
    """Leaves out all samples of the first virtual rank of the second global batch."""
    kept = [row for (row,) in rows if row[0] not in (8.0, 9.0)]
    return torch.stack(kept) if kept else torch.empty(0, 2)


def signs_of_gradients(refuses: bool) -> list[str]:
    """The gradients of two global batches of eight samples, with the signs of their zeros."""
    rows = torch.arange(16.0).view(16, 1).expand(16, 2)
    found = []
    with lockstep.init(seed=3, virtual_ranks=4) as world:
        model = WithNegativeZeros(refuses)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = world.prepare(model, optimizer)
        loader = DataLoader(TensorDataset(rows), batch_size=8, collate_fn=without_row_8)
        for batch in world.prepare(loader):
            optimizer.zero_grad()
            world.backward((-model(batch)).mean())
            optimizer.step()
            if world.is_last_micro_batch:
                for parameter in model.parameters():
                    gradient = parameter.grad
                    assert gradient is not None
                    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                    found.append(str(whole.flatten().tolist()))
    return found


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:(?s).*a collate function that leaves samples out")
class ComplexNet(nn.Module):
    """Two layers with complex weights, as of a Fourier neural operator, and a real bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.second = nn.Parameter(torch.randn(2, 4, dtype=torch.complex64).t())
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second @ (x.to(torch.complex64) @ self.first).t()).abs().t() + self.bias


def test_gradients_of_complex_weights_are_found_in_their_bucket() -> None:
    views: dict[int, torch.Tensor] = {}

    def note_views(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        views.update(zip(map(id, bucket.parameters()), gradients_of_bucket(bucket), strict=True))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    note_views.__annotations__.clear()  # they are texts here, which torch refuses
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(ComplexNet())
        model.register_comm_hook(None, note_views)
        model(torch.randn(5, 3)).square().sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert torch.equal(views[id(parameter)], parameter.grad)
        del model
        gc.collect()  # before the group, whose threads the model holds
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("refuses", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_signs_of_zeros_do_not_depend_on_the_processes(refuses: bool) -> None:
    """Also where a virtual rank has no rows: its zeros are positive, wherever they are added."""
    (alone,) = run_ranks(signs_of_gradients, 1, refuses)
    assert alone[0] == "[-0.0, 0.0, -1.0]"
    assert alone[3] == "[0.0, 0.0, -1.0]"
    for strategy in ("ddp", "fsdp"):
        for size in (2, 3):
            env = {"LOCKSTEP_STRATEGY": strategy}
            assert run_ranks(signs_of_gradients, size, refuses, env=env) == [alone] * size
    env = {"LOCKSTEP_STRATEGY": "hsdp:shard_size=2"}
    assert run_ranks(signs_of_gradients, 4, refuses, env=env) == [alone] * 4


def clip_each_virtual_rank(max_value: float | None) -> None:
    with lockstep.init(virtual_ranks=3) as world:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        for (rows,) in world.loader(TensorDataset(torch.ones(18, 2)), 6):
            world.backward(model(rows).mean())
            if max_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), max_value)
            optimizer.step()
            optimizer.zero_grad()


def test_gradients_of_one_virtual_rank_must_not_be_changed() -> None:
    """The last gradient on a process is that of the global batch, and others are not."""
    run_ranks(clip_each_virtual_rank, 1, None)
    with pytest.raises(RankFailed, match="written to between the micro-batches of a global batch"):
        run_ranks(clip_each_virtual_rank, 1, 0.01)


def skip_a_virtual_rank(*, as_advised: bool) -> None:
    with lockstep.init(virtual_ranks=3) as world:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        for number, (rows,) in enumerate(world.loader(TensorDataset(torch.ones(12, 2)), 6)):
            is_left_out = number == 4
            if is_left_out and not as_advised:
                continue
            loss = model(rows).mean()
            world.backward(0 * loss if is_left_out else loss)
            optimizer.step()
            optimizer.zero_grad()


def test_a_skipped_virtual_rank_is_said() -> None:
    with pytest.raises(RankFailed, match="has followed the batch of virtual rank 1, so its part"):
        run_ranks(partial(skip_a_virtual_rank, as_advised=False), 1)
    under_fsdp = {"LOCKSTEP_STRATEGY": "fsdp"}
    with pytest.raises(RankFailed, match="has followed the batch of virtual rank 0, so its part"):
        run_ranks(skip_the_first_virtual_ranks, 2, env=under_fsdp)
    run_ranks(partial(skip_a_virtual_rank, as_advised=True), 1)


def skip_the_first_virtual_ranks() -> None:
    """Each process skips its first batch of the second global batch."""
    with lockstep.init(virtual_ranks=4) as world:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        for number, (rows,) in enumerate(world.loader(TensorDataset(torch.ones(16, 2)), 8)):
            if number == 2:
                continue
            world.backward(model(rows).mean())
            optimizer.step()
            optimizer.zero_grad()


def keep_an_incomplete_gradient(clears: bool) -> None:
    """Skips virtual rank 1 of global batch 0, and all of global batch 1; steps after number 2."""
    with lockstep.init(virtual_ranks=3) as world:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        for number, (rows,) in enumerate(world.loader(TensorDataset(torch.ones(18, 2)), 6)):
            if number in (1, 3, 4, 5):
                continue
            world.backward(model(rows).mean())
            if number > 5:
                optimizer.step()
            elif clears:
                optimizer.zero_grad()


def test_an_incomplete_gradient_that_is_kept_for_a_later_step_is_said() -> None:
    run_ranks(keep_an_incomplete_gradient, 1, True)
    with pytest.raises(RankFailed, match="has followed the batch of virtual rank 1, so its part"):
        run_ranks(keep_an_incomplete_gradient, 1, False)


CLEARS = ("after the forward pass", "to zeros")
"""When or how a script clears gradients."""


def leave_an_incomplete_step_out(clears: str) -> None:
    """Each process skips its first batch of the second global batch, and the step of that one.

    Args:
        clears: when or how the script clears the gradients; one of `CLEARS`, or "never".
    """
    with lockstep.init(virtual_ranks=4) as world:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        num_own = 4 // world.size  # virtual ranks of this process
        for number, (rows,) in enumerate(world.loader(TensorDataset(torch.ones(32, 2)), 8)):
            loss = model(rows).mean()
            if number == num_own:
                continue
            if clears == "after the forward pass" and number % num_own == 0:
                optimizer.zero_grad()
            world.backward(loss)
            if world.is_last_micro_batch and number // num_own != 1:
                optimizer.step()
            if world.is_last_micro_batch and clears == "to zeros":
                optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize(("size", "strategy"), [(1, "ddp"), (2, "ddp"), (2, "fsdp")])
def test_a_loop_may_leave_out_the_step_of_a_skipped_virtual_rank(size: int, strategy: str) -> None:
    env = {"LOCKSTEP_STRATEGY": strategy}
    for clears in CLEARS:
        run_ranks(leave_an_incomplete_step_out, size, clears, env=env)
    with pytest.raises(RankFailed, match="has followed the batch of virtual rank 0, so its part"):
        run_ranks(leave_an_incomplete_step_out, size, "never", env=env)


class Doubled(nn.Module):
    """A block; under FSDP each is gathered for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, rows: Any) -> Any:
        return rows + self.second(self.first(rows))


def keep_gradients_over_a_skipped_global_batch() -> bool:
    """Skips the second of three equal global batches, after its forward passes, and never steps.

    Returns:
        True if all gradients are twice those of the first global batch.
    """

    def gradients() -> list[Any]:
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    with lockstep.init(virtual_ranks=4) as world:
        net = nn.Sequential(Doubled(), Doubled(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model, optimizer = world.prepare(net, optimizer)
        num_own = 4 // world.size  # virtual ranks of this process
        of_first = []
        for number, (rows,) in enumerate(world.loader(TensorDataset(torch.ones(24, 8)), 8)):
            loss = model(rows).mean()
            if number // num_own == 1:
                continue
            world.backward(loss)
            if number == num_own - 1:
                of_first = gradients()
        pairs = zip(of_first, gradients(), strict=True)
        return len(of_first) == 10 and all(bool((2 * one == two).all()) for one, two in pairs)


@pytest.mark.parametrize(("size", "strategy"), [(1, "ddp"), (2, "ddp"), (2, "fsdp")])
def test_a_skipped_global_batch_leaves_the_gradients_before_it(size: int, strategy: str) -> None:
    env = {"LOCKSTEP_STRATEGY": strategy}
    kept = run_ranks(keep_gradients_over_a_skipped_global_batch, size, env=env)
    assert kept == [True] * size


def step_after_the_loop() -> None:
    """The loop is left before the backward pass of its last virtual rank."""
    with lockstep.init(virtual_ranks=3) as world:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        for (rows,) in world.loader(TensorDataset(torch.ones(6, 2)), 6):
            loss = model(rows).mean()
            if world.is_last_micro_batch:
                del rows, loss
                break
            world.backward(loss)
        optimizer.step()


def test_a_virtual_rank_that_is_skipped_at_the_end_of_a_loop_is_said() -> None:
    with pytest.raises(RankFailed, match="has followed the batch of virtual rank 2, so its part"):
        run_ranks(step_after_the_loop, 1)
