"""Writes the block that closes a failed run: what failed first, what followed, and what to do.

FIRST FAILURE: rank 1 on host a, after step 12
ValueError: loss is NaN
train.py:12: loss.backward()
consequences: rank 0 (Connection closed by peer), ended by lockstep: ranks 2-3
traceback and logs: runs/logs
"""

from __future__ import annotations

from lockstep.run.watch.first_failure import FirstFailure
from lockstep.wording import format_ranks

_MAX_FAILURES_SHOWN = 8
_MAX_LINE_CHARS = 1000
"""The message of an exception may contain a tensor, or a whole file."""


def render_failure(failure: FirstFailure) -> str:
    """Writes the block that closes a failed run; it does not end in a newline."""
    lines = _heading_lines(failure)
    if failure.line:
        lines.append(f"  {failure.line}")
    if failure.at_the_same_time:
        lines.append("at the same time (order unknown):")
        for text in failure.at_the_same_time[:_MAX_FAILURES_SHOWN]:
            lines.append(f"  {_shorten(text)}")
        num_hidden = len(failure.at_the_same_time) - _MAX_FAILURES_SHOWN
        if num_hidden > 0:
            lines.append(f"  and {num_hidden} more; see their logs")
    for text in failure.advice:
        lines.append(f"what to do: {text}")
    consequences = list(failure.consequences)
    if failure.ended_by_lockstep:
        consequences.append(f"ended by lockstep: {format_ranks(failure.ended_by_lockstep)}")
    if consequences:
        lines.append(_shorten("consequences: " + ", ".join(consequences)))
    for text in failure.given_up[:_MAX_FAILURES_SHOWN]:
        lines.append(f"not ended: {text}")
    if failure.folder:
        lines.append(f"traceback and logs: {failure.folder}")
    return "\n".join(lines)


def render_briefly(failure: FirstFailure, times: int) -> str:
    """Writes one line about a failure that was printed in full before; without a newline.

    Args:
        failure: the failure.
        times: how often a failure of this kind has come.
    """
    heading = _heading_lines(failure)[0]
    text = f"{heading}: {failure.headline}"
    if failure.line:
        text += f", {failure.line}"
    return f"{_shorten(text)} (failure {times} of this kind; logs: {failure.folder})"


def _heading_lines(failure: FirstFailure) -> list[str]:
    """Writes which ranks failed, on which host and in which step, and how."""
    if failure.kind == "interrupted":
        return [f"INTERRUPTED: {failure.headline}"]
    heading = f"FIRST FAILURE: {failure.subject}"
    if failure.host and failure.ranks:  # without ranks, the subject is the host itself
        has_several_hosts = "," in failure.host  # as in "a, b"
        heading += f" on {'hosts' if has_several_hosts else 'host'} {failure.host}"
    if failure.step is not None:
        heading += f", after step {failure.step}"
    lines = [heading]
    for text in (failure.headline, *failure.details):
        lines.append(f"  {_shorten(text)}")
    return lines


def _shorten(text: str) -> str:
    if len(text) <= _MAX_LINE_CHARS:
        return text
    return f"{text[:_MAX_LINE_CHARS]}... (see the logs for the rest)"
