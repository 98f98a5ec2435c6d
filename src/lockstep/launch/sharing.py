"""Looking at the ranks of all machines at about the same time.

Each launcher can look at its own ranks alone. One that looks closely lets the others know; they
look as well, whatever they are doing, and the one that asked puts the parts together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from lockstep.diagnose.snapshot import Snapshot, from_json, merge, shorten, to_json
from lockstep.launch.meeting import Meeting

_KEY = "snapshot"
_CALLS, _FEW_CALLS = 100, 10
"""Collectives of each rank that are told; the fewer where many ranks make that too long."""
_ANSWER_S, _LINES_S = 2.0, 5.0
"""The other launchers are waited for so long; those that fetch the lines of earlier collectives
for longer."""
_POLL_S = 0.02


class Sharing:
    """One launcher's part, for one attempt.

    Args:
        meeting: carries what is told.
        node: rank of this machine.
        nodes: of how many.
        take: looks at the ranks of this machine; its argument: with the lines of earlier
            collectives.
    """

    def __init__(
        self, meeting: Meeting, node: int, nodes: int, take: Callable[[bool], Snapshot]
    ) -> None:
        self._meeting, self._node, self._nodes, self._take = meeting, node, nodes, take
        self._told = self._looks = 0
        self._with_lines = False
        self._answered: dict[int, int] = {}
        """The last look of each other launcher that it has had an answer to."""

    def all_ranks(self, own: Snapshot) -> Snapshot | None:
        """Makes of this machine's ranks all ranks of the run; waits some seconds at most.

        Returns:
            None where a machine has not answered in time, or none can.
        """
        if self._nodes == 1:
            return own
        if not self._meeting.hears:
            return None
        before = {node: told["number"] for node, told in self._others().items()}
        self._looks += 1
        self._with_lines = _has_lines(own)
        self._tell(own)
        limit = time.monotonic() + (_LINES_S if self._with_lines else _ANSWER_S)
        while not self._meeting.lost_nodes():
            parts = [
                from_json(json.dumps(told["snapshot"]))
                for node, told in self._others().items()
                if told["number"] > before.get(node, 0)
            ]
            if len(parts) == self._nodes - 1:
                return merge([own, *parts])
            if time.monotonic() > limit:
                break
            time.sleep(_POLL_S)
        return None

    def answer(self) -> None:
        """Looks at the ranks of this machine if another launcher wants it to; call it often."""
        asking = [
            told
            for node, told in (self._others().items() if self._nodes > 1 else ())
            if told["look"] > self._answered.get(node, 0)
        ]
        if asking:
            self._tell(self._take(any(told["lines"] for told in asking)))

    def _others(self) -> dict[int, dict[str, Any]]:
        heard = self._meeting.heard(_KEY)
        return {node: told for node, told in heard.items() if node != self._node}

    def _tell(self, own: Snapshot) -> None:
        self._answered = {node: told["look"] for node, told in self._others().items()}
        self._told += 1
        values = {"number": self._told, "look": self._looks, "lines": self._with_lines}
        for calls in (_CALLS, _FEW_CALLS):
            short = json.loads(to_json(shorten(own, calls)))
            if self._meeting.tell(_KEY, {**values, "snapshot": short}):
                break


def _has_lines(snapshot: Snapshot) -> bool:
    return any(call.frames is not None for state in snapshot.ranks for call in state.calls or ())
