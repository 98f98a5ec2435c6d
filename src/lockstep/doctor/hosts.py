"""`lockstep doctor --hosts`: examines several machines, and the links between them.

A process on each machine (`remote`) answers requests; it is started by ssh, as `lockstep run
--hosts` starts its launchers. All machines are asked the same thing at the same time. A machine
that fails or is late is asked nothing more, and what it has answered before stays.

All requests together have one deadline. Each may take a part of the remaining time, so that a
machine that hangs costs the others time, but none of their answers.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.distributed.network import is_here
from lockstep.doctor import DEADLINE_S, variables
from lockstep.doctor.base import ERROR, Finding
from lockstep.run.machines.hosts import (
    NUM_NEIGHBORS_TRIED,
    Host,
    is_forwarded,
    resolve_all,
    working_folder,
)
from lockstep.run.machines.ssh_connection import Remote, run_on_all

Answers = dict[str, dict[str, Any]]
"""By the name of the machine."""
Request = Callable[[Remote], Coroutine[Any, Any, dict[str, Any]]]
"""Asks one machine something."""
TOTAL_DEADLINE_S = 26.0
ANSWER_TRANSFER_S = 1.0
"""How long an answer may be on its way, and how long the last requests may take."""
NUM_CLOCK_READINGS = 3


def examine(
    hosts: Sequence[Host],
    folder: Path,
    ssh: Sequence[str] = ("ssh",),
    *,
    files: Mapping[str, str],
    fix: bool,
) -> tuple[Answers, dict[str, Finding]]:
    """Examines machines, and the links between them.

    Args:
        hosts: the machines.
        folder: where checkpoints are to go.
        ssh: the command line of ssh.
        files: what to compare: `script`, a file; `data`, a file or folder.
        fix: repair on each machine what can be repaired.

    Returns:
        The facts of each machine, for `comparison.judge`; and for each machine that failed, why.
    """
    resolve_all(hosts)
    remotes = [Remote(host, ssh, module="lockstep.doctor.remote") for host in hosts]
    examination = _Examination(remotes, folder)
    asyncio.run(examination.run(files=files, fix=fix))
    return examination.facts, examination.failures


class _Examination:
    """The requests to all machines.

    Args:
        remotes: the processes on the machines, which are not started yet.
        folder: where checkpoints are to go.
    """

    def __init__(self, remotes: Sequence[Remote], folder: Path) -> None:
        self._remotes = {remote.host.name: remote for remote in remotes}
        self._folder = folder
        self._deadline = time.monotonic() + TOTAL_DEADLINE_S
        self._token = secrets.token_hex(16)
        self.facts: Answers = {}
        self.failures: dict[str, Finding] = {}

    def _remaining_s(self, reserve_s: float = 0.0) -> float:
        """Returns the seconds to the deadline, without those to reserve for later requests."""
        return max(self._deadline - time.monotonic() - reserve_s, 0.0)

    async def _ask(
        self, request: Request, timeout_s: float, names: Iterable[str] | None = None
    ) -> Answers:
        """Asks machines at the same time; adds those that fail or are late to `failures`.

        Args:
            request: asks one machine.
            timeout_s: how long a machine may take to answer.
            names: which machines; None for all. Machines that have failed before are not asked.

        Returns:
            The answers of the others, by the name of the machine.
        """
        if names is None:
            names = self._remotes

        remotes = [self._remotes[name] for name in names if name not in self.failures]
        for remote in remotes:
            remote.answer_timeout_s = timeout_s

        answers, problems = await run_on_all(remotes, request)
        for remote, problem in problems.items():
            found, do = problem.args  # what went wrong with the machine, and what to do about it
            self.failures[remote.host.name] = Finding(ERROR, found, do)

        return {remote.host.name: answer for remote, answer in answers.items()}

    async def run(self, *, files: Mapping[str, str], fix: bool) -> None:
        """Makes all requests; what the machines answer is in `facts` and `failures`."""
        try:
            await self._connect()
            await self._read_clocks()
            await self._try_links()
            await self._run_checks(files, fix)
            await self._test_shared_folder()
        finally:
            await asyncio.gather(*(remote.close() for remote in self._remotes.values()))

    async def _connect(self) -> None:
        """Starts the process on each machine, and learns the address of each.

        For each machine that answers, `facts` gets its address and empty `links` and `checks`. A
        machine without the working folder is a failure.
        """

        async def connect(remote: Remote) -> dict[str, Any]:
            # The answer is that of `lockstep.run.machines.remote.describe_machine`.
            return await remote.connect(
                ask="look", folder=working_folder(), script=None, here=remote.here
            )

        answers = await self._ask(connect, self._remaining_s() / 2)
        for name, answer in answers.items():
            if answer["missing"]:  # a text that says what is missing
                self.failures[name] = Finding(
                    ERROR, answer["missing"], "the folder must be there, too"
                )
                continue

            address = answer["own"]
            if self._remotes[name].here:
                # No ssh connection led to this machine, which would show by which address it is
                # reached. But the others were reached from it, and saw its address.
                address = _address_of_this_machine(answers.values()) or address

            self.facts[name] = {"own": address, "links": {}, "checks": {}}

    async def _read_clocks(self) -> None:
        """Adds to the facts of each machine by how many seconds its clock is ahead: `clock`."""
        # A small part of the time: a process that does not hang tells its time at once.
        answers = await self._ask(_read_clock, self._remaining_s() / 12)
        for name, answer in answers.items():
            self.facts[name].update(answer)

    async def _try_links(self) -> None:
        """Connects each machine to every other, and measures the links to the next few.

        The fact `links` of a machine then has an entry for each other machine: its `error`, which
        is empty if the connection works, or what was measured.
        """
        token = self._token
        answers = await self._ask(
            lambda remote: remote.ask(ask="serve", token=token), self._remaining_s() / 4
        )
        places: dict[str, tuple[str, int]] = {}  # the address and port of each machine that listens
        for name, answer in answers.items():
            if "port" in answer:  # otherwise it could not listen
                address = self.facts[name]["own"] or self._remotes[name].host.address
                places[name] = (address, answer["port"])

        async def reach(remote: Remote) -> dict[str, Any]:
            others = {name: place for name, place in places.items() if name != remote.host.name}
            return await remote.ask(ask="reach", places=others)

        # `reach` answers only for the machines that were not reached.
        errors_of_machine = await self._ask(reach, self._remaining_s() / 3)
        for name, errors in errors_of_machine.items():
            links = {other: {"error": errors.get(other, "")} for other in places if other != name}
            self.facts[name]["links"] = links

        await self._measure_links(places)

    async def _measure_links(self, places: Mapping[str, tuple[str, int]]) -> None:
        """Measures the link of each machine to the next one, then to the one after that, ...

        The last machine is followed by the first. Links that do not work are left out.

        Args:
            places: the address and port of each machine.
        """
        names = [name for name in places if name not in self.failures]
        num_neighbors = min(NUM_NEIGHBORS_TRIED, len(names) - 1)
        for distance in range(1, num_neighbors + 1):
            neighbors = {}
            for index, name in enumerate(names):
                neighbor = names[(index + distance) % len(names)]
                if not self.facts[name]["links"][neighbor]["error"]:
                    neighbors[name] = neighbor
            await self._measure_links_to(neighbors, places)

    async def _measure_links_to(
        self, neighbors: Mapping[str, str], places: Mapping[str, tuple[str, int]]
    ) -> None:
        """Measures one link of each machine, all at the same time.

        The results are put into the fact `links` of each machine.

        Args:
            neighbors: for each machine, by its name, the name of the machine at the other end.
            places: the address and port of each machine.
        """

        async def measure(remote: Remote) -> dict[str, Any]:
            address, port = places[neighbors[remote.host.name]]
            return await remote.ask(ask="measure", address=address, port=port, token=self._token)

        # Half of the remaining time is kept for the links that are measured next.
        links = await self._ask(measure, timeout_s=self._remaining_s() / 2, names=neighbors)
        for name, link in links.items():
            self.facts[name]["links"][neighbors[name]] = link

    async def _run_checks(self, files: Mapping[str, str], fix: bool) -> None:
        """Runs the checks of `lockstep doctor` on each machine, and adds their facts to `facts`.

        Args:
            files: what to compare: `script`, a file; `data`, a file or folder.
            fix: repair on each machine what can be repaired.
        """
        addresses = {name: self._remotes[name].host.address for name in self.facts}

        # The answer needs time to arrive, and so do the requests that come after this one.
        checks_s = min(DEADLINE_S, self._remaining_s(reserve_s=2 * ANSWER_TRANSFER_S))

        # The arguments of `remote.facts`, which runs the checks on a machine.
        request = {
            "folder": str(self._folder),
            "files": files,
            "fix": fix,
            "names": addresses,
            "seconds": checks_s,
        }
        answers = await self._ask(
            lambda remote: remote.ask(ask="facts", **request),
            timeout_s=self._remaining_s(reserve_s=ANSWER_TRANSFER_S),
        )

        # `lockstep run --hosts` sends these variables from here to each machine, so in a run they
        # have the same values everywhere.
        forwarded = {}
        for name, value in variables.gather(self._folder).items():
            if is_forwarded(name):
                forwarded[name] = value

        for name, answer in answers.items():
            answer["checks"]["variables"].update(forwarded)
            self.facts[name].update(answer)

    async def _test_shared_folder(self) -> None:
        """Lets the first machine write a file that the others then read.

        The fact `shared` of a machine is True or False, or None if the first machine cannot write.
        """
        # The name is new and is also the text of the file, so that no other file is taken for it.
        path = str(self._folder / f".lockstep-doctor-{secrets.token_hex(8)}")
        able = [name for name in self.facts if name not in self.failures]
        if not able:
            return

        writer = able[0]
        answers = await self._ask(
            lambda remote: remote.ask(ask="write", path=path, text=path),
            self._remaining_s(),
            [writer],
        )
        if writer not in answers:  # it is one of the failures now
            return

        self.facts[writer]["shared"] = None  # it stays None if it cannot write
        if answers[writer]["error"] is None:
            await self._read_shared_file(answers[writer]["path"], expected_text=path)

    async def _read_shared_file(self, path: str, expected_text: str) -> None:
        """Lets all machines read the file; their fact `shared` says whether they see it.

        Args:
            path: the file that the first machine has written.
            expected_text: what it has written.
        """
        answers = await self._ask(
            lambda remote: remote.ask(ask="read", path=path), self._remaining_s()
        )
        for name, answer in answers.items():
            self.facts[name]["shared"] = answer["text"] == expected_text


def _address_of_this_machine(answers: Iterable[Mapping[str, Any]]) -> str | None:
    """Returns the address from which this machine reached another one; None if none tells it.

    Args:
        answers: those of `describe_machine`, whose `first` is the address from which ssh came. That
            may be a machine on the way.
    """
    for answer in answers:
        if answer["first"] and is_here(answer["first"]):
            return str(answer["first"])
    return None


async def _read_clock(remote: Remote) -> dict[str, Any]:
    """Returns, as `clock`, by how many seconds a machine's clock is ahead of this one's.

    The reading with the shortest round trip counts, since it is the most exact. The other clock is
    taken to be read in the middle of the round trip:

        ahead = other - (begin + end) / 2
    """
    shortest_s = float("inf")
    ahead_s = 0.0
    for _ in range(NUM_CLOCK_READINGS):
        begin = time.time()
        answer = await remote.ask(ask="time")
        end = time.time()
        if end - begin < shortest_s:
            shortest_s = end - begin
            ahead_s = answer["time"] - (begin + end) / 2

    return {"clock": ahead_s}
