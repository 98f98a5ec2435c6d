"""With virtual ranks BatchNorm can take its statistics from the global batch, with fixed bits."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import made_up_kernels
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from digests import digest_of
from ranks import as_on_machines, run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.batch.plan import part_sizes
from lockstep.communication.summation_tree import Node
from lockstep.errors import CheckpointError, SettingError
from lockstep.strategies import sync_batchnorm

pytestmark = pytest.mark.ranks

BATCH = 12
# The last global batch has two samples, so the third of three virtual ranks has none of them.
SAMPLES = 3 * BATCH + 2


class Net(nn.Module):
    """Two BatchNorm layers, one of them without weights, in front of others."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.mixing = nn.Conv2d(8, 4, 1)
        self.plain_norm = nn.BatchNorm2d(4, affine=False, momentum=None)
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, images: Tensor) -> Tensor:
        features = self.mixing(F.relu(self.norm(self.convolution(images))))
        features = self.dropout(F.relu(self.plain_norm(features)))
        output: Tensor = self.head(features.flatten(1))
        return output


def samples(count: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(count, 2, 6, 6, generator=generator) + 1.0
    return TensorDataset(images, torch.randint(0, 3, (count,), generator=generator))


# The naive reference: all virtual ranks side by side in one process, layer by layer


def naive_sum(values: Sequence[Any]) -> Any:
    """Adds up values of virtual ranks in the order of the tree. None: there is no value."""

    def sum_of(node: Node) -> Any:
        if node.end - node.begin == 1:
            return values[node.begin]
        left, right = (sum_of(child) for child in node.children())
        if left is None or right is None:
            return right if left is None else left
        return left + right

    return sum_of(Node(0, len(values)))


class NaiveBatchNorm(torch.autograd.Function):
    """BatchNorm of all virtual ranks at once; those without samples have an empty input."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, *inputs: Tensor) -> tuple[Tensor, ...]:
        parts = inputs[: len(inputs) // 3]
        weights = inputs[len(parts) : 2 * len(parts)]
        biases = inputs[2 * len(parts) :]
        counts: list[Any] = [None] * len(parts)
        moments: list[Any] = [None] * len(parts)
        for rank, part in enumerate(parts):
            if len(part):
                counts[rank] = torch.tensor(part.numel() / part.shape[1], dtype=torch.float64)
                moments[rank] = sync_batchnorm._two_pass_moments(part)
        present = [rank for rank, part in enumerate(parts) if len(part)]
        total = naive_sum(counts)
        sums: list[Any] = [None] * len(parts)
        squares: list[Any] = [None] * len(parts)
        between: list[Any] = [None] * len(parts)
        for rank in present:
            sums[rank] = counts[rank] * moments[rank].mean
            squares[rank] = moments[rank].sum_of_squares.double()
        mean = naive_sum(sums) / total
        for rank in present:
            between[rank] = counts[rank] * (moments[rank].mean - mean).square()
        variance = (naive_sum(squares) + naive_sum(between)) / total
        sync_batchnorm.update_running_stats(layer, mean, variance, total)
        invstd = (variance + layer.eps).rsqrt()
        dtype = sync_batchnorm.statistics_dtype(parts[0])
        outputs = []
        for rank, part in enumerate(parts):
            if rank not in present:
                outputs.append(torch.empty_like(part))
                continue
            centre, deviations = moments[rank].centred
            scale = invstd * weights[rank] if layer.affine else invstd
            shift = (centre - mean) * scale
            if layer.affine:
                shift = shift + biases[rank]
            scaled = deviations * scale.to(dtype).view(1, -1, 1, 1)
            outputs.append(scaled + shift.to(dtype).view(1, -1, 1, 1))
        ctx.layer = layer
        ctx.saved = (parts, weights, present, mean.to(dtype), variance.to(dtype), total)
        ctx.invstd = invstd.to(dtype)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        parts, weights, present, mean, variance, total = ctx.saved
        invstd = ctx.invstd
        own_sums: list[Any] = [None] * len(parts)
        for rank in present:
            sums_of_rank = sync_batchnorm._sum_and_sum_of_products(
                gradients[rank], parts[rank], mean, invstd
            )
            own_sums[rank] = torch.stack(sums_of_rank)
        sums = naive_sum([None if own is None else own.double() for own in own_sums])
        of_parts: list[Any] = [torch.zeros_like(part) for part in parts]
        of_weights: list[Any] = [None] * len(parts)
        of_biases: list[Any] = [None] * len(parts)
        for rank in present:
            scale = invstd
            if ctx.layer.affine:
                scale = invstd * weights[rank]
                of_biases[rank], of_weights[rank] = own_sums[rank]
            constant, factor = (sums / -total * scale).to(invstd.dtype)
            of_parts[rank] = sync_batchnorm._scaled_sum(
                gradients[rank],
                scale,
                parts[rank],
                mean,
                variance,
                ctx.layer.eps,
                factor,
                constant,
            )
        return (None, *of_parts, *of_weights, *of_biases)


def normalise(net: Net, name: str, copies: list[Net], inputs: list[Tensor]) -> list[Tensor]:
    """A BatchNorm layer of all virtual ranks, whose running statistics are those of `net`."""
    weights = [getattr(c, name).weight for c in copies]
    biases = [getattr(c, name).bias for c in copies]
    outputs: Any = NaiveBatchNorm.apply(getattr(net, name), *inputs, *weights, *biases)
    return list(outputs)


def naive_reference(num_virtual_ranks: int, dtype: torch.dtype) -> str:
    """Trains in one process: a copy of the model for each virtual rank, layer by layer."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Net().to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    images, labels = samples().tensors
    images = images.to(dtype)
    for begin in range(0, SAMPLES, BATCH):
        count = min(BATCH, SAMPLES - begin)
        sizes = list(part_sizes(count, (1,) * num_virtual_ranks))
        parts = images[begin : begin + count].split(sizes)
        labels_of_parts = labels[begin : begin + count].split(sizes)
        copies = [copy.deepcopy(net) for _ in sizes]
        convolved = [c.convolution(part) for c, part in zip(copies, parts, strict=True)]
        normed = normalise(net, "norm", copies, convolved)
        mixed = [c.mixing(F.relu(part)) for c, part in zip(copies, normed, strict=True)]
        normed = normalise(net, "plain_norm", copies, mixed)
        losses = []
        for rank, size in enumerate(sizes):
            if size:
                output = copies[rank].head(F.relu(normed[rank]).flatten(1))
                loss = F.cross_entropy(output, labels_of_parts[rank])
                losses.append(loss * (size * num_virtual_ranks / count))
        torch.autograd.backward(losses)
        parameters_of_copies = [list(c.parameters()) for c in copies]
        for place, parameter in enumerate(net.parameters()):
            leaves = []
            for size, parameters in zip(sizes, parameters_of_copies, strict=True):
                leaves.append(parameters[place].grad if size else None)
            parameter.grad = naive_sum(leaves) * (1.0 / num_virtual_ranks)
        optimizer.step()
    return digest_of(net)


def train(
    num_virtual_ranks: int, machines: tuple[int, ...] | None = None, **options: Any
) -> tuple[str, str]:
    """Trains one epoch; returns a hash of the model, and one of its outputs in evaluation."""
    if machines is not None:
        as_on_machines(machines)
    precision = options.pop("precision", "fp32")
    dropout = options.pop("dropout", 0.0)
    with lockstep.init(
        seed=0,
        virtual_ranks=num_virtual_ranks,
        sync_batchnorm=True,
        precision=precision,
        measure_link=False,
    ) as world:
        torch.manual_seed(0)
        net = Net()
        net.dropout.p = dropout
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.01)
        model, optimizer = world.prepare(net, optimizer)
        for images, labels in world.loader(samples(), BATCH, **options):
            world.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        outputs = model(samples().tensors[0])
        return digest_of(net), hashlib.sha256(outputs.detach().numpy().tobytes()).hexdigest()


def in_many_ways(num_virtual_ranks: int, machines: tuple[int, ...] | None) -> list[Any]:
    """Trains in several ways that have different bits each.

    In float64 the order of the sums shows, which are taken in float64 and rounded in the others.
    """
    return [
        train(num_virtual_ranks, machines, precision="fp64"),
        train(num_virtual_ranks, machines),
        train(num_virtual_ranks, machines, precision="bf16", micro_batch_size=2),
        train(num_virtual_ranks, machines, precision="fp16", dropout=0.2, shuffle=True),
    ]


THOROUGH_SIZES = [pytest.param(size, marks=pytest.mark.thorough) for size in (3, 4)]


@pytest.mark.parametrize("size", [2, *THOROUGH_SIZES])
def test_statistics_of_the_global_batch_have_the_bits_of_a_naive_sum(size: int) -> None:
    results = run_ranks(in_many_ways, size, size, None)
    assert results == [results[0]] * size
    digests = [digest for digest, _ in results[0]]
    assert len(set(digests)) == 4
    for digest, dtype in zip(digests, (torch.float64, torch.float32), strict=False):
        assert run_ranks(naive_reference, 1, size, dtype) == [digest]


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["fsdp", "hsdp:shard_size=2"])
def test_bits_depend_neither_on_shards_nor_on_machines(strategy: str) -> None:
    on_one_machine = run_ranks(in_many_ways, 4, 4, None)
    for machines in [(2, 2), (1, 3), None]:
        env = {"LOCKSTEP_STRATEGY": "ddp" if machines else strategy}
        assert run_ranks(in_many_ways, 4, 4, machines, env=env) == on_one_machine


def by_the_kernels_of_gpus(machines: tuple[int, ...] | None) -> list[Any]:
    """Trains with plain operations in the place of torch's kernels for CUDA."""
    made_up_kernels.install()
    return [train(4, machines, precision="fp64"), train(4, machines, micro_batch_size=2)]


@pytest.mark.thorough
def test_bits_of_the_kernels_of_gpus_do_not_depend_on_machines() -> None:
    on_one_machine = run_ranks(by_the_kernels_of_gpus, 4, None)
    assert on_one_machine == [on_one_machine[0]] * 4
    assert run_ranks(by_the_kernels_of_gpus, 4, (1, 3)) == on_one_machine
    env = {"LOCKSTEP_STRATEGY": "fsdp"}
    assert run_ranks(by_the_kernels_of_gpus, 4, None, env=env) == on_one_machine


def refusals() -> list[tuple[str, str]]:
    """Returns what two processes refuse: what was set, and what was found."""
    synchronised = nn.Sequential(nn.Conv2d(2, 8, 3), lockstep.SyncBatchNorm(8))
    torchs = nn.Sequential(nn.Conv2d(2, 8, 3), nn.SyncBatchNorm(8))
    of_some_ranks = copy.deepcopy(synchronised)
    cases: list[tuple[nn.Module, dict[str, Any]]] = [
        (Net(), {"virtual_ranks": 4, "sync_batchnorm": True}),
        (synchronised, {"virtual_ranks": 4}),
        (torchs, {"virtual_ranks": 4, "sync_batchnorm": False}),
        (Net(), {"virtual_ranks": 2, "sync_batchnorm": True, "check_devices": 2}),
        (of_some_ranks, {"virtual_ranks": 2}),
    ]
    refused = []
    for model, options in cases:
        with lockstep.init(**options) as world:
            group: Any = None
            if model is of_some_ranks:
                group = dist.new_group([world.rank], use_local_synchronization=True)
                of_some_ranks[1].process_group = group
            with pytest.raises(SettingError) as error:
                world.prepare(model)
            refused.append((error.value.was_set, error.value.found))
            if group is not None:  # nothing may outlive the run
                of_some_ranks[1].process_group = None
                dist.destroy_process_group(group)
                del group, error
    return refused


def test_statistics_of_the_global_batch_need_as_many_processes() -> None:
    refused = run_ranks(refusals, 2)[0]
    assert [was_set for was_set, _ in refused] == [
        "virtual_ranks=4 with sync_batchnorm=True",
        "virtual_ranks=4 with a SyncBatchNorm in the model",
        "virtual_ranks=4 with a SyncBatchNorm in the model",
        "check_devices=2 and virtual_ranks=2 with sync_batchnorm=True",
        "virtual_ranks=2 with a SyncBatchNorm in the model",
    ]
    founds = [found for _, found in refused]
    assert founds[0].startswith("2 processes: in each layer a virtual rank needs the sums")
    assert founds[:3] == founds[:1] * 3
    assert founds[3].startswith("to check a device, a virtual rank is computed again by itself")
    assert founds[4].startswith("the SyncBatchNorm has a process_group of some ranks")


class OwnForward(nn.BatchNorm2d):
    """A layer that cannot be synchronised, as it may compute something else."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * 1.0


def choices_and_later_runs() -> list[Any]:
    """Returns what is printed of BatchNorm, and the statistics of one model in several runs."""
    images = torch.arange(16.0).view(8, 2, 1, 1)
    mixed = nn.Sequential(nn.BatchNorm2d(2), nn.SyncBatchNorm(2))
    with_own_forward = nn.Sequential(nn.BatchNorm2d(2), OwnForward(2))
    printed: list[Any] = []
    for model, options in (
        (mixed, {"virtual_ranks": 2}),
        (with_own_forward, {"virtual_ranks": 2, "sync_batchnorm": True, "micro_batch_size": 1}),
        (nn.BatchNorm2d(2), {"virtual_ranks": 2}),
    ):
        text = io.StringIO()
        with lockstep.init(**options) as world, contextlib.redirect_stdout(text):
            world.prepare(model)
            world.loader(TensorDataset(images), 4)
        lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
        printed.append([line for line in lines if line.startswith("batchnorm")])
    # A run without virtual ranks has no tree to sum in, not for a copy of a model of one that has.
    layer: Any = nn.BatchNorm2d(2, momentum=1.0)
    for options in ({"virtual_ranks": 2, "sync_batchnorm": True}, {}):
        layer = copy.deepcopy(layer)
        with lockstep.init(**options) as world:
            prepared = world.prepare(layer)
            for (batch,) in world.loader(TensorDataset(images), 8):
                world.backward(prepared(batch).sum())
        printed.append([layer.running_mean.tolist(), layer.tree_sums is None])
    return printed


@pytest.mark.thorough
def test_what_is_printed_and_what_a_later_run_does() -> None:
    printed = run_ranks(choices_and_later_runs, 2)[0]
    tree = "added up in the tree of virtual ranks"
    assert printed == [
        [
            f"batchnorm 1 synchronised statistics of the global batch, as on one device, {tree}",
            "batchnorm 1 per virtual rank not a SyncBatchNorm",
        ],
        [
            "batchnorm 1 synchronised statistics of each micro-batch over all virtual ranks, not "
            f"of the global batch, {tree}",
            "batchnorm 1 per virtual rank they have a forward of their own",
        ],
        ["batchnorm statistics of each virtual rank, as DDP has them; running ones: their mean"],
        [[7.0, 8.0], False],
        [[7.0, 8.0], True],
    ]


def train_on(folder: Path, strategy: str, what: str) -> Any:
    """Trains in two micro-batches a virtual rank, of which the last global batch has one.

    Args:
        folder: of the checkpoints.
        strategy: of the run.
        what: "save": the training ends with a checkpoint in the middle of the second global batch.
            "leave": the loop is left in the middle of the first one, and begun again.
    """
    with lockstep.init(strategy, virtual_ranks=2, sync_batchnorm=True) as world:
        torch.manual_seed(0)
        net = Net()
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.01)
        model, optimizer = world.prepare(net, optimizer)
        # Of the three samples of the last global batch, virtual rank 0 has two.
        loader = world.loader(samples(2 * BATCH + 3), BATCH, num_micro_batches=2)
        checkpoint = world.checkpoint(folder, model=model, optimizer=optimizer, loader=loader)
        checkpoint.resume()
        if what == "leave":
            for images, labels in loader:
                world.backward(F.cross_entropy(model(images), labels))
                break
        for _ in world.epochs(2):
            for images, labels in loader:
                world.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
                if what == "save" and world.step == 1 and not world.is_last_micro_batch:
                    checkpoint.save()
                    return None
        return digest_of(net), world.step


def resume_otherwise(folder: Path) -> list[str]:
    """Resumes what was trained with statistics of the global batch without them, and reversed."""
    messages = []
    for name, before, after in (("first", True, None), ("second", False, True)):
        for synchronised in (before, after):
            with lockstep.init(virtual_ranks=2, sync_batchnorm=synchronised) as world:
                checkpoint = world.checkpoint(folder / name, model=world.prepare(nn.Linear(1, 1)))
                if synchronised == before:
                    checkpoint.save()
                    continue
                with pytest.raises(CheckpointError) as error:
                    checkpoint.resume()
                messages.append(f"{error.value.was_set.split()[-2:]}: {error.value.do}")
    return messages


@pytest.mark.thorough
def test_a_run_is_resumed_with_the_statistics_that_it_had(tmp_path: Path) -> None:
    undisturbed = run_ranks(train_on, 2, tmp_path / "undisturbed", "ddp", "")
    assert undisturbed == [undisturbed[0]] * 2
    run_ranks(train_on, 2, tmp_path / "resumed", "ddp", "save")
    assert run_ranks(train_on, 2, tmp_path / "resumed", "fsdp", "") == undisturbed
    assert run_ranks(train_on, 2, tmp_path / "left", "ddp", "leave") == undisturbed
    assert run_ranks(resume_otherwise, 2, tmp_path)[0] == [
        "['without', 'sync_batchnorm=True']: continue with sync_batchnorm=True, on 2 processes",
        "['with', 'sync_batchnorm=True']: leave sync_batchnorm out",
    ]
