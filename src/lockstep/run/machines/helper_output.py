"""Takes the answers of a helper out of its output.

An answer is a mark, JSON and a newline. It may interrupt a line of other output, and the output
arrives in pieces that may end at any byte.
"""

from __future__ import annotations

import json
from typing import Any

from lockstep.run.start.terminal_lines import finished_lines


class HelperOutput:
    """One stream of a helper's output, standard output or standard error.

    Args:
        answer_mark: the mark with which each answer begins.
    """

    def __init__(self, answer_mark: bytes) -> None:
        self._answer_mark = answer_mark
        self.unfinished_line = b""
        """The output after the last newline, without the beginning of an answer. It may be shown on
        a terminal."""
        self._begun_answer = b""
        """What follows the unfinished line: the beginning of an answer, or empty."""

    def add(self, data: bytes) -> tuple[list[dict[str, Any]], list[bytes]]:
        r"""Adds a piece of the output.

        The unfinished line and the unfinished answer at its end are kept for the next call. They
        are kept apart, as an unfinished line may be shown at the end of the run, but not an answer.

            kept from before, a line       b"loss "
            kept from before, an answer    b'\x1elockstep 5f {"ali'
            the new data                   b've": true}\n0.25\n'
            the result                     [{"alive": True}], [b"loss 0.25"]

        Returns:
            The answers that are complete now, and the other lines that are finished.
        """
        # An answer may begin in the middle of a line, so the line comes first.
        from_before = self.unfinished_line + self._begun_answer
        answers, text = self._take_answers(from_before + data)

        start_of_answer = self._find_begun_answer(text)  # the end of the text if there is none
        lines, self.unfinished_line = finished_lines(text[:start_of_answer])
        self._begun_answer = text[start_of_answer:]
        return answers, lines

    def drop_begun_answer(self) -> None:
        """Drops an answer that has not arrived completely, and of which no more will come."""
        self._begun_answer = b""

    def _take_answers(self, text: bytes) -> tuple[list[dict[str, Any]], bytes]:
        """Removes complete answers from a text; returns the answers, and the rest of the text."""
        answers: list[dict[str, Any]] = []
        while True:
            start = text.find(self._answer_mark)
            if start < 0:
                return answers, text

            end = text.find(b"\n", start)
            if end < 0:  # the rest of this answer has not arrived yet
                return answers, text

            answers.append(json.loads(text[start + len(self._answer_mark) : end]))
            text = text[:start] + text[end + 1 :]

    def _find_begun_answer(self, text: bytes) -> int:
        """Finds an incomplete answer, or the beginning of its mark, at the end of a text.

        Returns:
            The index at which it begins, or the length of the text if there is none.
        """
        start = text.rfind(self._answer_mark[:1])
        if start < 0:
            return len(text)
        begun_mark = text[start : start + len(self._answer_mark)]
        return start if self._answer_mark.startswith(begun_mark) else len(text)
