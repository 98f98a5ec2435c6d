"""`lockstep doctor --hosts`: asks all machines, and lets them try the ways between them.

They are called as `lockstep run --hosts` calls them.
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
    FORWARDED_PREFIXES,
    NUM_NEIGHBORS_TRIED,
    Host,
    resolve_all,
    working_folder,
)
from lockstep.run.machines.ssh_connection import Remote, run_on_all

Answers = dict[str, dict[str, Any]]
"""By the name of the machine."""
Work = Callable[[Remote], Coroutine[Any, Any, dict[str, Any]]]
_ALL_S = 26.0
"""For all steps together. Each gets a part of what is left, so that a machine that hangs in one
takes nothing from the others but time."""
_ROOM_S = 1.0
"""For the way of an answer, and for what follows."""


def look(
    hosts: Sequence[Host],
    folder: Path,
    ssh: Sequence[str] = ("ssh",),
    *,
    files: Mapping[str, str],
    fix: bool,
) -> tuple[Answers, dict[str, Finding]]:
    """What the machines have said, for `between.judge`; and why some have not said all or any.

    Args:
        hosts: the machines.
        folder: where checkpoints are to go.
        ssh: how it is called.
        files: what to compare: `script`, a file; `data`, a file or folder.
        fix: mend on each what can be mended.
    """
    asked = {"folder": str(folder), "files": files, "fix": fix}
    resolve_all(hosts)
    asking = _Asking([Remote(host, ssh, module="lockstep.doctor.remote") for host in hosts])
    asyncio.run(asking.all(folder, asked))
    return asking.machines, asking.failed


class _Asking:
    def __init__(self, remotes: Sequence[Remote]) -> None:
        self._remotes = {remote.host.name: remote for remote in remotes}
        self._end = time.monotonic() + _ALL_S
        self._token = secrets.token_hex(16)
        self.machines: Answers = {}
        self.failed: dict[str, Finding] = {}

    def _left(self, room: float = 0.0) -> float:
        return max(self._end - time.monotonic() - room, 0.0)

    async def _ask(self, seconds: float, work: Work, names: Iterable[str] = ()) -> Answers:
        """All, or some, at the same time; those that fail, or are late, take no part any more."""
        able = [self._remotes[n] for n in names or self._remotes if n not in self.failed]
        for remote in able:
            remote.answer_timeout_s = seconds
        found, problems = await run_on_all(able, work)
        for remote, problem in problems.items():
            self.failed[remote.host.name] = Finding(ERROR, *problem.args)
        return {remote.host.name: answer for remote, answer in found.items()}

    async def all(self, folder: Path, asked: dict[str, Any]) -> None:
        """Every step; what is found is in `machines` and `failed`."""
        try:
            await self._meet()
            await self._try_ways()
            asked["names"] = {name: self._remotes[name].host.address for name in self.machines}
            asked["seconds"] = min(DEADLINE_S, self._left(2 * _ROOM_S))
            told = await self._ask(self._left(_ROOM_S), lambda r: r.ask(ask="facts", **asked))
            own = variables.gather(folder)
            for name, facts in told.items():
                sent = {
                    key: value for key, value in own.items() if key.startswith(FORWARDED_PREFIXES)
                }
                facts["checks"]["variables"] |= sent  # as a run there would have them
                self.machines[name] |= facts
            await self._share(str(folder / f".lockstep-doctor-{secrets.token_hex(8)}"))
        finally:
            await asyncio.gather(*(remote.close() for remote in self._remotes.values()))

    async def _meet(self) -> None:
        begin = {"ask": "look", "folder": working_folder(), "script": None}

        async def meet(remote: Remote) -> dict[str, Any]:
            return await remote.connect(**begin, here=remote.here)

        seen = await self._ask(self._left() / 2, meet)
        for name, of in seen.items():
            if self._remotes[name].here:  # the address that the others were reached from
                came_from = [other["first"] for other in seen.values() if other["first"]]
                of["own"] = next(filter(is_here, came_from), of["own"])
            if of["missing"]:
                self.failed[name] = Finding(ERROR, of["missing"], "the folder must be there, too")
            else:
                self.machines[name] = {"own": of["own"], "links": {}, "checks": {}}
        for name, of in (await self._ask(self._left() / 12, _clock)).items():
            self.machines[name] |= of

    async def _try_ways(self) -> None:
        """Whether they are open, all of them; how fast they are, those to the next few."""
        served = await self._ask(self._left() / 4, lambda r: r.ask(ask="serve", token=self._token))
        places = {
            name: (self.machines[name]["own"] or self._remotes[name].host.address, of["port"])
            for name, of in served.items()
            if "port" in of
        }

        async def reach(remote: Remote) -> dict[str, Any]:
            others = {name: place for name, place in places.items() if name != remote.host.name}
            return await remote.ask(ask="reach", places=others)

        for name, closed in (await self._ask(self._left() / 3, reach)).items():
            links = {other: {"error": closed.get(other, "")} for other in places if other != name}
            self.machines[name]["links"] = links
        there = [name for name in places if name not in self.failed]
        for shift in range(1, min(len(there), NUM_NEIGHBORS_TRIED + 1)):
            to = {name: there[(i + shift) % len(there)] for i, name in enumerate(there)}
            open_ones = [n for n in to if not self.machines[n]["links"][to[n]]["error"]]

            async def measure(remote: Remote, to: dict[str, str] = to) -> dict[str, Any]:
                address, port = places[to[remote.host.name]]
                place = {"address": address, "port": port, "token": self._token}
                return await remote.ask(ask="measure", **place)

            found = await self._ask(self._left() / 2, measure, open_ones) if open_ones else {}
            for name, link in found.items():
                self.machines[name]["links"][to[name]] = link

    async def _share(self, path: str) -> None:
        """Whether each machine sees what the first has written; None: that could not write."""
        first = [name for name in self.machines if name not in self.failed][:1]
        write = {"ask": "write", "path": path, "text": path}
        wrote = await self._ask(self._left(), lambda remote: remote.ask(**write), first)
        for name in wrote:
            self.machines[name]["shared"] = None
        if any(of["error"] is None for of in wrote.values()):
            (place,) = (of["path"] for of in wrote.values())
            read = await self._ask(self._left(), lambda r: r.ask(ask="read", path=place))
            for name, of in read.items():
                self.machines[name]["shared"] = of["text"] == path


async def _clock(remote: Remote) -> dict[str, Any]:
    """By how much a machine is ahead of this one; the answer with the shortest way counts."""
    asked = []
    for _ in range(3):
        begun = time.time()
        there = (await remote.ask(ask="time"))["time"]
        ended = time.time()
        asked.append((ended - begun, there - (begun + ended) / 2))
    return {"clock": min(asked)[1]}
