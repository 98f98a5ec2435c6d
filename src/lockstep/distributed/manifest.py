"""What all ranks must agree on before the first step, and how they find out whether they do.

Each rank writes a join request with its manifest (command, code, versions, settings) to the store
that the ranks have met at. Rank 0 decides, and all ranks get the same decision. Everything written
is JSON. The keys, on a store of torch's (no process group exists yet):

    each rank   n = add("requests", 1); set("request/n", its request)
    rank 0      set("rank 0", its request); reads the requests until all ranks have come, two have
                the same rank, two have different world sizes, or the time is over; then
                set("member/rank", n) for each rank, and set("decision", ...)
    each rank   reads the decision; set("read/n"); goes on, or raises what the decision says; goes
                on only where its own request is the one that counts
    rank 0      after an error, stays until the others have read it, as it may host the store

Rank 0 alone reads what all others have written, and what it answers does not grow with their
number: with 1024 ranks a manifest from each to each would be half a gigabyte.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed import Store

from lockstep import errors
from lockstep.distributed.network import wait_until
from lockstep.distributed.topology import Topology
from lockstep.wording import format_ranks, group_by_key

# They number the process or its machine, so they differ by their nature.
_PLACE_FLAGS = frozenset(
    f"--{noun}{joint}rank" for noun in ("local", "node", "machine") for joint in "_-"
) | {"--rank"}
_GROUPS_SHOWN = 4


def collect(settings: Mapping[str, object]) -> dict[str, str]:
    """This rank's manifest: the command, the code, the versions and the settings of the run.

    Args:
        settings: what else must be equal on all ranks, such as the seed.

    Returns:
        Text by field.
    """
    manifest = {
        "arguments": shlex.join(shared_arguments(sys.argv)),
        "script": _script_hash(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "platform": platform.machine(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": nccl_version(),
        "numpy": _version("numpy"),
        "lockstep": _version("torch-lockstep"),
    }
    return manifest | {name: str(value) for name, value in settings.items()}


def mismatches(manifests: Sequence[Mapping[str, str]]) -> list[str]:
    """One line for each field that is not equal on all ranks.

    Args:
        manifests: one per rank, in the order of ranks.

    Returns:
        Lines such as "arguments: rank 0 has '--lr 0.1', rank 1 has '--lr 0.2'", ranks that agree
        grouped together.
    """
    lines = []
    for name in dict.fromkeys(name for manifest in manifests for name in manifest):
        holders = group_by_key(
            (manifest.get(name), rank) for rank, manifest in enumerate(manifests)
        )
        if len(holders) == 1:
            continue
        shown = [
            f"{format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} "
            + ("none" if value is None else repr(value))
            for value, ranks in list(holders.items())[:_GROUPS_SHOWN]
        ]
        if len(holders) > len(shown):
            shown.append(f"and {len(holders) - len(shown)} more values")
        lines.append(f"{name}: {', '.join(shown)}")
    return lines


def shared_arguments(argv: Sequence[str]) -> list[str]:
    """The script's name and its arguments without those that say which rank or node this is."""
    kept = [Path(script).name for script in argv[:1]]  # machines may keep it in other folders
    rest = iter(argv[1:])
    for argument in rest:
        flag, equals, _ = argument.partition("=")
        if flag not in _PLACE_FLAGS:
            kept.append(argument)
        elif not equals:
            next(rest, None)  # its value
    return kept


def _script_hash() -> str:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not Path(path).is_file():
        return "none"
    return f"sha256 {hashlib.sha256(Path(path).read_bytes()).hexdigest()}"


def nccl_version() -> str:
    """NCCL's, or `none`."""
    if torch.version.cuda is None or not dist.is_nccl_available():
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed as a package"


GRACE_S = 5.0
"""How long past the deadline a rank waits for a rank 0 that has come, and rank 0 for readers."""

REQUEST_MARK = '{"number": '
"""How the JSON of a `JoinRequest` begins."""
ERROR_MARK = '"error": ["'
"""What only the JSON of a decision that is an error holds."""

Error = errors.JoinError | errors.RanksDifferError


@dataclass(frozen=True)
class JoinRequest:
    """What one process has written to the store."""

    number: int
    """Counts the requests, from 1."""
    rank: int
    size: int
    """The world size it was started with."""
    host: str
    pid: int
    started: float
    """When the process was created, in seconds since 1970."""
    manifest: Mapping[str, str]
    """From `collect`."""

    @property
    def process(self) -> str:
        """Its process in words."""
        return f"process {self.pid} on {self.host}"


def read_request(store: Store, key: str) -> JoinRequest:
    """The request under a key that is there."""
    return JoinRequest(**json.loads(store.get(key)))


@dataclass
class Join:
    """One rank's side of coming together, from its request to the decision."""

    store: Store
    """Where the ranks of this run, and of no other, meet."""
    topology: Topology
    manifest: Mapping[str, str]
    """From `collect`."""
    place: str
    """Where the store is, for messages."""
    timeout: float
    """How long ranks wait for each other, in seconds."""
    file: Path | None = None
    """Of the store, where it has one; removed where the ranks do not come together."""
    host: str = field(default_factory=socket.gethostname)
    requests: list[JoinRequest] = field(default_factory=list)
    """Those that rank 0 has read."""

    def agree(self) -> list[str]:
        """Asks to join; rank 0 decides, and its decision is the same on every rank.

        Returns:
            The host of each rank.

        Raises:
            JoinError, RanksDifferError: the same on all ranks.
        """
        try:
            # A second rank 0 asks like any other, and the first one decides.
            decides = self.topology.is_main and self.store.add("ranks 0", 1) == 1
            process = psutil.Process()
            own = JoinRequest(
                number=int(self.store.add("requests", 1)),
                rank=self.topology.rank,
                size=self.topology.size,
                host=self.host,
                pid=process.pid,
                started=process.create_time(),
                manifest=dict(self.manifest),
            )
            self.store.set(f"request/{own.number}", json.dumps(vars(own)))
            return self._decide(own) if decides else self._await_decision(own)
        except RuntimeError as error:  # what torch's stores raise
            if isinstance(error, errors.LockstepError):
                raise
            reason = str(error).partition("\n")[0]
        # Here, as its context would keep the store alive.
        raise errors.MissingRankError(
            self._asked,
            f"rank 0 or its store went away during the join ({reason})",
            "look at rank 0's error: it failed first",
        )

    @property
    def _asked(self) -> str:
        return f"a run of {self.topology.size} processes that meet at {self.place}"

    @property
    def _another(self) -> str:
        """What a second run needs not to meet this one."""
        if self.file is None:
            return "a port of its own"
        return "a file of its own (if no other run uses this one, it is left over: remove it)"

    def _await_decision(self, own: JoinRequest) -> list[str]:
        store = self.store
        remove = f"; remove {self.file} before the next try" if self.file else ""
        limit, size = time.monotonic() + self.timeout, self.topology.size
        if not wait_until(lambda: store.check(["rank 0"]), limit, ranks=size):
            raise errors.MissingRankError(
                self._asked,
                f"rank 0 did not come within {self.timeout:g} s; {format_ranks([own.rank])} did",
                f"look at the output of rank 0's process, or start it{remove}",
            )
        limit = time.monotonic() + self.timeout + GRACE_S
        if not wait_until(lambda: store.check(["decision"]), limit, ranks=size):
            raise errors.MissingRankError(
                self._asked,
                f"rank 0 ({read_request(store, 'rank 0').process}) came, but stopped answering",
                "look at rank 0's process: it was ended, stopped, or its machine is out of reach"
                + remove,
            )
        decision = json.loads(store.get("decision"))
        store.set(f"read/{own.number}", "")
        if decision["error"] is not None:
            kind, was_set, found, do = decision["error"]
            error: Error = getattr(errors, kind)(was_set, found, do)
            raise error
        hosts = [host for host, count in decision["hosts"] for _ in range(count)]
        number = int(store.get(f"member/{own.rank % len(hosts)}"))
        if number != own.number:
            member = read_request(store, f"request/{number}")
            raise errors.DuplicateRankError(
                self._asked,
                f"a run has already begun there, with {member.process} as rank {member.rank}; "
                f"this is {own.process} as rank {own.rank}",
                f"start each rank once, and give a second run {self._another}",
            )
        return hosts

    def _decide(self, own: JoinRequest) -> list[str]:
        self.store.set("rank 0", json.dumps(vars(own)))
        wait_until(self._can_decide, time.monotonic() + self.timeout)
        by_rank = {request.rank: request for request in reversed(self.requests)}
        members = [by_rank[rank] for rank in sorted(by_rank)]
        error = self._contradiction() or self._absence() or self._mismatch(members)
        written = error and (type(error).__name__, error.was_set, error.found, error.do)
        hosts = [member.host for member in members]
        runs = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
        if error is None:
            for member in members:
                self.store.set(f"member/{member.rank}", str(member.number))
        decision = {"hosts": runs, "error": written}
        self.store.set("decision", json.dumps(decision))
        if error is not None:
            self._wait_for_readers(own, error)
            if self.file is not None:
                self.file.unlink(missing_ok=True)
            raise error
        return hosts

    def _read_new_requests(self) -> None:
        while self.store.check([key := f"request/{len(self.requests) + 1}"]):
            self.requests.append(read_request(self.store, key))

    def _can_decide(self) -> bool:
        self._read_new_requests()
        return self._contradiction() is not None or not self._missing()

    def _missing(self) -> set[int]:
        return set(range(self.topology.size)) - {r.rank for r in self.requests}

    def _contradiction(self) -> Error | None:
        by_size = group_by_key((request.size, request.rank) for request in self.requests)
        if len(by_size) > 1:
            return errors.WorldSizeError(
                f"processes that meet at {self.place}",
                "; ".join(
                    f"{format_ranks(ranks)} {'says' if len(set(ranks)) == 1 else 'say'} "
                    f"world size {size}"
                    for size, ranks in sorted(by_size.items())
                ),
                f"start all with the same world size, and give a second run {self._another}",
            )
        by_rank = group_by_key((request.rank, request) for request in self.requests)
        for rank, (first, *others) in sorted(by_rank.items()):
            if others:
                return errors.DuplicateRankError(
                    self._asked,
                    f"two processes claim rank {rank}: {first.process} and {others[0].process}",
                    f"start each with its own rank, and give a second run {self._another}",
                )
        return None

    def _absence(self) -> Error | None:
        missing = self._missing()
        if not missing:
            return None
        by_host = group_by_key((request.host, request.rank) for request in self.requests)
        came = "; ".join(f"{format_ranks(ranks)} on {host}" for host, ranks in by_host.items())
        return errors.MissingRankError(
            self._asked,
            f"{format_ranks(missing)} did not come within {self.timeout:g} s; came: {came}",
            f"look at the output of {format_ranks(missing)}, or start "
            f"{'it' if len(missing) == 1 else 'them'}; if there should be fewer processes, correct "
            "the world size",
        )

    def _mismatch(self, members: Sequence[JoinRequest]) -> Error | None:
        lines = mismatches([member.manifest for member in members])
        if not lines:
            return None
        return errors.RanksDifferError(
            self._asked,
            "; ".join(lines),
            "start the same command, with the same code and versions, on every machine",
        )

    def _wait_for_readers(self, own: JoinRequest, error: Error) -> None:
        """Until all that can be expected have read the decision, but not long."""
        missing = isinstance(error, errors.MissingRankError)

        def all_have_read() -> bool:
            self._read_new_requests()
            expected = 0 if missing else max(request.size for request in self.requests)
            keys = [f"read/{r.number}" for r in self.requests if r.number != own.number]
            return len(self.requests) >= expected and (not keys or self.store.check(keys))

        wait_until(all_have_read, time.monotonic() + GRACE_S)
