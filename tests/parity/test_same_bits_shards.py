"""With virtual ranks, what would make bits depend on how parameters are sharded is said."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from digests import digest_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import LockstepWarning, UsageError

pytestmark = pytest.mark.ranks

CUTS = ((20, 20), (13, 24), (1, 63), (5, 5, 5, 49))


def updated(kind: Any, options: dict[str, Any], sizes: tuple[int, ...]) -> list[Tensor]:
    """Updates a vector in pieces of these sizes, 10 times; returns it and its state, whole."""
    generator = torch.Generator().manual_seed(0)
    length = sum(sizes)
    whole = torch.randn(length, generator=generator)
    pieces = [nn.Parameter(piece.clone()) for piece in whole.split(list(sizes))]
    optimizer = kind(pieces, lr=0.01, **options)
    for _ in range(10):
        gradient = torch.randn(length, generator=generator)
        for piece, part in zip(pieces, gradient.split(list(sizes)), strict=True):
            piece.grad = part.clone()
        optimizer.step()
    found = [torch.cat([piece.detach() for piece in pieces])]
    for name, value in optimizer.state[pieces[0]].items():
        if isinstance(value, Tensor) and value.ndim == 1:
            found.append(torch.cat([optimizer.state[piece][name] for piece in pieces]))
    return found


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.NAdam, {}),
    ],
)
def test_where_a_tensor_is_cut_does_not_change_the_bits(
    kind: Any, options: dict[str, Any], foreach: bool
) -> None:
    for sizes in CUTS:
        whole = updated(kind, {**options, "foreach": foreach}, (sum(sizes),))
        pieces = updated(kind, {**options, "foreach": foreach}, sizes)
        assert all(map(torch.equal, whole, pieces))


def refused_optimizers() -> list[str]:
    messages = []
    for kind, options, dtype in (
        (torch.optim.AdamW, {"fused": True}, torch.float32),
        (torch.optim.SGD, {}, torch.bfloat16),
        (torch.optim.SGD, {}, torch.float32),
    ):
        with lockstep.init(virtual_ranks=4) as world:
            model = nn.Linear(4, 4, dtype=dtype)
            optimizer: Any = kind(model.parameters(), lr=0.1, **options)
            try:
                world.prepare(model, optimizer)
            except UsageError as error:
                messages.append(error.was_set)
    return messages


def test_optimizers_that_round_the_ends_of_shards_differently_are_refused() -> None:
    on_fsdp = run_ranks(refused_optimizers, 2, env={"LOCKSTEP_STRATEGY": "fsdp"})
    assert (
        on_fsdp
        == [
            [
                "AdamW(fused=True) on the shards of a model, with virtual_ranks",
                "SGD on shards of the type torch.bfloat16, with virtual_ranks",
            ]
        ]
        * 2
    )
    assert run_ranks(refused_optimizers, 1) == [[]]


def train_clipped(clips_itself: bool, **options: Any) -> list[str]:
    """Clips gradients, and returns what was warned of."""
    options = options or {"virtual_ranks": 4}
    with warnings.catch_warnings(record=True) as warned, lockstep.init(**options) as world:
        warnings.simplefilter("always")
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=8)
        model, optimizer, loader = world.prepare(model, optimizer, loader)
        for (rows,) in loader:
            optimizer.zero_grad()
            world.backward(model(rows).square().mean())
            if world.is_last_micro_batch:
                if clips_itself:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                else:
                    world.clip_grad_norm_(model, math.inf)
            optimizer.step()
    return [str(each.message) for each in warned if each.category is LockstepWarning]


def test_a_norm_over_shards_is_warned_of() -> None:
    on_fsdp = {"LOCKSTEP_STRATEGY": "fsdp"}
    (text,), on_rank_1 = run_ranks(train_clipped, 2, True, env=on_fsdp)
    assert "shards of gradients that the script changes before optimizer.step()" in text
    assert on_rank_1 == []
    assert run_ranks(train_clipped, 2, False, env=on_fsdp) == [[], []]
    assert run_ranks(train_clipped, 2, True) == [[], []]


def clip_scaled_gradients() -> str:
    with pytest.raises(UsageError) as error:
        train_clipped(clips_itself=True, precision="fp16")
    return error.value.was_set


def test_clipped_shards_of_scaled_gradients_are_refused() -> None:
    """Torch does not count the writes of its clip_grad_norm_ to shards."""
    (message,) = run_ranks(clip_scaled_gradients, 1, env={"LOCKSTEP_STRATEGY": "ddp"})
    on_fsdp = run_ranks(clip_scaled_gradients, 2, env={"LOCKSTEP_STRATEGY": "fsdp"})
    assert on_fsdp == [message] * 2


def train_with_noise() -> str:
    """Adds noise to gradients, drawn after the backward pass, and to weights after the step."""
    with lockstep.init(seed=3, virtual_ranks=4) as world:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(16, 4), torch.randint(3, (16,)))
        model, optimizer, loader = world.prepare(model, optimizer, DataLoader(data, batch_size=8))
        for rows, labels in loader:
            optimizer.zero_grad()
            world.backward(F.cross_entropy(model(rows), labels))
            if world.is_last_micro_batch:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad += 0.1 * torch.randn_like(parameter.grad)
            optimizer.step()
            if world.is_last_micro_batch:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter += 0.1 * torch.randn_like(parameter)
        return digest_of(model)


def test_noise_on_gradients_does_not_depend_on_the_processes() -> None:
    (alone,) = run_ranks(train_with_noise, 1)
    assert run_ranks(train_with_noise, 2) == [alone] * 2
