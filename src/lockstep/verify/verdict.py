"""The verdict on a run: all that was found, the first difference first, in words and as JSON.

Steps are counted from 1 here, as people do.
"""

from __future__ import annotations

import re
import traceback
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from lockstep.errors import LockstepError, UsageError
from lockstep.verify.catalogue import ENTRIES, cure_lines
from lockstep.verify.cause import Cause, format_items, script_names
from lockstep.verify.causes import KINDS, cause_of
from lockstep.verify.compare import (
    Divergence,
    find_divergences,
    learning_rates_differ,
    num_comparable_updates,
    tensor_differences,
    tolerance_of,
)
from lockstep.verify.line_findings import splitting_branches
from lockstep.verify.names import aligned
from lockstep.verify.record import OWN_PROCESSES, Recorded, recording_failed
from lockstep.verify.rules.evidence import gradient_patterns
from lockstep.verify.rules.model_inputs import all_ranks_had_the_same as repeated
from lockstep.verify.sample_rows import without_rows_that_are_no_samples as followed
from lockstep.verify.shards import (
    Finals,
    are_of_ranks,
    differs_in_steps,
    joined,
    outcomes_agree,
    without_steps,
)
from lockstep.verify.tolerance import FLOAT64, Tolerance
from lockstep.verify.training_record import RankUpdate, Update
from lockstep.wording import format_ranks


@dataclass(frozen=True)
class Finding:
    """A cause, and where it was found."""

    cause: Cause
    case: Divergence | None = None
    """None: the script ended with it, or it is known without a reference."""

    @property
    def names(self) -> list[str]:
        """Of the tensors that the cause is about."""
        return script_names(self.cause.names or (self.case.names if self.case is not None else ()))

    @property
    def title(self) -> str:
        """What is wrong, in one line; empty: the cause is not in the catalogue."""
        entry = ENTRIES.get(self.cause.code)
        return "" if entry is None else self.cause.title or entry.title

    @property
    def place(self) -> str:
        """In words."""
        case = self.case
        if case is None or case.kind == "length":
            return "" if case is None else KINDS[case.kind].description
        what = KINDS[case.kind].description
        if case.names:
            what += f" ({len(case.names)} of {case.num_compared})"
        update = case.expected[0]
        several = len({update[0].optimizer for update in case.reference_run}) > 1
        of_optimizer = f" of optimizer {update.optimizer + 1}" if several else ""
        if several and update.optimizer_class:
            of_optimizer += f" ({_optimizer_in_words(update)})"
        return f"{what}, step {update.step + 1}{of_optimizer}"

    def as_json(self) -> dict[str, Any]:
        """In plain values."""
        number, case = None, self.case
        if case is not None:
            number = 1 + (case.update_index if case.kind == "length" else case.expected[0].step)
        return {
            "code": self.cause.code,
            "title": self.title,
            "what": "" if case is None else case.kind,
            "step": number,
            "names": self.names,
            "seen": list(self.cause.evidence),
            **({} if self.cause.ratio is None else {"ratio": self.cause.ratio}),
        }

    def lines(self, word: str = "cause", *, by_lockstep: bool | None = None) -> list[str]:
        """For people.

        Args:
            word: what the line with the code begins with.
            by_lockstep: whether the script uses Lockstep, for what it is to write instead; None:
                that is only pointed at.
        """
        lines = []
        entry = ENTRIES.get(self.cause.code)
        if entry is not None:
            lines.append(f"  {word:7} {entry.code}: {self.title}")
        for text in self.cause.evidence:
            first, *rest = text.splitlines()
            lines += [f"  seen    {first}", *(f"          {line}" for line in rest)]
        if self.names:
            lines.append(f"  where   {format_items(self.names)}")
        if entry is not None and by_lockstep is not None:
            first, *rest = cure_lines(entry, by_lockstep=by_lockstep)
            lines += [f"  do      {first}", *(f"          {line}".rstrip() for line in rest)]
            lines.append(f"  more    lockstep explain {entry.code}")
        elif entry is not None:
            lines.append(f"  do      lockstep explain {entry.code} says what to write instead")
        return lines


def _optimizer_in_words(update: RankUpdate) -> str:
    """An optimizer by its class and the models that it trains."""
    names = [*update.gradients, *update.parameters]
    models = dict.fromkeys(name.partition("/")[0] for name in names)
    trained = " and ".join(list(filter(None, models))[:2])
    return f"{update.optimizer_class} of {trained}" if trained else update.optimizer_class


def _cause_of(case: Divergence) -> Cause:
    """The cause of a difference; the difference stands also where a rule fails."""
    try:
        return cause_of(case)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"a rule of `lockstep verify` itself has failed, in {last.name}"
        return Cause("LS210", (f"{text}: {type(error).__name__}: {error}", "please report it"))


def of_run(
    updates: Sequence[Update], tolerance: Tolerance, *, stopped: bool = True
) -> list[Finding]:
    """What is wrong with a run by itself, whatever a reference says.

    Gradients and parameters that differ between ranks, inputs that are the same on all of them, and
    orders that repeat. A sampler that is told its epoch only after a pass looks like LS103 until
    then, and where the order is meant to repeat it is no fault. Before a second pass it is said of
    a script that was `stopped` only: one that has come to its end made no second pass.
    """
    found: list[Finding] = []
    for number, update in enumerate(updates):
        for what, names in (
            ("replicas", update.replicas_that_differ()),
            ("gradients", update.ranks_that_differ("gradients", tolerance)),
        ):
            if names and not found:
                values = (number, what, tuple(names), len(update.merged("gradients")))
                case = Divergence(updates, updates, tolerance, *values)
                found.append(Finding(_cause_of(case), case))
        step, codes = update[0].step + 1, dict[str, str]()
        whole = all(rank.gradients.keys() <= rank.parameter_sums.keys() for rank in update)
        ranks = [Counter(c for t in r.batches for c in t.contents) for r in update if r.contributes]
        if whole and not any(batch.ids for batch in update.batches) and repeated(ranks):
            stream = all(batch.iterable for batch in update.batches)
            seen = f"in step {step} every rank computed the same inputs"
            codes["LS108" if stream else "LS101"] = seen
        if any(rank.optimizer_unprepared for rank in update):
            codes["LS407"] = f"optimizer {update[0].optimizer + 1} of the script, in step {step}"
        found += [Finding(Cause(code, (seen,))) for code, seen in codes.items()]
    if repeats := _repeated_orders(updates):
        found.append(Finding(Cause("LS103", (repeats,))))
    elif stopped and _has_a_fixed_order(updates):
        seen = "DistributedSampler was told no epoch before its first pass, and no second was begun"
        title = "without set_epoch a second pass would have the same order"
        found.append(Finding(Cause("LS103", (seen,), title=title)))
    return found


def _repeated_orders(updates: Sequence[Update]) -> str:
    """An order that several epochs have, in words; empty: there is none, or it is the data's."""
    orders: dict[tuple[int, int], list[int]] = defaultdict(list)
    batches = [batch for update in updates for batch in update[0].batches if batch.ids]
    for batch in batches:
        orders[batch.loader, batch.epoch] += batch.ids or ()
    for (loader, epoch), order in orders.items():
        before = orders.get((loader, epoch - 1), [])[: len(order)]
        same = before == order[: len(before)] and len(before) >= _BY_CHANCE
        if same and any(a > b for a, b in pairwise(before)):
            return f"epoch {epoch + 1} begins with the samples of epoch {epoch}, in their order"
    return ""


def _has_a_fixed_order(updates: Sequence[Update]) -> bool:
    """Whether the last batch is of a DistributedSampler that shuffles, and was told no epoch."""
    batches = [batch for update in updates for batch in update[0].batches if batch.ids]
    return bool(batches) and batches[-1].order_fixed


_BY_CHANCE = 6
"""Samples that come in one order twice do so by chance, if they are fewer."""


@dataclass(frozen=True)
class Verdict:
    """Of one way, against the reference."""

    reference: Recorded
    other: Recorded
    findings: tuple[Finding, ...] = ()
    """The first one first, then what is known without the reference."""
    but: str = ""
    """What differs and is no finding, as the parameters are equal all the same, in words."""
    unknown: str = ""
    """Why nothing can be said, in words; empty: something can."""
    unknown_do: str = ""
    """What to do then."""

    @property
    def word(self) -> str:
        """`EQUAL`, `DIFFERENT`, `NOT KNOWN`, or `FAILED`: the script ended with another error."""
        if self.unknown:
            return "NOT KNOWN"
        if self.other.error:
            return "DIFFERENT" if self.other.code else "FAILED"
        return "DIFFERENT" if any(found.case for found in self.findings) else "EQUAL"

    def as_json(self) -> dict[str, Any]:
        """In plain values."""
        return {
            "verdict": self.word,
            "way": self.other.way.name,
            "processes": self.other.way.nproc,
            "steps": len(self.reference.updates),
            "until": self.reference.until,
            "losses": [update.loss for update in self.reference.updates],
            "switched_off": list(self.other.notes),
            "by_choice": self.other.by_choice,
            "not_known": self.unknown,
            "batch_per_process": self.not_enlarged,
            "findings": [found.as_json() for found in self.findings],
        }

    @property
    def not_enlarged(self) -> str:
        """What `--batch-per-process` could not do, in words; empty: it did what it is for."""
        run = self.reference
        if run.way.batch_times == 1 or run.of_lockstep:
            return ""
        if run.kept_batches:
            return f"it could not enlarge a DataLoader that has no batch size: {run.kept_batches}"
        return "" if run.loaders else "it changed nothing, as no DataLoader of torch was trained on"

    @property
    def _is_of_order(self) -> bool:
        """Whether the first difference is one of order or augmentation; it may hide others."""
        fed = self.reference.way.batches is not None
        if self.word != "DIFFERENT" or self.reference.of_lockstep or fed:
            return False
        return self.findings[0].cause.code in _ORDER and self.reference.loaders > 0

    def lines(self) -> list[str]:
        """For people."""
        lines = self._lines()
        if self._is_of_order:
            lines.append(f"  then    {_SAME_SAMPLES}")
        if self.not_enlarged:
            lines.append(f"  note    --batch-per-process: {self.not_enlarged}")
        return lines

    def _lines(self) -> list[str]:
        head = f"{self.word:9}  {self.other.way.name}"
        if self.unknown:
            return [f"{head}: {self.unknown}", f"  do      {self.unknown_do}"]
        if self.word == "EQUAL":
            lines = [f"{head}: {_compared(self.reference)}", *self._precision()]
            if self.but:
                lines.append(f"  but     {self.but}")
            if chosen := self.other.by_choice:
                lines.insert(0, f"DIFFERENT by choice: {chosen}; all else is compared without")
            if self.reference.until:
                lines.append(f"  until   {self.reference.until}; what comes later is not compared")
            return lines + [line for found in self.findings for line in found.lines("also")]
        first, *others = self.findings
        told = first.lines(by_lockstep=self.reference.of_lockstep)
        lines = [f"{head}, first in {first.place}" if first.place else head, *told]
        lines += self._precision() if first.case else []
        for found in others:
            lines += [f"  and in  {found.place}"] if found.place else []
            lines += found.lines("cause" if found.place else "also")
        printed = self.other.output.splitlines() if self.word == "FAILED" else []
        return lines + [f"  | {line}" for line in printed]

    def _precision(self) -> list[str]:
        used = tolerance_of(self.reference.updates, self.other.updates)
        if used is FLOAT64:
            return []
        text = f"{used.relative:g} of a tensor's largest value, as what they are made of has been"
        return [f"  equal   within {text} in {used.dtype}"]


_ORDER = {"LS107", "LS109", "LS110"}
_SAME_SAMPLES = (
    "with --same-samples one process trains on the batches of all ranks, so that the rest is "
    "compared too"
)
_REWRITTEN = (
    "gradients differ, and parameters right after a step; before every next forward pass the "
    "parameters agree (after the last step they are not compared)"
)
_MADE_GOOD = "gradients and learning rates differ, and make the same parameters in every step"


_OF_PARTS_DO = (
    "where each rank begins with its part of the tensors of one process, the parts are joined and "
    "compared: make the whole tensors from one seed, and let each rank keep its part"
)
_MORE_STEPS = "compare more steps (`--steps`), so that all ranks come to train"
_IN_THE_END = (
    "where an optimizer's step begins each rank has gradients or tensors of its own; before every "
    "next forward pass the parameters of all ranks are those of one process"
)


def _is_right_in_the_end(
    reference: Sequence[Update],
    other: Sequence[Update],
    finals: tuple[Finals, Finals],
    tolerance: Tolerance,
) -> bool:
    """Whether what differs are values that no update used, as each has left the right parameters.

    As of gradients that are averaged inside of `optimizer.step()`, of optimizers that have a slice
    each, of ranks that let another one step, or that have joined.
    """
    return (
        are_of_ranks(other)
        and differs_in_steps(reference, other, tolerance)
        and outcomes_agree(reference, other, finals, tolerance)
    )


def _of_parts(cause: Cause, case: Divergence, parts: Sequence[str]) -> Cause:
    """The cause where ranks hold parts of tensors: rules for copies of a model say nothing then."""
    if case.kind not in ("gradients", "unclipped", "kept", "parameters"):
        return cause
    names = format_items(script_names(parts))
    seen = f"of these tensors the ranks hold parts, which were joined: {names}"
    return Cause("LS210", (seen, *gradient_patterns(case)))


def _between_steps(
    reference: Sequence[Update], other: Sequence[Update], tolerance: Tolerance
) -> tuple[list[Update], list[Update]] | None:
    """Both trainings with the parameters that their next forward passes begin with.

    And without gradients where those parameters agree only by what was done by hand after the step,
    as by averaging parameters instead of gradients: what is trained are the parameters. None: that
    is nowhere so.
    """
    both = list(zip(reference, other, strict=False))
    begins = [
        n
        for n, (one, many) in enumerate(both)
        if n and one[0].began_with_forward and many[0].began_with_forward
    ]
    changed: dict[int, tuple[Update, Update]] = {}
    for number, (one, many) in enumerate(both):
        after = next((both[n] for n in begins if n > number), None)
        if any(tensor_differences("parameters", one, many, tolerance)):
            if after is not None:
                settled = _settled(one, after[0]), _settled(many, after[1])
                whole = all(r.parameters.keys() == one[0].parameters.keys() for r in many)
                if whole and not any(tensor_differences("parameters", *settled, tolerance)):
                    changed[number] = settled
            elif any(one[0].optimizer == both[n][0][0].optimizer for n in changed):
                changed[number] = _settled(one, None), _settled(many, None)
    if not changed:
        return None
    first, second = (
        [changed[n][place] if n in changed else update for n, update in enumerate(run)]
        for place, run in enumerate((reference, other))
    )
    return first, second


def _settled(update: Update, after: Update | None) -> Update:
    """Without gradients, with the parameters before the next forward pass; None: not known."""
    return Update(
        replace(
            rank,
            gradients={},
            unclipped={},
            parameter_sums=rank.parameter_sums if rank.began_with_forward else {},
            parameters={}
            if after is None
            else {
                n: after[place].rewritten_parameters.get(n, a) for n, a in rank.parameters.items()
            },
        )
        for place, rank in enumerate(update)
    )


def _made_good(
    reference: Sequence[Update], other: Sequence[Update], tolerance: Tolerance
) -> tuple[list[Update], list[Update]] | None:
    """Both trainings without gradients, losses and learning rates.

    As of a loss that is half as large with a rate twice as high, where that leaves the parameters
    as they are. None: they are not, or it is not both that differs.
    """
    both = list(zip(reference, other, strict=False))
    if any(any(tensor_differences("parameters", one, many, tolerance)) for one, many in both):
        return None
    if not any(
        any(tensor_differences("gradients", one, many, tolerance))
        and learning_rates_differ(one, many, tolerance)
        for one, many in both
    ):
        return None
    first, second = (
        [
            Update(
                replace(r, gradients={}, unclipped={}, losses=[], learning_rates=()) for r in update
            )
            for update in run
        ]
        for run in (reference, other)
    )
    return first, second


def judge(reference: Recorded, other: Recorded) -> Verdict:
    """Compares a run with the reference.

    Raises:
        RecordingFailedError: the comparison itself has failed.
    """
    try:
        return _judge(reference, other)
    except LockstepError:
        raise
    except Exception as error:
        what = f"{other.way.name} of {other.way.script.path}"
        raise recording_failed(what, traceback.format_exc()) from error


def _judge(reference: Recorded, other: Recorded) -> Verdict:
    tolerance = tolerance_of(reference.updates, other.updates)
    one, many = reference.updates, aligned(reference.updates, other.updates)
    one, many = followed(one, many), followed(many, one)
    whole = joined(one, many)
    one, many = whole.reference, whole.other
    but = ""
    if rewritten := _between_steps(one, many, tolerance):
        (one, many), but = rewritten, _REWRITTEN
    elif made_good := _made_good(one, many, tolerance):
        (one, many), but = made_good, _MADE_GOOD
    elif _is_right_in_the_end(one, many, (reference.finals, other.finals), tolerance):
        one, many, but = without_steps(one), without_steps(many), _IN_THE_END
    reference, other = replace(reference, updates=one), replace(other, updates=many)
    if whole.unknown and not other.error:
        return Verdict(reference, other, unknown=whole.unknown, unknown_do=_OF_PARTS_DO)
    count = num_comparable_updates(reference.updates, other.updates, tolerance)
    if count < max(len(reference.updates), len(other.updates)):
        until = f"step {count}, as rounding has grown since to more than is passed over"
        reference = replace(reference, updates=reference.updates[:count], until=until)
        other = replace(other, updates=other.updates[:count])
    cases = find_divergences(reference.updates, other.updates, tolerance)
    if other.error:
        cases = [case for case in cases if case.kind != "length"]
    caused = [(_cause_of(case), case) for case in cases]
    if whole.parts:
        caused = [(_of_parts(cause, case, whole.parts), case) for cause, case in caused]
    causes = [cause for cause, _ in caused]
    found = [Finding(*each) for n, each in enumerate(caused) if each[0] not in causes[:n]]
    if not other.error and {each.cause.code for each in found} == {"LS501"}:
        but, found = f"the loss is {found[0].cause.evidence[0]} and parameters", []
    if other.error:
        idle = other.code == "LS304"
        seen = f"on {other.way.nproc} processes the script ended with: {other.error}"
        seen = other.error if idle else seen
        ways = splitting_branches(other.ways) if other.code == "LS405" else ()
        told = other.code in {each.cause.code for each in found}
        end = [] if told else [Finding(Cause(other.code, (seen, *ways)))]
        return Verdict(reference, other, (*found, *end) if other.code else (*end, *found))
    lost = next(filter(None, (update.first("gather_line") for update in reference.updates)), "")
    others = [] if whole.parts else of_run(other.updates, tolerance, stopped=bool(other.until))
    if lost:  # even on one process, so that there is nothing to compare it with
        others.append(Finding(Cause("LS207", ("on one process too the loss is made of it", lost))))
    places = {(case.kind, case.update_index) for case in cases}
    for more in others:
        told = more.cause.code in {each.cause.code for each in found}
        told = told or (
            more.case is not None and (more.case.kind, more.case.update_index) in places
        )
        if not told and (cases or more.case is None):  # ranks may differ by rounding
            found.append(more)
    if other.idle and not found:
        if other.until:
            return Verdict(reference, other, unknown=_not_yet(other), unknown_do=_MORE_STEPS)
        but = f"neither backward() nor an optimizer step of {format_ranks(other.idle)} was seen"
    return Verdict(reference, other, tuple(found), but)


def _not_yet(other: Recorded) -> str:
    """That ranks had not begun to train when the comparison ended, in words."""
    steps = f"the first {other.steps} optimizer steps"
    return f"while other ranks made {steps}, no step of {format_ranks(other.idle)} was seen"


def check_reference(
    reference: Recorded, was_set: str, asked: Sequence[str], again: str, thing: str
) -> None:
    """Whether there is something to compare with.

    Args:
        reference: a run on one process.
        was_set: by the user.
        asked: for what only Lockstep can do.
        again: what runs it without being compared.
        thing: what was run.

    Raises:
        UsageError: it failed, made no step, or does not train by Lockstep.
    """
    found, do = "", f"make this work: {again}"
    if reference.error:
        lines = reference.error.splitlines()
        told = "\n".join(line for line in lines if OWN_PROCESSES not in line)
        found = f"on one process it ended with {told}\n"
        found += "\n".join(f"| {line}" for line in reference.output.splitlines())
        if OWN_PROCESSES in reference.error:
            do = OWN_PROCESSES
        elif reference.way.precision == "fp64" and re.search("(?i)dtype|double", reference.error):
            do = f"the {thing} names dtypes itself; try precision fp32"
    elif not reference.updates:
        found = "it made no optimizer step on one process"
        do = "give it arguments with which it trains"
    elif asked and not reference.of_lockstep:
        found = f"it does not train by Lockstep, so nothing would come of {', '.join(asked)}"
        do = f"leave it out, or let the {thing} use lockstep.init and world.prepare"
    if reference.started and not reference.updates and do != OWN_PROCESSES:
        own = f"it started processes of its own, which are not seen: {reference.started}"
        found = f"{found.rstrip()}\n{own}"
        do = f"{OWN_PROCESSES}; else {do}"
    if found:
        raise UsageError(was_set, found.rstrip().replace("\n", "\n         "), do)


def _compared(reference: Recorded) -> str:
    updates = reference.updates
    if not updates:
        return "nothing was compared"
    first = updates[0]
    kinds = [
        f"{'the first' if reference.until else 'all'} {len(updates)} optimizer steps",
        f"{first.samples} samples each" if first.samples else "",
        "losses" if first.loss is not None else "",
        f"{len(first.merged('gradients'))} gradients" if first.merged("gradients") else "",
        f"{len(first.merged('parameters') or first.merged('parameter_sums'))} parameters",
        f"{len(first.merged('buffers'))} buffers" if first.merged("buffers") else "",
        "learning rates" if first[0].learning_rates else "",
    ]
    return ", ".join(filter(None, kinds))
