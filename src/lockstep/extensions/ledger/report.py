"""The report on a ledger: which samples were trained, and what is wrong with that.

`judge` fills it in. The fields are those of the file that `lockstep ledger --json` writes. Loaders
are named by their numbers. An *attempt* is a start of the run, or what followed when the run went
back to an earlier step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from lockstep.columns import join_label, pad_label
from lockstep.errors import explain_hint, hint_in_language
from lockstep.language import InLanguage, in_english
from lockstep.wording import count_noun

MAX_FINDINGS_IN_TEXT = 20
"""The text has no more findings than this. The JSON report has all of them."""


@dataclass(frozen=True)
class LedgerFinding:
    """Something in a ledger that is not as it should be."""

    code: str
    """The code of its entry in the catalogue of `lockstep explain`."""
    what: str
    step: int | None = None
    loader: int | None = None
    epoch: int | None = None
    samples: tuple[int, ...] = ()
    """The first of the samples that it is about."""


@dataclass
class LedgerReport:
    """What a ledger says about a run."""

    folder: str
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """For each attempt: name, time, number of ranks, first and last step, and how many steps of
    earlier attempts it trained again."""
    steps: int = 0
    """Optimizer steps that led to the last state."""
    again: int = 0
    """Optimizer steps that were trained again after a restart."""
    epochs: list[dict[str, Any]] = field(default_factory=list)
    """For each loader and epoch: samples, global batches, and whether the epoch was finished."""
    findings: list[LedgerFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is worth knowing and not wrong."""
    by_sample: list[int] = field(default_factory=list)
    """Loaders whose samples are recorded."""
    by_position: list[int] = field(default_factory=list)
    """Loaders of streams, of which only the positions of samples are recorded."""
    by_batch: list[int] = field(default_factory=list)
    """Loaders with a sampler of the script's own, which may repeat and leave out samples."""

    def add_finding(self, code: str, what: str, **place: Any) -> None:
        """Adds a finding; `place` has further fields of `LedgerFinding`."""
        self.findings.append(LedgerFinding(code, what, **place))

    def lines(self, in_language: InLanguage = in_english) -> list[str]:
        """Returns the report as lines of text. A finding is one entry of two lines."""
        lines = [f"{self.folder}: {in_language(count_noun(self.steps, 'optimizer step'))}"]
        for number, attempt in enumerate(self.attempts, 1):
            lines.append(in_language(_describe_attempt(number, attempt)))
        for epoch in self.epochs:
            lines.append(in_language(_describe_epoch(epoch)))
        for note in self.notes:
            lines.append("  " + join_label(in_language("note:"), in_language(note)))
        for finding in self.findings[:MAX_FINDINGS_IN_TEXT]:
            hint = hint_in_language(explain_hint(finding.code), in_language)
            what = in_language(finding.what)
            lines.append(f"{what}\n  {pad_label(in_language('more:'), hint)}")
        if len(self.findings) > MAX_FINDINGS_IN_TEXT:
            num_not_shown = len(self.findings) - MAX_FINDINGS_IN_TEXT
            lines.append(in_language(f"and {count_noun(num_not_shown, 'more finding')}"))
        if not self.findings:
            lines += [in_language(line) for line in self._describe_success()]
        return lines

    def _describe_success(self) -> list[str]:
        """Returns lines that say what a ledger without findings proves.

        That depends on what was recorded of each loader: its samples, their positions in a stream,
        or only the global batches of the script's own sampler. There is a line for each kind.
        """
        only_samples_were_recorded = not self.by_position and not self.by_batch
        if only_samples_were_recorded:
            return ["every sample once: nothing was trained twice, nothing was left out"]

        lines = []
        if self.by_position:
            # Of a stream, the ledger has the positions of samples and not the samples. So this
            # proves something only if the stream gives the same samples each time it is read.
            loaders = _name_loaders(self.by_position)
            lines.append(
                f"every position of the streams once ({loaders}): nothing "
                "was trained twice, nothing was left out, if they give the same samples in the "
                "same order to every rank, worker and start; the ledger records positions, and "
                "the first samples of each epoch"
            )
        if self.by_batch:
            loaders = _name_loaders(self.by_batch)
            lines.append(
                f"every global batch of the script's own order once "
                f"({loaders}): which samples are in it, and how often, is up "
                "to the sampler"
            )
        if self.by_sample:
            lines.append(f"every sample once ({_name_loaders(self.by_sample)})")
        return lines

    def as_json(self) -> dict[str, Any]:
        """Returns the fields of the report and a verdict, as values for `json.dumps`."""
        # There is one verdict for all loaders, so it claims no more than is known of each of them.
        if self.findings:
            verdict = "REPEATS OR GAPS"
        elif self.by_position:  # some loader reads a stream, of which only positions are known
            verdict = "EVERY POSITION ONCE"
        elif self.by_batch:  # some loader has a sampler of the script's own
            verdict = "EVERY GLOBAL BATCH ONCE"
        else:
            verdict = "EVERY SAMPLE ONCE"
        return {"verdict": verdict, **asdict(self)}


def _describe_attempt(number: int, attempt: dict[str, Any]) -> str:
    """Returns a line of text about an attempt, which users know as a start of the run.

    For example "  start 2, 2026-11-28 10:00:00: 2 ranks, steps 4 to 9; trained 2 steps again".

    Args:
        number: the number of the attempt, from 1.
        attempt: an item of `LedgerReport.attempts`.
    """
    started = datetime.fromtimestamp(attempt["started_ns"] / 1e9)
    num_ranks = count_noun(attempt["ranks"], "rank")
    if attempt["last"] is None:  # it ended before its first step
        steps = "no step"
    else:
        steps = f"steps {attempt['first']} to {attempt['last']}"
    text = f"  start {number}, {started:%Y-%m-%d %H:%M:%S}: {num_ranks}, {steps}"
    if attempt["again"]:
        text += f"; trained {count_noun(attempt['again'], 'step')} again"
    return text


def _describe_epoch(epoch: dict[str, Any]) -> str:
    """Returns a line of text about an epoch of a loader, an item of `LedgerReport.epochs`."""
    batches = f"{epoch['batches']}"
    num_planned_batches = epoch["steps"]  # None: a stream that does not say its length
    if num_planned_batches is not None:
        batches += f" of {num_planned_batches}"
    return (
        f"  loader {epoch['loader']} ({epoch['dataset']}), epoch {epoch['epoch']}: "
        f"{count_noun(epoch['samples'], 'sample')} in {batches} global batches"
    )


def _name_loaders(numbers: Sequence[int]) -> str:
    """Returns "loader 0" or "loaders 0, 1"."""
    plural = "s" if len(numbers) > 1 else ""
    return f"loader{plural} {', '.join(str(number) for number in numbers)}"
