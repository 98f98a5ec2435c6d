from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import ProfilerActivity, profile

from lockstep.optim import precision


def test_the_code_of_this_torch_is_known():
    """A torch that does more here than the one known costs speed, until this is brought up."""
    assert precision.KNOWS_STEP
    assert precision.knows_forward()


def sgd(kind: type[torch.optim.SGD] = torch.optim.SGD) -> Any:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return kind([parameter], lr=0.25)


def value(optimizer: Any) -> float:
    (number,) = set(optimizer.param_groups[0]["params"][0].tolist())
    return float(number)


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ranges that torch opens."""
    names: list[str] = []
    real = torch.autograd.profiler.record_function

    def note(name: str) -> Any:
        names.append(name)
        return real(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", note)
    return names


def test_a_step_is_the_optimizers_own_without_the_mark(marked):
    one, other = sgd(), sgd()
    other.step()
    assert marked == ["Optimizer.step#SGD.step"]
    assert precision.step(one, None) is None
    assert value(one) == value(other) == 0.75
    assert len(marked) == 1
    assert precision.step(one, lambda: 3.0) == 3.0
    assert value(one) == 0.5
    assert not one.param_groups[0]["params"][0].grad_fn


def test_a_profiler_sees_the_step():
    optimizer = sgd()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        precision.step(optimizer, None)
    assert "Optimizer.step#SGD.step" in {event.key for event in seen.key_averages()}


def test_hooks_and_schedulers_see_the_step(marked):
    def own(optimizer: Any) -> list[str]:
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        precision.step(optimizer, None)
        return calls

    assert own(sgd()) == ["before", "after"]
    calls: list[int] = []
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    try:
        precision.step(sgd(), None)
    finally:
        handle.remove()
    assert calls == [1]
    seen: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda *given: seen.append(given))
    try:
        optimizer = sgd()
        optimizer.register_step_post_hook(lambda *given: seen.append("own first"))
        precision.step(optimizer, None)
    finally:
        handle.remove()
    assert seen == ["own first", (optimizer, (optimizer, None), {})]
    assert len(marked) == 2
    optimizer = sgd()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    precision.step(optimizer, None)
    assert optimizer._opt_called  # what torch warns about when it is missing
    scheduler.step()
    assert len(marked) == 3


def test_a_step_of_the_users_own_is_taken(marked):
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            return super().step(closure)

    one, other = sgd(Twice), sgd(Twice)
    precision.step(one, None)
    inner = len(marked)
    other.step()
    assert value(one) == value(other) == 0.5
    assert len(marked) == 2 * inner + 1


@pytest.mark.parametrize("known", [True, False])
def test_torchs_own_way_where_its_code_is_another(monkeypatch, marked, known):
    monkeypatch.setattr(precision, "KNOWS_STEP", known)
    optimizer = sgd()
    precision.step(optimizer, None)
    assert value(optimizer) == 0.75
    assert len(marked) == (0 if known else 1)


def test_a_forward_pass_that_does_more_is_not_known(monkeypatch):
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return self.something_new(self._post_forward(self.module(*self._pre_forward(*inputs))))

    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "forward", forward)
    assert not precision.knows_forward()
