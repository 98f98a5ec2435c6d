"""With virtual ranks a run that was resumed has the bits of one that was never disturbed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import IterableDataset, TensorDataset

import lockstep
from lockstep.errors import CheckpointError, LockstepWarning, UsageError

pytestmark = pytest.mark.ranks

VIRTUAL_RANKS = 5
EPOCHS = 2
STEPS_PER_EPOCH = 3  # the last global batch of an epoch is short


class Net(nn.Module):
    """BatchNorm, dropout, a parameter without dimensions, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8 * 16, 3))
        self.logit_scale = nn.Parameter(torch.tensor(0.2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        output: Tensor = self.head(F.relu(self.norm(self.convolution(images))).flatten(1))
        return output * self.logit_scale.exp() / (10 + self.calls)


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(count, 2, 6, 6, generator=generator)
    return TensorDataset(images, torch.randint(0, 3, (count,), generator=generator))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for image, label in samples(35):
            yield image + 0.01 * torch.randn(2, 6, 6), label


class History:
    """What the script has computed beside the model, saved with it."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def digest_of(*states: Any) -> str:
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        elif isinstance(value, Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            digest.update(whole.detach().contiguous().numpy().tobytes())
        else:
            digest.update(repr(value).encode())

    for state in states:
        add(state)
    return digest.hexdigest()


class Part(NamedTuple):
    """A part of a run, which ends with a checkpoint or with the training."""

    size: int
    strategy: str
    until: int | None = None
    """The step at which it is broken off; None: it trains to the end."""
    inside: bool = False
    """Save in the middle of the next global batch, between two virtual ranks or parts of one."""


def train(folder: Path, part: Part, precision: str, data: str) -> str | None:
    """Trains until a step, or to the end; returns a hash of all that there is then."""
    with lockstep.init(part.strategy, virtual_ranks=VIRTUAL_RANKS, precision=precision) as world:
        net = Net()
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.01)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        average = AveragedModel(net, use_buffers=True)
        model, _, optimizer, scheduler = world.prepare(net, average, optimizer, scheduler)
        options: dict[str, Any] = {"micro_batch_size": 2}
        if data == "weights":
            options = {"weight": lambda batch: float(batch[1].sum() + len(batch[1]))}
        if data == "stream":
            loader: Any = world.loader(Stream(), 16, **options)
        else:
            loader = world.loader(samples(35), 16, shuffle=True, **options)
        history = History()
        checkpoint = world.checkpoint(
            folder,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            average=average,
            loader=loader,
            history=history,
        )
        checkpoint.resume()
        for _ in world.epochs(EPOCHS):
            for images, labels in loader:
                loss = F.cross_entropy(model(images), labels)
                world.backward(loss)
                world.clip_grad_norm_(model, 0.5)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if not world.is_last_micro_batch:
                    if part.inside and world.step == part.until:
                        checkpoint.save()
                        return None
                    continue
                mean = world.loss()
                assert mean is not None
                # Drawn after the last virtual rank: the same on all processes.
                history.values += [mean, float(torch.rand(())), random.random()]
                average.update_parameters(net)
                if world.step == part.until and not part.inside:
                    checkpoint.save()
                    return None
            # Drawn outside of the training loop.
            history.values += [float(torch.rand(())), float(np.random.rand()), random.random()]
        world.barrier()
        return digest_of(
            net.state_dict(),
            optimizer.state_dict()["state"],
            scheduler.state_dict(),
            average.state_dict(),
            history.values,
        )


def digest_of_parts(folder: Path, parts: list[Part], precision: str, data: str) -> str:
    digests: list[str | None] = []
    for part in parts:
        digests = run_ranks(train, part.size, folder, part, precision, data)
    assert len(set(digests)) == 1
    assert digests[0] is not None
    return digests[0]


CASES = [
    ([Part(3, "fsdp", 1, inside=True), Part(1, "single", 4), Part(2, "ddp")], "fp32", "samples"),
]
THOROUGH_CASES = [
    ([Part(2, "ddp", 1), Part(3, "fsdp", 4, inside=True), Part(1, "single")], "bf16", "weights"),
    ([Part(1, "single", 1, inside=True), Part(2, "ddp", 5), Part(3, "fsdp")], "fp16", "samples"),
    ([Part(2, "ddp", 1, inside=True), Part(1, "dp", 4), Part(3, "ddp")], "fp32", "stream"),
    ([Part(4, "hsdp:shard_size=2", 1), Part(2, "ddp", 4), Part(5, "fsdp")], "fp32", "weights"),
]


def check_case(folder: Path, parts: list[Part], precision: str, data: str) -> None:
    undisturbed = digest_of_parts(folder / "undisturbed", [Part(1, "single")], precision, data)
    assert digest_of_parts(folder / "resumed", parts, precision, data) == undisturbed


@pytest.mark.parametrize(("parts", "precision", "data"), CASES)
def test_a_resumed_run_has_the_same_bits(
    parts: list[Part], precision: str, data: str, tmp_path: Path
) -> None:
    check_case(tmp_path, parts, precision, data)


@pytest.mark.thorough
@pytest.mark.parametrize(("parts", "precision", "data"), THOROUGH_CASES)
def test_a_resumed_run_has_the_same_bits_in_more_cases(
    parts: list[Part], precision: str, data: str, tmp_path: Path
) -> None:
    check_case(tmp_path, parts, precision, data)


def save_and_resume(folder: Path) -> dict[str, Any]:
    """Saves with 5 virtual ranks and two threads, and resumes with other settings."""
    model = nn.Linear(2, 2)
    os.environ.pop("MKL_CBWR", None)
    threads_before = torch.get_num_threads()
    with lockstep.init(virtual_ranks=VIRTUAL_RANKS) as world:
        world.prepare(model)
        torch.set_num_threads(2)
        world.checkpoint(folder, model=model).save()
    found: dict[str, Any] = {
        "threads": torch.get_num_threads() - threads_before,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }
    if os.environ["RANK"] == "1":
        os.environ["MKL_CBWR"] = "AVX2"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        world = lockstep.init(virtual_ranks=VIRTUAL_RANKS)
    found["printed"] = printed.getvalue()
    with world:
        world.prepare(model)
        checkpoint = world.checkpoint(folder, model=model)
        os.environ["MKL_CBWR"] = "AVX2"
        checkpoint.resume()
        found["note"] = checkpoint.last_resume_note
        found["threads as saved"] = torch.get_num_threads()
        weights = model.weight.detach().clone()
    with lockstep.init(virtual_ranks=4) as world:
        model.weight.data.zero_()
        world.prepare(model)
        with pytest.raises(CheckpointError) as error:
            world.checkpoint(folder, model=model).resume()
        found["error"] = str(error.value)
        found["nothing was loaded"] = not model.weight.any()
    with lockstep.init() as world:
        world.prepare(model)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            world.checkpoint(folder, model=model).resume()
        found["warned"] = [str(w.message) for w in warned if w.category is LockstepWarning]
        found["loaded"] = torch.equal(model.weight, weights)
    return found


def test_what_would_change_the_bits_is_said(tmp_path: Path) -> None:
    on_rank_0, on_rank_1 = run_ranks(save_and_resume, 2, tmp_path)
    for found in (on_rank_0, on_rank_1):
        assert (found["threads"], found["deterministic"], found["cublas"]) == (0, False, None)
        assert found["threads as saved"] == 2
        assert "; 2 threads as saved, not 1" in found["note"]
        assert "virtual_ranks=4" in found["error"]
        assert "virtual_ranks=5" in found["error"]
        assert found["nothing was loaded"]
        assert found["loaded"]
    assert (
        "; bits are not promised: this run has another value of MKL_CBWR (AVX2, in the checkpoint "
        "none)" in on_rank_0["note"]
    )
    (warning,) = on_rank_0["warned"]
    assert "resuming" in warning
    assert "virtual_ranks=5" in warning
    text = "bits are not promised: rank 1 has another value of MKL_CBWR (AVX2, others none)\n"
    assert on_rank_0["printed"] == text
    assert on_rank_1["printed"] == ""


class Unordered(torch.autograd.Function):
    """Its backward pass uses an operation that torch computes in no fixed order."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone().put_(torch.tensor([0]), torch.tensor([1.0]))


def use_unordered_operation() -> tuple[str, list[str]]:
    """Returns the error in a backward pass, and the notes of that in a forward pass."""
    with pytest.raises(UsageError) as error, lockstep.init(virtual_ranks=2) as world:
        model = world.prepare(nn.Linear(2, 1))
        for images, _ in world.loader(samples(4), 4):
            world.backward(Unordered.apply(model(images[:, 0, 0, :2])).mean())
    with pytest.raises(RuntimeError) as in_forward, lockstep.init(virtual_ranks=2):
        torch.zeros(2).put_(torch.tensor([0]), torch.tensor([1.0]))
    return str(error.value), in_forward.value.__notes__


def test_an_operation_without_order_is_refused_in_our_words() -> None:
    ((error, notes),) = run_ranks(use_unordered_operation, 1)
    assert "found: torch computes put_ in no fixed order" in error
    assert "world.backward(Unordered.apply(" in error
    (note,) = notes
    assert note.startswith("lockstep: virtual_ranks")
    assert "found: torch computes put_ in no fixed order" in note


def leave_steps_out() -> str:
    """Leaves out the step of the second global batch, and the pass in the middle of the fifth."""
    with lockstep.init(seed=3, virtual_ranks=VIRTUAL_RANKS) as world:
        net = Net()
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
        model, optimizer = world.prepare(net, optimizer)
        loader = world.loader(samples(80), 16, micro_batch_size=2)
        for _ in world.epochs(2):
            position = 0
            for images, labels in loader:
                world.backward(F.cross_entropy(model(images), labels))
                if position == 4:
                    break
                if position != 1:
                    optimizer.step()
                optimizer.zero_grad()
                if world.is_last_micro_batch:
                    position += 1
        return digest_of(net.state_dict())


@pytest.mark.thorough
def test_steps_that_are_left_out_leave_nothing_behind() -> None:
    (alone,) = run_ranks(leave_steps_out, 1)
    assert run_ranks(leave_steps_out, 2) == [alone] * 2
    assert run_ranks(leave_steps_out, 3, env={"LOCKSTEP_STRATEGY": "fsdp"}) == [alone] * 3
