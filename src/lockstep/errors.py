"""The errors and warnings of Lockstep.

    LockstepError                   exit code
    ├── SettingError                2   an argument, flag or variable that cannot be honoured
    ├── UsageError                  2   an object used in a way that would give wrong numbers
    │   ├── NotOnStageError         2   a part of the model that is on another pipeline stage
    │   ├── UnknownNameError        2   a name of another library, for which Lockstep has its own
    │   └── UnknownArgumentError    2   a keyword argument that a function does not have
    ├── DataError                   2   a dataset, sampler or batch that cannot be split
    │   └── LengthUnknownError      2   the length of a stream that has none
    ├── CheckpointError             1   a file that cannot be read, written or matched
    ├── RankFailedError             1   a process of `lockstep.launch` raised, died or was late
    ├── RecordingFailedError        5   `lockstep verify` itself has failed
    ├── RanksDifferError            4   something that must be equal on all ranks is not
    │   └── WrongDeviceError        4   a device has computed different bits than others
    └── JoinError                   3   the ranks did not come together
        ├── HostError               3
        ├── MissingRankError        3
        ├── DuplicateRankError      3
        ├── WorldSizeError          3
        ├── MasterUnreachableError  3
        ├── PortTakenError          3
        ├── StaleInitFileError      3
        └── TokenDiffersError       3

Every message says what was set, what was found and what to do. It ends with the rank and the line
of the user's script. `warn` prints a message of the same form if the numbers are right here but may
be wrong elsewhere. A code such as LS303 names an entry of the catalogue
(`lockstep.verify.catalogue`), which `lockstep explain` prints.

The attributes of an error (`text`, `found`, ...) are in English, for programs and other ranks.
`str(error)`, which a traceback shows, is in the user's language (`lockstep.language`).

`lockstep run` exits with 0, or with a code for the first failure: the exit code of that rank's
script (1 for a Python exception, the codes above for ours), `EXIT_DEADLOCK`, `EXIT_LOST_RANK`, or
`EXIT_SIGNAL` + N if signal N (SIGHUP, SIGINT, SIGQUIT, SIGTERM) ended the run from outside.
"""

from __future__ import annotations

import copyreg
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType, TracebackType
from typing import Any

from lockstep.columns import pad_label
from lockstep.language import (
    LANGUAGE_OF_WORD,
    LANGUAGE_VARIABLE,
    LANGUAGES,
    InLanguage,
    heading_in_language,
    in_english,
    language_of,
    translate,
)
from lockstep.user_code import Location, user_line, user_location, user_traceback
from lockstep.wording import did_you_mean

EXIT_DEADLOCK = 70
"""The ranks waited for each other and could not go on."""
EXIT_LOST_RANK = 71
"""A rank was killed by a signal or the kernel, was stopped, left early, or its machine is gone."""
EXIT_SIGNAL = 128
"""The exit code of a run that was sent signal N, or of a process that signal N has killed, is
`EXIT_SIGNAL + N`, as in a shell."""

_rank: int | None = None


def set_rank(rank: int | None) -> None:
    """Sets the rank that the errors of this process name; None if it has joined no run."""
    global _rank
    _rank = rank


class LockstepError(Exception):
    """The base class of all errors.

    Args:
        was_set: what the user asked for, in the user's own terms.
        found: what is wrong with it.
        do: what to change.
        code: code of the entry in the catalogue (`lockstep.verify.catalogue`), if there is one.
        may_be_temporary: replaces the class attribute `may_be_temporary` for this error.
        of_rank: the rank that has failed, if this rank only reports the failure of another one.
    """

    exit_code = 1
    may_be_temporary = True
    """False if the same command on the same machines would always fail with this error. Then
    `lockstep run --max-restarts` does not start the ranks again."""

    def __init__(
        self,
        was_set: str,
        found: str,
        do: str,
        *,
        code: str | None = None,
        may_be_temporary: bool | None = None,
        of_rank: int | None = None,
    ) -> None:
        self.was_set = was_set
        self.found = found
        self.do = do
        self.code = code
        if may_be_temporary is not None:
            self.may_be_temporary = may_be_temporary
        self.of_rank = of_rank
        self.rank = _rank
        self.line = user_line()
        super().__init__(self.text)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the error with its attributes, as other processes may raise it again."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return self.translated_message + self._place(translate)

    @property
    def text(self) -> str:
        """The whole message in English."""
        return self.message + self._place(in_english)

    @property
    def message(self) -> str:
        """The message in English, without the rank and the line at its end."""
        return _format_message(self.was_set, self.found, self.do, self.code, in_english)

    @property
    def translated_message(self) -> str:
        """The message for people, without the rank and the line at its end."""
        return _format_message(self.was_set, self.found, self.do, self.code, translate)

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that IPython and notebooks print; they look for this method's name."""
        return format_for_user(self).splitlines()

    def _place(self, in_language: InLanguage) -> str:
        """Returns the last line of the message, with the rank and the line of the user's script.

        It is empty if neither is known.

        Args:
            in_language: function that returns a text in the language of the message.
        """
        places = []
        if self.rank is not None:
            places.append(f"rank {self.rank}")
        if self.line:
            places.append(self.line)
        if not places:
            return ""

        line = _labelled(in_language("at:"), ", ".join(places))
        return f"\n{line}"


class SettingError(LockstepError, ValueError):
    """An argument, flag or variable that cannot be honoured."""

    exit_code = 2
    may_be_temporary = False


class UsageError(LockstepError, RuntimeError):
    """An object used in a way that would give wrong numbers or a hang."""

    exit_code = 2


class NotOnStageError(UsageError, AttributeError):
    """A part of the model that is on another stage of a pipeline.

    It is also an AttributeError, so that `hasattr()` returns False.
    """


class UnknownNameError(UsageError, AttributeError):
    """A name of another library, for which Lockstep has a different name.

    It is also an AttributeError, so that `hasattr()` returns False.
    """


class UnknownArgumentError(UsageError, TypeError):
    """A keyword argument that a function does not have.

    It is also a TypeError, as Python's own error is.
    """


class DataError(LockstepError, ValueError):
    """A dataset, sampler or batch that cannot be split between the ranks."""

    exit_code = 2


class LengthUnknownError(DataError, TypeError):
    """The length of a stream that has no length.

    It is also a TypeError, so that `list()` reads the stream without asking for its length.
    """


class CheckpointError(LockstepError, RuntimeError):
    """A file that cannot be read, written or matched."""


class RanksDifferError(LockstepError, RuntimeError):
    """Something that must be equal on all ranks is not."""

    exit_code = 4


class WrongDeviceError(RanksDifferError):
    """A device has computed different bits than other devices, from the same numbers."""


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

    may_be_temporary = False


class MasterUnreachableError(JoinError):
    """Nothing that speaks our protocol answers at the master's address."""


class PortTakenError(JoinError):
    """The master's port belongs to another program."""


class StaleInitFileError(JoinError):
    """The file of `file://` is left over from an earlier run."""


class TokenDiffersError(JoinError):
    """The machine that serves the run's store has another token."""

    may_be_temporary = False


class RankFailedError(LockstepError, RuntimeError):
    """A process of `launch` raised, died or did not return in time.

    Attributes:
        rank: the rank that failed first.
        remote_traceback: the traceback of that rank; empty if it died without one.

    Args:
        was_set: the call of `launch`.
        found: what has failed.
        do: what to change.
        rank: the rank that failed first.
        remote_traceback: the traceback of that rank.
        is_told: True to leave the traceback out of the message, because `found` says the same.
        found_for_people: `found` in the user's language, with quotes of the script's output left as
            they are.
    """

    def __init__(
        self,
        was_set: str,
        found: str,
        do: str,
        rank: int,
        remote_traceback: str = "",
        *,
        is_told: bool = False,
        found_for_people: str = "",
    ) -> None:
        self.remote_traceback = remote_traceback
        self._translated_found = found_for_people
        self._is_told = is_told
        super().__init__(was_set, found, do)
        self.rank = rank

    @property
    def translated_message(self) -> str:
        """The message in the user's language, without the rank and the line at its end.

        `found` may quote the script, and a quote is not translated. If the launcher has told apart
        what is quoted, it has translated the rest already: `_translated_found`.
        """
        return _format_message(
            self.was_set,
            self.found,
            self.do,
            self.code,
            in_language=translate,
            translated_found=self._translated_found,
        )

    def _place(self, in_language: InLanguage) -> str:
        """Adds the traceback of the other rank, if there is one and it has not been shown yet."""
        place = super()._place(in_language)
        if self.remote_traceback and not self._is_told:
            place += f"\n\n{self.remote_traceback}"
        return place


class RecordingFailedError(LockstepError):
    """`lockstep verify` itself has failed, which says nothing about the script."""

    exit_code = 5


# How an error that nobody catches is printed


DEBUG_VARIABLE = "LOCKSTEP_DEBUG"
"""Environment variable that makes tracebacks of our errors include the frames of Lockstep."""

leave_to_launcher: Callable[[LockstepError], bool] | None = None
"""Function that passes an error which ends this process on to the launcher, and returns True if
the launcher prints it. None if this process was not started by Lockstep's launcher."""


def shows_all_frames() -> bool:
    """Returns True if LOCKSTEP_DEBUG asks for the frames of Lockstep in tracebacks."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def format_for_user(error: BaseException) -> str:
    """Formats an exception as Python prints it; for our errors, with only the user's own frames."""
    trace = error.__traceback__
    if isinstance(error, LockstepError) and not shows_all_frames():
        trace = user_traceback(trace)
    return "".join(traceback.format_exception(type(error), error, trace))


def install_excepthook() -> None:
    """Makes Python print our uncaught errors with only the user's own frames.

    If the launcher prints an error, this process prints nothing. All other exceptions are passed to
    the previous hook unchanged.
    """
    previous_hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Prints an uncaught exception; Python calls this as `sys.excepthook`."""
        if not isinstance(error, LockstepError) or shows_all_frames():
            previous_hook(kind, error, trace)
            return

        if _launcher_prints(error):
            return

        # Python's own hook prints `error.__traceback__`. Other hooks print their third argument.
        user_trace = user_traceback(trace)
        previous_hook(kind, error.with_traceback(user_trace), user_trace)

    sys.excepthook = show


def _launcher_prints(error: LockstepError) -> bool:
    """Passes an error on to the launcher, and returns True if the launcher prints it."""
    if leave_to_launcher is None:
        return False  # Lockstep's launcher has not started this process
    return leave_to_launcher(error)


class LockstepWarning(UserWarning):
    """Warns that numbers which are right here may be wrong elsewhere; issued by `warn`."""


on_warning: list[Callable[[str], None]] = []
"""Functions that are called with the English text of every warning."""


def warn(
    was_set: str,
    *,
    found: str,
    do: str,
    code: str | None = None,
    at: Location | None = None,
    on_this_rank: bool = False,
) -> None:
    """Issues a warning at the user's own line, on rank 0 only.

    Before the warning is issued, the functions in `on_warning` are called with its English text.

    Args:
        was_set: what the user asked for, in the user's own terms.
        found: what may be wrong with it.
        do: what to change.
        code: code of the entry in the catalogue, if there is one.
        at: the line of the user's script; by default the line that is running.
        on_this_rank: True to warn on this rank even if it is not rank 0, for what rank 0 does not
            notice.
    """
    is_rank_0 = _rank is None or _rank == 0  # None: a process that has joined no run
    if not is_rank_0 and not on_this_rank:
        return

    # In a command of Lockstep no line of the user's is running, so there is no file to name.
    file, line = at or user_location() or ("lockstep", 0)
    english_text = _format_message(was_set, found, do, code, in_language=in_english)
    for function in on_warning:
        function(english_text)

    translated_text = _format_message(was_set, found, do, code, in_language=translate)
    warnings.warn_explicit(translated_text, LockstepWarning, file, line)


def warn_about(error: LockstepError) -> None:
    """Issues a warning with the text of an error, which must have a code."""
    assert error.code is not None
    warn(error.was_set, found=error.found, do=error.do, code=error.code)


def add_note_once(error: BaseException, subject: str, note: str) -> None:
    """Adds the note "lockstep: ..." to an error, unless one on the same subject was added before.

    Args:
        error: the error, of the user's script or of torch.
        subject: what the note is about, such as "out of memory". It is not shown.
        note: the note in the language of this process.
    """
    subjects: set[str] = error.__dict__.setdefault("_subjects_of_lockstep_notes", set())
    if subject not in subjects:
        subjects.add(subject)
        error.add_note(f"lockstep: {note}")


def explain_hint(code: str) -> str:
    """Returns the hint for a message with an entry in the catalogue: how to print the entry."""
    return f"[{code}: lockstep explain {code}]"


def hint_in_language(hint: str, in_language: InLanguage) -> str:
    """Returns what `explain_hint` returns as it is in English, and the command alone in Chinese.

    The brackets belong to the English messages, in which programs find the code by them.
    """
    if in_language("more:") == "more:":
        return hint
    return hint.strip("[]").partition(": ")[2]


def unknown_choice_error(
    was_set: str,
    word: object,
    what: str,
    known_words: Collection[str],
    known_word_of_synonym: Mapping[str, str] = MappingProxyType({}),
) -> SettingError:
    """Returns the error for a word that is not one of the known words.

    Args:
        was_set: the setting as the user wrote it, for example "strategy='dpp'".
        word: the unknown word.
        what: plural noun for the known words, e.g. "strategies".
        known_words: the words that could have been meant.
        known_word_of_synonym: for example {"distributeddataparallel": "ddp"}. The synonyms are in
            lower case, without spaces, hyphens and underscores.
    """
    meant = known_word_of_synonym.get(re.sub(r"[ _-]", "", str(word).lower()))
    if meant is not None:
        advice = f"did you mean {meant!r}?"
    else:
        # There are few words to choose from, so they need not be very similar.
        advice = did_you_mean(str(word).lower(), known_words, "choose one of them", cutoff=0.3)
    return SettingError(was_set, f"{what} are {', '.join(known_words)}", advice)


def check_language(environ: Mapping[str, str]) -> None:
    """Raises SettingError if LOCKSTEP_LANG names a language that messages are not written in."""
    if language_of(environ) is None:
        name = environ[LANGUAGE_VARIABLE]
        first_part = re.split(r"[-_.@ ]", name)[0]  # "cn" of "cn.UTF-8"
        raise unknown_choice_error(
            f"{LANGUAGE_VARIABLE}={name}",
            word=first_part,
            what="languages",
            known_words=LANGUAGES,
            known_word_of_synonym=LANGUAGE_OF_WORD,
        )


def _format_message(
    was_set: str,
    found: str,
    do: str,
    code: str | None,
    in_language: InLanguage,
    *,
    translated_found: str = "",
) -> str:
    """Returns a message in a language, without the rank and the line at its end.

    Args:
        was_set: what the user asked for, in the user's own terms; the first line.
        found: what is wrong with it.
        do: what to change.
        code: code of the entry in the catalogue, if there is one.
        in_language: `translate`, or `in_english`, which returns a text as it is.
        translated_found: `found` if it is translated already; otherwise an empty text.
    """
    lines = [
        heading_in_language(was_set, in_language),
        _labelled(in_language("found:"), translated_found or in_language(found)),
        _labelled(in_language("do:"), in_language(do)),
    ]
    if code is not None:
        lines.append(
            _labelled(in_language("more:"), hint_in_language(explain_hint(code), in_language))
        )
    return "\n".join(lines)


def _labelled(label: str, text: str) -> str:
    """Returns one line of a message, e.g. `"  do:    use fewer ranks"`."""
    return f"  {pad_label(label, text)}"
