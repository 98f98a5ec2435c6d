"""Half precision on a GPU: it is really computed with, it learns, and an overflow skips a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_devices import ON_RANKS, run_on, settings
from problems import mean_loss, mlp, tensors, weights
from torch import Tensor

import lockstep

pytestmark = pytest.mark.ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCH, EPOCHS, SAMPLES = 16, 12, 64
OVERFLOWS_AT = 2


def learn(device: str, precision: str) -> list[float]:
    """The mean loss of each epoch."""
    with lockstep.init(seed=1, precision=precision, **settings(device)) as world:
        model = mlp(dtype=torch.float32)
        seen: set[torch.dtype] = set()
        model[0].register_forward_hook(lambda _, args, output: seen.add(output.dtype))
        model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        loader = world.loader(tensors(SAMPLES, torch.float32), BATCH, shuffle=True)
        losses = []
        for _ in world.epochs(EPOCHS):
            total = torch.zeros((), device=world.device)
            for x, y in loader:
                output = model(x)
                assert output.dtype == torch.float32
                loss = torch.nn.functional.cross_entropy(output, y)
                world.backward(loss)
                world.clip_grad_norm_(model, 5.0)
                optimizer.step()
                optimizer.zero_grad()
                total += loss.detach() * loader.current.local_rows
            losses.append(float(world.sum(total)) / SAMPLES)
        assert seen == {DTYPES[precision]}
        return losses


def half_precision(device: str) -> dict[str, list[float]]:
    return {precision: learn(device, precision) for precision in DTYPES}


@pytest.mark.parametrize(("device", "size"), ON_RANKS)
def test_half_precision_learns_as_full_precision_does(device: str, size: int) -> None:
    for losses in run_on(half_precision, size, device):
        for precision, of_epochs in losses.items():
            assert of_epochs[-1] < 0.9 * of_epochs[0], precision
            assert of_epochs == pytest.approx(losses["fp32"], rel=0.02), precision
        assert losses["bf16"] != losses["fp32"] != losses["fp16"]


def overflow(device: str, fused: bool) -> dict[str, Any]:
    """In one step the loss of the last rank is too large for fp16."""
    with lockstep.init(seed=1, precision="fp16", **settings(device)) as world:
        model = mlp(dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(tensors(6 * BATCH, torch.float32), BATCH)
        scaler = world._preparer.precision.scaler
        assert scaler is not None
        scaler.load_state_dict({**scaler.state_dict(), "scale": 256.0, "growth_interval": 2})
        found: dict[str, Any] = {"scales": [], "skipped": [], "moved": []}
        for step, batch in enumerate(loader):
            loss = mean_loss(model, batch)
            if step == OVERFLOWS_AT and world.rank == world.size - 1:
                loss = loss * 1e30
            before = weights(model)
            world.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found["scales"].append(scaler.get_scale())
            found["skipped"].append(optimizer.skipped)
            found["moved"].append(
                any(not torch.equal(before[name], now) for name, now in weights(model).items())
            )
        found["weights"] = {name: value.cpu() for name, value in weights(model).items()}
        return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("device", "size"), ON_RANKS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(device: str, size: int, fused: bool) -> None:
    ranks = run_on(overflow, size, device, fused)
    for found in ranks:
        assert found["skipped"] == [False, False, True, False, False, False]
        assert found["moved"] == [not skipped for skipped in found["skipped"]]
        # It doubles after two good steps, and halves after a bad one, each with the next backward.
        assert found["scales"] == [256, 256, 512, 256, 256, 512]
        assert all(bool(value.isfinite().all()) for value in found["weights"].values())
        assert same(found["weights"], ranks[0]["weights"])


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)
