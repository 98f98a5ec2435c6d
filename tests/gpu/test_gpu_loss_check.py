"""A loss that is NaN: named by its step, on a GPU one step late, and without waiting for it."""

from __future__ import annotations

import pytest
import torch
from on_devices import DEVICES, GPU, run_on, settings
from problems import mean_loss, mlp, tensors

import lockstep
from lockstep.errors import UsageError

pytestmark = pytest.mark.ranks

BATCH, IS_NAN = 8, 3


def until_it_is_said(device: str) -> tuple[str, int]:
    """What was said, and in which step."""
    with lockstep.init(**settings(device)) as world:
        model = mlp()
        model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        step = 0
        with pytest.raises(UsageError) as caught:
            for batch in world.loader(tensors(), BATCH):
                step += 1
                loss = mean_loss(model, batch)
                world.backward(loss * float("nan") if step == IS_NAN else loss)
                optimizer.step()
                optimizer.zero_grad()
                if device == "cuda":
                    torch.cuda.synchronize()  # else it may still be on its way a step later
        return str(caught.value), step


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_named_by_its_own_step(device: str) -> None:
    for text, step in run_on(until_it_is_said, 2, device):
        assert f"the loss of step {IS_NAN} is NaN" in text
        assert step == IS_NAN + (device == "cuda")


def without_waiting(device: str, reads: bool) -> int:
    """Steps under torch's watch for whatever waits for the GPU."""
    with lockstep.init(**settings(device)) as world:
        model = mlp()
        model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        steps = 0
        for batch in world.loader(tensors(), BATCH):
            loss = mean_loss(model, batch)
            torch.cuda.set_sync_debug_mode("error")
            try:
                world.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if reads:
                    loss.item()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            steps += 1
        return steps


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_gpu() -> None:
    device = GPU.values[0]
    assert run_on(without_waiting, 1, device, False) == [-(-len(tensors()) // BATCH)]
    with pytest.raises(AssertionError, match="synchronizing CUDA operation"):
        run_on(without_waiting, 1, device, True)
