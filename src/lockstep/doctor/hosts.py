"""`lockstep doctor --hosts`: asks all machines, and lets them try the ways between them.

ssh is called as `lockstep run --hosts` calls it.
"""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lockstep.doctor import variables
from lockstep.errors import HostError
from lockstep.launcher.hosts import (
    FORWARDED,
    SHIFTS,
    SSH_OPTIONS,
    Host,
    ssh_failure,
    working_folder,
)
from lockstep.launcher.remote import MARK

_ANSWER_S = 28.0


class Peer:
    """A machine, and the process there.

    Args:
        host: which.
        ssh: how ssh is called.
    """

    def __init__(self, host: Host, ssh: Sequence[str]) -> None:
        self.host = host
        python = [sys.executable, "-P", "-u", "-m", "lockstep.doctor.remote"]
        far = [*ssh, *SSH_OPTIONS, host.name.strip("[]"), f"exec {shlex.join(python)}"]
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - until it is closed
        self._process = subprocess.Popen(
            python if host.here else far,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,
        )

    def ask(self, what: str, **request: Any) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            HostError: there is none.
        """
        process = self._process
        assert process.stdin
        assert process.stdout
        late = threading.Timer(_ANSWER_S, process.kill)
        late.start()
        try:
            process.stdin.write(json.dumps({"ask": what, **request}).encode() + b"\n")
            process.stdin.flush()
            for line in process.stdout:
                _, mark, text = line.partition(MARK)
                if mark:
                    found: dict[str, Any] = json.loads(text)
                    return found
        except BrokenPipeError:
            pass
        finally:
            late.cancel()
        code = process.wait()
        self._said.seek(0)
        said = self._said.read().decode(errors="replace")
        what_failed, do = ssh_failure(self.host, None if code < 0 else code, said, sys.executable)
        if code < 0:
            do += (
                "; where that stops, too, packets may be longer than the way carries: "
                f"`ping -M do -s 1472 {self.host.address}`"
            )
        raise HostError(f"lockstep doctor --hosts {self.host.name}", what_failed, do)

    def close(self) -> None:
        """Ends the process there."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.close()
            self._process.wait(timeout=5.0)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._said.close()


def look(
    hosts: Sequence[Host],
    folder: Path,
    script: str | None = None,
    ssh: Sequence[str] = ("ssh",),
    *,
    data: str | None = None,
    fix: bool = False,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """What all machines have said, for `between.judge`; and why those did not that are missing.

    Args:
        hosts: the machines.
        folder: where checkpoints are to go.
        script: that is to be run.
        ssh: how it is called.
        data: a file or folder to compare.
        fix: mend on each what can be mended.
    """
    own = variables.gather(folder)
    sent = {name: value for name, value in own.items() if name.startswith(FORWARDED)}
    peers = {host.name: Peer(host, ssh) for host in hosts}
    failed: dict[str, str] = {}

    def on_all(
        work: Callable[[Peer], Mapping[str, Any]], names: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        """At the same time; those that fail take no part any more."""
        found: dict[str, dict[str, Any]] = {}

        def one(name: str) -> None:
            try:
                found[name] = dict(work(peers[name]))
            except HostError as error:
                failed[name] = str(error.parts)

        with ThreadPoolExecutor(max(1, len(names))) as pool:
            list(pool.map(one, names))
        return {name: found[name] for name in names if name in found}

    try:
        begin = {"folder": working_folder(), "script": None}
        seen = on_all(lambda peer: peer.ask("look", **begin), list(peers))
        for name in [name for name, of in seen.items() if of["missing"]]:
            failed[name] = f"{seen.pop(name)['missing']}: the folder must be there, too"
        clocks = on_all(_clock, list(seen))
        names = [peers[name].host.address for name in clocks]
        asked = {"folder": str(folder), "names": names, "script": script,
                 "data_path": data, "fix": fix}  # fmt: skip
        facts = on_all(lambda peer: peer.ask("facts", **asked), list(clocks))
        for of in facts.values():  # as a run there would have them
            of["checks"]["variables"] |= sent
        token = secrets.token_hex(16)
        ports = on_all(lambda peer: peer.ask("serve", token=token), list(facts))
        links: dict[str, dict[str, Any]] = {name: {} for name in ports}
        there = list(ports)
        for shift in range(1, min(len(there), SHIFTS + 1)):
            to = {name: there[(i + shift) % len(there)] for i, name in enumerate(there)}

            def try_way(peer: Peer, to: Mapping[str, str] = to) -> dict[str, Any]:
                other = to[peer.host.name]
                address = seen[other]["own"] or peers[other].host.address
                return peer.ask("measure", address=address, port=ports[other]["port"], token=token)

            for name, found in on_all(try_way, there).items():
                links[name][to[name]] = found
        shared = _shared({name: peers[name] for name in there}, folder)
    finally:
        for peer in peers.values():
            peer.close()
    machines = {
        name: {**facts[name], "clock": clocks[name]["off"], "links": links[name],
               "shared": shared.get(name)}
        for name in there if name not in failed
    }  # fmt: skip
    return machines, failed


def _clock(peer: Peer) -> dict[str, float]:
    """By how much a machine is ahead of this one; the answer with the shortest way counts."""
    asked = []
    for _ in range(3):
        begun = time.time()
        there = peer.ask("time")["time"]
        ended = time.time()
        asked.append((ended - begun, there - (begun + ended) / 2))
    return {"off": min(asked)[1]}


def _shared(peers: Mapping[str, Peer], folder: Path) -> dict[str, bool | None]:
    """Whether each machine sees what the first has written; None: that could not write."""
    if not peers:
        return {}
    first, *others = peers
    path, text = str(folder / f".lockstep-doctor-{secrets.token_hex(8)}"), secrets.token_hex(16)
    if peers[first].ask("write", path=path, text=text)["error"] is not None:
        return {**dict.fromkeys(others, True), first: None}
    try:
        return {name: peer.ask("read", path=path)["text"] == text for name, peer in peers.items()}
    finally:
        peers[first].ask("remove", path=path)
