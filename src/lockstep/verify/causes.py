"""The likely cause of a divergence, from numbers and calls alone, and the verdict on a run.

Each pattern is a code of the catalogue, with what was seen in words. Exact patterns go before
guesses: a gradient that is a whole multiple of the reference's says what it is by itself. A rule's
docstring says what it goes by, and what else would look the same; without its evidence no cause is
named (LS210), only what was seen.

The gradient of several ranks is a sum of what their backward passes left, each times a weight. If
the reference's gradient is such a sum too, with other weights, then only the weighting is wrong,
and the weights say what it should have been.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from lockstep.verify import replicas, samples
from lockstep.verify.algebra import constant_ratio, flat, mean_of, near, norm, proportional, weights
from lockstep.verify.catalogue import Cause, of_runs, plain, shown
from lockstep.verify.compare import Divergence, same_samples
from lockstep.verify.line_findings import describe_writes, new_branches
from lockstep.verify.tolerance import Array, scale_of
from lockstep.verify.training_record import Update
from lockstep.wording import format_ranks, join_first


def _of_initial(case: Divergence) -> Cause:
    apart = case.actual.ranks_that_differ("initial", case.tolerance)
    if stale := _stale(case):
        return stale
    seen = "all ranks began with the same values, which are not those of one process"
    if apart:
        seen = f"before the first step {replicas.ranks_of(apart)} had other values than rank 0"
    runs = [rank.seeds for rank in (*case.expected, *case.actual)]
    other = [line for line in runs[0] if len({run.get(line) for run in runs}) > 1]
    told = [
        f"torch was seeded with {of_runs([r.get(n, 'nothing') for r in runs])}" for n in other[:1]
    ]
    told += [f"that is by {line}" for line in other[:1]]
    return Cause("LS305", (seen, *told, *describe_writes(case, tuple(apart))))


def _stale(case: Divergence) -> Cause | None:
    """LS314: an optimizer holds parameters that no model has, and nothing brings them to a model.

    It goes by an optimizer all of whose parameters are of a model on one process, and by models
    whose parameters stay as they are. Those of sharded models are not looked at between steps.
    """
    loose = [n for n in case.actual.merged("initial") if n.startswith("/")]
    if not loose or any(name.startswith("/") for name in case.expected.merged("initial")):
        return None
    before, *later = [update.merged("parameter_sums") for update in case.parallel_run]
    models = [name for name in before if not name.startswith("/")]
    moved = any(
        name in held and not np.array_equal(held[name], before[name])
        for held in later
        for name in models
    )
    if moved:
        return None
    kind = case.actual[0].optimizer_class
    seen = f"{len(loose)} parameters that {kind} updates belong to no model that was called"
    before_wrap = "on one process all of its parameters do, so the model has got others since"
    return Cause("LS314", (seen, before_wrap), tuple(loose))


def _of_gradients(case: Divergence) -> Cause:
    """How the model was trained, ranks that differ, a gather, clipping, then the values.

    LS207 goes by a loss that was made of what an all-gather brought without its gradient. A loss
    that is scaled up to make good for that, by a wrong number, would look the same. Of what was
    detached before it was gathered see `_detached`.
    """
    if cause := _of_modes(case):
        return cause
    apart = case.actual.ranks_that_differ("gradients", case.tolerance)
    if apart and (cause := _of_own_step(case)):
        return cause
    if apart:
        return replicas.of_own_gradients(case, tuple(apart))
    if cause := replicas.of_shifted(case) or replicas.of_factors(case):
        return cause
    gathered = case.actual.first("gather_line") or _detached(case)
    if gathered:
        seen = "the loss is made of what an all-gather brought, which carries no gradient"
        return Cause("LS207", (seen, gathered, *patterns(case)))
    expected, found = case.expected.merged(case.kind), case.actual.merged(case.kind)
    if case.kind == "gradients" and (case.expected.clips or case.actual.clips):
        return _of_clipping(case)
    return samples.of_inputs(case) or _of_values(case, expected, found)


def _of_own_step(case: Divergence) -> Cause | None:
    """What an optimizer used that exchanges gradients itself, by what it made of the parameters.

    It goes by a first step on one process that is its gradient times one number, as of SGD; then
    the step of several processes, divided by that number, is the gradient that they used.
    """
    if not case.actual.in_step or case.update_index or case.kind != "gradients":
        return None
    expected = case.expected.merged("gradients")
    moved = []
    for update in (case.expected, case.actual):
        before, after = update.merged("initial"), update.merged("parameters")
        moved.append({n: before[n] - after[n] for n in expected if n in before and n in after})
    one, many = moved
    rate = constant_ratio(expected, one, case.max_error) if one.keys() == expected.keys() else None
    if rate is None or many.keys() != one.keys():
        return None
    used = {name: array / rate for name, array in many.items()}
    ranks = Update(replace(rank, gradients=used, unclipped=used) for rank in case.actual)
    other = [
        *case.parallel_run[: case.update_index],
        ranks,
        *case.parallel_run[case.update_index + 1 :],
    ]
    cause = _of_values(replace(case, parallel_run=other), expected, used)
    by = f"the optimizer exchanges gradients in its step: {case.actual.in_step[0].line}"
    what = "what it used of them is seen by what it made of the parameters"
    return replace(cause, seen=(by, what, *cause.seen))


def _detached(case: Divergence) -> str:
    """The line of an all-gather of what was detached, where the loss should follow it.

    On one process the gradient of a sample follows what models returned for others.
    """
    if case.expected.first("detached_gather_line") or not any(
        rank.loss_compares_samples for rank in case.expected
    ):
        return ""
    return case.actual.first("detached_gather_line")


def _of_modes(case: Divergence) -> Cause | None:
    """LS312: parameters that are trained on some processes only, or in another mode."""
    for what, words in (("frozen", "requires_grad"), ("in_eval_mode", "train() or eval()")):
        alone = set(getattr(case.expected[0], what))
        apart = {
            n: (alone ^ set(getattr(rank, what))) & rank.parameter_sums.keys()
            for n, rank in enumerate(case.actual)
            # A model and its copy that are met later may have come in another order.
            if Counter(plain(getattr(rank, what))) != Counter(plain(alone))
            or case.reference_run[0][0].initial.keys() >= alone | set(getattr(rank, what))
        }
        if names := tuple(sorted(set().union(*apart.values()))):
            ranks = format_ranks(n for n, of_rank in apart.items() if of_rank)
            seen = f"{words} is not that of one process on {ranks}: {shown(plain(names))}"
            return Cause("LS312", (seen,), names)
    expected, found = case.expected.merged(case.kind), case.actual.merged(case.kind)
    unused = tuple(sorted(expected.keys() - found.keys()))
    same_names = Counter(plain(expected)) == Counter(plain(found))
    if case.kind == "gradients" and unused and not same_names:
        seen = f"no optimizer of {case.num_ranks} processes updates {join_first(plain(unused))}"
        return Cause("LS312", (seen, "on one process one does"), unused)
    return None


def _of_values(
    case: Divergence, expected: Mapping[str, Array], found: Mapping[str, Array]
) -> Cause:
    ratio = constant_ratio(expected, found, case.max_error)
    if ratio is not None:
        return _of_ratio(case, ratio)
    pieces = [
        f"clipped after backward pass {call.passes_before} of {len(rank.losses)}: {call.line}"
        for rank in (*case.actual, *case.expected)
        for call in rank.calls
        if call.name == "clip" and call.has_clipped and call.passes_before < len(rank.losses)
    ]
    if pieces:
        return Cause("LS404", (pieces[0], *patterns(case)))
    return (
        _of_changes(case, found)
        or _of_missing(case)
        or _of_weights(case, expected, found)
        or _of_coupling(case)
    )


def _of_missing(case: Divergence) -> Cause | None:
    """LS312: what differs are parameters to which a rank's backward passes do not come."""
    alone = {name for part in case.expected[0].local_gradients for name in part}
    missing = {
        name
        for rank in case.actual
        if rank.contributes and rank.local_gradients
        for name in alone - {name for part in rank.local_gradients for name in part}
    }
    if not missing or not {*case.names} <= missing:
        return None
    ranks = [
        n for n, r in enumerate(case.actual) if missing - {k for p in r.local_gradients for k in p}
    ]
    seen = f"the backward passes of {format_ranks(ranks)} left no gradient of these parameters"
    return Cause("LS312", (seen, "on one process they do, and all others are right"), case.names)


def _of_changes(case: Divergence, found: Mapping[str, Array]) -> Cause | None:
    """What was made of gradients after backward passes that were right.

    It needs backward passes whose gradients are on average those that one process's left. LS213
    goes by a communication hook of the script's; LS404 by ranks that each multiplied theirs by one
    number before the average, and so to one length; LS406 by gradients that were reduced when they
    were no longer what the backward passes had left.
    """
    ranks = [
        replicas.left_by(rank.local_gradients, found) for rank in case.actual if rank.contributes
    ]
    alone = replicas.left_by(case.expected[0].local_gradients, found)
    if case.num_ranks == 1 or not alone or not all(ranks):
        return None
    mean = mean_of(ranks)
    right = constant_ratio(alone, mean, case.max_error)
    if right is None or constant_ratio(mean, found, case.max_error) is not None:
        return None
    seen = "what the backward passes left is, on average over the ranks, that of one process"
    if not near(right, 1):
        seen = f"{seen} times {right:.6g}"
    if hook := case.actual.first("comm_hook_line"):
        text = "what DDP's communication hook made of it is not its mean"
        return Cause("LS213", (seen, text, hook, *patterns(case)))
    used = weights(found, ranks, case.max_error)
    if used is not None and not _all_equal(used, case.max_error):
        text = f"each rank multiplied its own before they were added: {_ratio_text(used)}"
        norms = [norm(flat(own)) * abs(w) for own, w in zip(ranks, used, strict=True)]
        clipped = "to gradients of one length, as clipping does"
        return Cause("LS404", (seen, text, *([clipped] if _all_equal(norms, 1e-5) else [])))
    changed = [call.line for call in case.actual.calls if call.gradient_changed][:1]
    if changed:
        text = f"each rank changed its own before they were averaged: {changed[0]}"
        return Cause("LS406", (seen, text, *patterns(case)))
    return Cause("LS210", (f"{seen}; what was made of it afterwards is not", *patterns(case)))


def _of_clipping(case: Divergence) -> Cause:
    """Gradients that differ after they were clipped.

    LS404 goes by gradients that differed between the ranks when clipping changed them, were the
    same on all when they were used, and would have been right (but for a factor) as their mean; or,
    in `_of_values`, by clipping before the last backward pass of a step that changed something.
    LS403: they were equal before. Whether clipping is all that was done in between is not seen.
    """
    clips = case.actual.clips or case.expected.clips
    lines = [call.line for call in clips][:1]
    expected = case.expected.merged("unclipped")
    if not case.actual.ranks_that_differ("unclipped", case.tolerance):
        seen = "they were equal before they were clipped, and are not after"
        return Cause("LS403", (seen, *lines, *patterns(case)))
    mean = mean_of([rank.unclipped for rank in case.actual])
    ratio = constant_ratio(expected, mean, case.max_error)
    if ratio is None or not any(call.has_clipped for call in (*clips, *case.expected.clips)):
        cause = _of_values(case, expected, mean)
        early = "gradients were clipped while those of the ranks still differed"
        return replace(cause, seen=(*cause.seen, early, *lines))
    early = "clipping changed gradients while those of the ranks still differed"
    times = "" if near(ratio, 1) else f"{_times(ratio, case.num_ranks)} "
    right = f"their mean was {times or 'equal to '}that of one process before"
    return Cause("LS404", (early, right, *lines))


def _of_ratio(case: Divergence, ratio: float) -> Cause:
    """All gradients are off by one number, which says by itself what it is.

    Where the numbers of processes and of backward passes are the same, or their ratio is, it does
    not: all that it may be is said.
    """
    size, one, many = case.num_ranks, case.expected.backward_passes, case.actual.backward_passes
    if near(ratio, 1):
        return Cause("LS210", ("they are those of one process but for rounding, as in float32",))
    seen = f"all gradients are {_times(ratio, size)} those of one process"
    calls = [
        c for c in case.actual.calls if c.name.startswith("all_gather") and not c.carries_gradient
    ]
    more = [f"if the loss is made of it, its backward must add up: {c.line}" for c in calls[:1]]
    known = [("LS201", size, more), ("LS202", 1 / size, more)]
    if one != many and one and many:
        passes = [_passes(case)]
        known = [("LS203", many / one, passes), ("LS204", one / many, passes), *known]
    fitting = [(code, why) for code, value, why in known if near(ratio, value, case.max_error)]
    if fitting:
        code, why = fitting[0]
        also = [f"it may be {other} as well; another --nproc tells" for other, _ in fitting[1:]]
        return Cause(code, (seen, *_loss_line(case), *why, *also), ratio=ratio)
    factors = [rank.gradient_factor for rank in (*case.expected, *case.actual)]
    if near(factors[1] / factors[0] if factors[0] else math.nan, ratio):
        told = f"by {factors[1]:.6g}, on one process by {factors[0]:.6g}"
        after = f"they were right after the last backward pass, and then multiplied {told}"
        return Cause("LS403", (after, *(call.line for call in case.actual.clips[:1])))
    return Cause("LS209", (seen, *_loss_line(case)), ratio=ratio)


def _loss_line(case: Divergence) -> list[str]:
    line = case.actual.first("loss_line")
    return [f"the loss is made by {line}"] if line else []


def _of_weights(
    case: Divergence, expected: Mapping[str, Array], found: Mapping[str, Array]
) -> Cause | None:
    """Whether other weights of what the ranks' backward passes left would be right.

    LS205 and LS206 go by weights that are the counts of something in the batches; with few parts
    and small counts another count may fit by chance. Without such a count LS205 goes by means
    that are added up equally where unequal ones would add up to as much, of a loss that does not
    compare samples.
    """
    parts = [piece for rank in case.actual if rank.contributes for piece in rank.local_gradients]
    right, used = weights(expected, parts, case.max_error), weights(found, parts, case.max_error)
    if right is None:
        return None
    # Of a part that one process does not have, rounding leaves a weight.
    least = max(1e-6, case.max_error) * max(abs(weight) for weight in right)
    if used is None:
        if not _all_equal(right, case.max_error):
            return None
        text = "the sum of what the ranks' backward passes left is right, but for a factor"
        return _unknown(case, f"{text}; what was made of it afterwards is not")
    counted = [weight if abs(weight) > least else 0.0 for weight in right]
    if min(counted) <= 0.0:
        return _of_parts_left_out(case, counted, used)
    words = (
        "the gradient of one process is a sum of the same parts with other weights",
        f"the backward passes of the ranks weigh {_ratio_text(used)}; "
        f"they should weigh {_ratio_text(right)}",
        *_loss_line(case),
    )
    # A part's own scale says nothing where the ranks weigh it unequally themselves.
    relative = [r / u if u else 0.0 for r, u in zip(right, used, strict=True)]
    for key, counts in _counts(case, len(parts)).items():
        if proportional(relative, counts):
            numbers = ", ".join(f"{count:g}" for count in counts)
            code = "LS206" if key == "samples" else "LS205"
            return Cause(code, (*words, f"that is by their {key}: {numbers}"))
    if compares := _compares(case):
        return Cause("LS208", (*words, *compares))
    told = samples.statistics_of(case)
    if _all_equal(used, case.max_error) and near(sum(right), sum(used), 1e-5):
        nothing = "of nothing that was counted in the batches there is as much"
        return Cause("LS205", (*words, *(told or [nothing])))
    if told and not samples.draws_that_may_differ(case):
        return Cause("LS208", (*words, *told))
    return Cause("LS210", words)


def _of_parts_left_out(case: Divergence, right: Sequence[float], used: Sequence[float]) -> Cause:
    """Parts that one process does not train in this step at all, or with another sign.

    LS110 goes by one process whose gradient is that of some of the parts alone, in equal weights:
    it was given so many fewer samples.
    """
    alone = [number for number, weight in enumerate(right) if weight > 0]
    same = [right[number] for number in alone]
    known = True in same_samples(case.expected, case.actual)
    mean = alone and _all_equal(same, 1e-5) and _all_equal(used, 1e-5)
    if known or min(right) < 0 or not mean:
        seen = "the gradient of one process is a sum of the same parts, but not a mean of them"
        return Cause("LS210", (seen, *_loss_line(case), *patterns(case)))
    which = shown([number + 1 for number in alone])
    word = "parts" if len(alone) > 1 else "part"
    text = f"the gradient of one process is that of {word} {which} of {len(right)} alone"
    parts = "a part is what one backward pass of one rank left, in the order of ranks"
    return Cause("LS110", (text, parts, *_loss_line(case)))


def _counts(case: Divergence, parts: int) -> dict[str, list[float]]:
    """What each backward pass may weigh, by what was counted in its batch and its loss."""
    found: dict[str, list[float]] = {}
    batches = case.actual.batches
    if len(batches) == parts:
        # What is plainest first: samples, labels that count, then what is not padding.
        kinds = ("samples", "labels", "non-zero", "ones", "values")
        known = dict.fromkeys(key for batch in batches for key in batch.weights)
        keys = [key for kind in kinds for key in known if key.startswith(kind)]
        found = {key: [batch.weights.get(key, 0.0) for batch in batches] for key in keys}
    losses = [loss for rank in case.actual if rank.contributes for loss in rank.loss_divisors]
    if len(losses) == parts:
        keys = [*dict.fromkeys(key for loss in losses for key in loss)]
        found |= {key: [loss.get(key, 0.0) for loss in losses] for key in keys}
    return found


def _of_coupling(case: Divergence) -> Cause:
    """Gradients in which samples have to do with each other, or with chance.

    LS306 goes by BatchNorm's forward passes, LS307 by their number; LS406 by a hook that changed
    the gradient of a rank before it was averaged; LS211 by the numbers that were added up to the
    loss, which may fit by chance where they are few; LS208 by the second derivative of the loss on
    one process, which is not zero between the outputs of two samples, and by ranks that gathered
    nothing; LS308 by random numbers that the loss is made of. Each is true where it is said, but
    something else may be wrong besides.
    """
    if cause := _of_batchnorm(case):
        return cause
    if line := case.actual.first("gradient_hook_line"):
        seen = "a hook changed gradients of the ranks while they still differed"
        return Cause("LS406", (seen, line, *patterns(case)))
    terms, all_told = _of_terms(case)
    if all_told:
        return Cause("LS211", (*terms, *_loss_line(case), *patterns(case)))
    if cause := samples.of_outputs(case):
        return cause
    if compares := _compares(case):
        told = (*_loss_line(case), *patterns(case), *samples.draws_of(case))
        return Cause("LS208", (*compares, *told))
    if cause := samples.of_loss(case) or samples.of_draws(case, *patterns(case)):
        return replace(cause, seen=(*cause.seen, *_loss_line(case)))
    if cause := samples.of_padding(case):
        return cause
    words = []
    if any(rank.local_gradients for rank in case.actual) and case.num_ranks > 1:
        words.append("no weighting of the ranks' own gradients gives that of one process")
    return _unknown(case, *words, *terms)


def _unknown(case: Divergence, *seen: str) -> Cause:
    """What is seen of the way from batches to gradients, where no rule names a cause.

    Models that were given other samples are a cause all the same: LS110 by so many times as many
    inputs as there are processes, LS101, LS102 and LS111 by inputs that are there too often, or not
    at all.
    """
    words, code = [], "LS210"
    one, many = samples.inputs_of(case.expected), samples.inputs_of(case.actual)
    if one and many:
        same = (sum(one, Counter()) & sum(many, Counter())).total()
        numbers = [str(sum(map(Counter.total, each))) for each in (one, many)]
        shapes = [
            {b.shape for rank in each for b in rank.model_inputs}
            for each in (case.expected, case.actual)
        ]
        if shapes[0] != shapes[1]:
            sorts = (" or ".join(sorted(shape)) for shape in shapes)
            numbers = [f"{n} of {sort}" for n, sort in zip(numbers, sorts, strict=True)]
        text = "the models were called with {} inputs, on {} processes with {}; {} are the same"
        words.append(text.format(numbers[0], case.num_ranks, numbers[1], same))
        if shapes[0] == shapes[1] and samples.inputs_differ(case):
            code = _of_other_inputs(one, many, case.num_ranks)
    words += samples.what_is_equal(case)
    told = (*words, *samples.statistics_of(case), *_loss_line(case), *patterns(case))
    return Cause(code, (*seen, *told))


def _of_other_inputs(one: Sequence[Counter[str]], many: Sequence[Counter[str]], size: int) -> str:
    """The code of other inputs than one process has."""
    expected, found = sum(one, Counter[str]()), sum(many, Counter[str]())
    if not expected - found and set(found) == set(expected):
        return "LS101"
    if found.total() == size * expected.total() and not expected - found:
        return "LS110"
    if not found - expected:
        return "LS102"
    return "LS111"


def _of_terms(case: Divergence) -> tuple[list[str], bool]:
    """Terms of the loss that some ranks lack, or that do not all scale alike, in words.

    And whether that is all: it is not if some term is neither the mean nor the sum of the ranks'.
    """
    one = case.expected[0].loss_terms
    ranks = [rank.loss_terms for rank in case.actual if rank.contributes]
    if case.num_ranks == 1 or any(len(terms) != 1 for terms in (one, *ranks)):
        return [], False
    counts = [len(terms[0]) for terms in ranks]
    if {*counts} != {len(one[0])}:
        of_ranks = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
        text = f"the loss is a sum of {len(one[0])} terms on one process, of {of_ranks}"
        return [text], len({*counts}) > 1
    kinds: dict[str, list[int]] = {"mean": [], "sum": [], "neither the mean nor the sum": []}
    least = case.max_error * max(abs(term) for terms in (one, *ranks) for term in terms[0])
    for number, term in enumerate(one[0]):
        own = [terms[0][number] for terms in ranks]
        fits = [
            near(sum(own) / len(own), term, case.max_error),
            near(sum(own), term, case.max_error),
        ]
        if max(map(abs, (term, *own))) > least:  # what is zero but for rounding is both
            kinds[[*kinds][fits.index(True) if any(fits) else 2]].append(number + 1)
    if sum(map(bool, kinds.values())) < 2:
        return [], False
    said = (f"the {word} of number {shown(numbers)}" for word, numbers in kinds.items() if numbers)
    text = f"of the loss's terms, one process has, over the ranks, {', '.join(said)}"
    return [text.replace("the neither", "neither")], not [*kinds.values()][2]


def _compares(case: Divergence) -> list[str]:
    """Evidence for a loss over each rank's own samples that should be one over all, in words."""
    gathers = any(call.name.startswith("all_gather") for call in case.actual.calls)
    if (
        gathers
        or case.num_ranks == 1
        or not any(rank.loss_compares_samples for rank in case.expected)
    ):
        return []
    seen = "the loss compares samples: the gradient of one follows the output of another"
    return [seen, "no rank gathered those of the others"]


def patterns(case: Divergence) -> tuple[str, ...]:
    """How many gradients are right, and what the others are."""
    expected, found = case.expected.merged(case.kind), case.actual.merged(case.kind)
    wrong = [name for name in case.names if name in expected]
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in (name for name in wrong if name in found):
        one, many = {name: expected[name]}, {name: found[name]}
        ratio = constant_ratio(one, many, case.max_error) if expected[name].size > 1 else None
        kinds["in no constant ratio" if ratio is None else _times(ratio, case.num_ranks)].append(
            name
        )
    right = f"{len(expected) - len(wrong)} of {len(expected)} gradients are right"
    words = [right] if len(wrong) < len(expected) else []
    return (*words, *(f"{key}: {shown(plain(names))}" for key, names in list(kinds.items())[:3]))


def _of_loss(case: Divergence) -> Cause:
    one, many = case.expected.loss, case.actual.loss
    seen = f"{one:.9g} on one process, {many:.9g} on {case.num_ranks}, with equal gradients"
    return Cause("LS501", (seen,))


def _of_rates(case: Divergence) -> Cause:
    """Other learning rates, which is a fact; where they come from goes by the scheduler's steps.

    LS401 needs schedulers that have stepped another number of times. A rate that the script sets
    by hand, a scheduler of another length, and one that follows a metric are all LS402.
    """
    ranks = (*case.expected, *case.actual)
    if len({len(rank.learning_rates) for rank in ranks}) > 1:
        return Cause("LS403", tuple(_of_optimizers(case)) or ("other parameter groups",))
    texts = [", ".join(f"{rate:.6g}" for rate in rank.learning_rates) for rank in ranks]
    runs = [(case.reference_run, 0), *((case.parallel_run, rank) for rank in range(case.num_ranks))]
    turns = [
        sum(c.name == "schedule" for u in run[: case.update_index + 1] for c in u[rank].calls)
        for run, rank in runs
    ]
    apart = len({*texts[1:]}) > 1 or len({*turns[1:]}) > 1
    places = [
        "one process",
        *([f"rank {n}" for n in range(case.num_ranks)] if apart else [case.num_ranks]),
    ]

    def told(values: Sequence[object]) -> str:
        pairs = zip(values, places, strict=False)
        return ", ".join(f"{value} on {place}" for value, place in pairs)

    lines = [
        line
        for rank in (*case.actual, *case.expected)
        for other in ranks
        for rate, wrong, line in zip(
            rank.learning_rates, other.learning_rates, rank.learning_rate_lines, strict=False
        )
        if rate != wrong and line
    ]
    where = [f"it was set by {line}" for line in dict.fromkeys(lines)][:2]
    followed = [
        [c for u in run[: case.update_index + 1] for c in u[rank].calls if c.value is not None][-1:]
        for run, rank in runs
    ]
    values = [f"{call.value:.6g}" for last in followed for call in last]
    if all(followed) and len({*values}) > 1:
        where.append(f"ReduceLROnPlateau was given {of_runs(values)}: {followed[-1][0].line}")
    one, many = ranks[0].learning_rates, ranks[1].learning_rates
    ratio = many[0] / one[0] if one and many and one[0] else math.nan
    how = "no scheduler stepped"
    if any(turns):
        how = f"steps of the scheduler until then: {told(turns)}"
    elif case.update_index == 0 and not apart:
        size = case.num_ranks
        kinds = {size: f"{size} times", math.sqrt(size): f"the square root of {size} times"}
        word = next((w for c, w in kinds.items() if near(ratio, c)), f"{ratio:.6g} times")
        how = f"{word} as high"
    code = "LS401" if len({*turns[1:]}) == 1 and turns[0] != turns[1] else "LS402"
    return Cause(code, (told(texts), how, *where), ratio=ratio)


def _of_parameters(case: Divergence) -> Cause:
    """LS403 goes by the optimizer's options and by what it kept, LS304 by ranks that differ."""
    apart = case.actual.ranks_that_differ("parameters", case.tolerance)
    seen = "gradients and learning rates are equal, and the parameters after the step are not"
    if others := _of_optimizers(case):
        return Cause("LS403", (seen, *others))
    if apart:
        than = f"rank 0 has others than {replicas.ranks_of(apart)}"
        return Cause("LS304", (seen, than), tuple(apart))
    return Cause("LS403", (seen,))


def _of_optimizers(case: Divergence) -> list[str]:
    """Options of parameter groups, and what the optimizer kept, that are not alike, in words."""
    ranks = (*case.expected, *(rank for rank in case.actual if rank.stepped))
    words = []
    if len({len(rank.group_options) for rank in ranks}) > 1:
        counts = of_runs([len(rank.group_options) for rank in ranks])
        words.append(f"parameter groups of the optimizer: {counts}")
    for number, groups in enumerate(zip(*(rank.group_options for rank in ranks), strict=False), 1):
        for key in dict.fromkeys(key for group in groups for key in group):
            values = [group.get(key) for group in groups]
            if any(value != values[0] for value in values):
                what = "number of parameters" if key == "parameters" else key
                words.append(f"{what} of parameter group {number}: {of_runs(values)}")
    first, held = case.expected.merged("optimizer_state"), "what the optimizer kept before the step"
    for number, rank in enumerate(case.actual):
        keys = first.keys() | rank.optimizer_state.keys()
        scale = scale_of(first)
        whole = [n for n in keys if n not in first or n not in rank.optimizer_state]
        whole += [
            n
            for n in keys - {*whole}
            if case.tolerance.differ(first[n], rank.optimizer_state[n], scale)
        ]
        if whole and not words:
            of = f"is not that of one process on rank {number}"
            words.append(f"{held} {of}: {shown(sorted(plain(whole)))}")
    return words


def _of_kept(case: Divergence) -> Cause:
    """LS309 goes by parameters that are frozen; what changes others between steps is not seen."""
    before = f"before step {case.actual[0].step + 1}"
    if {*case.names} <= {*case.expected[0].frozen}:
        seen = f"{before} parameters that nothing trains are other ones"
        kind = "such as those of a teacher, an average or a target network"
        return Cause("LS309", (seen, kind, *describe_writes(case, case.names)))
    seen = f"{before} parameters are other ones than on one process"
    wrote = describe_writes(case, case.names)
    last = case.parallel_run[case.update_index - 1] if case.update_index else Update()
    if not last.merged("parameters"):
        return Cause("LS210", (seen, *wrote))
    how = wrote or ["something changes them between the steps, or in a forward pass"]
    return Cause("LS210", (f"{seen}; the last step left the same", *how))


def _of_buffers(case: Divergence) -> Cause:
    ends = ("running_mean", "running_var", "num_batches_tracked")
    of_norm = _of_batchnorm(case) if all(name.endswith(ends) for name in case.names) else None
    seen = f"after the step: {shown(plain(case.names))}"
    return of_norm or Cause("LS309", (seen, *describe_writes(case, case.names)))


def _of_batchnorm(case: Divergence) -> Cause | None:
    """LS306 and LS307 go by what BatchNorm's forward passes saw, and by how many they were."""
    of_gradients = () if case.kind == "buffers" else patterns(case)
    layers = sorted({layer for rank in case.actual for layer in rank.local_norm_layers})
    if layers and case.num_ranks > 1:
        frozen = {f"{name.rpartition('.')[0]}" for name in case.actual[0].frozen}
        kind = "BatchNorm layers of a model that is not trained" if {*layers} <= frozen else ""
        of = f"{kind or 'BatchNorm layers'}: {shown(plain(layers))}"
        return Cause(
            "LS306", (f"each rank's part alone gave the statistics of {of}", *of_gradients)
        )
    moved = any(name.endswith("running_mean") for name in case.actual.merged("buffers"))
    if moved and case.expected.backward_passes != case.actual.backward_passes:
        return Cause("LS307", (_passes(case), *of_gradients))
    return None


def _of_length(case: Divergence) -> Cause:
    one, many = len(case.reference_run), len(case.parallel_run)
    if not case.parallel_run:
        return Cause("LS405", (f"one process took {one} steps, and some rank took none",))
    return Cause("LS405", (f"one process took {one} steps, {case.num_ranks} took {many}",))


def _passes(case: Divergence) -> str:
    one, many = case.expected.backward_passes, case.actual.backward_passes
    return f"backward passes for this step: {one} on one process, {many} on each rank"


def _all_equal(values: Sequence[float], exact: float) -> bool:
    return all(near(values[0], value, max(exact, 1e-6)) for value in values)


def _times(ratio: float, size: int) -> str:
    if near(ratio, 1):
        return "but for rounding"
    return f"1/{size} of" if near(ratio, 1 / size) else f"{ratio:.6g} times"


def _ratio_text(weights: Sequence[float]) -> str:
    total = sum(weights)
    return " : ".join(f"{weight / total:.4g}" if total else f"{weight:.4g}" for weight in weights)


KINDS: dict[str, tuple[Callable[[Divergence], Cause], str]] = {
    "initial": (_of_initial, "the parameters before the first step"),
    "replicas": (replicas.of_replicas, "the parameters of the ranks"),
    "samples": (samples.of_samples, "the samples of the global batch"),
    "contents": (samples.of_contents, "the content of samples"),
    "kept": (_of_kept, "parameters before the step"),
    "unclipped": (_of_gradients, "gradients before they were clipped"),
    "gradients": (_of_gradients, "gradients"),
    "loss": (_of_loss, "the loss"),
    "rates": (_of_rates, "the learning rate"),
    "parameters": (_of_parameters, "the parameters after the step"),
    "buffers": (_of_buffers, "the buffers after the step"),
    "length": (_of_length, "the number of steps"),
}
"""Where trainings part: what finds the cause, and the place in words."""


def cause_of(case: Divergence) -> Cause:
    """The cause of a divergence, and where the script went another way.

    LS405 goes by optimizers of several classes in what should be one step: some ranks step with
    one that the others do not have, and nothing else can be compared from there.
    """
    kinds = (
        [rank.optimizer_class for rank in case.actual if rank.stepped]
        if case.kind != "length"
        else []
    )
    if len({*kinds}) > 1:
        seen = f"the ranks step with different optimizers: {of_runs(kinds, alone=False)}"
        cause = Cause("LS405", (seen,))
    else:
        unstepped = None
        if case.kind in ("unclipped", "gradients", "loss"):
            unstepped = replicas.of_unstepped(case)
        cause = unstepped or KINDS[case.kind][0](case)
    return replace(cause, seen=(*cause.seen, *new_branches(case, cause)))
