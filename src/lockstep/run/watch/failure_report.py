"""Writes the report at the end of a failed run: what failed first, what followed, and what to do.

    FIRST FAILURE: rank 1 on host a, after step 12
      ValueError: loss is NaN
      train.py:12: loss.backward()
    consequences: rank 0 (Connection closed by peer), ended by lockstep: ranks 2-3
    traceback and logs: runs/logs

Every function takes `in_language`, which translates a text to the user's language.
"""

from __future__ import annotations

from lockstep.columns import join_label, pad_label
from lockstep.errors import hint_in_language
from lockstep.language import InLanguage, comma_in_language, heading_in_language, in_english
from lockstep.run.watch.first_failure import FirstFailure
from lockstep.run.watch.messages import detail_lines
from lockstep.wording import format_ranks, join_first

_MAX_FAILURES_SHOWN = 8
_LABELS_OF_ERRORS = ("found:", "do:", "more:")
"""How the lines of Lockstep's own errors begin."""
# Details that are always Lockstep's: the title of the rank's output, a signal that ended the rank
# after an exception, and an exception that the script had caught.
_BEGINNINGS_OF_LOCKSTEPS_LINES = ("its last lines:", "its process was then ", "while handling ")
_INDENT_BELOW_LABEL = " " * 4
"""How a line begins that continues a part of an error of Lockstep's; a label has two spaces."""
_MAX_LINE_CHARS = 1000
"""The message of an exception may contain a tensor, or a whole file."""


def render_failure(failure: FirstFailure, in_language: InLanguage = in_english) -> str:
    """Writes the report on a failure, without a newline at its end."""
    lines = _heading_lines(failure, in_language)
    if failure.line:
        lines.append(f"  {failure.line}")

    if failure.simultaneous_failures:
        lines.append(in_language("at the same time (order unknown):"))
        for other in failure.simultaneous_failures[:_MAX_FAILURES_SHOWN]:
            text = _describe_simultaneous(other, failure.host, in_language)
            lines.append(f"  {_shorten(text, in_language)}")
        num_hidden = len(failure.simultaneous_failures) - _MAX_FAILURES_SHOWN
        if num_hidden > 0:
            lines.append(f"  {in_language(f'and {num_hidden} more; see their logs')}")

    for text in failure.advice:
        lines.append(join_label(in_language("what to do:"), in_language(text)))

    consequences = [in_language(text) for text in failure.consequences]
    for later in failure.later_failures:
        consequences.append(_describe_later(later, later.time - failure.time, in_language))
    if failure.ended_by_lockstep:
        ranks = format_ranks(failure.ended_by_lockstep)
        consequences.append(in_language(f"ended by lockstep: {ranks}"))
    if consequences:
        text = join_label(
            in_language("consequences:"), comma_in_language(in_language).join(consequences)
        )
        lines.append(_shorten(text, in_language))

    for text in failure.not_ended[:_MAX_FAILURES_SHOWN]:
        lines.append(in_language(f"not ended: {text}"))

    if failure.folder:
        lines.append(join_label(in_language("traceback and logs:"), failure.folder))

    return "\n".join(lines)


def render_briefly(failure: FirstFailure, times: int, in_language: InLanguage = in_english) -> str:
    """Writes one line about a failure whose like has been reported in full, without a newline.

    Args:
        failure: the failure.
        times: how many failures of this kind there have been.
        in_language: translates Lockstep's own texts.
    """
    heading = _heading_lines(failure, in_language)[0]
    text = f"{heading}: {_headline(failure, in_language)}"
    if failure.line:
        text += f", {failure.line}"
    remark = f"(failure {times} of this kind; logs: {failure.folder})"
    return f"{_shorten(text, in_language)} {in_language(remark)}"


def _heading_lines(failure: FirstFailure, in_language: InLanguage) -> list[str]:
    """Writes which ranks failed, on which host and after which step, and how they failed.

    For example:

        FIRST FAILURE: rank 1 on host a, after step 12
          UsageError: world.sum(x)
          found: x has 2 elements on this rank

    Texts are translated with their values in them: `in_language` recognizes ", after step 12".
    """
    if failure.kind == "interrupted":
        return [join_label(in_language("INTERRUPTED:"), in_language(failure.headline))]

    heading = join_label(in_language("FIRST FAILURE:"), _who_failed(failure, in_language))
    if failure.step is not None:
        heading += in_language(f", after step {failure.step}")
    if failure.simultaneous_failures:
        subjects = [other.subject for other in failure.simultaneous_failures]
        heading += in_language(f", together with {join_first(subjects)}")

    lines = [heading, f"  {_shorten(_headline(failure, in_language), in_language)}"]
    for part in _join_lines_of_parts(failure):
        for line in _detail_in_language(failure, part, in_language).splitlines():
            lines.append(f"  {_shorten(line, in_language)}")
    if failure.hang is not None:
        lines += detail_lines(failure.hang, in_language)
    return lines


def _headline(failure: FirstFailure, in_language: InLanguage) -> str:
    """Returns how the ranks failed, in the user's language as far as it is Lockstep's text."""
    if failure.kind != "exception":
        return in_language(failure.headline)

    # An exception that is not Lockstep's stays as it is.
    if not failure.is_from_lockstep:
        return failure.headline

    # "UsageError: world.sum(x)": the type stays, the message is translated.
    error_type, separator, message = failure.headline.partition(": ")
    return error_type + separator + heading_in_language(message, in_language)


def _who_failed(failure: FirstFailure, in_language: InLanguage) -> str:
    """Writes which ranks failed, and on which host: `ranks 0-1 on host a`."""
    subject = failure.subject  # the ranks or, if the machine itself failed, "host a"
    host_is_said = not failure.ranks
    if host_is_said or not failure.host:
        return in_language(subject)

    # A failure that was merged from those of several hosts has all their names: "a, b".
    has_several_hosts = "," in failure.host
    if has_several_hosts:
        return in_language(f"{subject} on hosts {failure.host}")
    return in_language(f"{subject} on host {failure.host}")


def _describe_simultaneous(
    failure: FirstFailure, host_of_first: str, in_language: InLanguage
) -> str:
    """Describes a failure in one line: `rank 1 on host b: ValueError: no data, train.py:12: f()`.

    Args:
        failure: the failure.
        host_of_first: the host of the first failure, which is not named again.
        in_language: translates Lockstep's own texts.
    """
    is_on_same_host = failure.host == host_of_first
    who = in_language(failure.subject) if is_on_same_host else _who_failed(failure, in_language)
    text = f"{who}: {_headline(failure, in_language)}"
    if failure.line:
        text += f", {failure.line}"
    return text


def _describe_later(failure: FirstFailure, delay_s: float, in_language: InLanguage) -> str:
    """Describes a failure that came after the first one: `rank 1 (ValueError: no data, 0.3 s
    later)`.
    """
    delay = in_language(f"{delay_s:.1f} s later")
    headline = _headline(failure, in_language)
    comma = comma_in_language(in_language)
    return f"{in_language(failure.subject)} ({headline}{comma}{delay})"


def _join_lines_of_parts(failure: FirstFailure) -> list[str]:
    """Returns the details of a failure, each part of an error of Lockstep's as one text.

    A part has several lines if a table follows it, say. They are translated together, so they are
    one text. A line that belongs to the part above it is indented deeper than the labels:

          found: of the model's 9 names 3 fit; 1 missing
            missing   fc.weight
          do:    build the model as it was when the file was saved
    """
    parts: list[str] = []
    for line in failure.details:
        is_below_label = failure.is_from_lockstep and line.startswith(_INDENT_BELOW_LABEL)
        if parts and is_below_label:
            parts[-1] += f"\n{line}"
        else:
            parts.append(line)
    return parts


def _detail_in_language(failure: FirstFailure, text: str, in_language: InLanguage) -> str:
    """Returns a part below the headline, in the user's language as far as it is Lockstep's text."""
    # Some texts are always Lockstep's, such as "its last lines:".
    if text.startswith(_BEGINNINGS_OF_LOCKSTEPS_LINES):
        return in_language(text)

    # What the rank has printed, and the message of an error that is not Lockstep's, stay as they
    # are.
    label, _, rest = text.strip().partition(" ")
    is_part_of_lockstep_error = failure.is_from_lockstep and label in _LABELS_OF_ERRORS
    if not is_part_of_lockstep_error:
        return text

    # "found: port 80 is taken", or the hint "more:  [LS311: lockstep explain LS311]".
    rest = rest.strip()
    rest = hint_in_language(rest, in_language) if label == "more:" else in_language(rest)
    return f"  {pad_label(in_language(label), rest)}"


def _shorten(text: str, in_language: InLanguage) -> str:
    """Cuts off a line that is too long for a report, and says where the rest is."""
    if len(text) <= _MAX_LINE_CHARS:
        return text
    return f"{text[:_MAX_LINE_CHARS]}... {in_language('(see the logs for the rest)')}"
