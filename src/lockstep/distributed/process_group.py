"""Joining and leaving a run: from settings and environment to an open process group.

A `Run` is one process's part in a training job. `join_run` finds out which rank this process is,
meets the other ranks at a *store* (torch's key-value store, which they share before a process
group exists), chooses the device and opens the process group; `leave` closes all of it. A *choice*
is something Lockstep decided by itself, with the reason, for the log.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store
from torch.distributed.constants import default_pg_timeout

from lockstep.communication import routing
from lockstep.communication.link import Link, measure
from lockstep.communication.shared_memory import open_shared_memory
from lockstep.communication.traffic import traffic
from lockstep.distributed import network
from lockstep.distributed.backend import choose_backend, close_group, open_group
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.device import choose_device
from lockstep.distributed.manifest import collect
from lockstep.distributed.topology import SET_BY_SCRIPT, Topology, detect, port
from lockstep.distributed.torch_compat import without_compile
from lockstep.errors import LockstepError, SettingError, UsageError, set_rank
from lockstep.masking import digest_of_secrets
from lockstep.session.extension import Extensions
from lockstep.session.step import Step
from lockstep.settings import Choice, Settings, settings_of_ranks

if TYPE_CHECKING:
    from lockstep.distributed.rendezvous import Joined


MAIN_PROCESS_FIRST_TIMEOUT = timedelta(days=7)
"""Long enough for any work of rank 0. A rank that has died ends the run in other ways."""

CLOSING_TIMEOUT = timedelta(seconds=5)
"""How long a request to the store may take at the end of a run, when its rank may have left."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process's part in a run, from `join_run` to `leave`."""

    topology: Topology
    device: torch.device
    backend: str
    """In torch's notation; empty on one process, where there is no process group."""
    collectives: Collectives
    step: Step
    settings: Settings
    joined: Joined | None
    """The store that the ranks met at; None on one process."""
    examples: list[Callable[[], Any]] = field(default_factory=list)
    """Functions that return a batch of a loader that is being prepared, for strategies that
    measure."""
    link: Link | None = None
    """The network between machines; None if there is one machine, or it was not measured."""
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    """The process groups that the strategy has opened, by name; closed with the run."""
    loaders: list[Any] = field(default_factory=list)
    """All prepared loaders."""
    prepared: list[weakref.ref[nn.Module]] = field(default_factory=list)
    """The modules that `World.prepare` returned."""
    checkpoint_folders: list[str] = field(default_factory=list)
    """The folders in which `World.checkpoint` saves."""

    @property
    def extensions(self) -> Extensions:
        """Everything that takes part in the training, in the order in which it is called."""
        return self.step.extensions


_current_run: Run | None = None
_num_joins = 0
"""How often this process has joined a run."""


@contextmanager
def store_at_end(joined: Joined) -> Iterator[Store]:
    """Gives the store of the run for a few requests at its end, with a short timeout.

    If the store's rank has left, the block ends early and nothing is raised.
    """
    store: Any = joined.store  # torch's annotations leave `timeout` out
    timeout_before = store.timeout
    store.set_timeout(CLOSING_TIMEOUT)
    try:
        yield store
    except RuntimeError:
        return
    finally:
        # Checkpoints that are still being written need the long timeout.
        store.set_timeout(timeout_before)


def run_of(module: nn.Module) -> Run | None:
    """Returns the run that a module was prepared in, if that is the current run; else None.

    A module that `torch.compile` made from a prepared module belongs to the run, too.
    """
    run = _current_run
    if run is None:
        return None
    # Look for the module itself, then for the one that was given to `torch.compile`, and so on.
    while not any(reference() is module for reference in run.prepared):
        inner_module = without_compile(module)
        if inner_module is module:  # it is not compiled
            return None
        module = inner_module
    return run


def blocked_reason() -> str | None:
    """Returns why a collective of the current run would hang just now, or None."""
    if _current_run is None:
        return None
    return _current_run.collectives.blocked_reason


def join_run(
    settings: Settings,
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
) -> tuple[Run, list[Choice]]:
    """Brings the processes together and opens the process group.

    Args:
        settings: what the user set.
        environ: the environment variables.
        rank: of this process, if the script gives it instead of a launcher.
        world_size: given together with `rank`.

    Returns:
        The run, and what Lockstep chose for it.

    Raises:
        JoinError: the ranks did not come together within `settings.join_timeout_s`.
        RanksDifferError: they run other code, arguments, versions or settings.
        SettingError: something that was set cannot be honoured.
        UsageError: this process is in a run already.
    """
    global _current_run
    if _current_run is not None or dist.is_initialized():
        if _current_run is not None:
            found = "this process is in a run already"
        else:
            found = "torch.distributed.init_process_group was called before it"
        raise UsageError(
            "lockstep.init",
            found,
            "call lockstep.init once, and nothing else that opens a process group; "
            "world.close() leaves the run",
        )
    topology = _find_topology(environ, settings.init_method, rank, world_size)
    set_rank(topology.rank if topology.size > 1 else None)
    joined = None
    try:
        if topology.size > 1:
            joined = _meet_other_ranks(topology, settings, environ)
            topology = topology.with_hosts(joined.hosts)
        run, choices = _set_up_run(topology, settings, environ, joined)
    except BaseException:
        close_group()
        if joined is not None:
            joined.close(others_leave=False)
        set_rank(None)
        raise
    _current_run = run
    return run, choices


def _find_topology(
    environ: Mapping[str, str], init_method: str | None, rank: int | None, world_size: int | None
) -> Topology:
    """Returns this process's place, from the environment or from the arguments of `init`.

    Args:
        environ: the environment variables, in which a launcher has set the place.
        init_method: the argument of `init`, such as `tcp://host:port`.
        rank: the argument of `init`; None if it was not given.
        world_size: the argument of `init`; None if it was not given.

    Raises:
        SettingError: only one of `rank` and `world_size` is given, or a launcher says otherwise.
    """
    detected = detect(environ, sys.argv[1:]) or Topology()
    if (rank is None) != (world_size is None):
        raise SettingError(
            f"rank={rank}, world_size={world_size}",
            "only one of them was given",
            "give both, or neither under a launcher",
        )
    if rank is None or world_size is None:
        return detected
    if detected.size > 1:
        if detected.rank == rank and detected.size == world_size:
            return detected
        raise SettingError(
            f"rank={rank}, world_size={world_size} in the script",
            f"{detected.source} says rank {detected.rank} of {detected.size}",
            "leave them out under a launcher",
        )
    # Without a launcher nothing says which processes share this machine. If the address of rank 0
    # is a loopback address, all of them do. Otherwise each is taken to be alone on its machine
    # until the ranks have met (`Topology.with_hosts`).
    master_host = environ.get("MASTER_ADDR")
    if init_method is not None and init_method.startswith("tcp://"):
        master_host = urlsplit(init_method).hostname
    all_on_this_machine = network.means_loopback(master_host)
    unknown = () if all_on_this_machine else ("local_rank", "local_size", "node_rank")
    return Topology(
        rank=rank,
        size=world_size,
        local_rank=rank if all_on_this_machine else 0,
        local_size=world_size if all_on_this_machine else 1,
        node_rank=0 if all_on_this_machine else rank,
        master_addr=master_host,
        master_port=port(environ),
        source=SET_BY_SCRIPT,
        unknown=frozenset(unknown),
    )


def _meet_other_ranks(topology: Topology, settings: Settings, environ: Mapping[str, str]) -> Joined:
    """Waits for the other ranks at the store and compares settings and versions with theirs.

    Returns:
        The store, and who is where.

    Raises:
        JoinError, RanksDifferError, SettingError: see `rendezvous.join`.
    """
    from lockstep.distributed.rendezvous import join  # not needed by a single process

    global _num_joins
    _num_joins += 1
    compared_settings: dict[str, object] = dict(settings_of_ranks(settings))
    compared_settings["threads"] = environ.get("OMP_NUM_THREADS")
    # Secrets are hidden in the arguments that the ranks compare.
    compared_settings["hidden arguments"] = digest_of_secrets(sys.argv)
    # A store may outlive this run. The next one must not find the requests of this one there, so
    # keys contain the launcher's run and restart, and the number of this join. If the script has
    # numbered the processes, each may have a launcher of its own, and another run of it.
    run_id = ""
    restart_count = ""
    if not topology.is_set_by_hand:
        run_id = environ.get("TORCHELASTIC_RUN_ID", "")
        restart_count = environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return join(
        topology,
        settings.init_method,
        manifest=collect(compared_settings),
        timeout=settings.join_timeout_s,
        attempt=f"{run_id}.{restart_count}.{_num_joins}",
    )


def _set_up_run(
    topology: Topology, settings: Settings, environ: Mapping[str, str], joined: Joined | None
) -> tuple[Run, list[Choice]]:
    """Chooses the device, opens the process group and builds the run.

    Args:
        topology: this process's place.
        settings: what the user set.
        environ: the environment variables.
        joined: the store that the ranks met at; None on one process.
    """
    device, reason = choose_device(
        settings.device,
        topology,
        environ,
        may_share=settings.backend == "gloo",
        on_this_machine=partial(_exchange_on_this_machine, joined, settings.join_timeout_s),
    )
    choices = [Choice("device", str(device), reason)]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif settings.virtual_ranks is None:  # else the number is pinned, and that is printed
        source = "OMP_NUM_THREADS" if environ.get("OMP_NUM_THREADS") else "torch's default"
        choices.append(Choice("threads", str(torch.get_num_threads()), f"per process; {source}"))

    backend = ""
    timeout = settings.collective_timeout
    if joined is not None:
        backend, reason = choose_backend(settings.backend, device)
        networks = open_group(topology, backend, device, joined.store, timeout=timeout)
        choices.append(Choice("backend", "nccl" if "nccl" in backend else backend, reason))
        choices += networks
    elif settings.backend is not None:
        choose_backend(settings.backend, device)  # raises if the backend cannot be used

    traffic.reset()
    collectives = Collectives(topology, device)
    if joined is not None:
        choices.append(_share_memory(collectives, settings, timeout))
    link = None
    several_machines = joined is not None and not topology.one_node
    if several_machines and backend == "gloo" and settings.measure_link:
        link = _measure_link(collectives)
    if link is not None:
        reason = "measured: each machine sends and receives at a time"
        latency = f"{link.latency_s * 1e3:.2g} ms from one machine to the next"
        choices.append(Choice("link", str(link), f"{reason}; {latency}"))
    run = Run(
        topology=topology,
        device=device,
        backend=backend,
        collectives=collectives,
        step=Step(),
        settings=settings,
        joined=joined,
        link=link,
    )
    return run, choices


def _exchange_on_this_machine(joined: Joined | None, timeout_s: float, text: str) -> list[str]:
    """Returns the texts of all processes of this machine, this one's included.

    Args:
        joined: the store that the ranks met at; None on one process.
        timeout_s: how long to wait for the texts of the others.
        text: of this process, such as the id of its GPU. Processes must have different texts, or
            the device is refused. So if a text does not come in time, the result is `[text, text]`.
    """
    if joined is None:
        return [text]
    store = joined.store
    keys = [f"here/{rank}" for rank in joined.ranks_on_this_host]
    store.set(f"here/{joined.rank}", text)
    if network.wait_until(lambda: store.check(keys), time.monotonic() + timeout_s):
        return [store.get(key).decode() for key in keys]
    return [text, text]  # as if another process had the same text


def _share_memory(
    collectives: Collectives, settings: Settings, timeout: timedelta | None
) -> Choice:
    """Makes CPU tensors go through shared memory if that is possible; returns what was chosen.

    Args:
        collectives: of the run.
        settings: what the user set. If that is a backend, there is no shared memory.
        timeout: how long a collective may take; None: torch's default.
    """
    if settings.backend is not None:
        shared_memory = None
        reason = f"backend={settings.backend!r} was asked for"
    else:
        shared_memory, reason = open_shared_memory(
            collectives.topology.rank,
            collectives.topology.node_rank,
            (timeout or default_pg_timeout).total_seconds(),
            collectives.exchange,
        )
    routing.use_shared_memory(shared_memory)
    carrier = "the backend" if shared_memory is None else "shared memory"
    return Choice("CPU tensors", f"through {carrier}", reason)


def _measure_link(collectives: Collectives) -> Link | None:
    """Measures the network between the first ranks of all machines; None if there is only one.

    Messages go round in a ring of machines: each machine sends to the next one.
    """
    node_of_rank = collectives.exchange(collectives.topology.node_rank)
    nodes = list(dict.fromkeys(node_of_rank))  # each once, in order
    first_ranks = [node_of_rank.index(node) for node in nodes]  # of each node its first rank
    num_machines = len(first_ranks)
    if num_machines == 1:  # although the environment says that there are several
        return None
    rank = collectives.topology.rank
    ring_position = None  # this rank is not the first of its machine, and only waits
    if rank in first_ranks:
        ring_position = first_ranks.index(rank)

    shift = partial(_shift_in_ring, first_ranks, ring_position)
    return measure(shift, collectives.max, num_machines)


def _shift_in_ring(first_ranks: Sequence[int], ring_position: int | None, size: int) -> float:
    """Sends some bytes to the next machine, and receives as many from the one before.

    Args:
        first_ranks: the first rank of each machine. These ranks form the ring.
        ring_position: the position of this rank in it; None if this is no first rank, which
            does nothing.
        size: the number of bytes.

    Returns:
        The seconds that it took.
    """
    if ring_position is None:
        return 0.0
    data_to_send = torch.zeros(size, dtype=torch.uint8)
    received_data = torch.zeros(size, dtype=torch.uint8)
    next_rank = first_ranks[(ring_position + 1) % len(first_ranks)]
    previous_rank = first_ranks[ring_position - 1]
    begin = time.perf_counter()
    # Sending first may halve the speed, see `routing.start_all_to_all`.
    receiving = dist.irecv(received_data, previous_rank)
    sending = dist.isend(data_to_send, next_rank)
    for work in (receiving, sending):
        if work is not None:  # torch returns None to a process outside of the group
            work.wait()
    return time.perf_counter() - begin


def leave(run: Run, *, failed: bool) -> None:
    """Closes what `join_run` opened.

    Args:
        run: the run to leave.
        failed: this process ends with an error, so the others cannot be counted on.
    """
    global _current_run
    if _current_run is not run:  # it was left before
        return
    _current_run = None
    # The stack calls these in reverse order: the extensions are closed first. It calls all of
    # them, even if one raises.
    with ExitStack() as stack:
        stack.callback(set_rank, None)
        stack.callback(_leave_group, run, failed)
        stack.callback(run.extensions.close, failed)


def _leave_group(run: Run, failed: bool) -> None:
    """Closes the process groups and the store of a run.

    Args:
        run: the run.
        failed: this process ends with an error, so the others cannot be counted on.
    """
    run.groups.clear()
    if run.joined is None:  # one process
        return
    # NCCL would wait for outstanding work of ranks that may never do theirs.
    nccl_may_hang = failed and run.device.type == "cuda"
    if not nccl_may_hang:
        close_group()
    run.joined.close(others_leave=not failed)


def close_at_exit(close: Callable[..., None]) -> None:
    """Leaves the run when Python ends.

    Python ends with exit code 0 even if a function raises that was registered with `atexit`. So an
    error of Lockstep's is printed here and the process ends with the exit code of the error.

    Args:
        close: called with `failed`: True if the script ended with an exception.
    """
    script_raised = hasattr(sys, "last_type")  # set by an uncaught exception
    try:
        close(failed=script_raised)
    except LockstepError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code)


@contextmanager
def main_process_first(run: Run, call_id: str) -> Iterator[None]:
    """Lets rank 0 run the block first, then the other ranks.

    They wait at the store, which has no short timeout as collectives have.

    Args:
        run: the current run.
        call_id: the same text on all ranks for one call, and another one for each call.

    Raises:
        UsageError: on the other ranks, if rank 0's block raised.
    """
    if run.joined is None:
        yield
        return
    store = run.joined.store
    key = f"main_process_first/{call_id}"  # rank 0 sets it at the end of its block
    if not run.topology.is_main:
        store.wait([key], MAIN_PROCESS_FIRST_TIMEOUT)
        if store.get(key) == b"failed":
            raise UsageError(
                "with world.main_process_first()",
                "rank 0 raised in its block",
                "look at rank 0's error",
            )
    run.collectives.in_main_process_first = True
    result = "failed"
    try:
        yield
        result = "done"
    finally:
        run.collectives.in_main_process_first = False
        if run.topology.is_main:
            store.set(key, result)
