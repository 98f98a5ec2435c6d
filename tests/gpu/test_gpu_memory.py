"""The memory of a real GPU: what is measured, what fits, and what is said when it does not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from on_devices import run_on, settings
from problems import mean_loss
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

pytestmark = [pytest.mark.ranks, pytest.mark.gpu]

BATCH, LEAST, MOST = 2048, 64, 4096
FRACTION, SAMPLES = 1 / 4, 64
STEPS = 3


def made() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(LEAST, MOST), nn.ReLU(), nn.Linear(MOST, LEAST))
    return model, TensorDataset(torch.randn(2 * BATCH, LEAST), torch.randint(LEAST, (2 * BATCH,)))


def measured(size: int) -> list[dict[str, Any]]:
    """What `world.memory` says of the only rank, or of two on one GPU."""
    with lockstep.init(**settings("cuda")) as world:
        model, data = made()
        model, optimizer = world.prepare(model, torch.optim.AdamW(model.parameters()))
        loader = world.loader(data, size * BATCH)
        table = world.memory(model, optimizer, loader, mean_loss)
        assert "torch.cuda.max_memory_allocated" in str(table)
        return [vars(device) for device in table.devices]


def by_hand() -> int:
    """The peak of a second step, in plain torch."""
    model, data = made()
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = (tensor[:BATCH] for tensor in data.tensors)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        F.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def test_the_measured_peak_is_that_of_a_step_in_plain_torch() -> None:
    [peak] = run_on(by_hand, 1)
    [[row]] = run_on(measured, 1, 1)
    assert row["device"].startswith("cuda")
    assert row["peak"] == pytest.approx(peak, rel=0.05, abs=2**20)
    assert row["state"] == 2 * row["parameters"] == 2 * row["gradients"]
    # Held by the model: the batch, what ReLU gives, and at most what it is given.
    kept = BATCH * (LEAST + MOST) * 4
    assert kept <= row["activations"] <= kept + BATCH * MOST * 4
    for rows in run_on(measured, 2, 2):
        assert [r["rank"] for r in rows] == [0, 1]
        for r in rows:
            # DDP's buckets are the gradients; beside them stands little.
            assert r["peak"] == pytest.approx(peak, rel=0.25, abs=2**20)


class Wide(nn.Module):
    """Keeps a 128th of the GPU's memory for each sample, and an eighth of that in parameters."""

    def __init__(self, memory: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, memory // (128 * 8 * 4)))

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.weight
        for _ in range(8):
            h = h.sin()
        return h.mean(1, keepdim=True)


def within_a_fraction(micro_batch_size: int | str) -> dict[str, Any]:
    """Some steps of a model of whose global batch a part fits."""
    torch.cuda.set_per_process_memory_fraction(FRACTION, 0)
    with lockstep.init(seed=1, micro_batch_size=micro_batch_size, device="cuda") as world:
        model = Wide(torch.cuda.get_device_properties(world.device).total_memory)
        model, optimizer = world.prepare(
            model, torch.optim.SGD(model.parameters(), lr=len(model.weight))
        )
        stride = len(model.weight) // 1000
        before = model.weight.detach()[::stride].cpu()
        data = TensorDataset(torch.rand(STEPS * SAMPLES, 1))
        loader = world.loader(data, SAMPLES)
        for (x,) in loader:
            world.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return {
            "pieces": loader.micro_batches,
            "steps": world._run.step.number,
            "refused": torch.cuda.memory_stats(world.device)["num_ooms"],
            "moved": model.weight.detach()[::stride].cpu() - before,
        }


def test_the_largest_micro_batch_is_found_where_memory_really_ends() -> None:
    [found] = run_on(within_a_fraction, 1, "auto")
    [given] = run_on(within_a_fraction, 1, 4)
    assert (given["refused"], given["pieces"]) == (0, SAMPLES // 4)
    assert found["refused"] > 0
    # Of 32 samples' room, a 20th of the GPU is kept free, and backward needs more than is kept.
    assert 3 <= found["pieces"] <= 8
    assert found["steps"] == given["steps"] == STEPS
    assert float(given["moved"].abs().min()) > 1e-3
    torch.testing.assert_close(found["moved"], given["moved"], rtol=1e-3, atol=1e-5)


def too_much() -> list[str]:
    try:
        within_a_fraction(SAMPLES)
    except torch.cuda.OutOfMemoryError as error:
        return copy.copy(error.__notes__)
    return []


def test_a_real_error_says_what_can_be_done() -> None:
    [[note]] = run_on(too_much, 1)
    assert note.startswith(f"lockstep: out of memory with {SAMPLES} samples at a time")
    assert "micro_batch_size=32" in note
