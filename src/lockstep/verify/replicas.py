"""Ranks that part: replicas that differ, and gradients that stay each rank's own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from lockstep.verify.algebra import constant_ratio, flat, mean_of, near, norm
from lockstep.verify.catalogue import Cause, plain, shown
from lockstep.verify.compare import Divergence
from lockstep.verify.line_findings import describe_writes
from lockstep.verify.samples import draws_of
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import LARGEST, Update
from lockstep.wording import format_ranks


def of_replicas(case: Divergence) -> Cause:
    """LS304: ranks that hold other parameters than rank 0 before a step."""
    apart = case.actual.replicas_that_differ()
    number = case.actual[0].step
    seen = f"before step {number + 1} {ranks_of(apart)} held other parameters than rank 0"
    wrote = describe_writes(case, tuple(apart))
    if not case.update_index:
        return Cause("LS304", (seen, *wrote))
    stepped = case.parallel_run[case.update_index - 1].ranks_that_differ(
        "parameters", case.tolerance
    )
    after = "has left them so" if stepped else "itself left all ranks with the same"
    return Cause("LS304", (seen, f"the last step {after}", *wrote))


def of_unstepped(case: Divergence) -> Cause | None:
    """LS304: parameters of an optimizer that some ranks step with, and others hold otherwise.

    It needs a difference that shows in the very step in which these parameters differ first.
    """
    apart = _unstepped_apart(case, case.update_index)
    if not apart or any(_unstepped_apart(case, n) for n in range(case.update_index)):
        return None
    names = sorted({name for own in apart.values() for name in own})
    kinds = {
        rank.optimizer_class
        for update in case.parallel_run[: case.update_index]
        for rank in update
        if not set(names).isdisjoint(rank.optimizer_parameters)
    }
    seen = f"before step {case.actual[0].step + 1} {format_ranks(apart)} held other parameters"
    which = f"of {' and '.join(sorted(kinds))}, which has not stepped there: {shown(plain(names))}"
    return Cause("LS304", (f"{seen} {which}",))


def _unstepped_apart(case: Divergence, number: int) -> dict[int, list[str]]:
    """By rank, parameters that it has not stepped with and holds otherwise than a rank that has."""
    update = case.parallel_run[number]
    holders: dict[int, tuple[int, Sequence[str]]] = {}
    for before in case.parallel_run[:number]:
        for rank, own in enumerate(before):
            if own.construction_index >= 0 and not all(each.stepped for each in before):
                holders.setdefault(own.construction_index, (rank, own.optimizer_parameters))
    apart: dict[int, list[str]] = {}
    for rank, own in enumerate(update):
        for (built, place), sums in own.unstepped_sums.items():
            if built not in holders:
                continue
            holder, names = holders[built]
            name = names[place] if place < len(names) else ""
            held = update[holder].parameter_sums.get(name)
            if held is not None and not np.array_equal(held, sums):
                apart.setdefault(rank, []).append(name)
    return apart


def of_own_gradients(case: Divergence, names: tuple[str, ...]) -> Cause:
    """Ranks that step with gradients of their own.

    LS303 goes by what DDP knows, LS213 by a communication hook of the script's, LS304 by clipping
    that some ranks alone did, LS308 by random numbers in gradients. The others need ranks that used
    what their own backward passes left: LS313 parameters that are averaged before a later step,
    LS302 forward passes around the wrapper and none through it, LS406 an all-reduce of these
    gradients, now or in the next step, LS311 a model that nothing holds. LS301 is what is left
    where DDP knows all of them (parameters that the loss does not use, or `no_sync` around the last
    backward pass, which look the same), or where the script reduces others. Where a rank used
    something else (noise, a weight of its own after the average) nothing is named.
    """
    total = len(case.actual.merged("gradients"))
    seen = f"the gradients of {len(names)} of {total} parameters differ between the ranks"
    new = {name for rank in case.actual for name in rank.unknown_to_ddp}
    if new and set(names) <= new:
        return Cause("LS303", (seen, "DDP was built before they were to be trained"), names)
    if hook := case.actual.first("comm_hook_line"):
        return Cause("LS213", (seen, f"DDP was given a communication hook: {hook}"), names)
    if groups := _of_groups(case):
        return Cause("LS315", (seen, *groups), names)
    clipping = [n for n, rank in enumerate(case.actual) if Update([rank]).clips]
    if clipping and not case.actual.ranks_that_differ("unclipped", case.tolerance):
        only = f"they were the same until {format_ranks(clipping)} clipped them"
        return Cause("LS304", (seen, only, case.actual.clips[0].line), names)
    if case.actual.in_step:
        return _of_own_exchange(case, names, seen)
    line = case.actual.first("past_wrapper_line")
    around = [f"around the wrapper: {line}"] if line else []
    own, passes = _passes_of_own(case, names), case.actual.backward_passes
    if not own:
        return _of_other_gradients(case, names, seen, *around)
    alone = "each rank used what its own backward pass left"
    if own < passes:
        alone = f"what the last {own} of {passes} backward passes left is each rank's own"
    return _of_what_was_left(case, names, around, seen, alone)


def _of_groups(case: Divergence) -> list[str]:
    """That DDP averages over groups of ranks, within which gradients agree; in words."""
    groups = list(dict.fromkeys(tuple(rank.ddp_ranks) for rank in case.actual))
    if len(groups) < 2 or not all(groups):
        return []
    for group in groups:
        inside = Update(case.actual[rank] for rank in group)
        if inside.ranks_that_differ("gradients", case.tolerance):
            return []
    told = "; ".join(format_ranks(group) for group in groups)
    return [f"DDP averages them over a part of the ranks, and they agree within each: {told}"]


def _of_own_exchange(case: Divergence, names: tuple[str, ...], seen: str) -> Cause:
    """An optimizer that exchanges gradients itself, while it steps.

    LS201 goes by what its own all-reduce left of the gradients, or by what it keeps of them. What
    else it used is not seen.
    """
    by = f"they differ as the step begins; the optimizer exchanges them in it: {_line_of(case)}"
    expected, found = case.expected.merged("gradients"), case.actual.merged("reduced_in_step")
    both = [name for name in names if name in expected and name in found]
    ratio = None
    if both:
        used = {name: found[name] for name in both}
        ratio = constant_ratio({name: expected[name] for name in both}, used, case.max_error)
    if ratio is not None and not near(ratio, 1):
        told = f"after that they are {ratio:.6g} times those of one process"
        code = "LS201" if near(ratio, case.num_ranks) else "LS209"
        return Cause(code, (seen, by, told), names, ratio)
    if kept := _kept_too_large(case):
        return Cause("LS201", (seen, by, *kept), names)
    told = "what it makes of them is not seen; parameters before the next step are other ones"
    return Cause("LS210", (seen, by, told), names)


def _line_of(case: Divergence) -> str:
    return case.actual.in_step[0].line


def _kept_too_large(case: Divergence) -> list[str]:
    """What optimizers keep of gradients that is N times, or N squared, that of one process."""
    for one, many in zip(case.reference_run, case.parallel_run, strict=False):
        ratios: dict[str, set[float]] = {}
        for name, sums in one[0].optimizer_state.items():
            largest = [
                rank.optimizer_state[name][LARGEST] for rank in many if name in rank.optimizer_state
            ]
            if largest and sums[LARGEST]:
                ratios.setdefault(name.rpartition("/")[2], set()).add(max(largest) / sums[LARGEST])
        for key, found in ratios.items():
            for power, factor in (("", case.num_ranks), (", squared", case.num_ranks**2)):
                if all(near(ratio, factor) for ratio in found):
                    text = f"is {factor} times as large as on one process"
                    of = f"the number of processes{power}"
                    return [f"what the optimizer keeps as {key!r} {text}: {of}"]
    return []


def _of_what_was_left(
    case: Divergence, names: tuple[str, ...], around: Sequence[str], seen: str, alone: str
) -> Cause:
    """Ranks that used what their own backward passes left; see `of_own_gradients`."""
    # What comes too late is among the calls before the next update.
    soon = case.parallel_run[case.update_index : case.update_index + 2]
    reduced = [call for update in soon for call in update.calls if call.gradient_of]
    if averaged := _averaged_later(case, names):
        return Cause("LS313", (seen, alone, *averaged), names)
    bare = set(names) <= {name for rank in case.actual for name in rank.unwrapped}
    if around and not bare and not any(rank.wrapped_passes for rank in case.actual):
        return Cause("LS302", (seen, *around), names)
    if any(call.gradient_of in names for call in reduced):
        late = f"gradients were averaged too late, or others than these: {reduced[0].line}"
        return Cause("LS406", (seen, alone, late), names)
    if others := [
        *[f"the script reduces others: {c.line}" for c in reduced],
        *_others(case, names),
    ]:
        return Cause("LS301", (seen, alone, others[0]), names)
    if bare:
        # A model may have been called before another one's step.
        lines = [
            update.first("unwrapped_line") for update in case.parallel_run[: case.update_index + 1]
        ]
        where = next(filter(None, reversed(lines)), "")
        held = "neither DDP nor Lockstep holds the model" + (f": {where}" if where else "")
        return Cause("LS311", (seen, alone, held), names)
    total = len(case.actual.merged("gradients"))
    every = ["none of all was averaged, as under no_sync"] if len(names) == total > 1 else []
    return Cause("LS301", (seen, alone, *around, *every), names)


def _averaged_later(case: Divergence, names: Sequence[str]) -> list[str]:
    """That the script averages these parameters between two later steps, in words."""
    for before, after in pairwise(case.parallel_run[case.update_index :]):
        now = [
            {n: rank.rewritten_parameters[n] for n in names if n in rank.rewritten_parameters}
            for rank in after
        ]
        was = [{n: r.parameters[n] for n in names if n in r.parameters} for r in before]
        if all(now) and before.ranks_that_differ("parameters", case.tolerance):
            ratios = [constant_ratio(mean_of(was), own, case.max_error) for own in now]
            if all(ratio is not None and near(ratio, 1) for ratio in ratios):
                step = after[0].step + 1
                return [
                    f"before step {step} parameters, not gradients, are averaged over the ranks"
                ]
    return []


def of_shifted(case: Divergence) -> Cause | None:
    """Parameters that the ranks have changed otherwise between the backward passes of one step.

    LS302 and LS301 go by gradients that were each rank's own after an earlier one of these passes,
    around DDP or not; LS304 is what is left.
    """
    apart = case.actual.ranks_that_differ("changed_between_passes", case.tolerance)
    if not apart:
        return None
    to = f"{ranks_of(apart)} changed parameters to others than rank 0"
    seen = [f"between the backward passes of this step {to}"]
    if not any(any(rank.local_passes[:-1]) for rank in case.actual):
        return Cause("LS304", (*seen, *describe_writes(case, tuple(apart))))
    seen.append("what a backward pass before it left was each rank's own, and no average")
    if line := case.actual.first("past_wrapper_line"):
        return Cause("LS302", (*seen, f"around the wrapper: {line}"))
    return Cause("LS301", tuple(seen))


def of_factors(case: Divergence) -> Cause | None:
    """LS404: ranks that have each multiplied their shards by another number after the backward."""
    factors = [rank.gradient_factor for rank in case.actual]
    if any(map(math.isnan, factors)) or all(near(factors[0], each) for each in factors):
        return None
    each = ", ".join(f"{factor:.4g} on rank {n}" for n, factor in enumerate(factors))
    seen = f"after the last backward pass gradients were multiplied by numbers of each rank: {each}"
    why = "as by the norm of its own shards, where it is to be that of all"
    return Cause("LS404", (seen, why, *(call.line for call in case.actual.clips[:1])))


def _others(case: Divergence, names: Sequence[str]) -> list[str]:
    """That gradients which DDP does not know are averaged, but for these, in words."""
    bare, optimizer = {*case.actual[0].unwrapped}, case.actual[0].optimizer
    models, averaged = {_root(name) for name in names}, dict[str, None]()
    # Other optimizers of the same models step shortly before or after.
    most = len({update[0].optimizer for update in case.parallel_run})
    near_by = case.parallel_run[max(0, case.update_index - most + 1) : case.update_index + most]
    for rank in (update[0] for update in near_by if {*names} <= bare):
        left = left_by(rank.local_gradients, rank.unwrapped)
        of_it = [n for n in left if rank.optimizer == optimizer or _root(n) in models]
        used = {n: rank.unclipped[n] for n in of_it if n not in names and n in rank.unclipped}
        for name, array in used.items():
            if norm(flat({name: array - left[name]})) > case.max_error * norm(array):
                averaged[name] = None
    return [f"those of others are averaged: {shown(plain(averaged))}"] if averaged else []


def _root(name: str) -> str:
    return name.partition("/")[0]


def _of_other_gradients(case: Divergence, names: tuple[str, ...], *seen: str) -> Cause:
    """Gradients that differ between ranks and are not what each one's backward passes left."""
    if drawn := case.actual.first("gradient_draw_line"):
        text = f"they are made of random numbers that each rank drew: {drawn}"
        return Cause("LS308", (*seen, text), names)
    more = ["they are not what each rank's own backward passes left"]
    first, *others = (rank.gradients for rank in case.actual)
    ratios = [constant_ratio(first, other, case.max_error) for other in others]
    if None not in ratios:
        words = (f"{ratio:.6g} times on rank {n}" for n, ratio in enumerate(ratios, 1))
        more.append(f"they are those of rank 0, {', '.join(words)}")
    calls = [call for call in case.actual.calls if call.gradient_of][:1]
    more += [f"gradients were reduced: {call.line}" for call in calls]
    return Cause("LS210" if None in ratios else "LS304", (*seen, *more, *draws_of(case)), names)


def _passes_of_own(case: Divergence, names: Sequence[str]) -> int:
    """How many of the last backward passes left what is each rank's own, and the only difference.

    0: something else differs too, or it is not known.
    """
    for count in range(1, min(len(rank.local_gradients) for rank in case.actual) + 1):
        own, rest = [], []
        for rank in case.actual:
            used = {n: rank.unclipped[n] for n in names if n in rank.unclipped}
            left = [
                {n: part.get(n, 0 * a) for n, a in used.items()} for part in rank.local_gradients
            ]
            own.append(sum(map(flat, left[-count:]), np.zeros(1)))
            rest.append(flat(used) - own[-1])
        most = case.max_error * norm(own[0])
        if len(set(map(len, rest))) == 1 and all(norm(each - rest[0]) <= most for each in rest):
            return count
    return 0


def left_by(local: Sequence[Mapping[str, Array]], names: Iterable[str]) -> dict[str, Array]:
    """What all backward passes have left; empty: it is not known of all names."""
    found = {n: [part[n] for part in local if n in part] for n in names}
    return {n: np.asarray(sum(each)) for n, each in found.items()} if all(found.values()) else {}


def ranks_of(apart: Mapping[str, Sequence[int]]) -> str:
    """The ranks of what differs, in words."""
    return format_ranks({rank for ranks in apart.values() for rank in ranks})
