"""Implements `lockstep doctor --hosts`: examines several machines, and the links between them.

On each machine, ssh starts a process (`helper`) that answers requests, in the same way as
`lockstep run --hosts` starts its launchers. All machines get the same request at the same time. A
machine that fails or is late gets no further requests, but its earlier answers are kept.

All requests together have one deadline. Each request may take a part of the remaining time, so that
a machine that hangs costs the others time, but not their answers.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.doctor import DEADLINE_S, variables
from lockstep.doctor.base import ERROR, Finding
from lockstep.machine.network import is_here
from lockstep.run.machines.hosts import (
    NUM_NEIGHBORS_TRIED,
    Host,
    is_forwarded,
    resolve_all,
    working_folder,
)
from lockstep.run.machines.machine_connection import MachineConnection, run_on_all
from lockstep.run.machines.ssh_command import DEFAULT_SSH_COMMAND, SshCommand
from lockstep.run.machines.ssh_connection import SshConnection

Answers = dict[str, dict[str, Any]]
"""The answers to a request, by the name of the machine."""
Request = Callable[[MachineConnection], Coroutine[Any, Any, dict[str, Any]]]
"""A function that sends a request to one machine, and returns the answer."""
TOTAL_DEADLINE_S = 26.0
ANSWER_TRANSFER_S = 1.0
"""The time reserved for the transfer of an answer, and for the last requests."""
NUM_CLOCK_READINGS = 3


def examine(
    hosts: Sequence[Host],
    folder: Path,
    ssh: SshCommand = DEFAULT_SSH_COMMAND,
    *,
    files: Mapping[str, str],
    fix: bool,
) -> tuple[Answers, dict[str, Finding]]:
    """Examines several machines, and the links between them.

    Args:
        hosts: the machines.
        folder: the folder for checkpoints.
        ssh: the ssh program and the user's options for it.
        files: the files to compare: `script`, a file, and `data`, a file or folder.
        fix: whether to repair on each machine what can be repaired.

    Returns:
        The facts of each machine, for `comparison.judge`, and a finding about each machine that
        failed.
    """
    resolve_all(hosts)
    connections = [SshConnection(host, ssh, module="lockstep.doctor.helper") for host in hosts]
    examination = _Examination(connections, folder)
    asyncio.run(examination.run(files=files, fix=fix))
    return examination.facts, examination.failures


class _Examination:
    """The requests to all machines, and their answers.

    Args:
        connections: the connections to the machines, which have not been opened yet.
        folder: the folder for checkpoints.
    """

    def __init__(self, connections: Sequence[MachineConnection], folder: Path) -> None:
        self._connections = {connection.host.name: connection for connection in connections}
        self._folder = folder
        self._deadline = time.monotonic() + TOTAL_DEADLINE_S
        self._token = secrets.token_hex(16)
        self.facts: Answers = {}
        self.failures: dict[str, Finding] = {}

    def _remaining_s(self, reserve_s: float = 0.0) -> float:
        """Returns the seconds until the deadline, minus those that are reserved for later
        requests.
        """
        return max(self._deadline - time.monotonic() - reserve_s, 0.0)

    async def _ask(
        self, request: Request, timeout_s: float, names: Iterable[str] | None = None
    ) -> Answers:
        """Sends a request to machines at the same time. Those that fail are added to `failures`.

        Args:
            request: function that sends the request to one machine.
            timeout_s: how long a machine may take to answer, in seconds.
            names: names of the machines; None for all. Machines that have failed before are
                skipped.

        Returns:
            The answers of the machines that have answered in time.
        """
        if names is None:
            names = self._connections

        connections = [self._connections[name] for name in names if name not in self.failures]
        for connection in connections:
            connection.answer_timeout_s = timeout_s  # how long the request waits for its answer

        answers, problems = await run_on_all(connections, request)
        for connection, problem in problems.items():
            self.failures[connection.host.name] = Finding(ERROR, problem.found, problem.advice)
        return {connection.host.name: answer for connection, answer in answers.items()}

    async def run(self, *, files: Mapping[str, str], fix: bool) -> None:
        """Sends all requests. The answers are collected in `facts` and `failures`."""
        try:
            await self._connect()
            await self._read_clocks()
            places = await self._listen()
            await self._connect_machines(places)
            await self._measure_links(places)
            await self._run_checks(files, fix)
            await self._test_shared_folder()
        finally:
            await asyncio.gather(*(connection.close() for connection in self._connections.values()))

    async def _connect(self) -> None:
        """Starts the process on each machine, and finds out the address of each.

        For each machine that answers, `facts` gets its address, and empty `links` and `checks`. A
        machine without the working folder is regarded as failed.
        """

        async def connect(connection: MachineConnection) -> dict[str, Any]:
            # The answer comes from `lockstep.run.machines.helper.describe_machine`.
            return await connection.connect(
                ask="look", folder=working_folder(), script=None, here=connection.here
            )

        answers = await self._ask(connect, self._remaining_s() / 2)
        for name, answer in answers.items():
            if answer["missing"]:  # a text that says what is missing
                self.failures[name] = Finding(
                    ERROR, answer["missing"], "the folder must be there, too"
                )
                continue

            address = answer["own_address"]  # at which ssh has reached the machine
            is_this_machine = self._connections[name].here  # which is not reached by ssh
            if is_this_machine:
                address = _address_of_this_machine(answers.values()) or address

            self.facts[name] = {"own": address, "links": {}, "checks": {}}

    async def _read_clocks(self) -> None:
        """Adds the fact `clock` of each machine: the seconds by which its clock is ahead."""
        # This gets a small part of the time, as a process that does not hang answers at once.
        answers = await self._ask(_read_clock, self._remaining_s() / 12)
        for name, answer in answers.items():
            self.facts[name].update(answer)

    async def _listen(self) -> dict[str, tuple[str, int]]:
        """Makes all machines listen, and returns the address and port of each that does."""
        token = self._token

        # A machine that hangs here must leave time to connect the others and to measure links.
        timeout_s = self._remaining_s() / 4
        answers = await self._ask(
            lambda connection: connection.ask(ask="serve", token=token), timeout_s
        )

        places = {}
        for name, answer in answers.items():
            can_listen = "port" in answer
            if can_listen:
                # The address that the machine has given for itself, or the one from the user.
                address = self.facts[name]["own"] or self._connections[name].host.address
                places[name] = (address, answer["port"])
        return places

    async def _connect_machines(self, places: Mapping[str, tuple[str, int]]) -> None:
        """Lets each machine connect to every other one.

        The fact `links` of a machine then has an entry for each other machine, with the `error`,
        which is empty if the connection works. `_measure_links` replaces some of the entries.

        Args:
            places: the address and port of each machine.
        """

        async def reach(connection: MachineConnection) -> dict[str, Any]:
            others = {name: place for name, place in places.items() if name != connection.host.name}
            return await connection.ask(ask="reach", places=others)

        # The answer of a machine only contains the machines that it could not reach.
        timeout_s = self._remaining_s() / 3
        errors_of_machine = await self._ask(reach, timeout_s)
        for name, errors in errors_of_machine.items():
            links = {other: {"error": errors.get(other, "")} for other in places if other != name}
            self.facts[name]["links"] = links

    async def _measure_links(self, places: Mapping[str, tuple[str, int]]) -> None:
        """Measures the link of each machine to the next one, then to the one after that, and so on.

        The last machine is followed by the first. Links that do not work are skipped.

        Args:
            places: the address and port of each machine.
        """
        names = [name for name in places if name not in self.failures]
        num_neighbors = min(NUM_NEIGHBORS_TRIED, len(names) - 1)
        for distance in range(1, num_neighbors + 1):
            neighbors = {}
            for index, name in enumerate(names):
                neighbor = names[(index + distance) % len(names)]

                # `_connect_machines` has set the error of each link. It is empty if the link works.
                if not self.facts[name]["links"][neighbor]["error"]:
                    neighbors[name] = neighbor
            await self._measure_links_to(neighbors, places)

    async def _measure_links_to(
        self, neighbors: Mapping[str, str], places: Mapping[str, tuple[str, int]]
    ) -> None:
        """Measures one link of each machine, all at the same time.

        The results are added to the fact `links` of each machine.

        Args:
            neighbors: for each machine, the name of the one to which its link is measured, such as
                `{"a": "b", "b": "c"}`.
            places: the address and port of each machine.
        """

        async def measure_link_of(machine: MachineConnection) -> dict[str, Any]:
            neighbor = neighbors[machine.host.name]
            address, port = places[neighbor]
            return await machine.ask(ask="measure", address=address, port=port, token=self._token)

        # `_measure_links` calls this method several times. Half of the remaining time is kept for
        # the later calls.
        timeout_s = self._remaining_s() / 2
        links = await self._ask(measure_link_of, timeout_s, names=neighbors.keys())
        for name, link in links.items():
            neighbor = neighbors[name]
            self.facts[name]["links"][neighbor] = link

    async def _run_checks(self, files: Mapping[str, str], fix: bool) -> None:
        """Runs the checks of `lockstep doctor` on each machine, and adds their facts to `facts`.

        Args:
            files: the files to compare: `script`, a file, and `data`, a file or folder.
            fix: whether to repair on each machine what can be repaired.
        """
        # After the checks, this answer is transferred, and then the answers to later requests.
        checks_timeout_s = self._remaining_s(reserve_s=2 * ANSWER_TRANSFER_S)
        answer_timeout_s = self._remaining_s(reserve_s=ANSWER_TRANSFER_S)

        # These are the arguments of `helper.facts`, which runs the checks on a machine.
        request = {
            "folder": str(self._folder),
            "files": files,
            "fix": fix,
            "address_of": {name: self._connections[name].host.address for name in self.facts},
            "seconds": min(DEADLINE_S, checks_timeout_s),
        }
        answers = await self._ask(
            lambda connection: connection.ask(ask="facts", **request), answer_timeout_s
        )

        forwarded = self._forwarded_variables()
        for name, answer in answers.items():
            answer["checks"]["variables"].update(forwarded)
            self.facts[name].update(answer)

    def _forwarded_variables(self) -> dict[str, Any]:
        """Returns the variables of this machine that `lockstep run --hosts` sends to the others.

        In a run, each machine has these values in place of its own.
        """
        variables_here = variables.gather(self._folder)
        return {name: value for name, value in variables_here.items() if is_forwarded(name)}

    async def _test_shared_folder(self) -> None:
        """Makes the first machine write a file, which the others then read.

        The file is written into the folder for checkpoints or, if there is no such folder, into the
        nearest one above it. The fact `shared` of a machine is True or False, or None if the first
        machine cannot write.
        """
        machines = [name for name in self.facts if name not in self.failures]
        if not machines:
            return

        # The path is the content too. It is unique, so no other file is mistaken for this one.
        path = str(self._folder / f".lockstep-doctor-{secrets.token_hex(8)}")
        unique_text = path
        writer = machines[0]
        answers = await self._ask(
            lambda connection: connection.ask(ask="write", path=path, text=unique_text),
            self._remaining_s(),
            [writer],
        )
        if writer not in answers:  # it has failed
            return

        self.facts[writer]["shared"] = None  # stays None if the machine cannot write
        if answers[writer]["error"] is None:
            written_path = answers[writer]["path"]
            await self._read_shared_file(written_path, expected_text=unique_text)

    async def _read_shared_file(self, path: str, expected_text: str) -> None:
        """Makes all machines read the file, and sets their fact `shared` accordingly.

        Args:
            path: path of the file that the first machine has written.
            expected_text: the content of the file.
        """
        answers = await self._ask(
            lambda connection: connection.ask(ask="read", path=path), self._remaining_s()
        )
        for name, answer in answers.items():
            self.facts[name]["shared"] = answer["text"] == expected_text


def _address_of_this_machine(answers: Iterable[Mapping[str, Any]]) -> str | None:
    """Returns the address from which this machine has reached another one, or None if it is not
    known.

    Args:
        answers: the results of `describe_machine`. The address from which ssh came may belong to a
            jump host.
    """
    for answer in answers:
        address = str(answer["address_ssh_came_from"])
        if address and is_here(address):
            return address
    return None


async def _read_clock(connection: MachineConnection) -> dict[str, Any]:
    """Measures the seconds by which a machine's clock is ahead of this one's.

    The reading with the shortest round trip is used, as it is the most precise. The other clock is
    assumed to be read in the middle of the round trip:

        ahead = other - (begin + end) / 2

    Returns:
        The seconds as `clock`.
    """
    shortest_s = float("inf")
    ahead_s = 0.0
    for _ in range(NUM_CLOCK_READINGS):
        begin = time.time()
        answer = await connection.ask(ask="time")
        end = time.time()
        if end - begin < shortest_s:
            shortest_s = end - begin
            ahead_s = answer["time"] - (begin + end) / 2
    return {"clock": ahead_s}
