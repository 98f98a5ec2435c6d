"""The join protocol, by which the processes of a run decide whether the run can start.

The processes share a *store* (torch's key-value store). Each writes a *join request* with its
*manifest* (command, code, versions, settings) to it. Rank 0 reads all requests and writes the
*decision*: either to start, or an error that all ranks then raise. If two processes claim the same
rank, the first one is the *member* of the run. No process group exists yet.

The protocol in the order of its steps; all values are JSON:

    each rank   n = add("requests", 1); set("request/n", its request)
    rank 0      set("rank 0", its request); reads requests until all ranks have come, two have the
                same rank, two have different world sizes, or the time is up; then
                set("member/rank", n) for each rank, and set("decision", ...)
    each rank   reads the decision, and set("read/n", ""); raises the error of the decision, or
                continues if its own request is that of the member
    rank 0      after an error, stays until the others have read it, as it may host the store

Only rank 0 reads all requests, and the size of the decision does not grow with the number of
requests. If each of 1024 ranks read every manifest, half a gigabyte would be sent.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import Store

from lockstep import errors
from lockstep.distributed.manifest import describe_mismatches, without_harmless_differences
from lockstep.machine.network import boot_id, wait_until
from lockstep.machine.topology import Topology
from lockstep.wording import conjugate, format_ranks, group_by_key

DECISION_GRACE_S = 5.0
"""How many seconds longer than the timeout a rank waits for the decision of a rank 0 that has
come."""
READING_GRACE_S = 30.0
"""How many seconds rank 0 waits until the others have come and read an error. A rank that comes
later finds no store and cannot learn why. On a busy machine, two ranks that were started together
may come ten seconds apart."""

REQUEST_MARK = '{"number": '
"""How the JSON of a `JoinRequest` begins."""
ERROR_MARK = '"error": ["'
"""Text that only the JSON of a decision that is an error contains."""

JoinFailure = errors.JoinError | errors.RanksDifferError


@dataclass(frozen=True)
class JoinRequest:
    """The request of one process to join the run, as it stands in the store."""

    number: int
    """The number of the request, from 1, in the order in which the processes came."""
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
    """The names of those of the three fields above that the process does not know yet (see
    `Topology.unknown`)."""

    @property
    def process(self) -> str:
        """Names the process in messages."""
        return f"process {self.pid} on {self.host}"


def read_request(store: Store, key: str) -> JoinRequest:
    """Reads the request that is stored under a key, which must exist."""
    return JoinRequest(**json.loads(store.get(key)))


def name_machines(requests: Sequence[JoinRequest]) -> list[str]:
    """Returns the name of each request's machine. Different machines get different names.

    The name is the host name. If several machines have the same host name, such as "node", they are
    called "node", "node (2)", and so on.

    Two processes are on one machine if both the host name and the boot id are equal, which is
    NCCL's rule too. The host name is not enough, as two machines may have the same one. The boot id
    is not enough either: containers on one machine share it.
    """
    boot_ids_of_host: dict[str, list[str]] = {}
    names = []
    for request in requests:
        boot_ids = boot_ids_of_host.setdefault(request.host, [])
        if request.boot_id not in boot_ids:  # another machine with this host name
            boot_ids.append(request.boot_id)

        number = boot_ids.index(request.boot_id) + 1
        names.append(request.host if number == 1 else f"{request.host} ({number})")
    return names


@dataclass
class Join:
    """One rank's side of the join protocol, from its request to the decision."""

    store: Store
    """The store that the ranks share. Its keys belong to this run only."""
    topology: Topology
    manifest: Mapping[str, str]
    store_location: str
    """The address or path of the store, for messages."""
    timeout_s: float
    """How long ranks wait for each other."""
    file: Path | None = None
    """The file of the store, if it has one. Rank 0 removes it if the join fails."""
    host: str = field(default_factory=socket.gethostname)
    boot_id: str = field(default_factory=boot_id)
    requests: list[JoinRequest] = field(default_factory=list)
    """The requests that rank 0 has read."""

    def agree(self) -> list[str]:
        """Asks to join, and returns once rank 0 has decided to start the run.

        Returns:
            The name of each rank's machine (see `name_machines`).

        Raises:
            JoinError, RanksDifferError: the run does not start. All ranks raise the same error.
        """
        try:
            return self._decide_or_await_decision()
        except RuntimeError as error:  # torch's stores raise this type, and so does Lockstep
            if isinstance(error, errors.LockstepError):
                raise

            reason = str(error).partition("\n")[0]

        # This is outside of the `except` block. Inside it, the new error would refer to the old
        # one, whose traceback refers to the store and would keep it alive.
        raise errors.MissingRankError(
            self._requested_run,
            f"rank 0 or its store went away during the join ({reason})",
            "look at rank 0's error: it failed first",
        )

    def _decide_or_await_decision(self) -> list[str]:
        """Does the work of `agree`. The store raises RuntimeError if rank 0 has gone away."""
        # Two processes may claim rank 0 by mistake. Then only the first one decides, and the second
        # one waits for its decision, as other ranks do.
        decides = False
        if self.topology.is_main:
            num_claims_of_rank_0 = self.store.add("ranks 0", 1)  # with this one
            decides = num_claims_of_rank_0 == 1

        request = self._write_request()
        if decides:
            return self._decide(request)
        return self._await_decision(request)

    def _write_request(self) -> JoinRequest:
        """Writes this process's request to the store and returns it.

        A launcher may have left out some of `local_rank`, `local_size` and `node_rank`. Their names
        are in the field `unknown`.
        """
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
        """The run that the user asked for, as error messages describe it."""
        return f"a run of {self.topology.size} processes that meet at {self.store_location}"

    @property
    def _advice_for_second_run(self) -> str:
        """The advice on what a second run needs so that it does not meet this one."""
        if self.file is None:
            return "a port of its own"
        return "a file of its own (if no other run uses this one, it is left over: remove it)"

    # On every rank but rank 0

    def _await_decision(self, request: JoinRequest) -> list[str]:
        """Waits for rank 0's decision. If rank 0 has decided on an error, this raises the error.

        Args:
            request: this process's own request.

        Returns:
            The name of each rank's machine.
        """
        advice_on_file = ""
        if self.file is not None:
            advice_on_file = f"; remove {self.file} before the next try"
        self._await_rank_0(request, advice_on_file)  # until rank 0 has come to the store

        # Rank 0 is there. It decides when all ranks have come, or when its timeout is over.
        deadline = time.monotonic() + self.timeout_s + DECISION_GRACE_S
        if not self._wait_for_key("decision", deadline):
            rank_0 = read_request(self.store, "rank 0")
            raise errors.MissingRankError(
                self._requested_run,
                f"rank 0 ({rank_0.process}) came, but stopped answering",
                "look at rank 0's process: it was ended, stopped, or its machine is out of reach"
                + advice_on_file,
            )

        decision = json.loads(self.store.get("decision"))

        # After an error, rank 0 keeps the store open until it sees this key.
        self.store.set(f"read/{request.number}", "")

        if decision["error"] is not None:
            raise _error_of_fields(decision["error"])

        # Consecutive ranks of one host are written as one pair:
        # [["a", 2], ["b", 1]] -> ["a", "a", "b"]
        hosts = []
        for host, num_ranks in decision["hosts"]:
            hosts += [host] * num_ranks
        self._check_is_member(request, num_members=len(hosts))
        return hosts

    def _await_rank_0(self, request: JoinRequest, advice_on_file: str) -> None:
        """Waits until rank 0 has come to the store; raises MissingRankError if it does not come.

        Args:
            request: this process's own request.
            advice_on_file: text that is appended to the advice; empty if the store is not a file.
        """
        if self._wait_for_key("rank 0", time.monotonic() + self.timeout_s):
            return
        raise errors.MissingRankError(
            self._requested_run,
            f"rank 0 did not come within {self.timeout_s:g} s; {format_ranks([request.rank])} did",
            f"look at the output of rank 0's process, or start it{advice_on_file}",
        )

    def _wait_for_key(self, key: str, deadline: float) -> bool:
        """Waits for a key of the store. Returns False if it has not appeared by the deadline."""
        return wait_until(
            lambda: self.store.check([key]),
            deadline,
            ranks=self.topology.size,
        )

    def _check_is_member(self, request: JoinRequest, num_members: int) -> None:
        """Raises DuplicateRankError if the run has started without this process.

        That happens if another process had claimed the same rank before.

        Args:
            request: this process's own request.
            num_members: the number of members, which is the world size of the run.
        """
        # Rank 0 has written down, for each rank, the number of the request that became the member.
        run_has_this_rank = request.rank < num_members
        if run_has_this_rank:
            member_number = int(self.store.get(f"member/{request.rank}"))
            if member_number == request.number:
                return
        else:
            # This process came to the wrong run: it has rank 5, say, and the run has 4 ranks. No
            # member has its rank, so the error names rank 0.
            member_number = int(self.store.get("member/0"))

        member = read_request(self.store, f"request/{member_number}")
        raise errors.DuplicateRankError(
            self._requested_run,
            f"a run has already begun there, with {member.process} as rank {member.rank}; "
            f"this is {request.process} as rank {request.rank}",
            f"start each rank once, and give a second run {self._advice_for_second_run}",
        )

    # On rank 0

    def _decide(self, own_request: JoinRequest) -> list[str]:
        """Waits for the other ranks, then decides whether the run starts and tells all ranks.

        Args:
            own_request: the request of this process, which has rank 0.

        Returns:
            The name of each rank's machine.

        Raises:
            JoinError, RanksDifferError: the run does not start. Before this is raised, the other
                ranks have had time to read the decision, and the store's file has been removed.
        """
        self.store.set("rank 0", json.dumps(vars(own_request)))

        wait_until(self._can_decide, time.monotonic() + self.timeout_s)

        # If several processes claim the same rank, the first one is the member.
        first_request_of_rank: dict[int, JoinRequest] = {}
        for request in self.requests:
            first_request_of_rank.setdefault(request.rank, request)
        members = [first_request_of_rank[rank] for rank in sorted(first_request_of_rank)]

        # The manifests can only be compared if each rank has come exactly once, so that is checked
        # first.
        error = (
            self._find_contradiction() or self._find_missing_ranks() or self._find_mismatch(members)
        )

        hosts = name_machines(members)
        self._tell_decision(members, hosts, error)

        if error is not None:
            self._wait_for_readers(own_request, error)
            if self.file is not None:
                self.file.unlink(missing_ok=True)
            raise error
        return hosts

    def _tell_decision(
        self, members: Sequence[JoinRequest], hosts: Sequence[str], error: JoinFailure | None
    ) -> None:
        """Writes the decision into the store, where the other ranks wait for it.

        Args:
            members: the request of each rank.
            hosts: the name of each rank's machine.
            error: the error that all ranks raise, or None if the run starts.
        """
        # The members are written before the decision, since ranks look them up when they have read
        # the decision.
        if error is None:
            for member in members:
                self.store.set(f"member/{member.rank}", str(member.number))

        # Consecutive ranks mostly share a host, so they are written as one pair:
        # ["a", "a", "b"] -> [("a", 2), ("b", 1)]
        host_counts = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
        error_fields = None if error is None else _to_fields(error)
        self.store.set("decision", json.dumps({"hosts": host_counts, "error": error_fields}))

    def _can_decide(self) -> bool:
        """Reads new requests. Returns True if all ranks have come, or an error is certain."""
        self._read_new_requests()
        return self._find_contradiction() is not None or not self._missing_ranks()

    def _read_new_requests(self) -> None:
        """Appends all requests to `self.requests` that were written since the last call."""
        while True:
            next_key = f"request/{len(self.requests) + 1}"
            if not self.store.check([next_key]):
                return
            self.requests.append(read_request(self.store, next_key))

    def _missing_ranks(self) -> set[int]:
        """Returns the ranks that have not come, as far as rank 0 has read the requests."""
        ranks_that_came = {request.rank for request in self.requests}
        return set(range(self.topology.size)) - ranks_that_came

    def _find_contradiction(self) -> JoinFailure | None:
        """Returns an error if processes have different world sizes or the same rank, else None."""
        # The ranks by the world size that they expect: {4: [0, 1, 2, 3], 2: [1]}
        ranks_of_size = group_by_key((request.size, request.rank) for request in self.requests)
        if len(ranks_of_size) > 1:
            texts = []
            for size, ranks in sorted(ranks_of_size.items()):
                verb = conjugate("says", len(set(ranks)))
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

    def _find_missing_ranks(self) -> JoinFailure | None:
        """Returns an error if ranks did not come in time, else None."""
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
        """Returns an error if the manifests of the members differ, else None.

        Differences that are harmless, such as a `--local-rank` argument, are ignored.
        """
        manifests = [member.manifest for member in members]
        are_equal = all(manifest == manifests[0] for manifest in manifests)
        if are_equal:  # the usual case
            return None

        # The topologies say which differences are harmless: `--rank 1` on rank 1, for example. Only
        # manifests that differ need them.
        topologies = self._topologies_of(members)
        lines = describe_mismatches(without_harmless_differences(manifests, topologies))
        if not lines:
            return None

        advice = "start the same command, with the same code and versions, on every machine"
        if any(line.startswith("arguments: ") for line in lines):
            advice += (
                "; an argument may differ if its value is the rank, local rank or machine number "
                "of each process and its name says so (--rank, --local-rank, --node-rank)"
            )

        # A launcher that restarts the ranks starts the same commands and code again, so the error
        # is not temporary.
        found = "; ".join(lines)
        return errors.RanksDifferError(self._requested_run, found, advice, may_be_temporary=False)

    def _topologies_of(self, members: Sequence[JoinRequest]) -> list[Topology]:
        """Returns the topology of each rank, as it will be once the run has started.

        What is the same on all ranks, such as the world size and the launcher, is taken from the
        topology of this rank. `with_hosts` fills in what a member does not know yet, such as its
        `node_rank`.

        Args:
            members: the members of the run, in the order of their ranks.
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
                unknown=frozenset(member.unknown),  # the names of these fields
            )
            topologies.append(topology.with_hosts(hosts))
        return topologies

    def _wait_for_readers(self, own_request: JoinRequest, error: JoinFailure) -> None:
        """Waits, up to `READING_GRACE_S` seconds, until the other processes have read the error.

        Rank 0 may host the store, so the others could not read the error after it has exited.

        Args:
            own_request: the request of rank 0 itself.
            error: the error of the decision.
        """

        def all_have_read() -> bool:
            return self._nobody_else_will_come(error) and self._all_have_read(own_request)

        wait_until(all_have_read, time.monotonic() + READING_GRACE_S)

    def _nobody_else_will_come(self, error: JoinFailure) -> bool:
        """Returns True if no other process is expected to come, now that the join has failed.

        Args:
            error: the error with which the join failed.
        """
        self._read_new_requests()

        # This error is raised after the whole timeout, so nobody else is on the way.
        if isinstance(error, errors.MissingRankError):
            return True

        # After any other error, some processes may still be on their way. If they disagree on the
        # world size, say 2 and 4, as many as 4 may come.
        largest_size = max(request.size for request in self.requests)
        return len(self.requests) >= largest_size

    def _all_have_read(self, own_request: JoinRequest) -> bool:
        """Returns True if all other processes that have come have read the decision."""
        # Each process sets its key when it has read the decision.
        keys = []
        for request in self.requests:
            if request.number != own_request.number:
                keys.append(f"read/{request.number}")
        return not keys or self.store.check(keys)


def _to_fields(error: JoinFailure) -> list[Any]:
    """Returns an error in a form that JSON can hold, from which other ranks raise it anew."""
    texts = [error.was_set, error.found, error.do]
    return [type(error).__name__, *texts, error.may_be_temporary]


def _error_of_fields(fields: Sequence[Any]) -> JoinFailure:
    """Returns the error that `_to_fields` has written down."""
    class_name, was_set, found, do, may_be_temporary = fields
    error_class = getattr(errors, class_name)  # for example `MissingRankError`
    error: JoinFailure = error_class(was_set, found, do, may_be_temporary=may_be_temporary)
    return error
