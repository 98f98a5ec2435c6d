"""Writes verdicts, calls and the states of ranks as text for the user.

A *row* of a verdict says what one rank does. Ranks that do the same are merged into one *entry*, so
that a verdict on many ranks fits on a screen. The *mismatch* of a verdict is the first collective
that the ranks did not all call in the same way.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

from lockstep.columns import join_label, wrap
from lockstep.language import InLanguage, in_english
from lockstep.run.watch.call_table import Mismatch
from lockstep.run.watch.snapshot import CollectiveCall, RankState
from lockstep.run.watch.stacks import Frame, user_frame
from lockstep.run.watch.verdict import Row, Verdict
from lockstep.user_code import format_source_line
from lockstep.wording import conjugate, format_ranks, join_first

MAX_WIDTH = 100
MAX_ENTRIES_SHOWN = 10
_MAX_HOSTS_SHOWN = 4
_MAX_TENSORS_SHOWN = 3
_MAX_CALLS_SHOWN = 20


def render(verdict: Verdict, in_language: InLanguage = in_english) -> str:
    """Writes a verdict as text, in lines of at most 100 columns."""
    lines = _wrap([in_language(verdict.headline)])
    lines += detail_lines(verdict, in_language)
    for text in verdict.advice:
        lines += _wrap([f"  {join_label(in_language('do:'), in_language(text))}"])
    return "\n".join(lines)


def detail_lines(verdict: Verdict, in_language: InLanguage = in_english) -> list[str]:
    """Writes what each rank does, which is shown between a verdict's headline and its advice.

    Returns:
        The lines, each indented by two spaces or more.
    """
    entries = _merge_equal_rows(verdict)
    lines: list[str] = []
    for rows in entries[:MAX_ENTRIES_SHOWN]:
        lines += _entry_lines(rows, in_language)

    ranks_not_shown = []
    for rows in entries[MAX_ENTRIES_SHOWN:]:
        ranks_not_shown += [row.rank for row in rows]
    if ranks_not_shown:
        text = f"{format_ranks(ranks_not_shown)}: see hang.txt"
        lines.append(f"  {in_language(text)}")

    if verdict.mismatch is not None:
        lines += _mismatch_lines(verdict.mismatch, in_language)

    return _wrap(lines)


def _merge_equal_rows(verdict: Verdict) -> list[list[Row]]:
    """Merges ranks that do the same into entries, of which the caller shows `MAX_ENTRIES_SHOWN`.

    Ranks are merged within one host or, if that gives too many entries to show, over all hosts. If
    that gives too many entries too, the most important ones come first: those with ranks at fault,
    and then those with few ranks.

    Returns:
        The entries, each a list of rows.
    """
    rows_of_host_and_content: dict[object, list[Row]] = defaultdict(list)
    for row in verdict.rows:
        rows_of_host_and_content[row.host, row.content].append(row)
    if len(rows_of_host_and_content) <= MAX_ENTRIES_SHOWN:
        return list(rows_of_host_and_content.values())

    rows_of_content: dict[object, list[Row]] = defaultdict(list)
    for row in verdict.rows:
        rows_of_content[row.content].append(row)
    entries = list(rows_of_content.values())
    if len(entries) <= MAX_ENTRIES_SHOWN:
        return entries

    ranks_at_fault = set(verdict.ranks)

    def sort_key(rows: list[Row]) -> tuple[bool, int]:
        nobody_is_at_fault = ranks_at_fault.isdisjoint(row.rank for row in rows)
        return nobody_is_at_fault, len(rows)  # False comes before True

    entries.sort(key=sort_key)
    return entries


def _entry_lines(rows: list[Row], in_language: InLanguage) -> list[str]:
    """Writes one entry of a verdict: `ranks 0-3 on a, b: wait in all_reduce, for 12 s`.

    Args:
        rows: the rows of the entry, which are equal except for their ranks and hosts.
        in_language: translates a text.
    """
    first = rows[0]
    ranks = [row.rank for row in rows]
    hosts = join_first(sorted({row.host for row in rows}), _MAX_HOSTS_SHOWN)

    # `does` begins with a singular verb: "waits in ...". Only English has a plural, "wait".
    does = first.does
    if in_language is in_english:
        does = conjugate(first.does, len(ranks))

    # `in_language` translates complete texts: it recognises the values in them by itself.
    who = format_ranks(ranks)
    text = in_language(f"{who} on {hosts}: {does}")
    if first.for_s is not None:
        text += in_language(f", for {first.for_s:.0f} s")

    lines = [f"  {text}"]
    if first.line is not None:
        lines.append(_source(first.line, indent=4))
    if first.handles:
        lines.append(f"    {in_language(f'while handling {first.handles}')}")
    return lines


def _mismatch_lines(mismatch: Mismatch, in_language: InLanguage) -> list[str]:
    """Writes which rank made which call, at the first call that differs.

    Ranks that made the same call at the same line are written together.

    Args:
        mismatch: the first call that differs.
        in_language: translates a text.
    """
    ranks_by_call: dict[tuple[str, Frame | None], list[int]] = defaultdict(list)
    for rank, call in mismatch.calls:
        if call is None:
            text = "has not reached it"
            frame = None
        else:
            text = describe(call)
            frame = user_frame(call.frames)  # with the line of the user's code
        ranks_by_call[text, frame].append(rank)

    heading = f"first mismatch: call {mismatch.seq} of {mismatch.group}:"
    lines = [f"  {in_language(heading)}"]
    for (text, frame), ranks in list(ranks_by_call.items())[:MAX_ENTRIES_SHOWN]:
        lines.append(f"    {in_language(f'{format_ranks(ranks)}: {text}')}")
        if frame is not None:
            lines.append(_source(frame, indent=6))

    # Before the mismatch, rank 0 may have called all_reduce at line 10 and rank 1 at line 20: equal
    # calls, but the ranks were already in different branches.
    if mismatch.lines_differ_since is not None:
        number = mismatch.lines_differ_since
        remark = f"(already from call {number} on they called from different lines)"
        lines.append(f"    {in_language(remark)}")

    return lines


def describe(call: CollectiveCall) -> str:
    """Describes a call by its operation, sizes and type: `all_reduce of 25 float`, `barrier`."""
    # The tensor of a barrier is torch's own, and does not concern the user. A rank that only
    # receives has outputs but no inputs.
    sizes = call.input_sizes or call.output_sizes
    if call.op == "barrier" or not sizes:
        return call.op

    shown_sizes = []
    for size in sizes[:_MAX_TENSORS_SHOWN]:
        lengths = "x".join(str(length) for length in size)
        shown_sizes.append(lengths or "1")  # a scalar has no dimensions, and one element

    shown = " + ".join(shown_sizes)
    if len(sizes) > _MAX_TENSORS_SHOWN:
        shown += f" + {len(sizes) - _MAX_TENSORS_SHOWN} more"

    unit = call.dtypes[0] if call.dtypes else "element"  # the type of the first tensor
    return f"{call.op} of {shown} {unit}"


def _source(line: Frame, indent: int) -> str:
    """Writes a line of code with its file and line number, cut off at the maximum width."""
    text = " " * indent + format_source_line(line.file, line.line, f", in {line.function}")
    if len(text) <= MAX_WIDTH:
        return text
    return f"{text[: MAX_WIDTH - 3]}..."


def _wrap(lines: Iterable[str]) -> list[str]:
    """Breaks lines that are too long. Continuation lines are indented by two more columns."""
    wrapped: list[str] = []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        wrapped += wrap(line, MAX_WIDTH, subsequent_indent=" " * (indent + 2))
    return wrapped


def render_state(state: RankState, in_language: InLanguage = in_english) -> str:
    """Writes everything that is known about a rank: process, steps, stacks and latest calls."""
    lines = [in_language(f"rank {state.rank} on {state.host}, process {state.pid}")]
    if state.code is not None:
        cause = f"exit code {state.code}" if state.code >= 0 else f"signal {-state.code}"
        lines.append(in_language(f"  ended: {cause}"))

    if state.steps is not None:
        lines.append(in_language(f"  optimizer steps: {state.steps}"))

    if state.in_flight is not None:
        lines.append(in_language(f"  while handling {state.in_flight.describe()}"))

    lines += _stack_lines("main thread", state.stack, in_language)
    for stack in state.all_threads:
        lines += _stack_lines("another thread", stack, in_language)

    if state.calls is None:
        lines.append(in_language("  collectives: not obtained"))
    else:
        lines.append(in_language("  collectives, latest last:"))
    for call in (state.calls or ())[-_MAX_CALLS_SHOWN:]:
        called_at = time.strftime("%H:%M:%S", time.localtime(call.time_s))
        lines.append(
            f"    {call.backend}:{call.group} {call.seq} {call.op} {list(call.input_sizes)} "
            f"{call.state} {called_at}"
        )
    return "\n".join(lines)


def _stack_lines(name: str, stack: Sequence[Frame] | None, in_language: InLanguage) -> list[str]:
    if stack is None:
        return [in_language(f"  {name}: no stack was obtained")]
    lines = [in_language(f"  {name}, innermost first:")]
    for frame in stack:
        lines.append(f"    {frame.file}:{frame.line} in {frame.function}")
    return lines
