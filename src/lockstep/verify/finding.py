"""A finding of `lockstep verify`: a cause, and where the runs differ by it, in words and as JSON.

A *cause* explains a difference by a code of the catalogue, such as LS205, and by evidence. A *case*
(`Divergence`) is the difference: which values, and in which update (optimizer step) of both runs.
Steps are counted from 1 here, as people do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.columns import pad
from lockstep.language import translate
from lockstep.verify.catalogue import ENTRIES, cure_lines
from lockstep.verify.cause import Cause, format_items, script_names
from lockstep.verify.causes import KINDS
from lockstep.verify.compare import Divergence
from lockstep.verify.training_record import RankUpdate

MAX_MODELS_OF_OPTIMIZER = 2


@dataclass(frozen=True)
class Finding:
    """A cause, and the difference that it explains."""

    cause: Cause
    # None if the script ended with an error, or if it is wrong whatever a reference says.
    case: Divergence | None = None

    @property
    def names(self) -> list[str]:
        """Names of the tensors that the cause is about, as the script knows them."""
        if self.cause.names:
            return script_names(self.cause.names)
        if self.case is not None:  # the cause is about all tensors that differ
            return script_names(self.case.names)
        return []

    @property
    def title(self) -> str:
        """What is wrong, in one line; empty if the cause is not in the catalogue."""
        entry = ENTRIES.get(self.cause.code)
        if entry is None:
            return ""
        return self.cause.title or entry.title

    @property
    def place(self) -> str:
        """Where the runs differ: "gradients (2 of 4), step 3 of optimizer 2 (SGD of Net)".

        It is empty if the finding stands for no difference between the runs.
        """
        case = self.case
        if case is None:
            return ""

        text = KINDS[case.kind].description
        if case.kind == "length":  # the number of steps differs, and no step
            return text

        if case.names:
            text += f" ({len(case.names)} of {case.num_compared})"

        update = case.expected[0]
        text += f", step {update.step + 1}"
        if case.num_optimizers > 1:
            text += f" of optimizer {update.optimizer + 1}"
            if update.optimizer_class:
                text += f" ({_describe_optimizer(update)})"

        return text

    @property
    def step(self) -> int | None:
        """The step of the optimizer in which the runs differ, from 1; None if there is no case."""
        case = self.case
        if case is None:
            return None
        if case.kind == "length":  # one of the runs has no such update, so they are only counted
            return case.update_index + 1
        return case.expected[0].step + 1

    def as_json(self) -> dict[str, Any]:
        """Returns the finding in plain values."""
        values: dict[str, Any] = {
            "code": self.cause.code,
            "title": self.title,
            "what": "" if self.case is None else self.case.kind,
            "step": self.step,
            "names": self.names,
            "seen": list(self.cause.evidence),
        }

        if self.cause.ratio is not None:
            values["ratio"] = self.cause.ratio

        return values

    def lines(self, heading: str = "", *, by_lockstep: bool | None = None) -> list[str]:
        """Returns the finding in lines for people.

        Args:
            heading: the label of the line with the code; by default "cause", translated.
            by_lockstep: whether the script uses Lockstep, which decides what it is told to write
                instead; None: the lines only point at the catalogue.
        """
        lines = []
        entry = ENTRIES.get(self.cause.code)
        if entry is not None:
            lines.append(
                labelled(heading or translate("cause"), f"{entry.code}: {translate(self.title)}")
            )

        for sentence in self.cause.evidence:
            lines += _with_label(
                translate("seen"), [translate(line) for line in sentence.splitlines()]
            )

        if self.names:
            lines.append(labelled(translate("where"), translate(format_items(self.names))))

        if entry is None:  # an error without a code, of which nothing more is known
            return lines

        if by_lockstep is None:
            advice = f"lockstep explain {entry.code} says what to write instead"
            lines.append(labelled(translate("do"), translate(advice)))
        else:
            cure = _with_label(
                translate("do"), cure_lines(entry, translate, by_lockstep=by_lockstep)
            )
            lines += [line.rstrip() for line in cure]  # empty lines stay empty
            lines.append(labelled(translate("more"), f"lockstep explain {entry.code}"))

        return lines


def verdict_head(word: str, name: str) -> str:
    """Returns how the first line of a verdict begins: "DIFFERENT  2 processes".

    Args:
        word: the verdict in one word. It is English in every language, with a translation, so that
            it is found in any log.
        name: the name of the run on several processes.
    """
    return f"{pad(translate(word), 9)}  {translate(name)}"


def labelled(label: str, text: str) -> str:
    """Returns a line of a verdict: a label in a column of its own, and a text."""
    return f"  {pad(label, 7)} {text}"


def _with_label(label: str, texts: list[str]) -> list[str]:
    """Returns the lines of a text, with a label before the first and the others indented."""
    first, *others = texts
    lines = [labelled(label, first)]
    for text in others:
        lines.append(f"          {text}")
    return lines


def _describe_optimizer(update: RankUpdate) -> str:
    """Names an optimizer by its class and the models that it trains: "SGD of Net and Head"."""
    models: dict[str, None] = {}  # each once, in their order
    for name in (*update.gradients, *update.parameters):
        model = name.partition("/")[0]
        if model:  # a parameter that is in no model has nothing before the "/"
            models[model] = None

    if not models:
        return update.optimizer_class

    first_models = list(models)[:MAX_MODELS_OF_OPTIMIZER]
    return f"{update.optimizer_class} of {' and '.join(first_models)}"
