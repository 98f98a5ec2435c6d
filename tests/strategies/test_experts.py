"""A mixture of experts, of which a part of a batch may use some only, with virtual ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import FEATURES, tensors
from ranks import run_ranks
from test_fsdp import whole
from torch import Tensor, nn

import lockstep
from lockstep.errors import LockstepError
from lockstep.strategies import DDP, FSDP

pytestmark = pytest.mark.ranks

SAMPLES = 8


class Experts(nn.Module):
    """Each sample is computed by the expert that its gate chooses.

    Args:
        uses_all: how experts without samples are used all the same: "no rows", "times 0", or "".
    """

    def __init__(self, uses_all: str) -> None:
        super().__init__()
        self.uses_all = uses_all
        self.gate = nn.Linear(FEATURES, 3)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.gate(x).softmax(1)
        choice = probabilities.argmax(1)
        output = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            chosen = choice == number
            if chosen.any() or self.uses_all == "no rows":
                weighted = expert(x[chosen]) * probabilities[chosen, number, None]
                output = output.index_put((chosen,), weighted)
        if self.uses_all == "times 0":
            output = output + 0 * sum(p.sum() for p in self.experts.parameters())
        return output


def train(strategy: str | DDP | FSDP, virtual_ranks: int, uses_all: str = "") -> Any:
    """The weights after some steps, or what was found and advised."""
    torch.manual_seed(3)
    model = Experts(uses_all).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with lockstep.init(strategy, virtual_ranks=virtual_ranks, seed=1) as world:
            model, optimizer = world.prepare(model, optimizer)
            for x, y in world.loader(tensors(3 * SAMPLES), SAMPLES):
                world.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            return whole(model)
    except LockstepError as error:
        return error.found, error.do


def on_two() -> dict[str, Any]:
    return {
        "ddp": train("ddp", SAMPLES),
        "fsdp": train("fsdp", SAMPLES),
        "fsdp, lengths differ": train("fsdp", 2),
        "ddp, option": train(DDP(find_unused_parameters=True), 2),
        "fsdp, option": train(FSDP(find_unused_parameters=True), 2),
        "no rows": [train(name, 4, "no rows") for name in ("ddp", "fsdp")],
        "times 0": [train(name, 4, "times 0") for name in ("ddp", "fsdp")],
    }


def test_experts_that_some_virtual_ranks_do_not_use():
    expected = train("single", 4)
    for found in run_ranks(on_two, 2):
        for name in ("ddp", "fsdp", "fsdp, lengths differ", "ddp, option", "fsdp, option"):
            _, advice = found[name]
            assert "in every virtual rank: call an expert also with no rows" in advice, name
            if name in ("ddp, option", "fsdp, option"):
                # Virtual ranks refuse the option, so the advice says first to leave it out.
                assert advice.startswith("leave find_unused_parameters out, and "), advice
            else:
                assert "find_unused_parameters" not in advice, name

        for name in ("no rows", "times 0"):  # what the advice says
            for trained in found[name]:
                assert trained.keys() == expected.keys()
                assert all(torch.equal(trained[key], expected[key]) for key in expected)
