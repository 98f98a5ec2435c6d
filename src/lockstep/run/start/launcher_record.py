"""Writes what the launcher does and finds into the record of a run, which `lockstep report` reads.

A record is a folder of JSON Lines files. The launcher of each machine has a file of its own in it,
so starts, findings, restarts and failures are in the report even if the script itself records
nothing.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from lockstep import masking
from lockstep.language import translate
from lockstep.run.start.process import Attempt
from lockstep.run.start.worker import Script
from lockstep.run.watch.failure_report import render_failure
from lockstep.run.watch.first_failure import FirstFailure


class LauncherRecord:
    """Writes what the launcher of this machine does and finds into the record of a run.

    Args:
        folder: the folder of the record; None if nothing is to be written. If a script names the
            folder in its own source, that is too late for the launcher.
        announce: function that shows a text to the user.
    """

    def __init__(self, folder: str | None, announce: Callable[[str], object]) -> None:
        self._announce = announce
        self._path = None
        if folder:
            name = f"{time.time_ns():020d}-{secrets.token_hex(4)}.launcher.record"
            self._path = Path(folder, name)

    def write(self, kind: str, text: str = "", **fields: object) -> str:
        """Appends a line to the record.

        Args:
            kind: `start`, `finding` or `restart`; or how an attempt has ended: `end` (well),
                `failure` or `interrupted`.
            text: a text for people.
            fields: further fields: `ranks` and `command` of a start, `exit_code` of a failure.

        Returns:
            Why the line could not be written; empty if it was, or if there is no record.
        """
        if self._path is None:
            return ""

        line = {"kind": kind, "text": text, "host": socket.gethostname(), "time": time.time()}
        line |= fields
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab", buffering=0) as file:
                file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            return f"{self._path.parent}: {error.strerror}"

        return ""

    def start(self, attempt: Attempt, script: Script) -> None:
        """Records that the ranks are about to be started. Only the machine of rank 0 does so."""
        if attempt.node != 0:
            return
        command = masking.mask_secrets([script.path, *script.arguments])
        problem = self.write("start", ranks=attempt.world_size, command=command)

        # Tell the user that there will be no record. A script that uses Lockstep would say so too,
        # but others would not.
        if problem:
            self._announce(translate(f"no record is written: {problem}"))

    def end(self, failure: FirstFailure | None) -> None:
        """Records that the ranks have ended, and how."""
        if failure is None:
            self.write("end")
            return
        kind = "interrupted" if failure.kind == "interrupted" else "failure"
        self.write(kind, render_failure(failure), exit_code=failure.exit_code)

    def find(self, text: str, shown_text: str) -> None:
        """Announces a finding of the supervisor, and records it.

        Args:
            text: the text in English, for the record.
            shown_text: the text in the language of the console.
        """
        self._announce(shown_text)
        self.write("finding", text)
