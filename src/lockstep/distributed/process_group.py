"""Joins and leaves a run: opens torch's process group and everything around it, and closes it.

`join_run` finds out which rank this process is, meets the other ranks at a *store* (torch's
key-value store, which works before a process group exists), chooses the device and opens the
process group. It returns a `Run`, and a list of *choices*: what Lockstep decided by itself, with
the reasons, for the log. `leave` closes everything again.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
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
from lockstep.distributed.backend import choose_backend, close_group, open_group
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.device import choose_device
from lockstep.distributed.manifest import collect
from lockstep.errors import (
    DuplicateRankError,
    LockstepError,
    SettingError,
    UsageError,
    WorldSizeError,
    set_rank,
    warn,
)
from lockstep.machine import network, process_copy
from lockstep.machine.topology import (
    SET_BY_SCRIPT,
    Topology,
    detect,
    launcher_above_script,
    port,
    threads_set_by_user,
)
from lockstep.masking import digest_of_secrets
from lockstep.session.extension import Extensions
from lockstep.session.step import Step
from lockstep.settings import Choice, Settings, settings_of_ranks
from lockstep.torch_compat import number_among_spawned, without_compile
from lockstep.units import format_number

if TYPE_CHECKING:
    from lockstep.distributed.rendezvous import Joined


MAIN_PROCESS_FIRST_TIMEOUT = timedelta(days=7)
"""How long the other ranks wait for rank 0: longer than any preparation of data takes. If rank 0
dies, the launcher ends the run."""

CLOSING_TIMEOUT = timedelta(seconds=5)
"""How long a request to the store may take at the end of a run, when the rank that serves the store
may have left."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process's part in a run, from `join_run` to `leave`."""

    topology: Topology
    device: torch.device
    backend: str
    """The backend in torch's notation, such as "gloo"; empty in a single process, which has no
    process group."""
    collectives: Collectives
    step: Step
    settings: Settings
    joined: Joined | None
    """The store at which the ranks have met; None in a single process."""
    examples: list[Callable[[], Any]] = field(default_factory=list)
    """Functions that return an example batch of a loader that is being prepared. A strategy that
    measures how fast the model is calls them."""
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
"""How many times this process has tried to join a run of several ranks."""


@contextmanager
def store_at_end(joined: Joined) -> Iterator[Store]:
    """Gives the store of the run a short timeout, for a few last requests at the end of the run.

    If the rank that serves the store has left already, the `with` block ends early and no error is
    raised. Any other RuntimeError of the block is suppressed too, so the block should contain
    nothing but requests to the store.
    """
    store: Any = joined.store  # torch's annotations leave `timeout` out
    timeout_before = store.timeout
    store.set_timeout(CLOSING_TIMEOUT)
    try:
        with suppress(RuntimeError):  # a request fails if the store is gone
            yield store
    finally:
        # Checkpoints that are still being written use the store, too, and need the long timeout.
        store.set_timeout(timeout_before)


def run_of(module: nn.Module) -> Run | None:
    """Returns the current run if the module was prepared in it, else None.

    A module that `torch.compile` made from a prepared module counts as prepared, too.
    """
    run = _current_run
    if run is None:
        return None

    # If the module itself was not prepared, the module that was passed to `torch.compile` may have
    # been. Modules can be compiled more than once.
    while True:
        # `run.prepared` contains weak references, which return the module or None.
        is_prepared = any(reference() is module for reference in run.prepared)
        if is_prepared:
            return run

        inner_module = without_compile(module)
        if inner_module is module:  # it was not made by `torch.compile`
            return None

        module = inner_module


def blocked_reason() -> str | None:
    """Returns why a collective of the current run would hang if it were called now, or None."""
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
    """Waits for the other ranks, and opens the process group.

    Args:
        settings: the user's settings.
        environ: the environment variables.
        rank: the rank of this process, if the script sets it instead of a launcher.
        world_size: the number of ranks, if the script sets it instead of a launcher.

    Returns:
        The run, and what Lockstep chose for it.

    Raises:
        JoinError: the ranks did not come together within `settings.join_timeout_s` seconds.
        RanksDifferError: the ranks run different code, arguments, versions or settings.
        SettingError: a setting is impossible here.
        UsageError: this process is in a run already.
    """
    global _current_run
    _check_in_no_run()

    topology = _find_topology(environ, settings.init_method, rank, world_size)
    set_rank(topology.rank if topology.size > 1 else None)  # errors name this rank from here on
    _warn_if_spawned_alone(topology)

    joined = None
    try:
        if topology.size > 1:
            with _explaining_rank_of_launcher(topology, environ):
                joined = _meet_other_ranks(topology, settings, environ)
            topology = topology.with_hosts(joined.hosts)
        run, choices = _set_up_run(topology, settings, environ, joined)
    except BaseException:
        close_group()
        if joined is not None:
            # This rank does not wait until the others leave: they may not have failed, and may
            # still use the store.
            joined.close(wait_for_others=False)
        set_rank(None)
        raise

    _current_run = run
    return run, choices


def _warn_if_spawned_alone(topology: Topology) -> None:
    """Warns if `torch.multiprocessing.spawn` has started processes that each are a run of one rank.

    Only one of these processes warns.
    """
    is_alone = topology.size == 1
    is_one_that_warns = number_among_spawned() == 1
    if is_alone and is_one_that_warns:
        warn(
            "lockstep.init in a process of torch.multiprocessing.spawn",
            found="this is a run of one rank, so each of the processes trains alone",
            do="call the function without spawn, and start the script with lockstep run --nproc N",
        )


@contextmanager
def _explaining_rank_of_launcher(topology: Topology, environ: Mapping[str, str]) -> Iterator[None]:
    """Explains errors of the meeting about a rank that this process has inherited.

    If each rank of a launcher calls `torch.multiprocessing.spawn`, several processes have the same
    rank. A rank that the script has set itself is not the launcher's.
    """
    try:
        yield
    except (DuplicateRankError, WorldSizeError) as error:
        if topology.source == SET_BY_SCRIPT:
            raise
        raise _with_process_of_script(error, environ) from None


def _with_process_of_script(error: LockstepError, environ: Mapping[str, str]) -> LockstepError:
    """Adds to an error about the launcher's rank that the script itself has started the process.

    Args:
        error: the error.
        environ: the environment variables.

    Returns:
        The error; another one if a rank of a launcher has started this process.
    """
    launcher = launcher_above_script(environ)
    if launcher is None:
        return error
    return type(error)(
        error.was_set,
        f"{error.found}; the script has started this process itself, in a rank of {launcher}",
        "let one of them start the processes: call the function without "
        "torch.multiprocessing.spawn, or start the script with --nproc-per-node 1",
    )


def _check_in_no_run() -> None:
    """Raises UsageError if this process is in a run already, or has opened a process group."""
    if _current_run is not None:
        found = "this process is in a run already"
    elif dist.is_initialized():
        found = "torch.distributed.init_process_group was called before it"
    else:
        return

    raise UsageError(
        "lockstep.init",
        found,
        "call lockstep.init once, and nothing else that opens a process group; world.close() "
        "leaves the run",
    )


def _find_topology(
    environ: Mapping[str, str], init_method: str | None, rank: int | None, world_size: int | None
) -> Topology:
    """Finds out which rank this process is, of how many, and on which machine.

    This follows from the environment variables that a launcher has set, or else from the arguments
    of `lockstep.init`.

    Args:
        environ: the environment variables.
        init_method: the argument of `lockstep.init`, such as `tcp://host:port`.
        rank: the argument of `lockstep.init`; None if it was not given.
        world_size: the argument of `lockstep.init`; None if it was not given.

    Raises:
        SettingError: only one of `rank` and `world_size` is given, or the launcher has set other
            values.
    """
    detected = detect(environ, sys.argv[1:]) or Topology()

    if (rank is None) != (world_size is None):  # exactly one of them is given
        raise SettingError(
            f"rank={rank}, world_size={world_size}",
            "only one of them was given",
            "give both, or neither under a launcher",
        )
    if rank is None or world_size is None:
        return detected

    # A launcher and the script may both set the rank, but then they must agree.
    if detected.size > 1:
        if detected.rank == rank and detected.size == world_size:
            return detected

        error = SettingError(
            f"rank={rank}, world_size={world_size} in the script",
            f"{detected.source} says rank {detected.rank} of {detected.size}",
            "leave them out under a launcher",
        )
        raise _with_process_of_script(error, environ)

    return _topology_set_by_script(environ, init_method, rank, world_size)


def _topology_set_by_script(
    environ: Mapping[str, str], init_method: str | None, rank: int, world_size: int
) -> Topology:
    """Returns the topology of a process whose rank the script has set, without a launcher.

    Then it is not known which processes share this machine. If the address of rank 0 is a loopback
    address, all of them must be on this machine. Otherwise, each process is assumed to be alone on
    its machine until the ranks have met (`Topology.with_hosts`).

    The arguments are those of `_find_topology`.
    """
    # The address in `init_method="tcp://host:port"` takes precedence over MASTER_ADDR.
    master_host = environ.get("MASTER_ADDR")
    if init_method is not None and init_method.startswith("tcp://"):
        master_host = urlsplit(init_method).hostname

    topology = Topology(
        rank=rank,
        size=world_size,
        master_addr=master_host,
        master_port=port(environ),
        source=SET_BY_SCRIPT,
    )
    all_are_on_this_machine = network.means_loopback(master_host)
    if all_are_on_this_machine:
        return replace(topology, local_rank=rank, local_size=world_size, node_rank=0)
    return replace(
        topology,
        local_rank=0,
        local_size=1,
        node_rank=rank,
        unknown=frozenset({"local_rank", "local_size", "node_rank"}),
    )


def _meet_other_ranks(topology: Topology, settings: Settings, environ: Mapping[str, str]) -> Joined:
    """Waits for the other ranks at the store, and compares settings and versions with theirs.

    Returns:
        The store, and the host of each rank.

    Raises:
        JoinError, RanksDifferError, SettingError: as in `rendezvous.join`.
    """
    from lockstep.distributed.rendezvous import join  # not needed by a single process

    # What must be equal on all ranks. `collect` adds versions and the arguments of the script, with
    # `...` in place of secrets such as `--api-key`. The hash shows if the secrets differ.
    compared: dict[str, object] = dict(settings_of_ranks(settings))
    # Only a number of threads that the user has set is compared. The launcher's own choice depends
    # on the number of cores, which may differ between machines.
    compared["threads"] = threads_set_by_user(environ)
    compared["hidden arguments"] = digest_of_secrets(sys.argv)
    return join(
        topology,
        settings.init_method,
        manifest=collect(compared),
        timeout=settings.join_timeout_s,
        attempt=_next_attempt(topology, environ),
    )


def _next_attempt(topology: Topology, environ: Mapping[str, str]) -> str:
    """Returns the text with which the keys of the next join begin in the store.

    A launcher's store may outlive this run, and the next run must not find the requests of this run
    in it. So the text contains the launcher's run id, its number of restarts, and the number of
    this join.
    """
    global _num_joins
    _num_joins += 1

    # If the ranks were set by hand, each process may have a launcher of its own, with an id of its
    # own. With different ids in their keys, the ranks would never meet.
    run_id = ""
    restart_count = ""
    if not topology.is_set_by_hand:
        run_id = environ.get("TORCHELASTIC_RUN_ID", "")
        restart_count = environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return f"{run_id}.{restart_count}.{_num_joins}"


def _set_up_run(
    topology: Topology, settings: Settings, environ: Mapping[str, str], joined: Joined | None
) -> tuple[Run, list[Choice]]:
    """Chooses the device, opens the process group and builds the run.

    Args:
        topology: this process's rank and machine.
        settings: the user's settings.
        environ: the environment variables.
        joined: the store at which the ranks have met; None in a single process.

    Returns:
        The run, and what Lockstep chose for it.
    """
    device, reason = choose_device(
        settings.device,
        topology,
        environ,
        may_share=settings.backend == "gloo",
        exchange_on_machine=partial(_exchange_on_this_machine, joined, settings.join_timeout_s),
    )
    choices = [Choice("device", str(device), reason)]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif settings.virtual_ranks is None:  # virtual ranks fix the number, which is logged elsewhere
        source = "OMP_NUM_THREADS" if environ.get("OMP_NUM_THREADS") else "torch's default"
        if process_copy.is_copy():
            source = process_copy.WHY_ONE_THREAD
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
        choices.append(_choice_of_link(link))

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


def _exchange_on_this_machine(
    joined: Joined | None, timeout_s: float, text: str
) -> list[str] | None:
    """Returns the texts of all processes on this machine, including this one.

    Args:
        joined: the store at which the ranks have met; None in a single process.
        timeout_s: how long to wait for the other processes, in seconds.
        text: the text of this process, such as the id of its GPU.

    Returns:
        None if the text of some process has not come in time.
    """
    if joined is None:
        return [text]

    # Each rank writes its text under the key "here/RANK", and reads the keys of the ranks on this
    # machine.
    store = joined.store
    keys = [f"here/{rank}" for rank in joined.ranks_on_this_host]
    store.set(f"here/{joined.rank}", text)
    all_have_come = network.wait_until(lambda: store.check(keys), time.monotonic() + timeout_s)
    if not all_have_come:
        return None
    return [store.get(key).decode() for key in keys]


def _share_memory(
    collectives: Collectives, settings: Settings, timeout: timedelta | None
) -> Choice:
    """Makes the ranks of a machine exchange CPU tensors through shared memory, if possible.

    Args:
        collectives: the collectives of the run.
        settings: the user's settings. If they name a backend, that backend is used instead.
        timeout: how long a collective may take; None for torch's default.

    Returns:
        What was chosen, for the log.
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


def _choice_of_link(link: Link) -> Choice:
    """Returns the line of the startup summary about the network between machines."""
    reason = "measured: each machine sends and receives at a time"
    latency = f"{format_number(link.latency_s * 1e3, 2)} ms from one machine to the next"
    return Choice("link", str(link), f"{reason}; {latency}")


def _measure_link(collectives: Collectives) -> Link | None:
    """Measures the network between the machines; returns None if there is only one machine.

    The machines form a ring, in which each sends messages to the next one. The first rank of each
    machine does this; the other ranks wait.
    """
    # Example: the machine of each rank is [0, 0, 1, 1], so the first ranks are [0, 2].
    node_of_rank = collectives.exchange(collectives.topology.node_rank)
    nodes = list(dict.fromkeys(node_of_rank))  # without duplicates
    first_ranks = [node_of_rank.index(node) for node in nodes]
    num_machines = len(first_ranks)
    if num_machines == 1:  # although the environment says that there are several
        return None

    rank = collectives.topology.rank
    ring_position = first_ranks.index(rank) if rank in first_ranks else None

    # `measure` calls `shift(size)` with several numbers of bytes, and gets the seconds it took. The
    # ranks without a position call it too, since all ranks must take part in `collectives.max`.
    shift = partial(_shift_in_ring, first_ranks, ring_position)
    return measure(shift, collectives.max, num_machines)


def _shift_in_ring(first_ranks: Sequence[int], ring_position: int | None, size: int) -> float:
    """Sends bytes to the next machine, and receives as many from the previous one.

    Args:
        first_ranks: the first rank of each machine. These ranks form the ring.
        ring_position: the index of this rank in `first_ranks`. If None, this rank is not part of
            the ring and does nothing.
        size: the number of bytes.

    Returns:
        How long it took, in seconds.
    """
    if ring_position is None:
        return 0.0

    data_to_send = torch.zeros(size, dtype=torch.uint8)
    received_data = torch.zeros(size, dtype=torch.uint8)
    next_rank = first_ranks[(ring_position + 1) % len(first_ranks)]
    previous_rank = first_ranks[ring_position - 1]

    begin = time.perf_counter()

    # The receive is started first: the other order may halve the speed (see
    # `routing.start_all_to_all`).
    receiving = dist.irecv(received_data, previous_rank)
    sending = dist.isend(data_to_send, next_rank)
    for work in (receiving, sending):
        assert work is not None  # for the type checker: only ranks outside of the group get None
        work.wait()
    return time.perf_counter() - begin


def leave(run: Run, *, failed: bool) -> None:
    """Closes what `join_run` opened.

    Args:
        run: the run to leave.
        failed: True if this process ends with an error. Then it does not wait for other ranks.
    """
    global _current_run
    if _current_run is not run:  # it was left before
        return

    _current_run = None

    # An ExitStack calls its callbacks in reverse order, so the extensions are closed first. It
    # calls all of them, even if one raises.
    with ExitStack() as stack:
        stack.callback(set_rank, None)
        stack.callback(_leave_group, run, failed)
        stack.callback(run.extensions.close, failed)


def _leave_group(run: Run, failed: bool) -> None:
    """Closes the process groups and the store of a run.

    Args:
        run: the run to leave.
        failed: True if this process ends with an error. Then it does not wait for other ranks.
    """
    run.groups.clear()
    if run.joined is None:  # a single process
        return

    # NCCL would wait for collectives in which the other ranks may never take part.
    nccl_may_hang = failed and run.device.type == "cuda"
    if not nccl_may_hang:
        close_group()

    run.joined.close(wait_for_others=not failed)


def close_at_exit(close: Callable[..., None]) -> None:
    """Leaves the run when Python exits; it is registered with `atexit`.

    If a function that `atexit` calls raises an error, Python still exits with code 0. So an error
    of Lockstep is printed here, and the process exits with the code of that error.

    Args:
        close: function that leaves the run. Its argument `failed` is True if the script ended with
            an exception.
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
    """Lets rank 0 run the `with` block first, then all other ranks.

    The other ranks wait for a key of the store, since a collective would run into its timeout if
    the block of rank 0 takes long.

    Args:
        run: the current run.
        call_id: text that identifies this call. It is the same on all ranks.

    Raises:
        UsageError: the block raised on rank 0. This is raised on the other ranks.
    """
    if run.joined is None:  # a single process
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

    # Inside the block, collectives raise an error instead of waiting for ranks that are not there.
    run.collectives.in_main_process_first = True
    result = "failed"
    try:
        yield
        result = "done"
    finally:
        run.collectives.in_main_process_first = False
        if run.topology.is_main:
            store.set(key, result)
