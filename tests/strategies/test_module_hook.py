"""Hooks that a run registers on a user's module: they do nothing in copies, which no run knows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.session.step import Step
from lockstep.strategies.ddp import _ForwardGuard
from lockstep.strategies.diloco.strategy import ModuleHook
from lockstep.strategies.placeholder import Placeholders
from lockstep.training.forward_watch import ForwardWatch

pytestmark = pytest.mark.unit


class Told(Exception):
    """Raised where a hook would tell the run something."""


def tell(*_: Any, **__: Any) -> None:
    raise Told


def watch_calls(module: nn.Module, step: Step) -> None:
    ForwardWatch(step, [module]).batches_fetched_ahead()


def give_placeholders(module: nn.Module, step: Step) -> None:
    Placeholders(step, [module]).part_is_empty()


def refuse_calls(module: nn.Module, step: Step) -> None:
    module.register_forward_pre_hook(_ForwardGuard(module))


def call_function(module: nn.Module, step: Step) -> None:
    module.register_forward_pre_hook(ModuleHook(tell))


@pytest.mark.parametrize("register", [watch_calls, give_placeholders, refuse_calls, call_function])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_hooks_of_a_run_do_nothing_in_copies(
    register: Callable[[nn.Module, Step], None],
    copied: Callable[[nn.Module], nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Step, "module_called", tell)
    module = nn.Linear(3, 2)
    register(module, Step())
    without_rows = torch.zeros(0, 3)
    with pytest.raises((Told, UsageError)):
        module(without_rows)
    assert copied(module)(without_rows).shape == (0, 2)
