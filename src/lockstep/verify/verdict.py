"""From what two runs did to `EQUAL` or `DIFFERENT`, in words and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.verify.catalogue import ENTRIES
from lockstep.verify.causes import Case, Cause, cause_of, shown
from lockstep.verify.compare import Divergence, Tolerance, first_divergence
from lockstep.verify.record import Update, count_of, loss_of, merged
from lockstep.verify.runs import Recorded

_WHAT = {
    "initial": "the parameters before the first step",
    "replicas": "the parameters of the ranks",
    "samples": "the samples of the global batch",
    "contents": "the content of samples",
    "gradients": "gradients",
    "loss": "the loss",
    "rates": "the learning rate",
    "parameters": "the parameters after the step",
    "buffers": "the buffers after the step",
    "length": "the number of steps",
}


@dataclass(frozen=True)
class Verdict:
    """Of one way, against the reference."""

    reference: Recorded
    other: Recorded
    divergence: Divergence | None
    cause: Cause | None

    @property
    def word(self) -> str:
        """`EQUAL`, `DIFFERENT`, or `FAILED`: the script ended with an error of another kind."""
        if self.other.error and not self.other.code:
            return "FAILED"
        return "EQUAL" if self.cause is None else "DIFFERENT"

    def as_json(self) -> dict[str, Any]:
        """In plain values."""
        found = []
        if self.cause is not None:
            entry = ENTRIES.get(self.cause.code)
            found.append(
                {
                    "code": self.cause.code,
                    "title": "" if entry is None else entry.title,
                    "what": "" if self.divergence is None else self.divergence.what,
                    "step": self._step(),
                    "names": [_plain(name) for name in self.cause.names],
                    "seen": list(self.cause.seen),
                    **({"ratio": r} if (r := self.cause.data.get("ratio")) is not None else {}),
                }
            )
        return {
            "verdict": self.word,
            "way": self.other.way.name,
            "processes": self.other.way.nproc,
            "steps": len(self.reference.updates),
            "losses": [loss_of(update) for update in self.reference.updates],
            "switched_off": list(self.other.notes),
            "findings": found,
        }

    def lines(self) -> list[str]:
        """For people."""
        if self.cause is None:
            updates = self.reference.updates
            return [f"{self.word:9}  {self.other.way.name}: {_compared(updates)}"]
        where = "" if self.divergence is None else f", first in {_place(self)}"
        lines = [f"{self.word:9}  {self.other.way.name}{where}"]
        entry = ENTRIES.get(self.cause.code)
        if entry is not None:
            lines.append(f"  cause   {self.cause.code}: {entry.title}")
        for text in self.cause.seen:
            first, *rest = text.splitlines()
            lines += [f"  seen    {first}", *(f"          {line}" for line in rest)]
        if self.cause.names:
            lines.append(f"  where   {shown([_plain(name) for name in self.cause.names])}")
        if entry is not None:
            lines.append(f"  do      lockstep explain {self.cause.code} says what to write instead")
        printed = self.other.output.splitlines() if self.word == "FAILED" else []
        return lines + [f"  | {line}" for line in printed]

    def _step(self) -> int | None:
        if self.divergence is None:
            return None
        updates = self.reference.updates
        number = self.divergence.update
        return updates[number][0].step if number < len(updates) else number


def judge(reference: Recorded, other: Recorded, tolerance: Tolerance) -> Verdict:
    """Compares a run with the reference."""
    if other.error:
        seen = (f"on {other.way.nproc} processes the script ended with: {other.error}",)
        return Verdict(reference, other, None, Cause(other.code, seen))
    found = first_divergence(reference.updates, other.updates, tolerance)
    if found is None:
        return Verdict(reference, other, None, None)
    cause = cause_of(Case(reference.updates, other.updates, found, tolerance))
    return Verdict(reference, other, found, cause)


def _place(verdict: Verdict) -> str:
    divergence = verdict.divergence
    assert divergence is not None
    what = _WHAT[divergence.what]
    if divergence.what == "length":
        return what
    optimizers = {update[0].optimizer for update in verdict.reference.updates}
    update = verdict.reference.updates[divergence.update][0]
    step = f"step {update.step}"
    if len(optimizers) > 1:
        step += f" of optimizer {update.optimizer}"
    if divergence.names and divergence.what not in ("samples", "contents"):
        what += f" ({len(divergence.names)} of {divergence.of})"
    return f"{what}, {step}"


def _compared(updates: Sequence[Update]) -> str:
    if not updates:
        return "nothing was compared"
    first = updates[0]
    kinds = [
        f"{len(updates)} optimizer steps",
        f"{count_of(first)} samples each" if count_of(first) else "",
        "losses" if loss_of(first) is not None else "",
        f"{len(merged(first, 'gradients'))} gradients",
        f"{len(merged(first, 'parameters'))} parameters",
        f"{len(merged(first, 'buffers'))} buffers" if merged(first, "buffers") else "",
        "learning rates",
    ]
    return ", ".join(filter(None, kinds))


def _plain(name: str) -> str:
    return name.partition("/")[2] or name
