"""Parameters that no rank used keep the gradient None, as on one device: optimizers leave them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import CLASSES, FEATURES, difference, tensors
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import lockstep
from lockstep.strategies import DDP, FSDP, HSDP

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
        reason="find_unused_parameters under fsdp needs a newer torch",
    ),
]
BATCH, STEPS = 12, 6


class Routed(nn.Module):
    """Each sample goes through an expert that its first feature chooses.

    The third expert has no samples but in every third step, and the last one never has any.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.head = nn.Linear(FEATURES, CLASSES)
        self.experts[1].bias.requires_grad_(False)
        self.gains = nn.ParameterList(torch.tensor(1.0 + i) for i in range(4))
        self.double()

    def forward(self, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        chosen = (x[:, 0] > 0).long()
        if step % 3 == 1:
            chosen = torch.where(x[:, 1] > 0.5, 2, chosen)
        out = x
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, self.gains[number] * expert(x[rows]))
        return self.head(out), out


def train(strategy: Any, *, micro: bool = False, loop: str = "usual") -> dict[str, Any]:
    """The weights, and in each step the names of the parameters without a gradient.

    Args:
        strategy: of `lockstep.init`.
        micro: three micro-batches in each global batch.
        loop: what the training loop does otherwise than usual.
    """
    without: list[list[str]] = []

    def note_missing_gradients(model: nn.Module) -> None:
        named = model.named_parameters()
        without.append(sorted(n.removeprefix("module.") for n, p in named if p.grad is None))

    with lockstep.init(strategy, seed=1) as world:
        model = Routed()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
        model, optimizer = world.prepare(model, optimizer)
        size = max(1, BATCH // world.size // 3) if micro else None
        loader = world.loader(tensors(STEPS * BATCH), BATCH, micro_batch_size=size)
        for x, y in loader:
            step = world.step
            scores, inner = model(x, step)
            if loop == "cleared between":
                optimizer.zero_grad()
            if loop == "loss.backward":
                F.cross_entropy(scores, y).backward()
            elif loop == "two losses":
                world.backward(0.5 * F.cross_entropy(scores, y), retain_graph=True)
                world.backward(0.5 * F.cross_entropy(scores, y) + inner.square().mean())
            elif loop == "left in the middle" and step == 1 and not loader.current.first:
                world.backward(F.cross_entropy(scores, y))
                break
            else:
                world.backward(F.cross_entropy(scores, y))
            if loader.current.last and loop != "loss.backward":
                note_missing_gradients(model)
            optimizer.step()
            if loop == "loss.backward":  # nobody is told of it before the step
                note_missing_gradients(model)
            if loop != "cleared between":
                optimizer.zero_grad(set_to_none=loop != "zeros")
        if loop == "left in the middle":
            for x, y in loader:
                world.backward(F.cross_entropy(model(x, 0)[0], y))
                optimizer.step()
                optimizer.zero_grad()
        state = getattr(model, "module", model).state_dict()
        whole = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}
        return {"weights": {n: v.detach().clone() for n, v in whole.items()}, "without": without}


WAYS: dict[str, Any] = {
    "fsdp": FSDP(find_unused_parameters=True),
    "shards add up": FSDP(find_unused_parameters=True, accumulate_shards=True),
    "hsdp": HSDP(find_unused_parameters=True, shard_size=1),
}
MORE_WAYS: dict[str, Any] = {
    **WAYS,
    "kept whole": FSDP(find_unused_parameters=True, reshard_after_forward=False),
    "ddp": DDP(find_unused_parameters=True),
}
LOOPS = ("usual", "cleared between", "two losses", "zeros", "left in the middle", "loss.backward")
CASES: list[dict[str, Any]] = [{"micro": True}]
MORE_CASES: list[dict[str, Any]] = [
    {"loop": loop, "micro": micro}
    for loop in LOOPS
    for micro in (False, True)
    if not (micro and loop in ("loss.backward", "two losses"))
]


def in_all_cases(ways: dict[str, Any], cases: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [train(strategy, **case) for case in cases] for name, strategy in ways.items()}


def compare(ways: dict[str, Any], cases: list[dict[str, Any]], sizes: tuple[int, ...]) -> None:
    one = run_ranks(in_all_cases, 1, {"single": "single"}, cases)[0]["single"]
    for size in sizes:
        for of_rank in run_ranks(in_all_cases, size, ways, cases):
            for way in ways:
                for case, expected, found in zip(cases, one, of_rank[way], strict=True):
                    assert found["without"] == expected["without"], (way, case)
                    distance = difference(expected["weights"], found["weights"])
                    assert distance < 1e-9, (way, case, distance)


def test_a_parameter_that_no_rank_used_is_left_alone():
    compare(WAYS, CASES, (2,))


@pytest.mark.thorough
def test_unused_parameters_in_every_way_and_loop():
    compare(MORE_WAYS, MORE_CASES, (2, 3))
