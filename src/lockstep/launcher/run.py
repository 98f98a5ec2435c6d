"""A run on this machine: from the rendezvous with the other machines to the exit code."""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.run import config_from_args

from lockstep.distributed.network import socket_variables
from lockstep.errors import JoinError, SettingError
from lockstep.launcher.agent import Agent, Watch
from lockstep.launcher.output import console_for
from lockstep.launcher.plan import HangRules, Plan, max_nodes, variables
from lockstep.launcher.process import Attempt, stops_with
from lockstep.launcher.rendezvous import open_rendezvous
from lockstep.launcher.worker import Command
from lockstep.launcher.zygote import Zygote
from lockstep.watchdog.exit_status import Interruption
from lockstep.watchdog.first_failure import FirstFailure
from lockstep.watchdog.probe import FLIGHT_RECORDER

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig


_DEFAULT_HANDLERS = (signal.SIG_DFL, signal.default_int_handler)
"""Handlers that no user has set."""

_GRACE_S = 10.0
"""Between asking a rank to end and killing it, where --shutdown-timeout does not say."""


LAUNCHER = "LOCKSTEP_LAUNCHER"
"""Variable of a rank: who gave it its rank, in words; `lockstep.init` prints it."""
_SCARCE = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_NAME = 60
"""Characters of a script's name that stand in its folder's."""
_ROOM_BYTES = 1 << 18
"""What a run's first files may need."""
_MASTER_PORT = 29500
"""Torchrun's, where --master-port does not say."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended on this machine."""

    failure: FirstFailure | None
    """None: all is well, or it was interrupted before a rank was started."""
    interrupted: Interruption | None
    attempt: Attempt | None
    """The last one; None: no rank was started."""
    late: tuple[int, ...] = ()
    """The ranks that were ended because the time was over."""

    @property
    def exit_code(self) -> int:
        """See `lockstep.errors`."""
        if self.failure is not None:
            return self.failure.exit_code
        return 0 if self.interrupted is None else 128 + self.interrupted.signal


def launch_agent(
    *,
    plan: Plan,
    namespace: argparse.Namespace,
    zygote: Zygote,
    command: Command | None,
    hang: HangRules,
    folder: Path,
    timeout: float | None = None,
    keyboard: bool = True,
    launcher: str = "lockstep run",
) -> Outcome:
    """Meets the other machines, starts the ranks of this one and watches them to their end.

    Args:
        plan: what to start here.
        namespace: torchrun's flags.
        zygote: starts the ranks.
        command: what a rank executes; None: the zygote's own work.
        hang: when the run counts as hanging.
        folder: of the run; each attempt gets a folder in it.
        timeout: seconds from the start of the ranks after which they are ended; None: no limit.
        keyboard: a rank that is alone gets the terminal's keys, see `Agent`.
        launcher: what the ranks are told of who gave them their ranks.

    Raises:
        SettingError: a flag's value that cannot be honoured.
        JoinError: the machines of the run did not come together.
    """
    namespace.log_dir = str(folder)
    config = _config(namespace)
    with (
        _scarcity_explained(plan.nproc),
        console_for(namespace, plan.nproc) as console,
        open_rendezvous(config, console.announce) as rendezvous,
    ):
        watch = Watch(console, rendezvous, hang, timeout)
        agent = Agent(
            _worker_spec(config, rendezvous.handler, folder.name),
            zygote,
            command,
            {
                **{k: v for k, v in FLIGHT_RECORDER.items() if k not in os.environ},
                **socket_variables(os.environ, rendezvous.interface),
                **plan.environment,
                **({} if plan.nproc == 1 and plan.one_node else console.environment),
                **({} if plan.own_processes else {LAUNCHER: launcher}),
            },
            folder,
            watch,
            grace=_grace(namespace),
            plain=plan.own_processes,
            keyboard=keyboard,
        )
        try:
            with (
                _signals(agent, watch, config.signals_to_handle),
                stops_with(agent.pass_on, agent.give_keys),
                _quiet_torch_logs(),
            ):
                agent.run()
        except SignalException:  # `watch.interrupted` has it
            events.record(agent.get_event_failed(), config.event_log_handler)
        except JoinError as error:
            # For another start, that is; what made it necessary is the first failure.
            if not agent.attempts or agent.attempts[-1].failure is None:
                raise
            console.announce(f"the ranks cannot be started again: {error}")
        else:
            events.record(agent.get_event_succeeded(), config.event_log_handler)
            rendezvous.handler.shutdown()
        attempt = agent.attempts[-1] if agent.attempts else None
        failure = attempt.failure if attempt else None
        if failure is not None:
            rendezvous.close(failure.headline)
        elif watch.interrupted is not None:
            rendezvous.close(f"it was sent {signal.Signals(watch.interrupted.signal).name}")
    return Outcome(failure, watch.interrupted, attempt, watch.late)


def _config(namespace: argparse.Namespace) -> LaunchConfig:
    """What torchrun makes of its flags; what its `run` does with them first is done here."""
    open_port = namespace.rdzv_backend == "static" and not namespace.rdzv_endpoint
    open_port = open_port and namespace.master_port is None
    if namespace.standalone or (open_port and max_nodes(namespace.nnodes) == 1):
        namespace.rdzv_backend = "c10d"
        namespace.rdzv_endpoint = "localhost:0"
        namespace.rdzv_id = str(uuid.uuid4())
    if namespace.master_port is None:
        namespace.master_port = _MASTER_PORT
    # The plan says how many threads: torch would set and announce its own choice.
    with variables({"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}):
        try:
            config, _, _ = config_from_args(namespace)
        except (ValueError, AssertionError) as error:
            raise SettingError(
                "torchrun's flags", str(error), "torchrun --help says what they take"
            ) from None
    return config


def _grace(namespace: argparse.Namespace) -> float:
    """Seconds between asking a rank to end and killing it."""
    asked: float | None = getattr(namespace, "shutdown_timeout", None)
    if asked is None:
        asked = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _GRACE_S))
    return asked


def _worker_spec(config: LaunchConfig, handler: Any, name: str) -> WorkerSpec:
    values = {
        "role": config.role,
        "local_world_size": config.nproc_per_node,
        "rdzv_handler": handler,
        "entrypoint": name,
        "max_restarts": config.max_restarts,
        "monitor_interval": config.monitor_interval,
        "local_addr": config.local_addr,
        "event_log_handler": config.event_log_handler,
        "virtual_local_rank": getattr(config, "virtual_local_rank", False),
    }
    known = {field.name for field in fields(WorkerSpec)}  # not the same in all versions of torch
    return WorkerSpec(**{key: value for key, value in values.items() if key in known})


def make_folder(asked: str | None, name: str) -> Path:
    """A new folder for a run's logs: in `--log-dir`, else in the system's temporary folder.

    Args:
        asked: the flag's value.
        name: of the script.

    Raises:
        SettingError: nothing can be written there.
    """
    try:
        # The ranks may change their own working folder.
        root = Path(asked or Path(tempfile.gettempdir(), f"lockstep-logs-{os.getuid()}")).absolute()
        root.mkdir(parents=True, exist_ok=True, mode=0o777 if asked else 0o700)
        if not asked and root.stat().st_uid != os.getuid():  # made by somebody to read or swap ours
            root = root.parent
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = Path(tempfile.mkdtemp(prefix=f"{name[:_NAME]}-{stamp}-", dir=root))
        (folder / "room").write_bytes(bytes(_ROOM_BYTES))  # a full disk is heard of here
        (folder / "room").unlink()
        return folder
    except OSError as error:
        raise SettingError(
            f"--log-dir {asked}" if asked else "the temporary folder, as there is no --log-dir",
            str(error),
            "name a folder in which you may write: --log-dir FOLDER",
        ) from None


@contextlib.contextmanager
def _scarcity_explained(nproc: int) -> Iterator[None]:
    """Within it the want of processes, threads, files or memory is told as what it is."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # Python and torch raise the second where they get no thread.
        words = ("can't start new thread", os.strerror(errno.EAGAIN))
        if getattr(error, "errno", None) not in _SCARCE and str(error) not in words:
            raise
        raise SettingError(
            f"{nproc} process{'' if nproc == 1 else 'es'} on this machine",
            f"the system gives no more: {error}",
            "raise the limits of processes, files or memory (ulimit -a; the container's), or start "
            "fewer processes",
        ) from None


@contextlib.contextmanager
def _quiet_torch_logs() -> Iterator[None]:
    """Within it torch's agent logs no warnings, which are said better here; LOGLEVEL still wins."""
    logger = logging.getLogger(SimpleElasticAgent.__module__)
    before = logger.level
    if "LOGLEVEL" not in os.environ:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _signals(agent: Agent, watch: Watch, names: str) -> Iterator[None]:
    """Within it the first signal ends the run in order, and a second one kills what still runs.

    SIGUSR1, which asks for a checkpoint, is passed on to the ranks.

    A signal that is ignored, as SIGHUP is under nohup, stays ignored, and one for which the user
    has set a handler keeps it. Elsewhere than in the main thread no signal can be caught.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if watch.interrupted is not None:
            agent.in_a_hurry = True
            return
        watch.interrupted = Interruption(signal=number, time=time.time())
        raise SignalException(f"process {os.getpid()} got signal {number}", signal.Signals(number))

    numbers = [signal.Signals[text.strip()] for text in names.split(",") if text.strip()]
    passed_on = [] if signal.SIGUSR1 in numbers else [signal.SIGUSR1]
    before = {number: signal.getsignal(number) for number in (*numbers, *passed_on)}
    try:
        for number, handler in before.items():
            if handler in _DEFAULT_HANDLERS:
                pass_on = number in passed_on
                signal.signal(number, (lambda n, _: agent.pass_on(n)) if pass_on else handle)
        yield
    finally:
        for number, handler in before.items():
            if handler in _DEFAULT_HANDLERS:
                signal.signal(number, handler)
