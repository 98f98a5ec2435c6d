"""Joining and leaving a run: from settings and environment to a process group.

Which backend, over which network interface, opened and closed.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from importlib import import_module
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
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.device import choose_device
from lockstep.distributed.manifest import collect
from lockstep.distributed.topology import Topology, detect, port
from lockstep.distributed.torch_compat import without_compile
from lockstep.errors import LockstepError, SettingError, UsageError, set_rank
from lockstep.session.extension import Extensions
from lockstep.session.step import Step
from lockstep.settings import Choice, Settings, settings_of_ranks
from lockstep.wording import did_you_mean

if TYPE_CHECKING:
    from lockstep.distributed.rendezvous import Joined


CUDA_BACKENDS = "cpu:gloo,cuda:nccl"
_BACKENDS = ("nccl", "gloo", "mpi")
_BY_SCRIPT = "the script"
# Long enough for any honest work of rank 0; a rank that has died ends the run in other ways.
_MAIN_FIRST = timedelta(days=7)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process's part in a run, from `join_run` to `leave`."""

    topology: Topology
    device: torch.device
    backend: str
    """Empty where there is no process group: on one process."""
    collectives: Collectives
    step: Step
    settings: Settings
    joined: Joined | None
    """The store that the ranks met at; None on one process."""
    examples: list[Callable[[], Any]] = field(default_factory=list)
    """Each gives a batch of a loader that is being prepared, for strategies that measure."""
    link: Link | None = None
    """Between machines; None: there is one, or it was not measured."""
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    """What the strategy has opened beside the group of all ranks; closed with it."""
    loaders: list[Any] = field(default_factory=list)
    """All prepared ones."""
    prepared: list[weakref.ref[nn.Module]] = field(default_factory=list)
    """The modules that `World.prepare` gave out."""

    @property
    def extensions(self) -> Extensions:
        """Everything that takes part in the training, in the order in which it is told."""
        return self.step.extensions


CLOSING_TIMEOUT = timedelta(seconds=5)
"""Of the store, for what ranks tell each other at the end of the run: it may have gone with one."""


@contextmanager
def store_at_end(joined: Joined) -> Iterator[Store]:
    """The store of the run, for a few requests at its end, which do not wait long.

    Nothing is raised where the store has gone with another rank.
    """
    store: Any = joined.store  # torch's annotations leave `timeout` out
    before = store.timeout
    store.set_timeout(CLOSING_TIMEOUT)
    try:
        yield store
    except RuntimeError:
        return
    finally:
        store.set_timeout(before)  # checkpoints that are still being written need theirs


def run_of(module: nn.Module) -> Run | None:
    """The run that a module was prepared in, as long as it goes on.

    What `torch.compile` has made of a prepared module belongs to the run, too.
    """
    run = _current
    if run is None:
        return None
    while not any(prepared() is module for prepared in run.prepared):
        inner = without_compile(module)
        if inner is module:
            return None
        module = inner
    return run


def blocked() -> str | None:
    """Why a collective of the present run would hang just now, or None."""
    return None if _current is None else _current.collectives.blocked


_current: Run | None = None
_joins = 0


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
        environ: read once, here.
        rank: given in the script instead of by a launcher; then `world_size` is given too.
        world_size: likewise.

    Raises:
        JoinError: the ranks did not come together within `settings.join_timeout_s`.
        RanksDifferError: they run other code, arguments, versions or settings.
        SettingError: something that was set cannot be honoured.
        UsageError: this process is in a run already.
    """
    global _current
    if _current is not None or dist.is_initialized():
        raise UsageError(
            "lockstep.init",
            "this process is in a run already"
            if _current is not None
            else "torch.distributed.init_process_group was called before it",
            "call lockstep.init once, and nothing else that opens a process group; "
            "world.close() leaves the run",
        )
    topology = _topology(environ, settings.init_method, rank, world_size)
    set_rank(topology.rank if topology.size > 1 else None)
    joined = None
    try:
        if topology.size > 1:
            joined = _meet(topology, settings, environ)
            topology = _with_neighbours(topology, joined)
        run, choices = _open(topology, settings, environ, joined)
    except BaseException:
        close_group()
        if joined is not None:
            joined.close(others_leave=False)
        set_rank(None)
        raise
    _current = run
    return run, choices


def _meet(topology: Topology, settings: Settings, environ: Mapping[str, str]) -> Joined:
    from lockstep.distributed.rendezvous import join  # one process meets nobody

    global _joins
    _joins += 1  # a store that outlives this run must not show it the requests of the last
    launch = environ.get("TORCHELASTIC_RUN_ID", ""), environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return join(
        topology,
        settings.init_method,
        manifest=collect(
            {**settings_of_ranks(settings), "threads": environ.get("OMP_NUM_THREADS")}
        ),
        timeout=settings.join_timeout_s,
        attempt=".".join((*launch, str(_joins))),
    )


def _open(
    topology: Topology, settings: Settings, environ: Mapping[str, str], joined: Joined | None
) -> tuple[Run, list[Choice]]:
    """Chooses the device and opens the process group."""
    device, reason = choose_device(
        settings.device,
        topology,
        environ,
        may_share=settings.backend == "gloo",
        on_this_machine=partial(_on_this_machine, joined, settings.join_timeout_s),
    )
    choices = [Choice("device", str(device), reason)]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        by = "OMP_NUM_THREADS" if environ.get("OMP_NUM_THREADS") else "torch's default"
        choices.append(Choice("threads", str(torch.get_num_threads()), f"per process; {by}"))
    if joined is not None or settings.backend is not None:
        backend, reason = choose_backend(settings.backend, device)
    if joined is not None:
        limit = settings.collective_timeout_s
        timeout = None if limit is None else timedelta(seconds=limit)
        interface = open_group(topology, backend, device, joined.store, timeout=timeout)
        choices.append(Choice("backend", "nccl" if "nccl" in backend else backend, reason))
        choices.append(Choice("network", *interface))
    traffic.reset()
    collectives = Collectives(topology, device)
    if joined is not None:
        choices.append(_share_memory(collectives, settings, timeout))
    link = None
    several = joined is not None and not topology.one_node
    if several and backend == "gloo" and settings.measure_link:
        link = _measure_link(collectives)
    if link is not None:
        reason = "measured: each machine sends and receives at a time"
        latency = f"{link.latency_s * 1e3:.2g} ms from one machine to the next"
        choices.append(Choice("link", str(link), f"{reason}; {latency}"))
    run = Run(
        topology=topology,
        device=device,
        backend="" if joined is None else backend,
        collectives=collectives,
        step=Step(),
        settings=settings,
        joined=joined,
        link=link,
    )
    return run, choices


def _measure_link(collectives: Collectives) -> Link | None:
    """Between the first ranks of all machines; None: there is one."""
    nodes = collectives.exchange(collectives.topology.node_rank)
    ranks = [nodes.index(node) for node in dict.fromkeys(nodes)]
    if len(ranks) == 1:  # the environment says otherwise
        return None
    place = ranks.index(own) if (own := collectives.topology.rank) in ranks else None

    def shift(size: int) -> float:
        if place is None:
            return 0.0
        given, taken = torch.zeros(2, size, dtype=torch.uint8)
        begin = time.perf_counter()
        after, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]
        # The other order may halve it, see `routing.start_all_to_all`.
        for work in (dist.irecv(taken, before), dist.isend(given, after)):
            if work is not None:
                work.wait()
        return time.perf_counter() - begin

    return measure(shift, collectives.max, len(ranks))


def _share_memory(
    collectives: Collectives, settings: Settings, timeout: timedelta | None
) -> Choice:
    """What is on the CPU goes through shared memory where that is possible, and why."""
    topology, shared = collectives.topology, None
    if settings.backend is not None:
        reason = f"backend={settings.backend!r} was asked for"
    else:
        limit = (timeout or default_pg_timeout).total_seconds()
        shared, reason = open_shared_memory(
            topology.rank, topology.node_rank, limit, collectives.exchange
        )
    routing.use_shared_memory(shared)
    way = "the backend" if shared is None else "shared memory"
    return Choice("CPU tensors", f"through {way}", reason)


def _on_this_machine(joined: Joined | None, timeout: float, text: str) -> list[str]:
    """This process's text, and those that the others of this machine tell in the same place.

    One that tells nothing in time counts as one that tells the same.
    """
    if joined is None:
        return [text]
    store, keys = joined.store, [f"here/{rank}" for rank in joined.here]
    store.set(f"here/{joined.rank}", text)
    come = network.wait_until(lambda: store.check(keys), time.monotonic() + timeout)
    return [store.get(key).decode() for key in keys] if come else [text, text]


def _with_neighbours(topology: Topology, joined: Joined) -> Topology:
    """Where the script gave the rank, the local rank is known once the ranks have met."""
    if topology.source != _BY_SCRIPT:
        return topology
    return replace(
        topology,
        local_rank=joined.here.index(topology.rank),
        local_size=len(joined.here),
        node_rank=list(dict.fromkeys(joined.hosts)).index(joined.hosts[topology.rank]),
    )


def leave(run: Run, *, failed: bool) -> None:
    """Closes what `join_run` opened.

    Args:
        run: to leave.
        failed: this process ends with an error, so the others cannot be counted on.
    """
    global _current
    if _current is not run:
        return
    _current = None
    with ExitStack() as stack:  # all of it, whatever raises
        stack.callback(set_rank, None)
        stack.callback(_leave_group, run, failed)
        stack.callback(run.extensions.close, failed)


def _leave_group(run: Run, failed: bool) -> None:
    run.groups.clear()
    if run.joined is not None:
        # NCCL waits for outstanding work of ranks that may never do theirs.
        if not (failed and run.device.type == "cuda"):
            close_group()
        run.joined.close(others_leave=not failed)


def close_at_exit(close: Callable[..., None]) -> None:
    """Leaves the run when Python ends.

    Python would end with 0 whatever is raised here; an error of ours gives it its own exit code.

    Args:
        close: is given `failed`.
    """
    try:
        close(failed=hasattr(sys, "last_type"))  # set by an uncaught exception
    except LockstepError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(error.exit_code)


@contextmanager
def main_process_first(run: Run, turn: str) -> Iterator[None]:
    """Rank 0 runs the block, then the others; they wait at the store, where no timeout is short.

    Raises:
        UsageError: on the other ranks, where rank 0's block raised.
    """
    if run.joined is None:
        yield
        return
    key, store, failed = f"main_process_first/{turn}", run.joined.store, True
    if not run.topology.is_main:
        store.wait([key], _MAIN_FIRST)
        if store.get(key) == b"failed":
            raise UsageError(
                "with world.main_process_first()",
                "rank 0 raised in its block",
                "look at rank 0's error",
            )
    run.collectives.in_turn = True
    try:
        yield
        failed = False
    finally:
        run.collectives.in_turn = False
        if run.topology.is_main:
            store.set(key, "failed" if failed else "done")


def _topology(
    environ: Mapping[str, str], init_method: str | None, rank: int | None, world_size: int | None
) -> Topology:
    found = detect(environ, sys.argv[1:]) or Topology()
    if (rank is None) != (world_size is None):
        raise SettingError(
            f"rank={rank}, world_size={world_size}",
            "only one of them was given",
            "give both, or neither under a launcher",
        )
    if rank is None or world_size is None:
        return found
    if found.size > 1:
        if (found.rank, found.size) == (rank, world_size):
            return found
        raise SettingError(
            f"rank={rank}, world_size={world_size} in the script",
            f"{found.source} says rank {found.rank} of {found.size}",
            "leave them out under a launcher",
        )
    # Without a launcher nothing says which processes share this machine. With an address of
    # loopback they all do; with any other, each is taken to be alone on its machine.
    host = environ.get("MASTER_ADDR")
    if init_method is not None and init_method.startswith("tcp://"):
        host = urlsplit(init_method).hostname
    local = network.means_loopback(host)
    return Topology(
        rank=rank,
        size=world_size,
        local_rank=rank if local else 0,
        local_size=world_size if local else 1,
        node_rank=0 if local else rank,
        master_addr=environ.get("MASTER_ADDR"),
        master_port=port(environ),
        source=_BY_SCRIPT,
    )


def choose_backend(backend: str | None, device: torch.device) -> tuple[str, str]:
    """The backend in torch's notation, and the reason.

    Args:
        backend: `nccl`, `gloo`, `mpi`, or None to choose by the device.
        device: the one this rank computes on.

    Raises:
        SettingError: the backend is unknown, not built into this torch, or cannot serve the device.
    """
    cuda = device.type == "cuda"
    if backend is None:
        if not cuda:
            return "gloo", f"the device is {device}"
        if dist.is_nccl_available():
            return CUDA_BACKENDS, "nccl for what is on the GPU, gloo for what is on the CPU"
        return "gloo", "this torch was built without nccl"
    if backend not in (*_BACKENDS, CUDA_BACKENDS):
        advice = did_you_mean(backend.lower(), _BACKENDS, "leave it out to have one chosen")
        found = f"the backends are {', '.join(_BACKENDS)}"
        raise SettingError(f"backend={backend!r}", found, advice)
    if backend in ("nccl", CUDA_BACKENDS):
        if cuda and dist.is_nccl_available():
            return CUDA_BACKENDS, "nccl was asked for; gloo serves what is on the CPU"
        found = f"the device is {device}; NCCL moves data of GPUs only"
        if cuda:
            found = f"torch {torch.__version__} was built without NCCL"
        raise SettingError("backend='nccl'", found, "use 'gloo', which serves GPUs too, slower")
    if backend == "mpi" and not dist.is_mpi_available():
        raise SettingError(
            "backend='mpi'",
            f"torch {torch.__version__} was built without MPI",
            f"use {'nccl' if cuda else 'gloo'} (mpirun still starts it), or a torch built with MPI",
        )
    return backend, "it was asked for"


def open_group(
    topology: Topology,
    backend: str,
    device: torch.device,
    store: Store,
    *,
    timeout: timedelta | None,
) -> tuple[str, str]:
    """Opens torch's default process group.

    Args:
        topology: who this process is.
        backend: from `choose_backend`.
        device: the one this rank computes on.
        store: where the ranks have met.
        timeout: how long a collective may take; None: torch's default for the backend.

    Returns:
        The network interface of the CPU side and the reason for it.

    Raises:
        SettingError: an interface that was named does not exist, or none can be chosen, or MPI
            numbers the ranks differently.
    """
    # Its functions take the default group as the default of an argument. Imported after the group
    # was opened (DDP does that), they would keep it, with its threads, alive until the process
    # ends; see `ExactDDP.release` for what such a thread can do then.
    import_module("torch.distributed.nn.functional")
    if backend == "mpi":
        dist.init_process_group("mpi", timeout=timeout)
        if (dist.get_rank(), dist.get_world_size()) != (topology.rank, topology.size):
            found = f"MPI says rank {dist.get_rank()} of {dist.get_world_size()}"
            dist.destroy_process_group()
            raise SettingError(
                f"rank {topology.rank} of {topology.size} (from {topology.source})",
                found,
                "start the run with the mpirun that this torch was built against",
            )
        return "MPI's own", "the backend is mpi"
    store.set_timeout(timeout or default_pg_timeout)  # the join's is too short for what follows
    interface, reason = network.choose_interface(
        os.environ,
        network.local_addresses(),
        topology.one_node,
        network.address_reaching(topology.master_addr),
        network.hostname_address(),
    )
    network.use_gloo_interface(interface, topology.size)
    dist.init_process_group(
        backend,
        store=store,
        rank=topology.rank,
        world_size=topology.size,
        timeout=timeout,
        # NCCL then connects now, not in the first collective, and knows the device.
        device_id=device if "nccl" in backend else None,
    )
    # A rank that left now, as its strategy is refused, would close connections that others have
    # yet to accept, and they would tell of that instead.
    store.add("connected", 1)
    limit = time.monotonic() + (timeout or default_pg_timeout).total_seconds()
    size = topology.size
    network.wait_until(lambda: store.add("connected", 0) == size, limit, ranks=size)
    return interface or "by host name", reason


def carrier_device(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """Where what is sent must lie: NCCL takes CUDA tensors, every other backend the CPU's."""
    if device.type == "cpu":
        return device
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return device if backends.get(device.type) == "nccl" else torch.device("cpu")


def close_group() -> None:
    """Undoes `open_group`, as far as it came."""
    network.use_gloo_interface(None)
    routing.use_shared_memory(None)
    if dist.is_initialized():
        dist.destroy_process_group()
