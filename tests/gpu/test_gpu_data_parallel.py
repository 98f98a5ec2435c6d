"""DataParallel joins outputs on another device than the module's."""

from __future__ import annotations

import pytest
import torch
from on_devices import DEVICES, run_on
from torch import Tensor, nn

from lockstep.strategies.data_parallel.module import DataParallel

pytestmark = pytest.mark.ranks


class DoublesAndCounts(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, torch.tensor(x.shape[1], device=x.device)


def outputs_on_the_cpu(device: str) -> tuple[str, int, bool]:
    module = DataParallel(DoublesAndCounts().to(device), replicas=2, output_device=-1)
    doubled, count = module(torch.ones(4, 3, device=device))
    return count.device.type, int(count), torch.equal(doubled, torch.full((4, 3), 2.0))


@pytest.mark.parametrize("device", DEVICES)
def test_equal_outputs_without_samples_are_returned_on_the_output_device(device):
    assert run_on(outputs_on_the_cpu, 1, device) == [("cpu", 3, True)]
