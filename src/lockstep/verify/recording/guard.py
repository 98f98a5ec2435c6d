"""Keeps errors of the recorder apart from those of the script that it records."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

from lockstep.errors import LockstepError, RecordingFailedError
from lockstep.verify.rank_files import LOST_PEER_PATTERN
from lockstep.verify.recording.progress import RunProgress


class ExitByRecorder(SystemExit):
    """Ends the script because of an error in the recorder itself.

    The process that has started the run raises a `RecordingFailedError` afterwards.
    """


class HasState(Protocol):
    """A part of the recorder, such as its `LossRecorder`."""

    state: RunProgress


Method = TypeVar("Method", bound=Callable[..., Any])


def guarded(method: Method) -> Method:
    """Decorates a method of the recorder, so that its errors are not taken for the script's errors.

    An error in the method ends the script with `ExitByRecorder`, a `SystemExit`, and its traceback
    is kept in `state.internal_error`. Two kinds of errors pass unchanged: those of a script that
    uses Lockstep incorrectly, and those that follow from the failure of another rank.
    """
    exit_code = RecordingFailedError.exit_code

    @wraps(method)
    def guarded_method(part: HasState, *args: Any, **kwargs: Any) -> Any:
        """Replaces the decorated method: an error inside of it ends the script.

        Args:
            part: part of the recorder, whose method is called.
            *args: positional arguments of the method.
            **kwargs: keyword arguments of the method.
        """
        try:
            return method(part, *args, **kwargs)
        except LockstepError:  # the script uses Lockstep incorrectly
            raise
        except Exception as error:
            # The recorder gathers sharded tensors. If that fails with a message such as "Connection
            # closed by peer", another rank has failed first, and will report the reason.
            has_lost_connection = re.search(LOST_PEER_PATTERN, str(error))
            if has_lost_connection:
                raise

            # The traceback of the first error is kept for the report.
            is_first_error = not part.state.internal_error
            if is_first_error:
                part.state.internal_error = traceback.format_exc()

            # This is a `SystemExit`, which the script's `except Exception` does not catch.
            raise ExitByRecorder(exit_code) from error

    return cast(Method, guarded_method)
