"""Takes snapshots of the ranks of all machines at about the same time.

Each launcher can only ask the ranks of its own machine. A launcher that needs a snapshot of the
whole run asks a *question*: the other launchers take snapshots too, and send them back, and it
merges the parts.

All launchers notice a hang at the same time, but it is enough if one of them asks. So the launcher
of the first machine *leads*: the others begin later, and do not ask while one with a lower rank
does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.machine.network import wait_until
from lockstep.run.machines.rendezvous import Rendezvous
from lockstep.run.watch.snapshot import Snapshot, from_json, merge, shorten, to_json

_ASK_TOPIC = "snapshot asked for"
_ANSWER_TOPIC = "snapshot"

Question = Mapping[str, Any]
"""A `number`, and `call_stacks`: whether to include the stack of each recorded call."""

# How many collectives of each rank are sent at most. If the message is too long with that many, as
# it may be with many ranks, the next number is tried.
_CALLS_SENT_AT_MOST = (100, 10, 1)

# How long to wait for the other launchers, without and with the stacks of recorded calls.
_ANSWER_TIMEOUT_S = 2.0
_ANSWER_WITH_STACKS_TIMEOUT_S = 5.0

# How much later than the first launcher the others begin to ask.
_HEAD_START_S = 1.0
# How long a launcher does not ask after one with a lower rank has asked. This is more than twice
# the longest pause between two snapshots of the supervisor: with many ranks a snapshot takes
# seconds.
_LED_FOR_S = 10.0


class SnapshotExchange:
    """Exchanges snapshots with the launchers of the run's other machines.

    Args:
        rendezvous: the connection that carries the messages.
        node: the rank of this machine.
        nodes: the number of machines.
        take: function that takes a snapshot of this machine's ranks. Its argument says whether to
            include the stack of each recorded call.
    """

    def __init__(
        self, rendezvous: Rendezvous, node: int, nodes: int, take: Callable[[bool], Snapshot]
    ) -> None:
        self._rendezvous = rendezvous
        self._node = node
        self._nodes = nodes
        self._take = take
        self._last_question = 0
        self._last_answered_number: dict[int, int] = {}
        """The number of the last question that this launcher has answered, by machine."""
        self._other_leads_until = 0.0
        self.delay_s = 0.0 if node == 0 else _HEAD_START_S
        """How much later than the first launcher this one begins to ask."""

    def take_of_all_ranks(self, *, call_stacks: bool = False) -> Snapshot | None:
        """Takes a snapshot of all ranks of the run. This may take some seconds.

        Args:
            call_stacks: whether to include the stack of each recorded call, which the report on a
                hang shows.

        Returns:
            The snapshot. None if a machine does not answer in time or has left the run, if messages
            cannot be sent now, or if a launcher with a lower rank is taking snapshots.
        """
        if self._nodes == 1:
            return self._take(call_stacks)

        if not self._rendezvous.can_publish:
            return None

        # While a launcher with a lower rank looks for a hang, this one need not. The stacks of
        # calls are for the report on a hang that this one has already found.
        another_leads = time.monotonic() < self._other_leads_until
        if another_leads and not call_stacks:
            return None

        # The number tells answers to this question from late answers to an earlier one.
        self._last_question += 1
        question = {"number": self._last_question, "call_stacks": call_stacks}
        self._rendezvous.publish(_ASK_TOPIC, question)

        own_part = self._take(call_stacks)
        num_others = self._nodes - 1

        def all_answered_or_lost() -> bool:
            self.answer()  # another launcher may ask at the same time
            is_node_lost = bool(self._rendezvous.departed_nodes())
            return is_node_lost or len(self._answers()) == num_others

        timeout_s = _ANSWER_WITH_STACKS_TIMEOUT_S if call_stacks else _ANSWER_TIMEOUT_S
        wait_until(all_answered_or_lost, time.monotonic() + timeout_s)

        other_parts = [from_json(text) for text in self._answers()]
        if len(other_parts) != num_others:
            return None
        return merge([own_part, *other_parts])

    def answer(self) -> None:
        """Answers the questions of other launchers with a snapshot of this machine's ranks.

        The launcher calls this many times a second. Each question is answered once. After a
        question from a launcher with a lower rank, this launcher does not ask for a while.
        """
        if self._nodes == 1:
            return

        questions = self._new_questions()
        if not questions:
            return

        lowest_asking_node = min(questions)
        if lowest_asking_node < self._node:  # that launcher leads now
            self._other_leads_until = time.monotonic() + _LED_FOR_S

        for node, question in questions.items():
            self._last_answered_number[node] = question["number"]

        # One snapshot answers all questions.
        call_stacks = any(question["call_stacks"] for question in questions.values())
        snapshot = self._take(call_stacks)

        # Send fewer calls of each rank until the message is short enough. If it is too long even
        # with one call, there is no answer.
        for max_calls in _CALLS_SENT_AT_MOST:
            text = to_json(shorten(snapshot, max_calls))
            is_short_enough = self._send_answers(questions, text)
            if is_short_enough:
                break

    def _new_questions(self) -> dict[int, Question]:
        """Returns the questions of other launchers that have not been answered yet, by machine."""
        questions = {}
        # `published` returns the last question of each machine, including this one.
        for node, question in self._rendezvous.published(_ASK_TOPIC).items():
            is_new = question["number"] > self._last_answered_number.get(node, 0)
            if node != self._node and is_new:
                questions[node] = question
        return questions

    def _send_answers(self, questions: Mapping[int, Question], text: str) -> bool:
        """Sends a snapshot to all launchers that asked for one.

        Args:
            questions: the questions, by the machine that asked.
            text: the snapshot as JSON.

        Returns:
            False if the snapshot is too long to send.
        """
        for node, question in questions.items():
            answer = {"to": question["number"], "snapshot": text}
            if not self._rendezvous.publish(_ANSWER_TOPIC, answer, to=node):
                return False
        return True

    def _answers(self) -> list[str]:
        """Returns the snapshots that answer this launcher's last question, as JSON."""
        texts = []
        for answer in self._rendezvous.published(_ANSWER_TOPIC).values():
            if answer["to"] == self._last_question:
                texts.append(answer["snapshot"])
        return texts
