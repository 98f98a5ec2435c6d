"""Where a model is cut, and in which order the ranks compute: the pure parts of the pipeline."""

from __future__ import annotations

import re
from collections import UserDict
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch import nn

from lockstep.errors import SettingError, UsageError
from lockstep.strategies.pipeline.schedule import Action, order
from lockstep.strategies.pipeline.split import balanced_cuts, split, units
from lockstep.strategies.pipeline.stage import StagedModel
from lockstep.strategies.pipeline.strategy import check_compiled_parts
from lockstep.strategies.pipeline.unit_costs import measure

pytestmark = pytest.mark.unit

SIZES = [
    (schedule, positions, per_rank, micro_batches)
    for schedule, positions, per_rank, micro_batches in product(
        ("gpipe", "1f1b"), (2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 8)
    )
]


@pytest.mark.parametrize(("schedule", "positions", "per_rank", "micro_batches"), SIZES)
def test_every_rank_computes_everything_once_and_never_waits_for_ever(
    schedule, positions, per_rank, micro_batches
):
    """Simulates the ranks with what they may know, all meeting twice in a turn of the loop."""
    orders = [
        order(schedule, position, positions, per_rank, micro_batches)
        for position in range(positions)
    ]
    last = positions * per_rank - 1
    for position, actions in enumerate(orders):
        assert len(set(actions)) == len(actions) == 2 * per_rank * micro_batches
        assert {a.stage for a in actions} == set(range(position, last + 1, positions))
        for stage, forward in product({a.stage for a in actions}, (True, False)):
            # Messages of one cut come in the order of the micro-batches.
            sent = [a.micro_batch for a in actions if (a.stage, a.forward) == (stage, forward)]
            assert sent == sorted(sent)
    highest = [last + 1 - positions + position for position in range(positions)]
    done: set[Action] = set()
    at = [0] * positions
    for turn, backward in product(range(micro_batches), (False, True)):
        # All ranks meet after the call of the model, and after that of world.backward.
        until = []
        for p, actions in enumerate(orders):
            unknown = [a.micro_batch > turn - (not (a.forward or backward)) for a in actions]
            until.append([*unknown, True].index(True))
            if not backward:
                called = actions.index(Action(True, highest[p], turn)) + 1
                assert called <= until[p]
                until[p] = max(called, at[p])
        moved = True
        while moved:
            moved = False
            for p, actions in enumerate(orders):
                while at[p] < until[p] and needs(actions[at[p]], last) <= done:
                    done.add(actions[at[p]])
                    at[p] += 1
                    moved = True
        assert at == until
    assert at == [len(actions) for actions in orders]


def needs(action: Action, last: int) -> set[Action]:
    stage, micro_batch = action.stage, action.micro_batch
    if action.forward:
        return {Action(True, stage - 1, micro_batch)} if stage else set()
    found = {Action(True, stage, micro_batch)}
    return found | ({Action(False, stage + 1, micro_batch)} if stage < last else set())


def seconds(schedule: str, positions: int, per_rank: int, micro_batches: int) -> float:
    """Of a global batch, in forward passes of a rank's stages; a backward pass takes two."""
    last = positions * per_rank - 1
    orders = [
        list(order(schedule, position, positions, per_rank, micro_batches))
        for position in range(positions)
    ]
    ends: dict[Action, float] = {}
    free = [0.0] * positions
    while any(orders):
        for p, actions in enumerate(orders):
            while actions and needs(actions[0], last) <= ends.keys():
                action = actions.pop(0)
                begin = max([free[p], *(ends[before] for before in needs(action, last))])
                ends[action] = free[p] = begin + (1 if action.forward else 2) / per_rank
    return max(free)


def test_on_two_and_three_ranks_interleaved_stages_wait_no_longer():
    for positions, rounds in product((2, 3), (1, 2, 4)):
        sizes = positions, 2, rounds * positions
        assert seconds("1f1b", *sizes) <= seconds("1f1b", positions, 1, sizes[-1]) * 1.005
    assert seconds("1f1b", 2, 2, 2) == 8
    assert seconds("1f1b", 2, 1, 2) == 9


def in_words(schedule: str, position: int, positions: int, micro_batches: int) -> str:
    actions = order(schedule, position, positions, 1, micro_batches)
    return " ".join(f"{'F' if a.forward else 'B'}{a.micro_batch}" for a in actions)


def test_the_known_schedules():
    assert in_words("gpipe", 0, 2, 3) == "F0 F1 F2 B0 B1 B2"
    assert in_words("1f1b", 0, 3, 4) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert in_words("1f1b", 1, 3, 4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert in_words("1f1b", 2, 3, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_1f1b_keeps_no_more_activations_than_positions():
    for position in range(4):
        kept = peak = 0
        for action in order("1f1b", position, 4, 1, 16):
            kept += 1 if action.forward else -1
            peak = max(peak, kept)
        assert peak == 4 - position


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 5))
def test_balanced_is_the_best_of_all_cuts(costs, parts):
    assume(len(costs) >= parts)

    def worst(cuts: list[int]) -> float:
        edges = [0, *cuts, len(costs)]
        return max(sum(costs[a:b]) for a, b in pairwise(edges))

    def all_cuts(begin: int, left: int) -> list[list[int]]:
        if not left:
            return [[]]
        return [[c, *rest] for c in range(begin, len(costs)) for rest in all_cuts(c + 1, left - 1)]

    found = balanced_cuts(costs, parts)
    assert len(found) == parts - 1
    assert sorted({0, *found}) == [0, *found]
    assert worst(found) == min(map(worst, all_cuts(1, parts - 1)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.a(x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.drop = nn.Dropout(0.1)
        self.encoder = Encoder()
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.drop(self.embed(x))))


BLOCKS = ["embed", "encoder.layers.0", "encoder.layers.1", "encoder.layers.2", "encoder.norm"]


def test_units_are_blocks_and_what_stands_beside_them():
    assert units(Model()) == [*BLOCKS, "head"]
    chain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(Block(), Block()), Encoder())
    assert units(chain) == ["0", "2.0", "2.1", "3.layers.0", "3.layers.1", "3.layers.2", "3.norm"]
    assert units(Block()) == ["a", "b.0", "b.1"]
    assert units(nn.Linear(2, 2)) == [""]


def test_a_split_gives_every_parameter_one_stage():
    model = Model()
    made = split(model, ["encoder.layers.1", "head"])
    assert made.pieces == {
        "embed": 0,
        "encoder.layers.0": 0,
        "encoder.layers.1": 1,
        "encoder.layers.2": 1,
        "encoder.norm": 1,
        "head": 2,
    }
    assert made.loose_parameters == {"encoder.scale": 0}
    covered = [
        name
        for name, _ in model.named_parameters()
        if name in made.loose_parameters
        or any(name.startswith(f"{piece}.") for piece in made.pieces)
    ]
    assert covered == [name for name, _ in model.named_parameters()]
    assert split(model, []).pieces == {"": 0}


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (["encoder.layer.1"], "did you mean 'encoder.layers.1'"),
        (["drop"], "no parameters"),
        (["head", "encoder"], "not in the order"),
        (["encoder", "encoder.norm"], "not in the order"),
        (["head", "head"], "not in the order"),
    ],
)
def test_cuts_that_cannot_be(cuts, message):
    with pytest.raises(SettingError, match=message):
        split(Model(), cuts)


def test_a_parameter_of_two_stages_is_refused():
    model = Model()
    model.head.weight = model.embed.weight
    with pytest.raises(UsageError, match=r"embed.weight \(stage 0\) and head.weight \(stage 1\)"):
        split(model, ["head"])
    split(nn.Sequential(nn.Linear(4, 4), model), ["1"])


def test_a_submodule_in_two_places_belongs_to_one_stage():
    again = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), again, nn.Tanh(), again, nn.Linear(4, 4))
    assert units(model) == ["0", "1", "4"]
    made = split(model, ["1", "4"])
    assert [made.stage_of(f"{place}.weight") for place in range(5) if place != 2] == [0, 1, 1, 2]
    between = nn.Sequential(again, nn.Linear(4, 4), again)
    with pytest.raises(UsageError, match=r"0.weight \(stage 0\) and 2.weight \(stage 1\)"):
        split(between, ["1"])


def test_costs_follow_what_is_measured():
    heavy = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64))
    model = nn.Sequential(heavy, nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    names = ["0", "1", "2", "3"]
    costs, reason, _ = measure(model, names, [lambda: [torch.randn(128, 64), torch.zeros(128)]])
    assert "measured" in reason
    assert sum(costs) == pytest.approx(2)
    assert max(costs) == costs[0]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parts_that_train_nothing_or_write_to_their_input_are_measured():
    writing = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    statistics = nn.BatchNorm1d(4, affine=False)
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), writing, statistics)
    costs, reason, _ = measure(model, ["0", "1", "2"], [lambda: torch.randn(8, 4)])
    assert "measured" in reason
    assert all(cost > 0 for cost in costs)


def test_a_model_without_parameters_is_measured():
    costs, reason, _ = measure(
        nn.Sequential(nn.Tanh(), nn.Tanh()), ["0", "1"], [lambda: torch.ones(2, 4)]
    )
    assert "measured" in reason
    assert all(cost > 0 for cost in costs)


class Named(nn.Sequential):
    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize("kind", [dict, UserDict])  # the second is what tokenizers give
def test_entries_of_a_batch_are_the_arguments_by_name(kind: Any):
    model = Named(nn.Linear(3, 5), nn.Linear(5, 2))
    _, reason, _ = measure(model, ["0", "1"], [lambda: kind(x=torch.zeros(2, 3))])
    assert "measured" in reason


def test_costs_without_a_usable_example_are_those_of_parameters():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    for examples in ([], [lambda: {"images": torch.zeros(2, 3)}]):
        costs, reason, _ = measure(model, ["0", "1"], examples)
        assert costs == [80.0, 48.0]
        assert "no example" in reason


def test_what_the_example_does_not_call_is_known():
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.spare = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    measured = measure(Spare(), ["a", "b", "spare"], [lambda: torch.zeros(2, 3)])
    assert measured.called == [True, True, False]
    assert measure(Spare(), ["a", "b", "spare"], []).called == [True, True, True]


def compiled_model(kind: str) -> nn.Module:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    if kind == "whole":
        model = torch.compile(model, backend="eager")
    elif kind == "whole, in place":
        model.compile(backend="eager")
    elif kind == "around a cut":
        model[0] = torch.compile(model[0], backend="eager")
    elif kind == "a piece in place":
        model[1].compile(backend="eager")
    elif kind == "pieces":
        model[0][0] = torch.compile(model[0][0], backend="eager")
        model[1] = torch.compile(model[1], backend="eager")
    return model


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("whole", "no rank runs the whole of it"),
        ("whole, in place", "no rank runs the whole of it"),
        ("around a cut", "with 0 compiled"),
        ("a piece in place", "1.compile()"),
        ("pieces", None),
    ],
)
def test_what_is_compiled_across_a_cut_is_refused(kind, found):
    model = compiled_model(kind)
    prefix = {"whole": "_orig_mod.0.1", "around a cut": "0._orig_mod.1"}
    cuts = split(model, [prefix.get(kind, "0.1")])
    if found is None:
        check_compiled_parts(model, cuts)
        return
    with pytest.raises(UsageError, match=re.escape(found)):
        check_compiled_parts(model, cuts)


def test_a_module_that_is_cut_may_have_parameters_that_are_not_there():
    model = Model()
    model.encoder.register_parameter("shift", None)
    staged = StagedModel(model, split(model, ["encoder.layers.1"]), [1], torch.device("cpu"))
    assert model.encoder.shift is None
    assert model.embed.weight.is_meta
    assert not model.head.weight.is_meta
    assert len(staged.parameters_on_other_ranks) == 2 * len(
        [p for p in model.parameters() if p.is_meta]
    )
