"""Which step of a rank is which of another one, where ranks leave steps to others."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.verify.lines_up import line_up, with_idle_ranks
from lockstep.verify.training_record import RankUpdate, Update

pytestmark = pytest.mark.unit

RANDOM = np.random.default_rng(2)
MODELS = {"A": "Encoder/weight", "B": "Probe/weight"}


def rank_of(text: str) -> list[list[RankUpdate]]:
    """The steps of a rank: a letter for each, which says of which model."""
    numbers: dict[str, int] = {}
    counts: dict[str, int] = {}
    steps = []
    for letter in text:
        number = numbers.setdefault(letter, len(numbers))
        counts[letter] = counts.get(letter, -1) + 1
        values = {MODELS[letter]: np.zeros(2)}
        steps.append(
            [
                RankUpdate(
                    optimizer=number,
                    optimizer_class="Adam",
                    step=counts[letter],
                    parameters=values,
                    initial={"Encoder/weight": np.ones(2)} if not steps else {},
                )
            ]
        )
    return steps


def told(updates: list[Update]) -> list[str]:
    """Of each update a letter a rank, and a dot for one that has not stepped."""
    letters = {name: letter for letter, name in MODELS.items()}
    found = []
    for update in updates:
        own = [letters[next(iter(rank.parameters))] if rank.stepped else "." for rank in update]
        found.append("".join(own))
    return found


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (("ABAB", "ABAB"), ["AA", "BB", "AA", "BB"]),
        (("ABAB", "AA"), ["AA", "B.", "AA", "B."]),
        (("AA", "ABAB"), ["AA", ".B", "AA", ".B"]),
        (("BABA", "AA"), ["B.", "AA", "B.", "AA"]),
        (("AA", "BABA"), [".B", "AA", ".B", "AA"]),
        (("AAABAA", "AAAAA"), ["AA", "AA", "AA", "B.", "AA", "AA"]),
        (("ABAB", "AA", "ABAB"), ["AAA", "B.B", "AAA", "B.B"]),
        (("ABAB", "AA", "AA"), ["AAA", "B..", "AAA", "B.."]),
        (("ABABAB", "A"), ["AA", "B."]),
        (("AA", "BB"), ["AB", "AB"]),
        (("A", ""), []),
    ],
)
def test_a_step_that_some_ranks_leave_to_others_is_theirs_alone(
    ranks: tuple[str, ...], expected: list[str]
) -> None:
    updates = line_up([rank_of(text) for text in ranks])
    assert told(updates) == expected
    for update in updates:
        assert len({rank.optimizer for rank in update}) == 1
        assert len({rank.step for rank in update}) == 1
    # The first update says of all ranks with what they began.
    for rank in updates[0] if updates else ():
        assert "Encoder/weight" in rank.initial


@pytest.mark.parametrize("known", ["parameters", "rates"])
@pytest.mark.parametrize("pretrains", [0, 1])
def test_a_rank_that_trained_a_model_before_is_known_by_the_step_that_is_alike(
    known: str, pretrains: int
) -> None:
    """Both optimizers are of one class and hold the same parameters."""

    def step(optimizer: int, number: int, value: float) -> list[RankUpdate]:
        left = value if known == "parameters" else float(RANDOM.normal())
        return [
            RankUpdate(
                optimizer=optimizer,
                optimizer_class="SGD",
                step=number,
                parameters={"Net/weight": np.full(3, left)},
                initial={"Net/weight": np.ones(3)},
                learning_rates=[0.1] if known == "parameters" else [value],
            )
        ]

    alone = [step(0, 0, 5.0), step(1, 0, 7.0), step(1, 1, 7.0)]
    other = [step(0, 0, 7.0), step(0, 1, 7.0)]
    ranks = [other, other]
    ranks[pretrains] = alone
    stepped = [[rank.stepped for rank in update] for update in line_up(ranks)]
    before = [rank == pretrains for rank in range(2)]
    assert stepped == [before, [True, True], [True, True]]


def test_a_rank_that_took_no_part_has_not_stepped() -> None:
    updates = with_idle_ranks(line_up([rank_of("AA"), rank_of("AA")]), (0, 2))
    assert told(updates) == [".A.A", ".A.A"]
    assert not updates[0][0].contributes


def test_of_two_steps_by_one_backward_pass_the_samples_are_those_of_all_ranks() -> None:
    ranks = [rank_of("A"), rank_of("BA")]
    for steps, losses in zip(ranks, ([1.0], [1.0, 2.0]), strict=True):
        for step in steps:
            step[0].losses = losses
    ranks[0][0][0].parameter_sums = {"Encoder/weight": np.ones(2)}
    first, second = line_up(ranks)
    assert first[0].parameter_sums
    assert first[0].contributes
    # Which of the two a loss is of, and what ranks held between them, is not known.
    assert not any(rank.losses or rank.parameter_sums for rank in second)
    assert not any(rank.losses for rank in first)
