"""The join protocol: how ranks that have met at a store decide whether to start the run.

Each rank writes a *join request* with its *manifest* (command, code, versions, settings) to the
store. Rank 0 reads all requests and writes the *decision*: start, or an error that all ranks then
raise. The processes whose requests count, one for each rank, are the *members* of the run.
Everything written is JSON. The keys, on a store of torch's (no process group exists yet):

    each rank   n = add("requests", 1); set("request/n", its request)
    rank 0      set("rank 0", its request); reads the requests until all ranks have come, two have
                the same rank, two have different world sizes, or the time is over; then
                set("member/rank", n) for each rank, and set("decision", ...)
    each rank   reads the decision; set("read/n"); goes on, or raises what the decision says; goes
                on only where its own request is the one that counts
    rank 0      after an error, stays until the others have read it, as it may host the store

Only rank 0 reads what all others have written, and the size of its answer does not grow with their
number. If each of 1024 ranks read each manifest, half a gigabyte would be moved.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import psutil
from torch.distributed import Store

from lockstep import errors
from lockstep.distributed.manifest import mismatches, without_harmless_differences
from lockstep.distributed.network import boot_id, wait_until
from lockstep.distributed.topology import Topology
from lockstep.wording import format_ranks, group_by_key

GRACE_S = 5.0
"""How long past the deadline a rank waits for a rank 0 that has come, and rank 0 for readers."""

REQUEST_MARK = '{"number": '
"""How the JSON of a `JoinRequest` begins."""
ERROR_MARK = '"error": ["'
"""Text that only the JSON of a decision that is an error contains."""

JoinFailure = errors.JoinError | errors.RanksDifferError


@dataclass(frozen=True)
class JoinRequest:
    """What one process has written to the store."""

    number: int
    """Counts the requests, from 1."""
    rank: int
    size: int
    """The world size that the process was started with."""
    host: str
    pid: int
    started: float
    """When the process was created, in seconds since 1970."""
    manifest: Mapping[str, str]
    boot_id: str = ""
    """Changes whenever the machine is started; empty if its system has no such number."""
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    unknown: Sequence[str] = ()
    """Which of the three numbers before the process does not know yet: see `Topology.unknown`."""

    @property
    def process(self) -> str:
        """Names the process in messages."""
        return f"process {self.pid} on {self.host}"


def read_request(store: Store, key: str) -> JoinRequest:
    """Returns the request that was written under a key; the key must exist."""
    return JoinRequest(**json.loads(store.get(key)))


def name_machines(requests: Sequence[JoinRequest]) -> list[str]:
    """Returns a name for the machine of each request, which is equal for those of one machine.

    The name is the host name. If several machines have the same one, the second is called "name
    (2)", and so on. As for NCCL, two processes are on one machine if both host name and boot id are
    equal: containers of one machine share the boot id, and machines may share a host name.
    """
    boot_ids_of_host: dict[str, list[str]] = {}
    names = []
    for request in requests:
        if request.host not in boot_ids_of_host:
            boot_ids_of_host[request.host] = []
        boot_ids = boot_ids_of_host[request.host]
        if request.boot_id not in boot_ids:  # another machine with this host name
            boot_ids.append(request.boot_id)
        number = boot_ids.index(request.boot_id) + 1
        names.append(request.host if number == 1 else f"{request.host} ({number})")
    return names


@dataclass
class Join:
    """One rank's side of the join protocol, from its request to the decision."""

    store: Store
    """The store in which the ranks of this run, and of no other, meet."""
    topology: Topology
    manifest: Mapping[str, str]
    store_location: str
    """The place of the store, for messages."""
    timeout_s: float
    """How long ranks wait for each other."""
    file: Path | None = None
    """The file of the store, if it has one. Rank 0 removes it if the join fails."""
    host: str = field(default_factory=socket.gethostname)
    boot_id: str = field(default_factory=boot_id)
    requests: list[JoinRequest] = field(default_factory=list)
    """The requests that rank 0 has read."""

    def agree(self) -> list[str]:
        """Asks to join and returns when rank 0 has decided to start the run.

        Returns:
            The host of each rank, as `name_machines` returns them.

        Raises:
            JoinError, RanksDifferError: the same on all ranks.
        """
        try:
            # If two processes have rank 0, the first one decides and the second asks like others.
            # The key counts them.
            decides = self.topology.is_main and self.store.add("ranks 0", 1) == 1
            request = self._write_request()
            if decides:
                return self._decide(request)
            return self._await_decision(request)
        except RuntimeError as error:  # what torch's stores raise
            if isinstance(error, errors.LockstepError):
                raise
            reason = str(error).partition("\n")[0]
        # Raised outside of the `except` block: the context of the error would keep the store alive.
        raise errors.MissingRankError(
            self._requested_run,
            f"rank 0 or its store went away during the join ({reason})",
            "look at rank 0's error: it failed first",
        )

    def _write_request(self) -> JoinRequest:
        """Writes this process's request to the store and returns it."""
        process = psutil.Process()
        request = JoinRequest(
            number=int(self.store.add("requests", 1)),
            rank=self.topology.rank,
            size=self.topology.size,
            host=self.host,
            pid=process.pid,
            started=process.create_time(),
            manifest=dict(self.manifest),
            boot_id=self.boot_id,
            local_rank=self.topology.local_rank,
            local_size=self.topology.local_size,
            node_rank=self.topology.node_rank,
            unknown=sorted(self.topology.unknown),
        )
        self.store.set(f"request/{request.number}", json.dumps(vars(request)))
        return request

    @property
    def _requested_run(self) -> str:
        """What the user asked for, as error messages say it."""
        return f"a run of {self.topology.size} processes that meet at {self.store_location}"

    @property
    def _advice_for_second_run(self) -> str:
        """What to give a second run, so that it does not meet this one."""
        if self.file is None:
            return "a port of its own"
        return "a file of its own (if no other run uses this one, it is left over: remove it)"

    # On every rank but rank 0

    def _await_decision(self, request: JoinRequest) -> list[str]:
        """Waits for rank 0's decision; returns the host of each rank, or raises its error.

        Args:
            request: what this process has written.
        """
        advice_on_file = ""
        if self.file is not None:
            advice_on_file = f"; remove {self.file} before the next try"
        self._await_rank_0(request, advice_on_file)

        deadline = time.monotonic() + self.timeout_s + GRACE_S
        if not self._wait_for_key("decision", deadline):
            rank_0 = read_request(self.store, "rank 0")
            raise errors.MissingRankError(
                self._requested_run,
                f"rank 0 ({rank_0.process}) came, but stopped answering",
                "look at rank 0's process: it was ended, stopped, or its machine is out of reach"
                + advice_on_file,
            )
        decision = json.loads(self.store.get("decision"))
        self.store.set(f"read/{request.number}", "")  # rank 0 may wait for it before it leaves
        if decision["error"] is not None:
            error_name, was_set, found, do, may_pass = decision["error"]
            error_class = getattr(errors, error_name)  # such as `MissingRankError`
            error: JoinFailure = error_class(was_set, found, do, may_pass=may_pass)
            raise error

        # The decision has each host once, with the number of its consecutive ranks.
        hosts = []
        for host, num_ranks in decision["hosts"]:
            hosts += [host] * num_ranks
        self._check_is_member(request, num_members=len(hosts))
        return hosts

    def _await_rank_0(self, request: JoinRequest, advice_on_file: str) -> None:
        """Returns when rank 0 has come to the store; raises MissingRankError if it does not.

        Args:
            request: what this process has written.
            advice_on_file: ends the advice, if the store is a file.
        """
        if self._wait_for_key("rank 0", time.monotonic() + self.timeout_s):
            return
        raise errors.MissingRankError(
            self._requested_run,
            f"rank 0 did not come within {self.timeout_s:g} s; {format_ranks([request.rank])} did",
            f"look at the output of rank 0's process, or start it{advice_on_file}",
        )

    def _wait_for_key(self, key: str, deadline: float) -> bool:
        """Returns True as soon as the store has the key, and False after the deadline."""
        return wait_until(
            lambda: self.store.check([key]),
            deadline,
            ranks=self.topology.size,
        )

    def _check_is_member(self, request: JoinRequest, num_members: int) -> None:
        """Raises DuplicateRankError if the run has started with another process of this rank.

        Args:
            request: what this process has written.
            num_members: the number of ranks of the run, for each of which the store has the number
                of the request that counts.
        """
        # A process of a second, larger run may have a rank that this run does not have. Any member
        # will do then: its number is another one than this request's.
        member_rank = request.rank % num_members
        member_number = int(self.store.get(f"member/{member_rank}"))
        if member_number == request.number:
            return
        member = read_request(self.store, f"request/{member_number}")
        raise errors.DuplicateRankError(
            self._requested_run,
            f"a run has already begun there, with {member.process} as rank {member.rank}; "
            f"this is {request.process} as rank {request.rank}",
            f"start each rank once, and give a second run {self._advice_for_second_run}",
        )

    # On rank 0

    def _decide(self, own_request: JoinRequest) -> list[str]:
        """Waits for the other ranks, writes the decision, and acts on it as the other ranks do.

        Args:
            own_request: what this process, which has rank 0, has written.

        Returns:
            The host of each rank.

        Raises:
            JoinError, RanksDifferError: the run does not start. Once the other ranks have read
                that, the file of the store, if it has one, is removed.
        """
        self.store.set("rank 0", json.dumps(vars(own_request)))
        wait_until(self._can_decide, time.monotonic() + self.timeout_s)
        # If several processes have one rank, the first one is the member.
        first_request_of_rank: dict[int, JoinRequest] = {}
        for request in self.requests:
            if request.rank not in first_request_of_rank:
                first_request_of_rank[request.rank] = request
        members = [first_request_of_rank[rank] for rank in sorted(first_request_of_rank)]

        # Only if all ranks have come, once each, can their manifests be compared.
        error = self._find_contradiction() or self._find_absence() or self._find_mismatch(members)
        error_fields = None
        if error is not None:
            texts = (error.was_set, error.found, error.do)
            error_fields = (type(error).__name__, *texts, error.may_pass)
        hosts = name_machines(members)
        # Consecutive ranks mostly share a host, so each host is written once, with their number.
        host_counts = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
        if error is None:
            for member in members:
                self.store.set(f"member/{member.rank}", str(member.number))
        self.store.set("decision", json.dumps({"hosts": host_counts, "error": error_fields}))
        if error is not None:
            self._wait_for_readers(own_request, error)
            if self.file is not None:
                self.file.unlink(missing_ok=True)
            raise error
        return hosts

    def _can_decide(self) -> bool:
        """Returns True if all ranks have come, or an error is certain already."""
        self._read_new_requests()
        return self._find_contradiction() is not None or not self._missing_ranks()

    def _read_new_requests(self) -> None:
        """Adds the requests that were written since the last call to `requests`."""
        while True:
            next_key = f"request/{len(self.requests) + 1}"
            if not self.store.check([next_key]):
                return
            self.requests.append(read_request(self.store, next_key))

    def _missing_ranks(self) -> set[int]:
        """Returns the ranks of which no request has been read."""
        ranks_that_came = {request.rank for request in self.requests}
        return set(range(self.topology.size)) - ranks_that_came

    def _find_contradiction(self) -> JoinFailure | None:
        """Returns the error if processes differ in the world size or have the same rank."""
        ranks_of_size = group_by_key((request.size, request.rank) for request in self.requests)
        if len(ranks_of_size) > 1:
            texts = []
            for size, ranks in sorted(ranks_of_size.items()):
                verb = "says" if len(set(ranks)) == 1 else "say"
                texts.append(f"{format_ranks(ranks)} {verb} world size {size}")
            return errors.WorldSizeError(
                f"processes that meet at {self.store_location}",
                "; ".join(texts),
                "start all with the same world size, and give a second run "
                f"{self._advice_for_second_run}",
            )
        requests_of_rank = group_by_key((request.rank, request) for request in self.requests)
        for rank in sorted(requests_of_rank):
            requests = requests_of_rank[rank]
            if len(requests) > 1:
                return errors.DuplicateRankError(
                    self._requested_run,
                    f"two processes claim rank {rank}: {requests[0].process} and "
                    f"{requests[1].process}",
                    "start each with its own rank, and give a second run "
                    f"{self._advice_for_second_run}",
                )
        return None

    def _find_absence(self) -> JoinFailure | None:
        """Returns the error if ranks did not come in time."""
        missing_ranks = self._missing_ranks()
        if not missing_ranks:
            return None
        ranks_of_host = group_by_key((request.host, request.rank) for request in self.requests)
        ranks_that_came = []
        for host, ranks in ranks_of_host.items():
            ranks_that_came.append(f"{format_ranks(ranks)} on {host}")
        pronoun = "it" if len(missing_ranks) == 1 else "them"
        return errors.MissingRankError(
            self._requested_run,
            f"{format_ranks(missing_ranks)} did not come within {self.timeout_s:g} s; came: "
            + "; ".join(ranks_that_came),
            f"look at the output of {format_ranks(missing_ranks)}, or start {pronoun}; if there "
            "should be fewer processes, correct the world size",
        )

    def _find_mismatch(self, members: Sequence[JoinRequest]) -> JoinFailure | None:
        """Returns the error if the manifests of the members differ."""
        manifests = [member.manifest for member in members]
        if not mismatches(manifests):
            return None
        lines = mismatches(without_harmless_differences(manifests, self._topologies_of(members)))
        if not lines:
            return None
        do = "start the same command, with the same code and versions, on every machine"
        if any(line.startswith("arguments: ") for line in lines):
            do += (
                "; an argument may differ if its value is the rank, local rank or machine number "
                "of each process and its name says so (--rank, --local-rank, --node-rank)"
            )
        # A launcher starts the same commands, with the same code and versions, again.
        found = "; ".join(lines)
        return errors.RanksDifferError(self._requested_run, found, do, may_pass=False)

    def _topologies_of(self, members: Sequence[JoinRequest]) -> list[Topology]:
        """Returns the place of each rank, as it will be once the run has started.

        Args:
            members: the processes of the run, in the order of their ranks.
        """
        hosts = name_machines(members)
        topologies = []
        for member in members:
            topology = replace(
                self.topology,
                rank=member.rank,
                local_rank=member.local_rank,
                local_size=member.local_size,
                node_rank=member.node_rank,
                unknown=frozenset(member.unknown),
            )
            topologies.append(topology.with_hosts(hosts))
        return topologies

    def _wait_for_readers(self, own_request: JoinRequest, error: JoinFailure) -> None:
        """Waits, up to `GRACE_S`, until all processes that may still come have read the error.

        Args:
            own_request: that of rank 0, which need not read its own error.
            error: what the decision says.
        """
        # These ranks are not waited for: they have had the whole timeout to come.
        ranks_are_missing = isinstance(error, errors.MissingRankError)

        def all_have_read() -> bool:
            """Returns True if each process that may come has come and has read the decision."""
            self._read_new_requests()
            if not ranks_are_missing:
                largest_size = max(request.size for request in self.requests)
                if len(self.requests) < largest_size:
                    return False  # more processes are expected
            keys = []  # each process writes its own after it has read the decision
            for request in self.requests:
                if request.number != own_request.number:
                    keys.append(f"read/{request.number}")
            return not keys or self.store.check(keys)

        wait_until(all_have_read, time.monotonic() + GRACE_S)
