"""Work that each rank does on its own, and whose errors are raised on all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from lockstep.errors import CheckpointError, LockstepError, UsageError
from lockstep.runtime.collectives import Collectives

T = TypeVar("T")


def everywhere(
    collectives: Collectives, doing: str, work: Callable[[], tuple[T, str]]
) -> tuple[T, list[str]]:
    """Runs `work` on every rank: its own result, and all ranks' texts.

    Communication: one exchange of text.

    Args:
        collectives: of the run.
        doing: what this is, for messages.
        work: gives this rank's result, and a text for all ranks.

    Raises:
        CheckpointError: on all ranks, what `work` has raised on one of them; on that one as it is.
        UsageError: in the body of an evaluation loop.
    """
    if collectives.blocked is not None:
        raise UsageError(
            f"{doing} in the body of an evaluation loop",
            collectives.blocked,
            "do it after the loop",
        )
    failure: Exception | None = None
    try:
        result, text = work()
        answer: dict[str, Any] = {"text": text}
    except Exception as error:  # whatever it is, the others must not wait for this rank
        failure, answer = error, {"error": _in_parts(doing, error)}
    answers = [json.loads(a) for a in collectives.exchange(json.dumps(answer))]
    if failure is not None:
        raise failure
    for rank, heard in enumerate(answers):
        if "error" in heard:
            was_set, found, do = heard["error"]
            raise CheckpointError(was_set, f"rank {rank}: {found}", do)
    return result, [heard["text"] for heard in answers]


def _in_parts(doing: str, error: Exception) -> tuple[str, str, str]:
    if isinstance(error, LockstepError):
        return error.was_set, error.found, error.do
    return doing, f"{type(error).__name__}: {error}", "see the traceback of that rank"
