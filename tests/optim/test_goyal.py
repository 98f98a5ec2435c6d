"""The four remarks of Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677, section 3).

Each is a mistake that is easily made when a training is spread over several workers. Each test
shows the mistake, so that it is seen to matter, and that Lockstep does not make it.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import CLASSES, FEATURES, difference, mean_loss, mlp, tensors, weights
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep
from lockstep.batch.plan import plan_epoch

pytestmark = pytest.mark.ranks

DECAY = 0.2
SHARES = {1: "1", 2: "1:2", 3: "3:1:1"}
STEPS = 8
BATCH = 12


def penalty(model: nn.Module) -> Tensor:
    """Weight decay as a term of the loss."""
    return DECAY / 2 * sum(p.square().sum() for p in model.parameters())


def plain_steps(
    lr: float, scale: float = 1.0, decay: float = 0.0, in_loss: bool = False
) -> dict[str, Tensor]:
    """Plain torch over the planned batches, the cross entropy scaled."""
    model, data = mlp(), tensors()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay)
    plan = plan_epoch(len(data), BATCH, seed=5)
    for step in range(len(plan)):
        loss = mean_loss(model, data[torch.from_numpy(plan[step])]) * scale
        (loss + penalty(model) if in_loss else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def lockstep_steps(in_loss: bool) -> dict[str, Tensor]:
    """The same, where Lockstep scales the losses of uneven parts and of 2 micro-batches."""
    with lockstep.init(seed=5) as world:
        model = mlp()
        decay = 0.0 if in_loss else DECAY
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=decay)
        lockstep.optim.scale_learning_rate(optimizer, batch_size=BATCH, base_batch_size=BATCH // 3)
        model, optimizer = world.prepare(model, optimizer)
        shares = SHARES[world.size]
        loader = world.loader(tensors(), BATCH, shuffle=True, shares=shares, micro_batch_size=5)
        for batch in loader:
            loss = mean_loss(model, batch)
            world.backward(loss + penalty(model) if in_loss else loss)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)


def decay_both_ways() -> list[dict[str, Tensor]]:
    return [lockstep_steps(in_loss) for in_loss in (False, True)]


def all_on_a_rank() -> dict[str, Any]:
    """What the tests need, in one start of the ranks."""
    return {
        "decay": decay_both_ways(),
        "gradients": gradients_of_one_batch(),
        "samples": samples_seen(),
    }


@pytest.fixture(scope="module")
def ranks() -> dict[int, list[dict[str, Any]]]:
    return {size: run_ranks(all_on_a_rank, size) for size in (1, 2, 3)}


def test_remark_1_scaling_the_cross_entropy_is_not_scaling_the_learning_rate(ranks) -> None:
    """Remark 1: weight decay is not scaled with the cross entropy, but with the learning rate."""
    for in_loss in (False, True):
        decay = 0.0 if in_loss else DECAY
        right = plain_steps(lr=0.3, decay=decay, in_loss=in_loss)
        trap = plain_steps(lr=0.1, scale=3.0, decay=decay, in_loss=in_loss)
        assert difference(right, trap) > 1e-2
    assert difference(plain_steps(lr=0.3), plain_steps(lr=0.1, scale=3.0)) < 1e-12, "no decay"

    for size in (1, 2, 3):
        for of_rank in ranks[size]:
            for in_loss, found in zip((False, True), of_rank["decay"], strict=True):
                decay = 0.0 if in_loss else DECAY
                expected = plain_steps(lr=0.3, decay=decay, in_loss=in_loss)
                assert difference(expected, found) < 1e-9, (size, in_loss)


GRADIENT = [
    torch.tensor(g, dtype=torch.float64) for g in (1.0, -0.5, 2.0, 0.3, 1.0, -1.0, 0.7, 1.0)
]


def rates() -> list[float]:
    """The rates of a warm-up over 4 steps and a drop by 10 after two more."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    drop = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    schedule = lockstep.optim.warmup(drop, steps=4, start=0.25)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def absorbed(gradients: list[Tensor], corrected: bool) -> Tensor:
    """Equation 10 of the paper: v = m v + lr g, w -= v; the rate is in the momentum.

    Corrected as remark 2 says: m is multiplied by the new rate over the one before.
    """
    w, v, before = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), None
    for g, lr in zip(gradients, rates(), strict=True):
        correction = lr / before if corrected and before is not None else 1.0
        v = 0.9 * correction * v + lr * g
        w, before = w - v, lr
    return w


def by_torch(optimizer_class: Any, **options: Any) -> Tensor:
    w = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = optimizer_class([w], lr=1.0, momentum=0.9, **options)
    drop = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    schedule = lockstep.optim.warmup(drop, steps=4, start=0.25)
    for g in GRADIENT:
        w.grad = g.clone()
        optimizer.step()
        schedule.step()
    return w.detach()


def test_remark_2_momentum_is_corrected_when_the_learning_rate_changes() -> None:
    """Remark 2: where the rate is in the momentum, what is left of old steps has the old rate."""
    assert len(set(rates())) > 4
    right = absorbed(GRADIENT, corrected=True)
    assert abs(right - absorbed(GRADIENT, corrected=False)) > 0.1, "the trap"
    # Torch's SGD and LARS keep the rate out of the momentum (equation 9): nothing to correct.
    torch.testing.assert_close(by_torch(torch.optim.SGD), right, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        by_torch(lockstep.optim.LARS, adapt=False), right, rtol=0, atol=1e-12
    )


def test_remark_2_lars_is_the_papers_with_the_correction() -> None:
    """Algorithm 1 of LARS has the rate in v; ours is that algorithm, corrected as remark 2 says."""
    generator = torch.Generator().manual_seed(3)
    gradients = torch.randn(STEPS, 3, 2, generator=generator, dtype=torch.float64)

    def of_the_paper(corrected: bool) -> Tensor:
        w, v, before = torch.ones(3, 2, dtype=torch.float64), 0.0, None
        for g, lr in zip(gradients, rates(), strict=True):
            local = 0.1 * w.norm() / (g.norm() + 0.05 * w.norm())
            correction = lr / before if corrected and before is not None else 1.0
            v = 0.9 * correction * v + lr * local * (g + 0.05 * w)
            w, before = w - v, lr
        return w

    w = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    optimizer = lockstep.optim.LARS([w], 1.0, 0.9, 0.05, trust_coefficient=0.1, eps=0.0)
    for g, lr in zip(gradients, rates(), strict=True):
        optimizer.param_groups[0]["lr"] = lr
        w.grad = g.clone()
        optimizer.step()
    torch.testing.assert_close(w.detach(), of_the_paper(corrected=True), rtol=0, atol=1e-12)
    assert (w - of_the_paper(corrected=False)).abs().max() > 0.01


def gradients_of_one_batch() -> dict[str, dict[str, Tensor]]:
    """Of the first global batch: by Lockstep, and this rank's own mean over its part."""
    found = {}
    with lockstep.init(seed=5) as world:
        model = mlp()
        alone = mlp()
        model = world.prepare(model)
        shares = SHARES[world.size]
        for x, y in world.loader(tensors(), BATCH, shuffle=True, shares=shares):
            world.backward(F.cross_entropy(model(x), y))
            F.cross_entropy(alone(x), y).backward()
            break
        inner = getattr(model, "module", model)
        for name, net in (("lockstep", inner), ("own", alone)):
            found[name] = {n: p.grad.clone() for n, p in net.named_parameters()}
    return found


def test_remark_3_the_loss_is_normalised_by_the_total_batch_size(ranks) -> None:
    """Remark 3: by kn, the samples of all workers, and not by the n of each worker."""
    model, data = mlp(), tensors()
    mean_loss(model, data[torch.from_numpy(plan_epoch(len(data), BATCH, seed=5)[0])]).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    for size in (1, 2, 3):
        gradients = [of_rank["gradients"] for of_rank in ranks[size]]
        for of_rank in gradients:
            assert difference(expected, of_rank["lockstep"]) < 1e-9
        if size > 1:
            own = [of_rank["own"] for of_rank in gradients]
            summed = {n: sum(g[n] for g in own) for n in expected}
            averaged = {n: summed[n] / size for n in expected}
            assert difference(expected, summed) > 0.5, "the trap: sums of means, k times as large"
            assert difference(expected, averaged) > 1e-3, "with uneven parts their average is too"


class Numbers(Dataset[tuple[Tensor, int]]):
    """Samples that say which they are."""

    def __len__(self) -> int:
        return 31

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((FEATURES,), float(index)), index


def samples_seen() -> tuple[list[list[list[int]]], list[int]]:
    """By epoch and global batch; and those of an order that each rank draws for itself."""
    with lockstep.init(seed=5) as world:
        model = nn.Linear(FEATURES, CLASSES)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(Numbers(), 8, shuffle=True)
        seen = []
        for _ in world.epochs(2):
            seen.append([])
            for x, numbers in loader:
                world.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                seen[-1].append(numbers.tolist())
        torch.manual_seed(world.rank)
        return seen, torch.randperm(31)[: 31 // world.size].tolist()


def test_remark_4_one_shuffle_an_epoch_is_divided_over_all_workers(ranks) -> None:
    """Remark 4: a single random shuffle of the training data, per epoch, for all workers."""
    whole: dict[int, list[list[int]]] = {}
    for size in (1, 2, 3):
        samples = [of_rank["samples"] for of_rank in ranks[size]]
        for epoch, step in itertools.product(range(2), range(4)):
            parts = [seen[epoch][step] for seen, _ in samples]
            batch = sum(parts, [])
            whole.setdefault(epoch * 4 + step, batch)
            assert batch == whole[epoch * 4 + step], "the same samples, in the same order"
        if size > 1:
            drawn = sum((own for _, own in samples), [])
            assert len(set(drawn)) < len(drawn), "the trap: orders of their own repeat samples"
    epochs = [sum((whole[epoch * 4 + step] for step in range(4)), []) for epoch in range(2)]
    for order in epochs:
        assert sorted(order) == list(range(31)), "no sample twice, none missing"
    assert epochs[0] != epochs[1]
    assert list(range(31)) not in epochs


@pytest.mark.parametrize("k", [2, 32])
def test_gradual_warmup_goes_from_the_small_batchs_rate_to_the_scaled_one(k: int) -> None:
    """Section 2.2: from lr to k lr, by a constant increment each iteration."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    lockstep.optim.scale_learning_rate(optimizer, batch_size=256 * k, base_batch_size=256)
    schedule = lockstep.optim.warmup(optimizer, steps=10, start=1 / k)
    found = []
    for _ in range(12):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert found[0] == pytest.approx(0.1)
    assert found[10] == found[11] == pytest.approx(0.1 * k)
    steps = [b - a for a, b in itertools.pairwise(found[:11])]
    assert steps == pytest.approx([steps[0]] * 10)
