"""A finding of `lockstep verify`: why two runs differ and where, as text and as JSON.

A *cause* explains a difference by a code of the catalogue, such as LS205, and by evidence. A *case*
(`Divergence`) is the difference itself: which values differ, and in which update (optimizer step)
of both runs. Here, steps are counted from 1, as users do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.columns import pad
from lockstep.language import translate, translate_names
from lockstep.verify.catalogue import ENTRIES, Entry, cure_lines
from lockstep.verify.cause import Cause, format_items, script_names
from lockstep.verify.causes import KINDS
from lockstep.verify.divergence import Divergence
from lockstep.verify.names import model_of
from lockstep.verify.training_record import RankUpdate

MAX_MODELS_OF_OPTIMIZER = 2


@dataclass(frozen=True)
class Finding:
    """A cause, and the difference that it explains."""

    cause: Cause
    # None if the script ended with an error, or if it is wrong even without a difference.
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
        """What is wrong, in one line; empty if the code of the cause is not in the catalogue."""
        entry = ENTRIES.get(self.cause.code)
        if entry is None:
            return ""
        return self.cause.title or entry.title

    @property
    def place(self) -> str:
        """Where the runs differ: "gradients (2 of 4), step 3 of optimizer 2 (SGD of Net)".

        Empty if the finding is not about a difference between the runs.
        """
        case = self.case
        if case is None:
            return ""

        text = KINDS[case.kind].description
        if case.kind == "length":  # the runs differ in their number of steps, and not in a step
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
        """The optimizer step in which the runs differ, from 1; None if there is no difference."""
        case = self.case
        if case is None:
            return None
        if case.kind == "length":  # one of the runs has no such update, so its number is used
            return case.update_index + 1
        return case.expected[0].step + 1

    def as_json(self) -> dict[str, Any]:
        """Returns the finding as plain values."""
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

    def lines(
        self, label_of_cause: str | None = None, *, uses_lockstep: bool | None = None
    ) -> list[str]:
        """Returns the lines of the finding that are printed for the user.

        Args:
            label_of_cause: label of the first line, which has the code and the title; by default
                "cause".
            uses_lockstep: whether the script uses Lockstep, which decides what kind of advice is
                printed. With None, only a reference to the catalogue is printed instead.
        """
        lines = []
        entry = ENTRIES.get(self.cause.code)
        if entry is not None:
            label = "cause" if label_of_cause is None else label_of_cause
            lines.append(labelled(label, f"{entry.code}: {translate(self.title)}"))

        for sentence in self.cause.evidence:
            texts = [translate(line) for line in sentence.splitlines()]
            lines += _labelled_lines("seen", texts)

        if self.names:
            lines.append(labelled("where", translate_names(format_items(self.names))))

        if entry is not None:  # otherwise it is an error without a code, with no known cure
            lines += _lines_of_cure(entry, uses_lockstep)

        return lines


def verdict_head(word: str, name: str) -> str:
    """Returns the beginning of a verdict's first line: "DIFFERENT  2 processes".

    Args:
        word: verdict in one word. Its translation keeps the English word, so that it can be found
            in any log.
        name: name of the run on several processes.
    """
    return f"{pad(translate(word), 9)}  {translate(name)}"


def labelled(label: str, text: str) -> str:
    """Formats a line of a verdict: a label in a column of its own, followed by a text.

    Args:
        label: an English word, which is translated here.
        text: the text, which is translated already.
    """
    return f"  {pad(translate(label), 7)} {text}"


def lines_on_later_steps(*, stopped_at: str, advice_on_more_steps: str) -> list[str]:
    """Returns the lines of an equal run on the steps that were not compared.

    For example:

          until   step 3, batch 3 of 23 of epoch 1; what comes later is not compared
          then    ...

    Args:
        stopped_at: where the script was stopped; empty if it ran to its end.
        advice_on_more_steps: how more steps are compared; empty if there is no such advice.
    """
    lines = []
    if stopped_at:
        lines.append(
            labelled("until", translate(f"{stopped_at}; what comes later is not compared"))
        )
    if advice_on_more_steps:
        lines.append(labelled("then", translate(advice_on_more_steps)))
    return lines


def _labelled_lines(label: str, texts: list[str]) -> list[str]:
    """Formats several lines of a verdict: a label before the first, and the others indented."""
    first, *others = texts
    lines = [labelled(label, first)]
    for text in others:
        indented = f"          {text}"
        lines.append(indented.rstrip())  # no spaces on an empty line
    return lines


def _lines_of_cure(entry: Entry, uses_lockstep: bool | None) -> list[str]:
    """Returns the lines that say what to do about a cause.

    Args:
        entry: what the catalogue says of the cause.
        uses_lockstep: whether the script uses Lockstep, which decides what kind of advice is
            printed. With None, only a reference to the catalogue is printed instead.
    """
    if uses_lockstep is None:
        reference = f"lockstep explain {entry.code} says what to write instead"
        return [labelled("do", translate(reference))]

    texts = cure_lines(entry, translate, uses_lockstep=uses_lockstep)
    return [*_labelled_lines("do", texts), labelled("more", f"lockstep explain {entry.code}")]


def _describe_optimizer(update: RankUpdate) -> str:
    """Describes an optimizer by its class and the models that it trains: "SGD of Net and Head"."""
    # Names are such as "Net/layer.weight", or "/parameter 1" for a parameter that is in no model. A
    # parameter may have no gradient, and the parameters may not be recorded, so both are looked at.
    models: dict[str, None] = {}  # each once, in their order
    for name in (*update.gradients, *update.parameters):
        model = model_of(name)
        if model:
            models[model] = None

    if not models:
        return update.optimizer_class

    first_models = list(models)[:MAX_MODELS_OF_OPTIMIZER]
    return f"{update.optimizer_class} of {' and '.join(first_models)}"
