"""What can go wrong, as a tree.

    LockstepError                   exit code
    ├── SettingError                2   an argument, flag or variable that cannot be honoured
    ├── UsageError                  2   an object used in a way that would give wrong numbers
    │   └── NotOnStageError         2   a part of the model that a stage of a pipeline has not
    ├── DataError                   2   a dataset, sampler or batch that cannot be cut into shares
    │   └── LengthUnknownError      2   the length of a stream that does not say its own
    ├── CheckpointError             1   a file that cannot be read, written or matched
    ├── RankFailedError             1   a process of `lockstep.launch` raised, died or was late
    ├── RanksDifferError            4   something that must be equal on all ranks is not
    └── JoinError                   3   the ranks did not come together
        ├── HostError               3
        ├── MissingRankError        3
        ├── DuplicateRankError      3
        ├── WorldSizeError          3
        ├── MasterUnreachableError  3
        ├── PortTakenError          3
        ├── StaleInitFileError      3
        └── TokenDiffersError       3

Every message says what was set, what was found and what to do, and closes with the rank and the
user's own line. Where the numbers are right here but may be wrong elsewhere the same is said by
`warn`, as a `LockstepWarning`. A code, LS303 say, names the entry of the catalogue that tells more.

`lockstep run` ends with 0, or with what failed first: the exit code of that rank's script (1 for
an exception of Python's, the codes above for ours), `EXIT_DEADLOCK`, `EXIT_LOST_RANK`, or 128 + N
where signal N (SIGHUP, SIGINT, SIGQUIT, SIGTERM) ended the run from outside.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

from lockstep.wording import did_you_mean

# Frames of these are not the user's: this package, the standard library, installed packages and
# commands, and what was compiled from strings.
_NOT_THE_USERS = (
    str(Path(__file__).parent),
    sysconfig.get_paths()["stdlib"],
    str(Path(sys.executable).parent),
    "<frozen ",
    "<string>",
)

EXIT_DEADLOCK = 70
"""The ranks waited for each other and could not go on."""
EXIT_LOST_RANK = 71
"""A rank was killed by a signal or the kernel, was stopped, left early, or its machine is gone."""

_rank: int | None = None


def set_rank(rank: int | None) -> None:
    """Names the rank that this process's errors carry (None: no run has been joined)."""
    global _rank
    _rank = rank


class LockstepError(Exception):
    """The root of the tree.

    Args:
        was_set: what the user asked for, in the user's own terms.
        found: what stands against it.
        do: what to change.
        code: of its entry in the catalogue (`lockstep.verify.catalogue`), where it has one.
    """

    exit_code = 1

    def __init__(self, was_set: str, found: str, do: str, *, code: str | None = None) -> None:
        self.was_set = was_set
        self.found = found
        self.do = do
        self.code = code
        self.rank = _rank
        self.line = user_line()
        super().__init__(self._text())

    @property
    def parts(self) -> str:
        """The message without the place at its end."""
        return _three_parts(self.was_set, self.found, self.do, self.code)

    def _text(self) -> str:
        rank = None if self.rank is None else f"rank {self.rank}"
        place = ", ".join(filter(None, (rank, self.line)))
        return f"{self.parts}\n  at:    {place}" if place else self.parts


class SettingError(LockstepError, ValueError):
    """An argument, flag or variable that cannot be honoured."""

    exit_code = 2


class UsageError(LockstepError, RuntimeError):
    """An object used in a way that would give wrong numbers or a hang."""

    exit_code = 2


class NotOnStageError(UsageError, AttributeError):
    """A part of the model that a stage of a pipeline has not; for `hasattr()` it is missing."""


class DataError(LockstepError, ValueError):
    """A dataset, sampler or batch that cannot be cut into shares."""

    exit_code = 2


class LengthUnknownError(DataError, TypeError):
    """The length of a stream that does not say its own; for `list()` it is a missing `len()`."""


class CheckpointError(LockstepError, RuntimeError):
    """A file that cannot be read, written or matched."""


class RanksDifferError(LockstepError, RuntimeError):
    """Something that must be equal on all ranks is not."""

    exit_code = 4


class JoinError(LockstepError, RuntimeError):
    """The ranks did not come together."""

    exit_code = 3


class HostError(JoinError):
    """A machine of `lockstep run --hosts` on which the run cannot be started."""


class MissingRankError(JoinError):
    """A rank did not come within the join timeout."""


class DuplicateRankError(JoinError):
    """Two processes claim the same rank."""


class WorldSizeError(JoinError):
    """The ranks were started with different world sizes."""


class MasterUnreachableError(JoinError):
    """Nothing that speaks our protocol answers at the master's address."""


class PortTakenError(JoinError):
    """The master's port belongs to another program."""


class StaleInitFileError(JoinError):
    """The file of `file://` is left over from an earlier run."""


class TokenDiffersError(JoinError):
    """The machine that serves the run's store has another token."""


class RankFailedError(LockstepError, RuntimeError):
    """A process of `launch` raised, died or did not return in time.

    `rank` failed first; `remote_traceback` is its traceback, empty where it died without one.
    """

    def __init__(
        self, was_set: str, found: str, do: str, rank: int, remote_traceback: str = ""
    ) -> None:
        self.remote_traceback = remote_traceback
        super().__init__(was_set, found, do)
        self.rank = rank

    def _text(self) -> str:
        text = super()._text()
        return f"{text}\n\n{self.remote_traceback}" if self.remote_traceback else text


class RecordingFailedError(LockstepError):
    """`lockstep verify` itself has failed; of the script nothing is known."""

    exit_code = 5


class LockstepWarning(UserWarning):
    """Numbers that are right here and may be wrong elsewhere; `warn` gives it."""


on_warning: list[Callable[[str], None]] = []
"""Called on rank 0 with the text of every warning."""


Place = tuple[str, int]
"""A file and a line in it."""


def warn(
    was_set: str,
    found: str,
    do: str,
    *,
    code: str | None = None,
    at: Place | None = None,
    on_this_rank: bool = False,
) -> None:
    """Warns at the user's own line; on rank 0 alone.

    Args:
        was_set: what the user asked for, in the user's own terms.
        found: what stands against it.
        do: what to change.
        code: of the entry in the catalogue, where there is one.
        at: the user's line, where the warning comes later than what it is about.
        on_this_rank: warn on this rank, whichever it is: rank 0 does not know of it.
    """
    if _rank and not on_this_rank:
        return
    file, line = at or user_place() or ("lockstep", 0)
    text = _three_parts(was_set, found, do, code)
    for hear in on_warning:
        hear(text)
    warnings.warn_explicit(text, LockstepWarning, file, line)


def warn_of(error: LockstepError) -> None:
    """Warns of what would be an error elsewhere; it has an entry in the catalogue."""
    assert error.code is not None
    warn(error.was_set, error.found, error.do, code=error.code)


def reference(code: str) -> str:
    """What follows a message that has an entry in the catalogue."""
    return f"[{code}: lockstep explain {code}]"


def unknown_choice_error(
    was_set: str, word: object, what: str, known_words: Iterable[str]
) -> SettingError:
    """Returns the error for a word that is none of the known ones.

    Args:
        was_set: the setting as the user wrote it.
        word: the unknown word.
        what: the noun for the known words, in the plural: "strategies".
        known_words: the words that could have been meant.
    """
    do = did_you_mean(str(word).lower(), known_words, "choose one of them", 0.3)
    return SettingError(was_set, f"{what} are {', '.join(known_words)}", do)


def _three_parts(was_set: str, found: str, do: str, code: str | None) -> str:
    text = f"{was_set}\n  found: {found}\n  do:    {do}"
    return text if code is None else f"{text}\n  more:  {reference(code)}"


def user_place() -> Place | None:
    """File and line of the innermost line of the stack that is the user's own."""
    frame = _user_frame()
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


_NAMES_IN_SCRIPTS = {
    "World": "world",
    "Checkpoint": "checkpoint",
    "PreparedOptimizer": "optimizer",
    "PreparedScheduler": "scheduler",
}
"""What scripts call the objects of a class, by the name of the class."""
_PUBLIC_FUNCTIONS = ("save_weights", "load_weights")


def user_call() -> str | None:
    """What the user's own line has called of Lockstep: "checkpoint.save()"; None: not known."""
    package = str(Path(__file__).parent)
    names: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(package):
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    for name in reversed(names):
        owner, _, method = name.partition(".")
        if owner in _NAMES_IN_SCRIPTS and method.isidentifier():
            return f"{_NAMES_IN_SCRIPTS[owner]}.{method}()"
        if name in _PUBLIC_FUNCTIONS:
            return f"lockstep.{name}()"
    return None


def user_line() -> str | None:
    """The innermost line of the stack that is the user's own, `file:line: code`."""
    frame = _user_frame()
    return None if frame is None else source_line(frame.f_code.co_filename, frame.f_lineno)


def source_line(file: str, line: int, without_source: str = "") -> str:
    """`train.py:41: loss.backward()`; without its source the place and another text."""
    code = linecache.getline(file, line).strip()
    return f"{Path(file).name}:{line}" + (f": {code}" if code else without_source)


def is_users(file: str) -> bool:
    """Whether a file of source is the user's own."""
    return not file.startswith(_NOT_THE_USERS) and "site-packages" not in file


def user_stack() -> tuple[tuple[str, int], ...]:
    """File and line of each of the user's own frames, the innermost first."""
    found, frame = [], _user_frame()
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None
