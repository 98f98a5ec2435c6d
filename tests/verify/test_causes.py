"""Divergences made up of numbers, each with its cause."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.run.start.worker import Script
from lockstep.verify.catalogue import ENTRIES
from lockstep.verify.cause import Cause
from lockstep.verify.causes import cause_of
from lockstep.verify.divergence import Divergence, find_divergences
from lockstep.verify.rules.gradient_values import unused_parameters
from lockstep.verify.run_config import RunConfig
from lockstep.verify.run_record import RunRecord
from lockstep.verify.self_checks import findings_without_reference
from lockstep.verify.tolerance import FLOAT32, FLOAT64
from lockstep.verify.training_record import Batch, Forward, RankUpdate, ScriptCall, Update
from lockstep.verify.verdict import Verdict, judge

pytestmark = pytest.mark.launcher

RANDOM = np.random.default_rng(1)
ONE, OTHER = RANDOM.normal(size=(6, 4)), RANDOM.normal(size=(6, 4))
"""What the backward passes over two halves of a batch leave."""
WHOLE = (ONE + OTHER) / 2
THIRD = RANDOM.normal(size=(6, 4))
"""What no weighting of them gives."""


def taken(*ids: int, **values: Any) -> Batch:
    found: dict[str, Any] = {
        "ids": ids,
        "contents": tuple(f"content {i}" for i in ids),
        "shape": "f",
        "weights": {"samples": float(len(ids))},
        **values,
    }
    return Batch(**found)


def update(gradient: np.ndarray, *batches: Batch, **values: Any) -> RankUpdate:
    found: dict[str, Any] = {
        "learning_rates": (0.1,),
        "losses": (1.0,),
        "initial": {"w": np.ones((6, 4))},
        "parameter_sums": {"w": np.ones(2)},
        "gradients": {"w": gradient},
        "unclipped": {"w": gradient},
        "parameters": {"w": 1 - 0.1 * gradient},
        **values,
    }
    return RankUpdate(batches=list(batches), **found)


ALONE = update(WHOLE, taken(0, 1, 2, 3))


def parting(
    reference: Sequence[Sequence[RankUpdate]], other: Sequence[Sequence[RankUpdate]]
) -> Divergence | None:
    parted = find_divergences(list(map(Update, reference)), list(map(Update, other)), FLOAT64)
    return parted[0] if parted else None


def found(many: Sequence[RankUpdate], one: RankUpdate = ALONE) -> tuple[Divergence, Cause]:
    divergence = parting([[one]], [many])
    assert divergence is not None
    cause = cause_of(divergence)
    assert cause.code in ENTRIES
    assert cause.evidence
    return divergence, cause


def two(gradient: np.ndarray, **values: Any) -> list[RankUpdate]:
    return [
        update(gradient, taken(0, 1), local_gradients=({"w": ONE},), **values),
        update(gradient, taken(2, 3), local_gradients=({"w": OTHER},), **values),
    ]


def test_what_is_equal_has_no_divergence() -> None:
    assert parting([[ALONE]], [two(WHOLE)]) is None
    almost = WHOLE * (1 + 1e-12)
    assert parting([[ALONE]], [two(almost)]) is None


def test_a_gradient_that_vanishes_may_differ_by_rounding() -> None:
    one = update(WHOLE, taken(0), gradients={"w": WHOLE, "bias": np.full(3, 1e-18)})
    many = [update(WHOLE, taken(0), gradients={"w": WHOLE, "bias": np.full(3, -2e-17)})]
    assert parting([[one]], [many]) is None


@pytest.mark.parametrize(
    ("factor", "code"), [(2.0, "LS201"), (0.5, "LS202"), (1.7, "LS209"), (-1.0, "LS209")]
)
def test_a_constant_ratio(factor: float, code: str) -> None:
    divergence, cause = found(two(factor * WHOLE))
    assert (divergence.kind, divergence.names, cause.code) == ("gradients", ("w",), code)
    assert cause.ratio == pytest.approx(factor)


@pytest.mark.parametrize(("factor", "code"), [(0.5, "LS203"), (2.0, "LS204")])
def test_a_ratio_of_the_numbers_of_backward_passes_goes_first(factor: float, code: str) -> None:
    one = update(WHOLE, taken(0, 1), taken(2, 3), losses=(1.0, 1.0))
    assert found(two(factor * WHOLE), one)[1].code == code


@pytest.mark.parametrize("key", ["samples", "labels in tensor 1"])
def test_a_mean_of_means_is_known_by_what_the_parts_should_weigh(key: str) -> None:
    one = update(0.25 * ONE + 0.75 * OTHER, taken(0, 1, 2, 3))
    weighs = [{"samples": 2.0, key: 5.0}, {"samples": 2.0, key: 15.0}]
    many = [
        update(WHOLE, taken(0, 1, weights=weighs[0]), local_gradients=({"w": ONE},)),
        update(WHOLE, taken(2, 3, weights=weighs[1]), local_gradients=({"w": OTHER},)),
    ]
    cause = found(many, one)[1]
    assert cause.code == ("LS206" if key == "samples" else "LS205")
    assert any("0.25 : 0.75" in text and "0.5 : 0.5" in text for text in cause.evidence)


def test_a_mean_of_means_over_what_is_not_counted() -> None:
    one = update(0.2 * ONE + 0.8 * OTHER, taken(0, 1, 2, 3))
    assert found(two(WHOLE), one)[1].code == "LS205"
    # These would not add up to as much: it may be anything.
    one = update(0.3 * ONE + 0.9 * OTHER, taken(0, 1, 2, 3))
    cause = found(two(WHOLE), one)[1]
    assert cause.code == "LS210"
    assert any("0.25 : 0.75" in text for text in cause.evidence)


CLIP = ScriptCall(
    name="clip", line="train.py:9: clip_grad_norm_(p, 1)", num_passes_before=1, has_clipped=True
)


def clipped(gradient: np.ndarray, *before: np.ndarray) -> list[RankUpdate]:
    """Two ranks that clip, with what they had before."""
    many = two(gradient, calls=(CLIP,))
    for rank, own in zip(many, before, strict=True):
        rank.unclipped = {"w": own}
    return many


ALONE_CLIPPED = update(0.1 * WHOLE, taken(0, 1, 2, 3), unclipped={"w": WHOLE}, calls=(CLIP,))


def test_clipping_before_averaging() -> None:
    cause = found(clipped(0.1 * ONE + 0.2 * OTHER, ONE, OTHER), ALONE_CLIPPED)[1]
    assert cause.code == "LS404"
    assert CLIP.line in cause.evidence


def test_clipping_is_no_cause_where_gradients_were_averaged_before() -> None:
    other = RANDOM.normal(size=(6, 4))
    assert found(clipped(0.1 * other, other, other), ALONE_CLIPPED)[1].code == "LS210"
    # It does nothing to a mean of means.
    uneven = 0.2 * ONE + 0.8 * OTHER
    one = update(uneven, taken(0, 1, 2, 3), unclipped={"w": uneven})
    assert found(clipped(WHOLE, WHOLE, WHOLE), one)[1].code == "LS205"


def test_what_is_frozen_on_some_processes_only_is_named_as_that() -> None:
    for values, words in (
        ({"frozen": ["w"]}, "requires_grad"),
        ({"in_eval_mode": ["w"]}, "train()"),
    ):
        cause = found(two(2 * WHOLE, **values))[1]
        assert (cause.code, cause.names) == ("LS312", ("w",))
        assert cause.evidence[0].startswith(words)
        assert cause.evidence[0].endswith("is not that of one process on ranks 0-1: w")
    # A model and its frozen copy, which several processes see in another order.
    one = update(WHOLE, taken(0, 1, 2, 3), frozen=["0/w"])
    assert (
        found(two(2 * WHOLE, frozen=["1/w"], parameter_sums={"0/w": WHOLE, "1/w": WHOLE}), one)[
            1
        ].code
        == "LS201"
    )
    # What a rank does not hold, as under a pipeline, it cannot freeze.
    one = update(WHOLE, taken(0, 1, 2, 3), frozen=["head.weight"])
    assert found(two(2 * WHOLE), one)[1].code == "LS201"


def test_clipping_hides_nothing() -> None:
    divergence, cause = found(clipped(0.1 * WHOLE, 0.5 * WHOLE, 0.5 * WHOLE), ALONE_CLIPPED)
    assert (divergence.kind, cause.code) == ("unclipped", "LS202")
    uneven = 0.2 * ONE + 0.8 * OTHER
    one = update(0.1 * uneven, taken(0, 1, 2, 3), unclipped={"w": uneven}, calls=(CLIP,))
    assert found(clipped(0.3 * WHOLE, WHOLE, WHOLE), one)[1].code == "LS205"


def test_clipping_each_rank_s_own_gradient_where_nothing_is_clipped_is_equal() -> None:
    one = update(WHOLE, taken(0, 1, 2, 3), unclipped={"w": WHOLE}, calls=(CLIP,))
    assert parting([[one]], [clipped(WHOLE, ONE, OTHER)]) is None


def test_clipping_by_another_norm() -> None:
    divergence, cause = found(clipped(0.2 * WHOLE, WHOLE, WHOLE), ALONE_CLIPPED)
    assert (divergence.kind, cause.code) == ("gradients", "LS403")


def test_clipping_on_one_rank_alone() -> None:
    many = clipped(WHOLE, WHOLE, WHOLE)
    many[1].gradients, many[0].calls = {"w": 0.1 * WHOLE}, []
    cause = found(many, update(WHOLE, taken(0, 1, 2, 3), unclipped={"w": WHOLE}))[1]
    assert cause.code == "LS304"
    assert "they were the same until rank 1 clipped them" in cause.evidence


def test_clipping_between_the_backward_passes_of_a_step() -> None:
    batches, twice, uneven = (taken(0, 1), taken(2, 3)), (1.0, 1.0), 0.3 * ONE + OTHER
    one = update(ONE + OTHER, *batches, losses=twice, unclipped={"w": ONE + OTHER})
    rank = update(uneven, *batches, losses=twice, unclipped={"w": uneven}, calls=(CLIP,))
    rank.local_gradients = [{"w": ONE}, {"w": OTHER}]
    cause = found([rank], one)[1]
    assert cause.code == "LS404"
    assert cause.evidence[0] == f"clipped after backward pass 1 of 2: {CLIP.line}"
    rank.calls = [replace(CLIP, has_clipped=False)]  # it was longer than none of them
    assert found([rank], one)[1].code == "LS210"


def test_a_gather_goes_before_the_ratio_it_leaves() -> None:
    gather = ScriptCall(
        name="all_gather", line="train.py:7: dist.all_gather(x)", carries_gradient=True
    )
    cause = found(two(0.5 * WHOLE, calls=(gather,), gather_line=gather.line))[1]
    assert cause.code == "LS207"
    assert "train.py:7: dist.all_gather(x)" in cause.evidence
    # Of what the loss is not made the gradient does not matter: a metric, say.
    assert found(two(0.5 * WHOLE, calls=(gather,)))[1].code == "LS202"


def test_a_parameter_that_no_rank_updates() -> None:
    """An optimizer that divides the parameters over the ranks and forgets one."""
    scale = {"gradients": {"w": WHOLE, "scale": ONE}, "parameters": {"w": 1 - 0.1 * WHOLE}}
    cause = found(two(WHOLE), update(WHOLE, taken(0, 1, 2, 3), **scale))[1]
    assert (cause.code, cause.names) == ("LS312", ("scale",))
    assert cause.evidence[0] == "no optimizer of 2 processes updates scale"


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"local_norm_layers": ("bn1",)}, "LS306"),
        ({"loss_draws": [("train.py:3", "the same on all ranks")]}, "LS106"),
        ({"loss_draws": [("train.py:3", "the same")]}, "LS210"),
        ({"gradient_hook_line": "train.py:4: p.register_hook(clamp)"}, "LS406"),
        ({}, "LS210"),
    ],
)
def test_what_is_no_sum_of_the_ranks_gradients(values: dict[str, Any], code: str) -> None:
    one = update(THIRD, taken(0, 1, 2, 3))
    if code == "LS210":
        one.loss_draws = values.get("loss_draws", [])
    assert found(two(RANDOM.normal(size=(6, 4)), **values), one)[1].code == code


def test_what_is_seen_is_said_though_the_cause_is_not_known() -> None:
    def called(shape: str, *contents: str) -> dict[str, Any]:
        return {"model_inputs": [taken(ids=(), contents=contents, shape=shape)]}

    one = update(THIRD, taken(0, 1, 2, 3), **called("int64 [8]", "a", "b"))
    other = RANDOM.normal(size=(6, 4))
    cause = found(two(other, **called("int64 [4]", "c")), one)[1]
    assert (
        "the models were called with 2 of int64 [8] inputs, on 2 processes with 2 of int64 [4]; "
        "0 are the same"
    ) in cause.evidence
    # What the backward passes left would be right.
    cause = found(two(other))[1]
    assert cause.code == "LS210"
    assert "what was made of it afterwards is not" in cause.evidence[0]
    # A hook that changed gradients after they were recorded says what was made of it.
    line = "train.py:4: p.register_hook(clamp)"
    cause = found(two(other, gradient_hook_line=line))[1]
    assert (cause.code, cause.evidence[2]) == ("LS406", line)


def test_an_optimizer_that_steps_inside_the_backward_pass_is_too_early() -> None:
    line = "train.py:8: optimizers[p].step()"
    own = {"step_line_in_backward": line, "optimizer_unprepared": True}
    # Each rank steps with its own gradient, or with what a hook has made of it.
    for factor in (1, -1):
        many = [
            update(ONE, taken(0, 1), local_gradients=({"w": ONE},), **own),
            update(OTHER, taken(2, 3), local_gradients=({"w": factor * OTHER},), **own),
        ]
        cause = found(many)[1]
        assert (cause.code, line in cause.evidence[1]) == ("LS406", True)
        assert codes([[ALONE]], [many]) == ["LS406", "LS407"]


def test_a_loss_over_a_rank_s_own_samples_needs_one_that_compares_them() -> None:
    many = two(RANDOM.normal(size=(6, 4)), loss_line="train.py:5: loss.backward()")
    one = update(THIRD, taken(0, 1, 2, 3), loss_compares_samples=True)
    cause = found(many, one)[1]
    assert cause.code == "LS208"
    assert "the loss is made by train.py:5: loss.backward()" in cause.evidence
    for rank in many:
        rank.calls = [ScriptCall(name="all_gather", line="train.py:4")]
    assert found(many, one)[1].code == "LS210"
    # The root of a mean is no mean of roots, but a sum of them with other weights.
    one = update(0.53 * ONE + 0.48 * OTHER, taken(0, 1, 2, 3), loss_compares_samples=True)
    assert found(two(WHOLE), one)[1].code == "LS208"


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        (
            ((3.0, 2.0), (1.0, 2.0)),
            "has, over the ranks, the mean of term 1, the sum of term 2",
        ),
        (((2.5, 4.0), (1.5,)), "of 2 on rank 0, 1 on rank 1"),
        (((2.5,), (1.5,)), "*of 1 on rank 0, 1 on rank 1"),
        (((3.0, 4.0), (1.0, 4.0)), ""),
        (
            ((3.0, 7.0), (1.0, 4.0)),
            "*the mean of term 1, neither the mean nor the sum of term 2",
        ),
    ],
)
def test_terms_of_the_loss_that_do_not_scale_alike(
    terms: tuple[tuple[float, ...], ...], words: str
) -> None:
    one = update(THIRD, taken(0, 1, 2, 3), loss_terms=[[2.0, 4.0]])
    many = two(RANDOM.normal(size=(6, 4)))
    for rank, own in zip(many, terms, strict=True):
        rank.loss_terms = [list(own)]
    cause = found(many, one)[1]
    assert cause.code == ("LS211" if words.strip("*") == words != "" else "LS210")
    assert any(words.strip("*") in text for text in cause.evidence)


def test_a_term_of_the_loss_that_is_zero_but_for_rounding_is_both_mean_and_sum() -> None:
    one = update(THIRD, taken(0, 1, 2, 3), loss_terms=[[1e-17, 4.0]])
    many = two(RANDOM.normal(size=(6, 4)))
    for rank, own in zip(many, ((3e-17, 5.0), (-2e-17, 3.0)), strict=True):
        rank.loss_terms = [list(own)]
    assert found(many, one)[1].code == "LS210"


def test_gradients_that_are_nearly_equal_are_no_multiple() -> None:
    cause = found(two(WHOLE * (1 + 1e-8)))[1]
    assert cause.code == "LS210"
    assert cause.evidence == ("they are those of one process but for rounding, as in float32",)


def test_where_a_ratio_says_two_things_both_are_told() -> None:
    one = update(WHOLE, taken(0, 1), taken(2, 3), losses=(1.0, 1.0))
    cause = found(two(0.5 * WHOLE), one)[1]
    assert cause.code == "LS203"
    assert cause.evidence[-1] == "it may be LS202 as well; another --nproc tells"


@pytest.mark.parametrize(
    ("own", "code"),
    [
        ([("a", "b"), ("a", "b")], "LS101"),
        ([("c", "d"), ("e", "f")], "LS110"),
        ([("c",), ("e",)], "LS210"),
    ],
)
def test_batches_of_no_loader_are_known_by_what_the_model_was_called_with(
    own: list[tuple[str, ...]], code: str
) -> None:
    def called(gradient: np.ndarray, *contents: str, shape: str = "f") -> RankUpdate:
        batch = taken(ids=(), contents=contents, shape=shape)
        return update(gradient, batch, model_inputs=[batch])

    one, gradient = called(WHOLE, "a", "b"), RANDOM.normal(size=(6, 4))
    cause = found([called(gradient, *contents) for contents in own], one)[1]
    assert cause.code == code
    if code == "LS110":  # pieces of the same batch are no larger one
        pieces = [called(gradient, *contents, shape="half") for contents in own]
        assert found(pieces, one)[1].code == "LS210"


@pytest.mark.parametrize(
    ("own", "code"),
    [
        ([("a", "b", "c"), ("d", "e", "f")], "LS110"),
        ([("a", "b", "c"), ("a", "b", "c")], "LS101"),
        ([("a", "b"), ("b", "c")], "LS101"),
        ([("a",), ("b",)], "LS102"),
        ([("a", "b"), ("d",)], "LS111"),
        ([("a", "b"), ("c",)], "LS210"),
    ],
)
def test_other_inputs_of_models_are_a_cause_though_the_samples_are_not_known(
    own: list[tuple[str, ...]], code: str
) -> None:
    """Worker processes read a stream, so that what they drew is not known."""

    def called(gradient: np.ndarray, *contents: str) -> RankUpdate:
        loaded = taken(ids=None, contents=(), shape="", workers=True)
        seen = taken(ids=(), contents=contents)
        rows = np.array([[ord(letter), ord(letter) ** 2] for letter in contents], dtype=float)
        beside = np.zeros((len(contents), 0))
        forward = Forward(model="Net, forward pass 1", shape="f", inputs=rows, other_inputs=beside)
        return update(gradient, loaded, model_inputs=[seen], forwards=[forward])

    one, gradient = called(WHOLE, "a", "b", "c"), RANDOM.normal(size=(6, 4))
    divergence, cause = found([called(gradient, *contents) for contents in own], one)
    assert divergence.kind == "gradients"
    assert cause.code == code
    same = len({*own[0], *own[1]} & {*"abc"})
    numbers = f"3 inputs, on 2 processes with {len(own[0] + own[1])}; {same} are the same"
    assert f"the models were called with {numbers}" in cause.evidence


def test_in_float32_a_part_that_one_process_does_not_have_weighs_nothing() -> None:
    noise = 1e-5 * RANDOM.normal(size=(6, 4))
    one = update(ONE + noise, taken(ids=None, contents=(), shape=""))
    many = []
    for rank in two(WHOLE):
        rank.batches = one.batches
        many.append(rank)
    (divergence,) = find_divergences([Update([one])], [Update(many)], FLOAT32)
    cause = cause_of(divergence)
    assert cause.code == "LS110"
    assert cause.evidence[0] == "the gradient of one process is that of part 1 of 2 alone"


def test_in_float32_a_ratio_of_some_gradients_is_known_in_spite_of_rounding() -> None:
    one = update(WHOLE, taken(0, 1), gradients={"w": WHOLE, "b": ONE})
    gradients = {"w": 2 * WHOLE * (1 + 1e-6 * RANDOM.normal(size=(6, 4))), "b": OTHER}
    many = [update(WHOLE, taken(sample), gradients=gradients) for sample in (0, 1)]
    (divergence,) = find_divergences([Update([one])], [Update(many)], FLOAT32)
    assert cause_of(divergence).evidence == ("2 times: w", "in no constant ratio: b")


def test_without_the_ranks_own_gradients_nothing_is_guessed() -> None:
    many = [
        update(RANDOM.normal(size=(6, 4)), taken(0, 1, 2, 3), local_gradients=()) for _ in range(1)
    ]
    assert found(many)[1].code == "LS210"


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"unknown_to_ddp": ("w",)}, "LS303"),
        ({"line_that_bypassed_wrapper": "train.py:5"}, "LS302"),
        ({"calls": (ScriptCall(name="all_reduce", line="", gradient_of="w"),)}, "LS406"),
        ({"unwrapped_parameters": ("w",), "unwrapped_line": "train.py:6: model(x)"}, "LS311"),
        ({}, "LS301"),
    ],
)
def test_ranks_with_gradients_of_their_own(values: dict[str, Any], code: str) -> None:
    many = [
        update(ONE, taken(0, 1), local_gradients=({"w": ONE},), **values),
        update(OTHER, taken(2, 3), local_gradients=({"w": OTHER},), **values),
    ]
    assert found(many)[1].code == code
    if "line_that_bypassed_wrapper" in values:  # the script went both ways
        assert found([replace(rank, wrapped_passes=1) for rank in many])[1].code == "LS301"


@pytest.mark.parametrize("earlier", [THIRD, 0 * THIRD])
def test_what_the_last_backward_pass_left_is_each_rank_s_own(earlier: np.ndarray) -> None:
    """As where `no_sync` is around the last of several."""
    many = [
        update(
            earlier + part,
            taken(n, n + 2),
            losses=(1.0, 1.0),
            local_gradients=[{"w": 2 * part}, {"w": part}],
        )
        for n, part in enumerate((ONE, OTHER))
    ]
    cause = found(many)[1]
    assert cause.code == "LS301"
    assert "the gradients of the last 1 of 2 backward passes were not averaged" in cause.evidence


def test_ranks_whose_gradients_are_not_what_their_backward_passes_left() -> None:
    reduced = ScriptCall(name="all_reduce", line="train.py:9", gradient_of="w")
    many = [
        update(
            factor * WHOLE,
            taken(n, n + 2),
            local_gradients=({"w": part},),
            unwrapped_parameters=("w",),
            calls=[reduced],
        )
        for n, (factor, part) in enumerate([(1.0, ONE), (1.2, OTHER)])
    ]
    cause = found(many)[1]
    assert cause.code == "LS304"
    assert cause.evidence[-2:] == (
        "they are those of rank 0, 1.2 times on rank 1", "gradients were reduced: train.py:9",
    )  # fmt: skip
    many[1] = replace(many[1], unclipped={"w": THIRD}, gradients={"w": THIRD})  # noise, say
    assert found(many)[1].code == "LS210"


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([(0, 1, 2, 3), (0, 1, 2, 3)], "LS101"),
        ([(0, 1), (1, 2)], "LS101"),
        ([(0, 1), (2,)], "LS102"),
        ([(0, 1), (4, 5)], "LS109"),
        ([(0, 1, 2, 3), (4, 5, 6, 7)], "LS110"),
    ],
)
def test_other_samples(parts: list[tuple[int, ...]], code: str) -> None:
    many = [update(WHOLE, taken(*ids)) for ids in parts]
    divergence, cause = found(many)
    assert (divergence.kind, cause.code) == ("samples", code)


def test_samples_that_are_known_by_their_content_are_told_by_their_index() -> None:
    cause = found([update(WHOLE, taken(0, 1)), update(WHOLE, taken(2))])[1]
    assert cause.evidence[1] == "left out: 3"
    cause = found([update(WHOLE, taken(0, 1)), update(WHOLE, taken(1, 2))])[1]
    assert cause.evidence[1].endswith("by several ranks: 1")


def test_the_order_within_the_global_batch_does_not_matter() -> None:
    many = [update(WHOLE, taken(3, 1)), update(WHOLE, taken(0, 2))]
    assert parting([[ALONE]], [many]) is None


def test_a_stream_that_is_the_same_on_all_ranks() -> None:
    for iterable, code in ((True, "LS108"), (False, "LS101")):
        batch = taken(0, 1, ids=None, iterable=iterable)
        one = update(WHOLE, taken(0, 1, ids=None))
        assert found([update(WHOLE, batch), update(WHOLE, batch)], one)[1].code == code


@pytest.mark.parametrize(
    ("rows_of_ranks", "codes"),
    [([(0, 1), (2, 3)], []), ([(0, 1), (1, 2)], ["LS101"]), ([(0, 1), ()], ["LS101"])],
)
def test_ranks_may_compute_the_same_inputs_and_train_rows_of_their_own(
    rows_of_ranks: list[tuple[int, ...]], codes: list[str]
) -> None:
    ranks = []
    for trained_rows in rows_of_ranks:
        gradients = np.zeros((4, 2))
        gradients[list(trained_rows)] = 1.0
        forward = Forward(
            model="GraphNet, forward pass 1",
            shape="nodes",
            inputs=np.ones((4, 2)),
            other_inputs=np.zeros((0, 2)),
            output_gradients=gradients,
        )
        ranks.append(update(WHOLE, taken(ids=(), contents=("a", "b")), forwards=[forward]))

    findings = findings_without_reference([Update(ranks)], FLOAT64)
    assert [finding.cause.code for finding in findings] == codes


@pytest.mark.parametrize(
    ("contents", "streams", "code"),
    [
        (("content 0", "content 1"), ("", ""), "LS105"),
        (("new", "newer"), ("", ""), "LS104"),
        (("new", "newer"), ("x", "x"), "LS106"),
        (("new", "newer"), ("x", "y"), "LS107"),
    ],
)
def test_other_content(contents: tuple[str, str], streams: tuple[str, str], code: str) -> None:
    many = [
        update(WHOLE, taken(0, 1, random_draws=drawn(streams[0]))),
        update(WHOLE, taken(2, 3, contents=contents, random_draws=drawn(streams[1]))),
    ]
    divergence, cause = found(many)
    assert (divergence.kind, cause.code) == ("contents", code)


def drawn(numbers: str, of: str = "train.py:2") -> dict[str, str]:
    return {of: numbers} if numbers else {}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"workers": True}, "worker processes read them, whose draws are not seen"),
        ({"random_draws": "numpy's global stream"}, "to read them: numpy's global stream"),
        ({}, "no draw from torch or a global stream was seen; what is left is a generator"),
    ],
)
def test_draws_are_told_as_they_were_seen(values: dict[str, Any], words: str) -> None:
    one = update(WHOLE, taken(0, 1, 2, 3, contents=("a", "b", "c", "d")))
    ways = [
        {
            **values,
            **(
                {"random_draws": drawn(s, values["random_draws"])}
                if "random_draws" in values
                else {}
            ),
        }
        for s in "xy"
    ]
    many = [
        update(WHOLE, taken(0, 1, contents=("e", "f"), **ways[0])),
        update(WHOLE, taken(2, 3, contents=("g", "h"), **ways[1])),
    ]
    cause = found(many, one)[1]
    assert cause.code == "LS107"
    assert words in cause.evidence[1]


def test_datasets_that_are_parts_of_one_are_known_by_their_content() -> None:
    many = [
        update(WHOLE, taken(0, 1)),
        update(WHOLE, taken(0, 1, contents=("content 2", "content 3"))),
    ]
    assert parting([[ALONE]], [many]) is None


def test_content_is_compared_only_where_the_samples_have_one_shape() -> None:
    many = [
        update(WHOLE, taken(0, 1, contents=("padded", "padded too"), shape="longer")),
        update(WHOLE, taken(2, 3)),
    ]
    assert parting([[ALONE]], [many]) is None


def test_what_comes_after_equal_gradients() -> None:
    assert found(two(WHOLE, learning_rates=(0.2,)))[1].code == "LS402"
    assert found(two(WHOLE, losses=(2.0,)))[1].code == "LS501"
    assert found(two(WHOLE, parameters={"w": WHOLE}))[1].code == "LS403"
    mean = {"bn.running_mean": ONE}
    assert found(two(WHOLE, buffers=mean, local_norm_layers=("bn",)))[1].code == "LS306"
    assert found(two(WHOLE, buffers=mean, losses=(0.5, 0.5)))[1].code == "LS307"
    assert found(two(WHOLE, buffers=mean))[1].code == "LS309"
    assert found(two(WHOLE, buffers={"centre": ONE}))[1].code == "LS309"
    parted = [*two(WHOLE)[:1], *two(WHOLE, parameters={"w": ONE})[1:]]
    assert found(parted)[1].code == "LS304"


def test_what_comes_before_the_first_step() -> None:
    divergence, cause = found(two(WHOLE, initial={"w": ONE}))
    assert (divergence.kind, cause.code) == ("initial", "LS305")
    divergence, cause = found([*two(WHOLE)[:1], *two(WHOLE, parameter_sums={"w": np.zeros(2)})[1:]])
    assert (divergence.kind, cause.code) == ("replicas", "LS304")
    assert cause.evidence[0] == "before step 1 rank 1 held different parameters than rank 0"


@pytest.mark.parametrize(
    ("turns", "code", "words"),
    [
        ((1, 2), "LS401", "steps of the scheduler until then: 1 on one process, 2 on 2"),
        ((1, 1), "LS402", "steps of the scheduler until then: 1 on one process, 1 on 2"),
        ((0, 0), "LS402", "no scheduler stepped"),
    ],
)
def test_a_rate_that_parts_later_is_the_schedules_if_there_is_one(
    turns: tuple[int, int], code: str, words: str
) -> None:
    calls = [[ScriptCall(name="schedule", line="train.py:8: s.step()")] * n for n in turns]
    later = update(WHOLE, taken(4), step=1, calls=calls[0])
    faster = update(WHOLE, taken(4), step=1, learning_rates=(0.05,), calls=calls[1])
    divergence = parting([[ALONE], [later]], [two(WHOLE), [faster, replace(faster, batches=[])]])
    assert divergence is not None
    assert divergence.update_index == 1
    cause = cause_of(divergence)
    assert cause.code == code
    assert words in cause.evidence[1]


def test_a_rate_names_the_line_and_the_rank() -> None:
    one = update(WHOLE, taken(0, 1, 2, 3), learning_rates=(0.3, 0.1))
    many = two(
        WHOLE,
        learning_rates=(0.3, 0.2),
        learning_rate_lines=("train.py:2", "train.py:3: g['lr'] = 0.2"),
    )
    cause = found(many, one)[1]
    assert cause.evidence[-1] == "it was set by train.py:3: g['lr'] = 0.2"
    many = two(WHOLE)
    many[1].learning_rates = (0.2,)
    assert found(many)[1].evidence[0] == "0.1 on one process, 0.1 on rank 0, 0.2 on rank 1"
    many = two(WHOLE)
    step = ScriptCall(name="schedule", line="train.py:8: s.step()")
    many[1].learning_rates, many[0].calls = (0.2,), [step]
    text = "steps of the scheduler until then: 0 on one process, 1 on rank 0, 0 on rank 1"
    assert found(many)[1].evidence[1] == text


def verdict(
    reference: Sequence[Sequence[RankUpdate]], other: Sequence[Sequence[RankUpdate]]
) -> Verdict:
    way = RunConfig(name="2 processes", nproc=2, script=Script(path="train.py"))
    runs = [RunRecord(way, list(map(Update, updates))) for updates in (reference, other)]
    return judge(*runs)


def codes(*runs: Sequence[Sequence[RankUpdate]]) -> list[str]:
    return [found.cause.code for found in verdict(*runs).findings]


def test_all_differences_are_listed_but_not_what_follows_from_them() -> None:
    doubled = two(2 * WHOLE, learning_rates=(0.2,), buffers={"centre": ONE})
    assert codes([[ALONE]], [doubled]) == ["LS201", "LS402"]
    other = [update(WHOLE, taken(0, 1)), update(ONE, taken(4, 5), learning_rates=(0.2,))]
    assert codes([[ALONE]], [other])[:2] == ["LS109", "LS402"]
    # Parameters have parted; samples and rates have not.
    later = update(ONE, taken(4, 5), step=1)
    after = [update(OTHER, taken(4), step=1), update(OTHER, taken(), step=1)]
    assert codes([[ALONE], [later]], [two(2 * WHOLE), after]) == ["LS201", "LS102"]


def test_steps_are_counted_from_one() -> None:
    found = verdict([[ALONE]], [two(2 * WHOLE)])
    assert found.lines()[0] == "DIFFERENT  2 processes, first in gradients (1 of 1), step 1"
    assert found.as_json()["findings"][0]["step"] == 1


def test_what_needs_no_reference_is_said_beside_other_samples() -> None:
    many = [
        update(part, taken(n), unwrapped_parameters=("w",), local_gradients=[{"w": part}])
        for n, part in ((8, ONE), (9, OTHER))
    ]
    found = verdict([[ALONE]], [many])
    assert [each.cause.code for each in found.findings] == ["LS109", "LS311"]
    assert any(line == "  and in  gradients (1 of 1), step 1" for line in found.lines())
    held = [
        update(WHOLE, taken(8), parameter_sums={"w": np.ones(2)}),
        update(WHOLE, taken(9), parameter_sums={"w": np.zeros(2)}),
    ]
    assert "LS304" in codes([[ALONE]], [held])


def test_replicas_that_part_by_a_step_or_after_it() -> None:
    later = [update(WHOLE, taken(4), step=1, parameter_sums={"w": np.full(2, n)}) for n in range(2)]
    for parameters, words in ((WHOLE, "itself left all ranks with the same"), (ONE, "has left")):
        first = two(WHOLE)
        first[1].parameters = {"w": parameters}
        first[0].parameters = {"w": WHOLE}
        run = list(map(Update, (first, later)))
        case = Divergence(run, run, FLOAT64, 1, "replicas", ("w",), 1)
        assert cause_of(case).evidence[1].startswith(f"the last step {words}")


def test_an_optimizer_that_was_not_prepared_is_said_where_the_numbers_are_equal() -> None:
    assert codes([[ALONE]], [two(WHOLE, optimizer_unprepared=True)]) == ["LS407"]
    assert verdict([[ALONE]], [two(WHOLE, optimizer_unprepared=True)]).word == "EQUAL"


def test_a_wrapper_before_names_does_not_matter() -> None:
    def named(prefix: str, *, swap: bool = False) -> RankUpdate:
        first, second = ("1.0", "0.0") if swap else ("0.0", "1.0")
        values = {f"{prefix}{first}.w": ONE, f"{prefix}{second}.w": OTHER}
        whole = {**values, f"{prefix}bias": np.zeros(6), f"{prefix}scale": np.zeros(6)}
        own = {n: a for n, a in whole.items() if a.ndim == 2}
        arrays = dict.fromkeys(("initial", "parameters", "gradients", "unclipped"), whole)
        return update(
            WHOLE, taken(0, 1, 2, 3), **{**arrays, "parameter_sums": {}, "local_gradients": [own]}
        )

    wrapped = named("Module/net.")
    assert codes([[named("Net/")]], [[wrapped]]) == []
    assert codes([[named("Net/")]], [[named("Module/net.", swap=True)]])[0] == "LS305"
    # What is there on one side only is no wrapper's doing.
    more = replace(wrapped, initial={**wrapped.initial, "Module/other": np.ones(3)})
    assert codes([[named("Net/")]], [[more]])[0] == "LS305"


def test_rounding_that_grows_ends_the_comparison() -> None:
    def run(*apart: float) -> list[list[RankUpdate]]:
        each = enumerate(apart)
        return [[update(WHOLE * (1 + d), taken(n), parameters={}, step=n)] for n, d in each]

    grown = verdict(run(0, 0, 0, 0), run(1e-13, 1e-11, 1e-9, 1e-7))
    assert (grown.word, len(grown.reference.updates)) == ("EQUAL", 3)
    assert "rounding has grown" in grown.lines()[1]
    sudden = verdict(run(0, 0, 0, 0), run(1e-13, 1e-12, 1e-7, 1e-3))
    assert sudden.word == "DIFFERENT"


def test_inputs_that_all_ranks_share_are_said_where_the_numbers_are_equal() -> None:
    same = taken(ids=(), contents=("a", "b"))
    found = verdict([[update(WHOLE, same)]], [[update(WHOLE, same), update(WHOLE, same)]])
    assert found.word == "EQUAL"
    assert found.lines()[1] == f"  also    LS101: {ENTRIES['LS101'].title}"
    # A constant is no batch.
    same = taken(ids=(), contents=("a",) * 4)
    assert codes([[update(WHOLE, same)]], [[update(WHOLE, same), update(WHOLE, same)]]) == []


def test_a_gradient_that_a_gather_loses_on_one_process_too_is_said() -> None:
    line = "train.py:7: dist.all_gather(x)"
    one, many = update(WHOLE, taken(0, 1, 2, 3), gather_line=line), two(WHOLE, gather_line=line)
    assert codes([[one]], [many]) == ["LS207"]
    assert verdict([[one]], [many]).word == "EQUAL"
    # Who puts the own part back, with its gradient, has lost none on one process.
    assert codes([[ALONE]], [many]) == []


def test_an_order_that_repeats_is_said_where_the_numbers_are_equal() -> None:
    order = (4, 1, 7, 0, 3, 2)
    for again, expected in ((order, ["LS103"]), ((1, 4, 7, 0, 3, 2), [])):
        run = [[update(WHOLE, taken(*order))], [update(WHOLE, taken(*again, epoch=1), step=1)]]
        assert codes(run, run) == expected
    ascending = [[update(WHOLE, taken(*range(6), epoch=n), step=n)] for n in range(2)]
    assert codes(ascending, ascending) == []


def test_of_a_second_pass_with_the_same_order_is_spoken_only_where_there_may_be_one() -> None:
    untold = [Update([update(WHOLE, taken(4, 1, 7, 0, 3, 2, order_fixed=True))])]
    assert findings_without_reference(untold, FLOAT64, was_stopped=False) == []
    (finding,) = findings_without_reference(untold, FLOAT64, was_stopped=True)
    assert finding.lines("also")[:2] == [
        "  also    LS103: without set_epoch a second pass would have the same order",
        "  seen    set_epoch was not called before the DistributedSampler's first pass, and no "
        "second was begun",
    ]


def test_random_numbers_that_one_process_has_drawn_too_are_no_cause() -> None:
    """Each sample has a draw of its own: the last one of a rank is another one's on one process."""
    one = replace(update(THIRD, taken(0, 1, 2, 3)), loss_draws=[("train.py:3", "d")])
    many = two(RANDOM.normal(size=(6, 4)))
    for rank, last, drawn in zip(many, "bd", ("ab", "cd"), strict=True):
        rank.loss_draws, rank.drawn_digests = [("train.py:3", last)], frozenset(drawn)
    one.drawn_digests = frozenset("abcd")
    assert found(many, one)[1].code == "LS210"
    many[1].loss_draws, many[1].drawn_digests = [("train.py:3", "b")], frozenset("ab")
    assert found(many, one)[1].code == "LS106"
    many[1].loss_draws, many[1].drawn_digests = [("train.py:3", "x")], frozenset("yx")
    assert found(many, one)[1].code == "LS308"


def test_fewer_steps() -> None:
    divergence = parting([[ALONE], [ALONE]], [two(WHOLE)])
    assert divergence is not None
    cause = cause_of(divergence)
    assert cause.code == "LS405"
    assert cause.evidence == ("one process took 2 steps, 2 processes took 1",)


def test_an_optimizer_that_some_ranks_alone_step_with() -> None:
    """Rank 0 pretrains: its first step is not that of the others, and is not compared with it."""
    ranks = [
        update(WHOLE, taken(0, 1), optimizer_class="Adam", learning_rates=(0.01,)),
        update(THIRD, taken(2, 3), optimizer_class="SGD"),
    ]
    found = verdict([[replace(ALONE, optimizer_class="Adam")]], [ranks]).findings
    assert [each.cause.code for each in found] == ["LS405"]
    assert found[0].cause.evidence[0].endswith("Adam on rank 0, SGD on rank 1")


def test_ranks_keep_their_numbers_where_another_rank_has_not_stepped() -> None:
    ranks = [
        update(WHOLE, taken(0, 1), stepped=False),
        update(WHOLE, taken(0, 1), optimizer_class="Adam", learning_rates=(0.01,)),
        update(THIRD, taken(2, 3), optimizer_class="SGD"),
    ]
    found = verdict([[replace(ALONE, optimizer_class="Adam")]], [ranks]).findings
    assert found[0].cause.evidence[0].endswith("Adam on rank 1, SGD on rank 2")


def test_shards_that_each_rank_has_multiplied_by_a_number_of_its_own() -> None:
    factors = [{"local_gradients": (), "gradient_factor": factor} for factor in (0.2, 0.4)]
    many = [replace(rank, **own) for rank, own in zip(two(THIRD), factors, strict=True)]
    cause = found(many)[1]
    assert cause.code == "LS404"
    assert "0.2 on rank 0, 0.4 on rank 1" in cause.evidence[0]


def test_a_factor_that_came_after_the_backward_pass_is_none_of_the_loss_s() -> None:
    one = replace(ALONE, gradient_factor=0.5)
    assert found(two(1.4 * WHOLE, gradient_factor=0.7), one)[1].code == "LS403"
    assert found(two(1.4 * WHOLE, gradient_factor=0.5), one)[1].code == "LS209"
    assert found(two(1.4 * WHOLE), one)[1].code == "LS209"


def test_several_replicas_of_one_process_are_compared_as_one() -> None:
    replicas = [replace(ALONE, batches=[taken(0, 1)]), replace(ALONE, batches=[taken(2, 3)])]
    clipped_replicas = [replace(replica, gradient_factor=0.5) for replica in replicas]
    parted = parting([clipped_replicas], [two(1.4 * WHOLE, gradient_factor=0.7)])
    assert parted is not None
    assert cause_of(parted).code == "LS403"
    parted = parting([replicas], [two(WHOLE, learning_rates=(0.2,))])
    assert parted is not None
    cause = cause_of(parted)
    assert (cause.code, cause.ratio) == ("LS402", 2.0)
    assert cause.evidence == ("0.1 on one process, 0.2 on 2", "2 times as high")


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"local_passes": [True, False]}, "LS301"),
        ({"local_passes": [True, False], "line_that_bypassed_wrapper": "train.py:5"}, "LS302"),
        ({"local_passes": [False, True]}, "LS304"),
    ],
)
def test_parameters_that_are_changed_between_backward_passes(
    values: dict[str, Any], code: str
) -> None:
    many = two(THIRD, **values)
    moved = [{"w": np.array([1.0, number])} for number in (1.0, 2.0)]
    parted = [replace(r, changed_between_passes=own) for r, own in zip(many, moved, strict=True)]
    assert found(parted)[1].code == code
    same = [replace(rank, changed_between_passes=moved[0]) for rank in many]
    assert found(same)[1].code == "LS210"


@pytest.mark.parametrize(("share", "code"), [(0.5, "LS313"), (0.6, "LS311")])
def test_parameters_that_are_averaged_instead_of_gradients(share: float, code: str) -> None:
    many = [
        replace(
            rank,
            gradients={"w": own},
            unclipped={"w": own},
            unwrapped_parameters=("w",),
            parameters={"w": own},
        )
        for rank, own in zip(two(WHOLE), (ONE, OTHER), strict=True)
    ]
    mean = share * ONE + (1 - share) * OTHER
    later = [replace(rank, rewritten_parameters={"w": mean}, step=1) for rank in many]
    case = parting([[ALONE], [ALONE]], [many, later])
    assert case is not None
    assert cause_of(case).code == code


@pytest.mark.parametrize(("passes", "code"), [(1, "LS102"), (3, "LS405")])
def test_steps_that_are_skipped_on_some_processes(passes: int, code: str) -> None:
    one = update(WHOLE, taken(0, 1, 2, 3, 4, 5), losses=(1.0,) * passes)
    later = [replace(ALONE, losses=(1.0,))], [replace(rank, losses=(1.0,)) for rank in two(WHOLE)]
    case = parting([[one], later[0]], [two(WHOLE), later[1]])
    assert case is not None
    assert cause_of(case).code == code


def test_backward_passes_are_told_by_the_rank_that_made_them() -> None:
    """Rank 0's losses do not count, as on the first stage of a pipeline."""
    one = update(WHOLE, taken(0, 1, 2, 3, 4, 5), losses=(1.0,) * 3)
    idle = update(WHOLE, contributes=False)
    later = [replace(idle), *(replace(rank, losses=(1.0,)) for rank in two(WHOLE))]
    case = parting([[one], [replace(ALONE, losses=(1.0,))]], [[idle, *two(WHOLE)], later])
    assert case is not None
    assert "1 on rank 1, 1 on rank 2" in " ".join(cause_of(case).evidence)


def test_ranks_whose_gradients_do_not_count_are_not_told_to_lack_some() -> None:
    """Rank 0 has no gradients that count; of the others, rank 2 does not reach one parameter."""
    both = {"w": ONE, "v": OTHER}
    one = update(
        ONE,
        taken(0, 1),
        local_gradients=(both,),
        gradients=both,
        unclipped=both,
    )
    without = {"w": ONE, "v": OTHER / 2}
    values = {"gradients": without, "unclipped": without}
    many = [
        update(ONE, contributes=False, **values),
        update(ONE, taken(0), local_gradients=(both,), **values),
        update(ONE, taken(1), local_gradients=({"w": ONE},), **values),
    ]
    cause = unused_parameters(found(many, one)[0], both, without)
    assert cause is not None
    assert cause.evidence[0].startswith("the backward passes of rank 2 left no gradient")
