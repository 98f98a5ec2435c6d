"""Gradients that are averaged while the backward pass runs, against their plain mean."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import in_gloo_group, run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.communication import routing
from lockstep.errors import UsageError
from lockstep.strategies import replication
from lockstep.strategies.gradient_average import GradientAverage

pytestmark = pytest.mark.ranks

WIDTH = 8


class Net(nn.Module):
    """Some layers: one that only rank 1 uses, one that none uses, one whose gradient is doubled."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH)
        for parameter in self.last.parameters():
            parameter.register_post_accumulate_grad_hook(double_gradient)

    def forward(self, x: Tensor, rank: int, recompute: bool) -> Tensor:
        if recompute:  # two backward passes inside of one, each of which adds to the gradient
            for _ in range(2):
                x = checkpoint(self.first, x, use_reentrant=True)
        else:
            x = self.first(self.first(x))
        if rank == 1:
            x = self.sometimes(x)
        return self.last(self.frozen(x))


def double_gradient(parameter: Tensor) -> None:
    parameter.grad *= 2


def gradients(net: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in net.named_parameters()}


@in_gloo_group
def average(recompute: bool) -> dict[str, Any]:
    """The averaged gradients, those of this rank alone, and what was sent in the backward pass."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net().double()
    x = torch.randn(4, WIDTH, dtype=torch.float64) * (rank + 1)
    x.requires_grad_()
    net(x, rank, recompute).square().sum().backward()
    own = {name: None if g is None else g.clone() for name, g in gradients(net).items()}
    net.zero_grad()
    sent_during_backward = []
    in_backward = False
    start = routing.start_all_reduce

    def start_noted(tensor: Tensor, group: Any = None) -> Any:
        sent_during_backward.append(in_backward)
        return start(tensor, group)

    loss = net(x, rank, recompute).square().sum()
    averaging = GradientAverage(dist.group.WORLD)
    with (
        mock.patch.object(replication, "BUCKET_BYTES", 200),  # a bucket for each parameter
        mock.patch.object(routing, "start_all_reduce", start_noted),
    ):
        with averaging.during_backward(list(net.parameters())):
            in_backward = True
            loss.backward()
            in_backward = False
        averaging.finish()
    hooks = [len(p._post_accumulate_grad_hooks or ()) for p in net.parameters()]
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with (
        pytest.raises(UsageError, match="average of sparse gradients"),
        GradientAverage(dist.group.WORLD).during_backward([table.weight]),
    ):
        pass
    return {"own": own, "found": gradients(net), "sent": sent_during_backward, "hooks": hooks}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_every_gradient_becomes_the_mean(size: int, recompute: bool):
    ranks = run_ranks(average, size, recompute)
    for name, own in ranks[0]["own"].items():
        of_ranks = [rank["own"][name] for rank in ranks]
        present = [g for g in of_ranks if g is not None]
        for rank in ranks:
            found = rank["found"][name]
            assert (found is None) == (not present), name
            if found is not None:
                torch.testing.assert_close(found, sum(present) / size, msg=name)
                assert torch.equal(found, ranks[0]["found"][name])
        assert ("never" in name or "frozen" in name) == (not present)
        assert ("sometimes" in name) == (own is None and bool(present))
    # Two buckets a layer were sent before the backward pass was over. A layer that is not used
    # holds up those after it, as all ranks send in one order.
    for number, rank in enumerate(ranks):
        num_early = 6 if number == 1 else 4
        assert rank["sent"][:8] == [True] * num_early + [False] * (8 - num_early)
        assert rank["hooks"] == [0] * 8 + [1, 1]
