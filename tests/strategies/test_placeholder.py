"""Ranks without samples, and models that refuse a batch of none."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from problems import difference, mlp, tensors, weights
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset, TensorDataset

import lockstep
from lockstep.batch.no_rows import (
    NoRows,
    Placeholder,
    call_with_placeholder,
    mark_no_rows,
    placeholder_of,
)
from lockstep.errors import DataError
from lockstep.extensions.checks.loss import _nan_gradients_error
from lockstep.session.micro_batch import MicroBatch, VirtualRank
from lockstep.strategies.empty_part import note_empty_part

pytestmark = pytest.mark.ranks

SAMPLES, BATCH, LENGTH = 9, 4, 5  # the last batch has one sample: all ranks but one have none


def sequences() -> TensorDataset:
    """Token ids of shape (LENGTH,), how many of them count, and a label."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, 11, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (SAMPLES,), generator=generator)
    labels = torch.randint(3, (SAMPLES,), generator=generator)
    return TensorDataset(ids, lengths, labels)


class Reshapes(nn.Module):
    """Cannot infer a dimension of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(ids).reshape(len(ids), -1, 2, 4).flatten(2).mean(1)
        logits = self.out(x)
        if labels is None:
            return logits
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Padded(nn.Module):
    """An encoder with a mask, and with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 3)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        padding = torch.arange(ids.shape[1]) >= lengths[:, None]
        x = self.encoder(self.embed(ids), src_key_padding_mask=padding)
        return self.out(x[:, 0])


class Packed(nn.Module):
    """A recurrent network over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(6, 3)
        self.rnn = nn.GRU(8, 6, batch_first=True)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.out(self.rnn(packed)[1][0])


class Normalised(nn.Module):
    """BatchNorm, statistics that forward moves by hand, and a reshape with -1."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        x = self.embed(ids).reshape(len(ids), -1, 8).transpose(1, 2)
        return self.out(self.norm(x).mean(2))


class Connectionist(nn.Module):
    """The loss is computed inside, and refuses an empty batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        log_probs = self.out(self.embed(ids)).log_softmax(-1).transpose(0, 1)
        times = torch.full_like(lengths, ids.shape[1])
        loss: Tensor = nn.functional.ctc_loss(
            log_probs, labels[:, None] + 1, times, torch.ones_like(lengths)
        )
        return loss


class Letters(nn.Module):
    """Takes any number of samples; the loop calls functions on what it returns that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.out(self.embed(ids))


class Penalised(nn.Module):
    """A critic whose gradient by its input is part of the loss, which is differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(LENGTH, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.layers(x.double().reshape(len(x), -1))


def loss_with_gradient_penalty(model: Any, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
    x = x.double().requires_grad_()
    output = model(x, lengths)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    return cross_entropy(output, labels) + penalty


def loss_in_the_loop(model: Any, ids: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
    """CTCLoss, a reshape with -1, the longest sample and the largest output."""
    flat = ids.view(ids.size(0), -1)
    assert 1 <= int(lengths.max()) <= LENGTH
    output = model(flat, lengths)
    largest = output.detach().max()
    assert bool(largest.isnan()) is (len(ids) == 0)
    log_probs = output.log_softmax(-1).transpose(0, 1)
    times = torch.full_like(lengths, LENGTH)
    loss: Tensor = nn.CTCLoss()(log_probs, labels[:, None] + 1, times, torch.ones_like(lengths))
    return loss + output.reshape(len(output), -1).amax(1).mean()


MODELS = [Normalised, Reshapes, Padded, Packed, Connectionist, Letters, Penalised]


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().double()


def loss_of(model: Any, batch: Any) -> Tensor:
    ids, lengths, labels = batch
    inner = getattr(model, "module", model)
    if isinstance(inner, Connectionist):
        loss: Tensor = model(ids, lengths, labels)
        return loss
    if isinstance(inner, Letters):
        return loss_in_the_loop(model, ids, lengths, labels)
    if isinstance(inner, Penalised):
        return loss_with_gradient_penalty(model, ids, lengths, labels)
    return cross_entropy(model(ids, lengths), labels)


def train(world: lockstep.World, kind: type[nn.Module], *, converts: bool = False) -> Any:
    """Two epochs; what was computed, and what the script itself counts."""
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, optimizer = world.prepare(model, optimizer)
    loader = world.loader(sequences(), BATCH)
    losses, seen = [], 0
    for _ in range(2):
        for batch in loader:
            if converts:
                batch = [field + 0 for field in batch]
            loss = loss_of(model, batch)
            world.backward(loss)
            losses.append(world.loss())
            optimizer.step()
            optimizer.zero_grad()
            seen += len(batch[0])
    model.eval()
    correct, rows = 0, 0
    with torch.no_grad():
        for ids, lengths, labels in world.loader(sequences(), BATCH):
            if kind is Connectionist:
                rows += len(ids)
                model(ids, lengths, labels)
                continue
            output = model(ids, lengths)
            if kind is Letters:
                output = output.reshape(len(output), -1)
            correct += int((output.argmax(1) == labels).sum())
            rows += len(output)
    counted = world.sum([seen, rows, correct])
    saved = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in model.named_parameters()}
    saved |= dict(model.named_buffers())
    plain = {n.removeprefix("module."): t.detach().clone() for n, t in saved.items()}
    return plain, losses, counted


def all_models(strategy: str | None) -> dict[str, Any]:
    with lockstep.init(strategy=strategy) as world:
        found = {kind.__name__: train(world, kind) for kind in MODELS}
        found["converted"] = train(world, Padded, converts=True)
        return found


@pytest.fixture(scope="module")
def on_one() -> dict[str, Any]:
    return all_models(None)


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        ("ddp", 3),
        ("fsdp", 2),
        pytest.param("ddp", 2, marks=pytest.mark.thorough),
        pytest.param("hsdp", 2, marks=pytest.mark.thorough),
    ],
)
def test_models_that_refuse_an_empty_batch_train_and_evaluate_exactly(on_one, strategy, size):
    for found in run_ranks(all_models, size, strategy):
        for name, (expected, losses, counted) in on_one.items():
            trained, own_losses, own_counted = found[name]
            assert own_losses == pytest.approx(losses), name
            assert difference(expected, trained) < 1e-12, name
            assert own_counted == counted, name


class StatisticsOfTheBatch(nn.Module):
    """BatchNorm without running statistics, which refuses a batch of one in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(LENGTH, 8),
            nn.BatchNorm1d(8, track_running_stats=False),
            nn.Linear(8, 3),
            nn.BatchNorm1d(3, affine=False, track_running_stats=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        first, norm, second, last_norm = self.layers
        x = norm(input=first(x.double().reshape(len(x), -1, LENGTH).mean(1)))
        return last_norm(second(x))


def statistics_of_the_batch() -> tuple[list[float], list[str]]:
    """The sum of the gradients after each batch, and the names of the buffers.

    Rank 2 gets no samples. One layer is in training mode, one in evaluation mode.
    """
    with lockstep.init(sync_batchnorm=False, shares="1:1:0") as world:
        model = world.prepare(build(StatisticsOfTheBatch))
        model.module.layers[3].eval()
        sums = []
        for ids, _, labels in world.loader(Subset(sequences(), range(8)), 4):
            world.backward(cross_entropy(model(ids), labels))
            sums.append(sum(p.grad.abs().sum().item() for p in model.parameters()))
            model.zero_grad()
        return sums, [name for name, _ in model.named_buffers()]


def random_streams() -> Any:
    """What a forward pass of a rank without samples leaves behind."""
    with lockstep.init() as world:
        model = build(Padded)
        model.encoder.dropout = nn.Dropout(0.5)
        model = world.prepare(nn.Sequential(nn.BatchNorm1d(LENGTH), model.encoder).double())
        changes = []
        for ids, _, _ in world.loader(sequences(), BATCH):
            before = torch.get_rng_state()
            x = ids[:, :, None].double().expand(-1, -1, 8)
            world.backward(model(x).sum() / max(1, len(x)))
            changes.append(not before.equal(torch.get_rng_state()))
        norms = [p.grad.abs().max().item() for p in model.parameters()]
        return changes, norms, model.module[0].running_mean


def test_a_placeholder_moves_no_random_streams_and_no_statistics():
    first, second, third = run_ranks(random_streams, 3)
    assert first[0] == [True, True, True]
    assert second[0] == third[0] == [True, True, False]
    for other in (second, third):
        assert first[1] == other[1]  # the gradients
        assert first[2].equal(other[2])  # the statistics


def test_batchnorm_without_running_statistics_computes_a_placeholder():
    first, second, third = run_ranks(statistics_of_the_batch, 3)
    assert first == second == third
    sums, buffers = third
    assert len(sums) == 2
    assert all(number > 0 for number in sums)
    assert buffers == []  # the layers have given their statistics back


def refused(length: int) -> tuple[str, int]:
    """What is said of batches that cannot be emptied, and after how many of them."""

    def packed(samples: list[Any]) -> Any:
        return nn.utils.rnn.pack_sequence([ids for ids, _, _ in samples])

    with lockstep.init() as world:
        dataset = Subset(sequences(), range(length))
        batches = 0
        try:
            for _ in world.loader(dataset, BATCH, collate_fn=packed):
                batches += 1
        except DataError as error:
            return str(error), batches
        return "", batches


def test_batches_that_cannot_be_emptied_are_refused_before_the_first_step():
    for said, batches in run_ranks(refused, 2, SAMPLES):
        assert batches == 0
        assert "found: some rank gets no samples of a short batch in this pass" in said
        assert "drop_last=True" in said
    assert run_ranks(refused, 2, SAMPLES - 1) == [("", 2)] * 2


class Made:
    """What a maker returns: an object of a class that is no container."""

    __slots__ = ("noise", "rows")

    def __init__(self, rows: Tensor, noise: torch.distributions.Normal) -> None:
        self.rows = rows
        self.noise = noise


class Maker(nn.Module):
    """Makes samples from noise, and refuses to make none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, noise: Tensor) -> SimpleNamespace:
        rows = self.layer(noise.reshape(len(noise), -1, 2).flatten(1)).tanh()
        made = Made(rows, torch.distributions.Normal(rows, 1.0))
        return SimpleNamespace(made=[made], maker=self, name="noise")


class Judge(nn.Module):
    """Judges what a maker returns, and refuses to judge none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, namespace: SimpleNamespace) -> Tensor:
        rows = namespace.made[0].rows
        return self.layers(rows.reshape(len(rows), -1, 2).flatten(1))


def two_models() -> Any:
    """One model is called with what another one made."""
    with lockstep.init() as world:
        torch.manual_seed(3)
        maker, judge = Maker().double(), Judge()
        optimizer = torch.optim.SGD(maker.parameters(), lr=0.3)
        maker, judge, optimizer = world.prepare(maker, judge, optimizer)
        counted = torch.zeros(3, dtype=torch.int64)
        for x, _ in world.loader(tensors(SAMPLES), BATCH):
            namespace = maker(x[:, :4])
            made = namespace.made[0]
            counted += torch.tensor([len(made.rows), len(made.noise.sample()), len(x)])
            assert namespace.maker is getattr(maker, "module", maker)
            world.backward(judge(namespace).square().mean() - made.noise.log_prob(x[:, :6]).mean())
            optimizer.step()
            optimizer.zero_grad()
        return weights(maker), world.sum(counted).tolist()


def test_a_model_that_is_called_with_the_output_of_another():
    expected, _ = two_models()
    for size in (2, 3):
        for found, counted in run_ranks(two_models, size):
            assert difference(expected, found) < 1e-12
            assert counted == [SAMPLES] * 3  # also in objects of any class and distributions


def test_what_is_said_of_no_samples_is_true_of_micro_batches():
    virtual_rank = VirtualRank(
        number=1,
        begins=True,
        ends=True,
        num_on_process=1,
        virtual_ranks_per_process=4 / 3,
        has_own_step=False,
        is_padding=True,
    )
    notes = []
    for micro_batch in (
        MicroBatch(global_samples=1),
        MicroBatch(global_samples=12, num_micro_batches=2),
        MicroBatch(global_samples=12, num_micro_batches=2, virtual_rank=virtual_rank),
        MicroBatch(global_samples=12, num_micro_batches=2, left_out=3),
    ):
        error = RuntimeError("a shape")
        note_empty_part(error, micro_batch)
        notes += error.__notes__
    assert notes[0].startswith("lockstep: this rank has none of the 1 samples of this batch, so")
    assert notes[1].startswith("lockstep: this rank has no samples in this micro-batch, so")
    assert notes[2].startswith("lockstep: this rank has no virtual rank left to compute")
    assert notes[2].endswith("or give all ranks the same number of virtual ranks.")
    assert "left out all 3 of its part" in notes[3]
    for micro_batches, part in ((1, "none of the 12 samples"), (2, "no samples in this micro")):
        micro_batch = MicroBatch(global_samples=12, num_micro_batches=micro_batches)
        assert f"it has {part}" in str(_nan_gradients_error(micro_batch))


def test_the_row_is_that_of_the_sample_also_in_views():
    sample = torch.arange(12.0).view(1, 3, 4)
    empty = sample[:0]
    assert placeholder_of(empty[:, 1:, ::2], []).tolist() == [[[4, 6], [8, 10]]]
    assert placeholder_of(empty.flatten(1), []).tolist() == sample.flatten(1).tolist()
    assert placeholder_of(empty.transpose(0, 1), []).shape == (3, 1, 4)
    converted = empty.double()
    assert placeholder_of(converted, [sample]).tolist() == sample.tolist()
    assert placeholder_of(torch.zeros(0, 2, dtype=torch.int64), []).tolist() == [[1, 1]]
    assert not placeholder_of(torch.zeros(0, 2, dtype=torch.bool), []).any()
    assert placeholder_of(torch.zeros(0, 3), []).std() > 0


def test_a_function_that_refuses_no_rows_gets_one():
    sample = torch.arange(6.0).view(1, 6)
    empty = mark_no_rows(sample[:0])
    assert empty.reshape(len(empty), -1, 2).shape == (0, 3, 2)
    assert empty.view(empty.size(0), -1, 3).shape == (0, 2, 3)
    assert empty.max().isnan()
    assert empty.amax(1).shape == (0,)
    assert empty[0].isnan().all()
    assert empty.sum() == 0  # taken as it is
    assert mark_no_rows(torch.tensor([5, 7])[:0]).max() == 5
    with pytest.raises(RuntimeError, match="size"):
        empty.reshape(0, 5, -1, 7)


@pytest.mark.parametrize(
    "write",
    [
        lambda kept, rows, values: kept.__setitem__(rows, values),
        lambda kept, rows, values: kept.index_put_((rows,), values),
        lambda kept, rows, values: kept.add_(values),
        lambda kept, rows, values: kept.__iadd__(values),
    ],
)
def test_what_is_kept_for_rows_is_not_overwritten_by_a_row_that_stands_in(write):
    """A state for each row is written back, but one dimension of it is not as it should be."""
    kept = torch.zeros(3, 2, 4)
    rows = mark_no_rows(torch.tensor([1])[:0])
    result = write(kept, rows, mark_no_rows(torch.ones(1, 1, 4)[:, :0]))
    assert torch.equal(kept, torch.zeros(3, 2, 4))
    assert result is None or result is kept


def test_the_rows_of_a_recurrent_state_are_found_behind_its_layers():
    placeholder = Placeholder([])
    series, state = placeholder.add_to((torch.zeros(0, 8, 1), torch.zeros(2, 0, 16)))
    assert (series.shape, state.shape) == ((1, 8, 1), (2, 1, 16))
    shapes = [(1, 8, 16), (8, 16), (2, 1, 16), (2, 16), (5,)]
    cut = [tuple(placeholder.cut_off(torch.ones(shape)).shape) for shape in shapes]
    assert cut == [(0, 8, 16), (0, 16), (2, 0, 16), (0, 16), (5,)]


def test_only_tensors_of_no_rows_differ_from_plain_ones():
    empty = mark_no_rows(torch.ones(1, 3)[:0])
    rows = torch.ones(2, 3)
    assert type(empty) is NoRows
    assert type(empty * 2) is NoRows
    assert type(empty.max(1).values) is NoRows
    assert type(torch.cat([empty, rows])) is Tensor
    assert type(empty.sum()) is Tensor
    assert type(mark_no_rows(rows)) is Tensor
    assert type(pickle.loads(pickle.dumps(empty))) is Tensor
    assert empty.numpy().shape == (0, 3)
    kept = empty
    kept += 1
    assert kept is empty


def test_gradients_of_a_row_that_stands_in_are_zero():
    weight = torch.ones(3, requires_grad=True)
    output = mark_no_rows(torch.ones(1, 3)[:0] * weight)
    output.max().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0, 0, 0]


def test_a_compiled_loss_takes_tensors_of_no_rows():
    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(output, labels, reduction="sum")

    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    labels = torch.tensor([0, 1])
    assert compiled(torch.zeros(2, 3), labels) > 0
    assert compiled(mark_no_rows(torch.zeros(2, 3)[:0]), mark_no_rows(labels[:0])) == 0


def test_a_function_in_place_without_a_first_tensor_is_refused_and_writes_nothing():
    def add_(targets, values):
        targets[0].add_(values[0])

    rows, kept = mark_no_rows(torch.ones(1, 3)[:0]), torch.zeros(1, 3)
    refusal = RuntimeError("no rows")
    with pytest.raises(RuntimeError, match="no rows"):
        call_with_placeholder(torch.relu_, (), {"input": rows}, refusal)
    with pytest.raises(RuntimeError, match="no rows"):
        call_with_placeholder(add_, ([kept], [rows]), {}, refusal)
    assert not kept.any()
