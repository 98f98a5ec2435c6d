"""The format of a run's record: the names of its files, the columns of its rows, its lines.

A *record* is a folder of files with one JSON value per line. Every rank writes one file for each
*start* of the run (a run that is started again after a failure has several starts), and so does
every launcher. A *row* is a line with a JSON list: what a rank measured in one or several
optimizer steps in a row, one value for each of `COLUMNS`. All other lines are JSON objects.

Lines that are not understood are skipped: a full disk may cut a line in the middle, and the line
written after it then begins there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lockstep.session.extension import PHASES

FORMAT_VERSION = 2
# A rank's file is named TIME-ID.rankN.record and a launcher's file TIME-ID.launcher.record, where
# TIME is `time.time_ns()` and ID a random number. All ranks of a start have the same TIME and ID.
RECORD_SUFFIX = ".record"

COLUMNS = (
    "step",  # the number of the row's last step, counted from 1
    "steps",  # how many steps the row covers
    "at",  # seconds since the record was begun
    "longest_s",  # seconds of the longest step of the row
    "loss",  # this rank's part of the loss, averaged over the row's steps; the mean over all ranks
    # is the loss of the global batch
    "learning_rate",
    "samples",  # samples trained by all ranks together
    "memory",  # the peak memory so far, in bytes
    "sent",  # bytes sent to other ranks since the start
    "shared",  # bytes written into shared memory since the start
    *PHASES,  # seconds spent in each phase, in all steps of the row
)
COLUMN_INDEX = {name: index for index, name in enumerate(COLUMNS)}

PHASES_WITHOUT_WAITING = tuple(phase for phase in PHASES if phase != "communication")
"""The phases in which a rank does not wait for other ranks."""

_MAY_BE_NOT_FINITE = (COLUMN_INDEX["loss"], COLUMN_INDEX["learning_rate"])


class Row(NamedTuple):
    """A row that was read."""

    values: list[float]
    """One for each of `COLUMNS`; NaN where the row has null."""
    has_loss: bool
    """False if the script gave no loss to `World.backward` in these steps. A loss may be NaN."""


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 2**63


def _is_list_of_text(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _are_choices(value: object) -> bool:
    """Returns True for a list of [name, value, reason]."""
    if not isinstance(value, list):
        return False
    return all(_is_list_of_text(choice) and len(choice) == 3 for choice in value)


def _are_means(value: object) -> bool:
    """Returns True for a dict from names to numbers. A mean may be NaN or infinite."""
    if not isinstance(value, dict):
        return False
    return all(_is_finite_number(mean) or isinstance(mean, float) for mean in value.values())


def _are_weights(value: object) -> bool:
    """Returns True for a dict from names to positive numbers."""
    if not isinstance(value, dict):
        return False
    return all(_is_finite_number(weight) and weight > 0 for weight in value.values())


_Fields = dict[str, Callable[[object], bool]]

_FIELDS_OF_A_BEGINNING: _Fields = {
    "ranks": _is_finite_number,
    "time": _is_finite_number,
    "host": _is_text,
    "command": _is_list_of_text,
}
_FIELDS_BY_KEY: dict[str, _Fields] = {
    "record": _FIELDS_OF_A_BEGINNING,
    "choices": {"choices": _are_choices},
    "logged": {
        "logged": _are_means,
        "weights": _are_weights,
        "step": _is_finite_number,
    },
    "warning": {"warning": _is_text, "step": _is_finite_number},
    "gpu": {
        "gpu": _is_finite_number,
        "gpu_memory": _is_finite_number,
        "step": _is_finite_number,
    },
    "trace": {"trace": _is_text, "step": _is_finite_number},
    "end": {"end": _is_text},
    "kind": {"kind": _is_text, "time": _is_finite_number, "text": _is_text, "host": _is_text},
}
"""The fields that an object must have. The first of these keys that it has tells what it is:
`record`, the first line of a rank; `kind`, a line of a launcher."""
_FIELDS_OF_A_PASS: _Fields = {
    "pass": _is_text,
    "training": _is_bool,
    "complete": _is_bool,
    # What tells the pass from others, equal on all ranks that take part in it: the number of its
    # loader, the steps before it, and its number among the passes over this loader at that step.
    "loader": _is_finite_number,
    "begun": _is_finite_number,
    "number": _is_finite_number,
}
"""The fields that an object with logged values has besides, unless they belong to no pass."""
_FIELDS_OF_A_LAUNCHER_START: _Fields = {
    "kind": _is_text,
    "text": _is_text,
    **_FIELDS_OF_A_BEGINNING,
}


def parse_line(line: bytes) -> Row | dict[str, Any] | None:
    """Returns the row or the object on a line, or None if the line is not understood."""
    try:
        value = json.loads(line)

        # Half of a surrogate pair, such as "\udcff", is no character and could not be printed, so
        # it is replaced. A whole pair, such as "\ud83d\ude00", is not changed.
        may_have_half_of_pair = b"\\ud" in line
        if may_have_half_of_pair:
            value = _without_surrogates(value)

        if isinstance(value, list):
            return _parse_row(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None

    is_known = isinstance(value, dict) and _is_known_object(value)
    return value if is_known else None


def _without_surrogates(value: Any) -> Any:
    r"""Replaces each half of a surrogate pair, such as `\udcff`, by a question mark.

    The name of a file may have bytes that are not text. Python keeps each of them as such a half,
    which could not be encoded later. Here the value is encoded once with question marks, and read
    again.
    """
    encoded = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    return json.loads(encoded)


def _parse_row(values: list[Any]) -> Row | None:
    """Returns a row, with JSON's null as NaN.

    Returns:
        None if it is not a whole row: it was cut off, covers no step, or has NaN or infinity where
        only the loss and the learning rate may have them.
    """
    row = [math.nan if value is None else float(value) for value in values]
    if len(row) != len(COLUMNS):
        return None

    covers_no_step = row[COLUMN_INDEX["steps"]] <= 0
    if covers_no_step:
        return None

    # If one of the values is NaN or infinite, so is their sum. One check is faster than many.
    total = sum(value for index, value in enumerate(row) if index not in _MAY_BE_NOT_FINITE)
    if not math.isfinite(total):
        return None
    return Row(row, has_loss=values[COLUMN_INDEX["loss"]] is not None)


def _is_known_object(value: dict[str, Any]) -> bool:
    """Returns True if a line is an object of this format and has all fields that it must have.

    For example, `{"gpu": 80, "gpu_memory": 4096, "step": 3}` has the key "gpu". So it must have the
    fields of `_FIELDS_BY_KEY["gpu"]`, and the value of each must pass the check that stands there.
    """
    # The first line of a file of another version is known too, so that the reader can refuse it.
    if is_of_another_version(value):
        return True

    # An object may have several of the keys. The one that `_FIELDS_BY_KEY` lists first decides.
    first_key = next((key for key in _FIELDS_BY_KEY if key in value), None)
    if first_key is None:
        return False

    check_of_field = _required_fields(first_key, value)
    for name, is_valid in check_of_field.items():
        if not is_valid(value.get(name)):  # a missing field is None, which no check accepts
            return False
    return True


def _required_fields(key: str, value: Mapping[str, Any]) -> Mapping[str, Callable[[Any], bool]]:
    """Returns the checks of the fields that an object must have, by their names.

    Args:
        key: the key that tells what the object is: "kind" for a line of a launcher.
        value: the object, such as `{"kind": "start", "time": 1.5, ...}`. Its values count too: a
            launcher's "start" must have more fields than its "failure".
    """
    is_start_of_launcher = key == "kind" and value["kind"] == "start"
    was_logged_in_loop = key == "logged" and "loader" in value
    if is_start_of_launcher:
        return _FIELDS_OF_A_LAUNCHER_START
    if was_logged_in_loop:
        return {**_FIELDS_BY_KEY[key], **_FIELDS_OF_A_PASS}
    return _FIELDS_BY_KEY[key]


def is_of_another_version(value: dict[str, Any]) -> bool:
    """Returns True for the first line of a file whose format has another version than this one."""
    version = value.get("record")
    return isinstance(version, int) and version != FORMAT_VERSION
