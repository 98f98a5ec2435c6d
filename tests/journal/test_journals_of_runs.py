"""The journal of hashes: equal for equal bits, on any number of processes; and where it differs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.cli.main import main
from lockstep.extensions.journal.comparison import JournalComparison, compare_journals
from lockstep.extensions.journal.reading import read_journal

pytestmark = pytest.mark.ranks

NUM_VIRTUAL_RANKS = 5
STEPS_OF_EPOCH = 3


class Net(nn.Module):
    """Has rows that three processes cannot share equally, buffers, dropout and a large weight."""

    def __init__(self, large: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.convolution = nn.Conv2d(2, 7, 2)
        self.norm = nn.BatchNorm2d(7)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(7, 3)
        self.logit_scale = nn.Parameter(torch.tensor(0.2))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        # More than 64 KiB, so that it is hashed where it is; its shards are of odd lengths.
        self.table = nn.Embedding(301, 303) if large else None

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(self.convolution(images)).tanh().mean((2, 3))
        output: Tensor = self.head(self.dropout(features) * self.scale) * self.frozen
        if self.table is not None:
            rows = (images.flatten(1).sum(1).abs() * 100).long() % 301
            output = output + self.table(rows).view(len(images), 3, 101).mean(2)
        return output * self.logit_scale.exp()


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(35, 2, 4, 4, generator=generator)
    return TensorDataset(images, torch.randint(0, 3, (35,), generator=generator))


def train(
    journal: Path,
    *,
    flip: tuple[int, int] | None = None,
    num_threads: int | None = None,
    checkpoint_folder: Path | None = None,
    epochs: int = 2,
    large: bool = False,
    **options: Any,
) -> None:
    """Trains epochs of three global batches, the last of which is short.

    Args:
        journal: the folder.
        flip: a step and a virtual rank, in whose gradient of `head.bias` one bit is flipped.
        num_threads: set after `init`.
        checkpoint_folder: saves after the first epoch, or resumes.
        epochs: how many.
        large: the model has a large weight.
        **options: of `lockstep.init`.
    """
    options = {"virtual_ranks": NUM_VIRTUAL_RANKS, "seed": 3, "journal_every": 1, **options}
    with lockstep.init(journal=journal, **options) as world:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        model = Net(large)

        def flip_bit(gradient: Tensor) -> Tensor:
            virtual_rank = world._run.step.micro_batch.virtual_rank_number
            if (world.step, virtual_rank) != flip:
                return gradient
            flipped = gradient.clone()
            flipped.view(torch.int32)[1] ^= 2**20
            return flipped

        if flip is not None:
            model.head.bias.register_hook(flip_bit)
        optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01
        )
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(samples(), batch_size=16, shuffle=True)
        checkpoint = None
        if checkpoint_folder is not None:
            checkpoint = world.checkpoint(
                checkpoint_folder, model=model, optimizer=optimizer, loader=loader
            )
            checkpoint.resume()
        for epoch in world.epochs(epochs):
            for images, labels in loader:
                optimizer.zero_grad()
                world.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
            if checkpoint is not None and epoch == 0:
                checkpoint.save()


def train_with(journal: Path, options: dict[str, Any]) -> None:
    train(journal, **options)


def run(folder: Path, size: int, strategy: str | None = None, **options: Any) -> Path:
    """Trains on processes, and returns the folder of the journal."""
    env = {} if strategy is None else {"LOCKSTEP_STRATEGY": strategy}
    run_ranks(train_with, size, folder, options, env=env)
    return folder


def compare(folder_a: Path, folder_b: Path) -> JournalComparison:
    return compare_journals(read_journal(folder_a), read_journal(folder_b))


def diff(folder_a: Path, folder_b: Path) -> tuple[int, str]:
    """Calls the command; returns its exit code and what it prints."""
    result = CliRunner().invoke(main, ["journal", "diff", str(folder_a), str(folder_b)])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def on_one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("journal"), 1)


@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (3, "fsdp"),
        pytest.param(2, "ddp", marks=pytest.mark.thorough),
        pytest.param(3, "ddp", marks=pytest.mark.thorough),
        pytest.param(2, "fsdp", marks=pytest.mark.thorough),
        pytest.param(4, "hsdp:shard_size=2", marks=pytest.mark.thorough),
    ],
)
def test_journals_are_equal_on_any_number_of_processes(
    size: int, strategy: str, on_one_process: Path, tmp_path: Path
) -> None:
    exit_code, output = diff(on_one_process, run(tmp_path, size, strategy))
    assert exit_code == 0, output
    assert "equal in every bit: 6 steps" in output
    assert f"processes: A has 1, B has {size}" in output
    step = read_journal(tmp_path).read_step(4)
    # Everything was written down: only frozen parameters and counts of batches are left out of it.
    assert step.gradients.keys() == set(range(NUM_VIRTUAL_RANKS))
    for hashes in (*step.gradients.values(), step.weights, step.state):
        assert len(set(hashes.tolist())) == len(hashes)
        assert hashes.all()


@pytest.mark.thorough
@pytest.mark.parametrize(("precision", "strategy"), [("bf16", "fsdp"), ("fp16", "ddp")])
def test_journals_are_equal_with_large_weights(
    precision: str, strategy: str, tmp_path: Path
) -> None:
    alone = run(tmp_path / "a", 1, large=True, precision=precision)
    exit_code, output = diff(alone, run(tmp_path / "b", 3, strategy, large=True))
    assert exit_code == 1, output
    assert f"precision: A has {precision}, B has fp32" in output
    together = run(tmp_path / "c", 3, strategy, large=True, precision=precision)
    exit_code, output = diff(alone, together)
    assert exit_code == 0, output


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_flipped_bit_is_named(size: int, on_one_process: Path, tmp_path: Path) -> None:
    comparison = compare(on_one_process, run(tmp_path, size, flip=(4, 2)))
    found = comparison.first_difference
    assert found is not None
    assert (found.step, found.step_before) == (4, 3)
    assert found.differed_first == "gradient"
    assert found.gradients == {2: ["head.bias"]}
    assert found.state == ["head.bias"]
    assert comparison.weights_at_beginning == []
    exit_code, output = diff(on_one_process, tmp_path)
    assert exit_code == 1
    assert "step 4: the gradient diverged first; equal up to step 3\n" in output
    assert "  gradient: virtual rank 2, head.bias\n" in output


def test_other_settings_are_named(on_one_process: Path, tmp_path: Path) -> None:
    exit_code, output = diff(on_one_process, run(tmp_path, 1, seed=4, num_threads=7))
    assert exit_code == 1
    assert "the weights differ before the first step: convolution.weight, " in output
    assert "  seed: A has 3, B has 4\n" in output
    assert ", B has 7\n" in output.partition("  threads: A has ")[2]


@pytest.mark.thorough
def test_a_resumed_run_is_told_from_what_it_trains_again(
    on_one_process: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "checkpoint"
    run(tmp_path / "journal", 1, checkpoint_folder=saved, seed=3)
    (file,) = (tmp_path / "journal").iterdir()
    # As if it was killed while it wrote the last step of the second epoch.
    file.write_bytes(file.read_bytes()[:-10])
    assert read_journal(tmp_path / "journal").steps == [0, 1, 2, 3, 4]
    run(tmp_path / "journal", 2, "ddp", checkpoint_folder=saved)
    exit_code, output = diff(on_one_process, tmp_path / "journal")
    assert exit_code == 0, output
    assert "equal in every bit: 6 steps" in output
    assert "2 starts, 2 steps trained again" in output
    assert "start 1, rank 0: the last record is incomplete and left out" in output


def train_two_networks(world: lockstep.World, steps_of: str, scale: float = 1.0) -> None:
    """Trains two layers, each with an optimizer of its own, on six global batches.

    Args:
        world: of the run.
        steps_of: "in turns": one of the optimizers steps for each global batch. "every second":
            both step after two global batches, whose gradients add up.
        scale: of the loss in the third global batch.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizers = [
        torch.optim.AdamW(model[0].parameters(), lr=0.01),
        torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9),
    ]
    model, *optimizers = world.prepare(model, *optimizers)
    loader = world.loader(samples(), batch_size=6, shuffle=False)
    number = 0
    for images, labels in loader:
        loss = F.cross_entropy(model(images.flatten(1)), labels)
        world.backward(loss * scale if number == 2 else loss)
        chosen = optimizers
        if steps_of == "in turns":
            chosen = [optimizers[number % 2]]
        elif number % 2 == 0:
            chosen = []
        for optimizer in chosen:
            optimizer.step()
        for optimizer in chosen:
            optimizer.zero_grad()
        number += world.is_last_micro_batch


def journals_of_rare_steps(folder: Path) -> None:
    for steps_of in ("in turns", "every second"):
        for name, scale in (("a", 1.0), ("b", 1.0 + 2**-20)):
            journal = folder / f"{name}, {steps_of}"
            with lockstep.init(virtual_ranks=3, journal=journal, journal_every=1) as world:
                train_two_networks(world, steps_of, scale)


def test_journals_of_optimizers_that_step_rarely(tmp_path: Path) -> None:
    run_ranks(journals_of_rare_steps, 1, tmp_path / "alone")
    run_ranks(journals_of_rare_steps, 2, tmp_path / "two")
    for steps_of, num_steps, changed_step in (("in turns", 6, 2), ("every second", 3, 1)):
        for name in "ab":
            together = compare(
                tmp_path / "alone" / f"{name}, {steps_of}", tmp_path / "two" / f"{name}, {steps_of}"
            )
            assert not together.differs, together.lines()
            assert together.num_with_hashes == num_steps
        # The third global batch has another gradient. If the optimizers step after the fourth one,
        # it is found in the gradients that belong to their step, whose last losses are equal.
        changed = compare(
            tmp_path / "alone" / f"a, {steps_of}", tmp_path / "two" / f"b, {steps_of}"
        )
        found = changed.first_difference
        assert found is not None
        assert found.step == changed_step
        assert set(found.gradients) == {0, 1, 2}
        assert bool(found.losses) == (steps_of == "in turns")
        journal = read_journal(tmp_path / "two" / f"a, {steps_of}")
        steps = [journal.read_step(number) for number in journal.steps]
        for before, after in itertools.pairwise(steps):
            moved = [bool(moved) for moved in before.weights != after.weights]
            first_moves = steps_of == "every second" or after is steps[2] or after is steps[4]
            second_moves = steps_of == "every second" or not first_moves
            assert moved == [first_moves] * 2 + [second_moves] * 2


def train_and_drop(world: lockstep.World, dropped: str) -> None:
    """Trains on four global batches. The loop leaves the second one out.

    Args:
        world: of the run.
        dropped: "backward": the gradients of the second batch are computed and then cleared.
            "batch": they are not computed.
    """
    torch.manual_seed(1)
    model = nn.Linear(32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.prepare(model, optimizer)
    for number, (images, labels) in enumerate(world.loader(samples(), batch_size=9)):
        if number == 1 and dropped == "batch":
            continue
        world.backward(F.cross_entropy(model(images.flatten(1)), labels))
        if number != 1:
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_that_a_loop_drops_are_not_in_the_hashes(size: int, tmp_path: Path) -> None:
    run_ranks(journals_of_dropped_steps, size, tmp_path)
    comparison = compare(tmp_path / "backward", tmp_path / "batch")
    assert not comparison.differs, comparison.lines()
    assert comparison.num_with_hashes == 3


def journals_of_dropped_steps(folder: Path) -> None:
    for dropped in ("backward", "batch"):
        with lockstep.init(virtual_ranks=2, journal=folder / dropped, journal_every=1) as world:
            train_and_drop(world, dropped)
