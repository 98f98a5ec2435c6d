"""What the agent takes from torch elastic, not all of it public: a change of it shows up here."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from older_torch import needs_torchrun_flag
from torch.distributed.elastic.agent.server.api import (
    SimpleElasticAgent,
    Worker,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from lockstep.run.machines.static_rendezvous import StaticRendezvous
from lockstep.run.start import (
    agent as agent_module,
    fork_server as fork_server_module,
    rank_environment as rank_environment_module,
)
from lockstep.run.start.agent import Agent
from lockstep.run.start.exit_reports import ExitReports
from lockstep.run.start.fork_server import ForkServer
from lockstep.run.start.fork_server_messages import Event, answer_on_left_behind, control_sockets
from lockstep.run.start.interrupts import Interrupts
from lockstep.run.start.local_ranks import LocalRanks
from lockstep.run.start.machine import Machine
from lockstep.run.start.plan import LaunchSpec, make_plan
from lockstep.run.start.process import Attempt, Process
from lockstep.run.start.process_memory import OomCounts
from lockstep.run.start.rank_environment import rank_environment, variables_of_all_ranks
from lockstep.run.start.rank_watch import RankWatch
from lockstep.run.start.step_memory import StepMemory
from lockstep.run.start.worker import Script
from lockstep.run.watch.exit_status import ExitReport
from lockstep.run.watch.first_failure import FirstFailure

pytestmark = pytest.mark.launcher


def test_agent_defines_the_methods_that_torch_leaves_abstract() -> None:
    abstract = {"_start_workers", "_stop_workers", "_monitor_workers", "_shutdown"}
    assert SimpleElasticAgent.__abstractmethods__ == abstract
    assert not Agent.__abstractmethods__
    for name in abstract:
        theirs = inspect.signature(getattr(SimpleElasticAgent, name)).parameters
        ours = list(inspect.signature(getattr(Agent, name)).parameters)
        assert ours[: len(theirs)] == list(theirs)  # `_shutdown` has one more since torch 2.12


class Group:
    """The parts of a WorkerGroup that are read."""

    def __init__(self, **options: object) -> None:
        self.group_rank, self.group_world_size = 1, 2
        self.master_addr, self.master_port = "127.0.0.1", 1234
        handler = object.__new__(StaticRendezvous)
        handler.get_run_id = lambda: "run"  # type: ignore[method-assign]
        self.spec = WorkerSpec(
            role="trainer",
            local_world_size=2,
            rdzv_handler=handler,  # type: ignore[arg-type]
            entrypoint="x",
            max_restarts=3,
            **options,  # type: ignore[arg-type]
        )


WORKER = Worker(local_rank=1, global_rank=3, role_rank=3, world_size=4, role_world_size=4)


def test_a_rank_gets_the_variables_of_torchrun() -> None:
    found = rank_environment(Group(), WORKER, 2, {})  # type: ignore[arg-type]
    assert found == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    source = inspect.getsource(LocalElasticAgent._start_workers)
    theirs = {word.strip('",: ') for word in source.split() if word.startswith('"')}
    names = {word for word in theirs if word.isupper() and word != "OMP_NUM_THREADS"}
    assert names <= set(found)


@needs_torchrun_flag("--virtual-local-rank")
@pytest.mark.parametrize(("environ", "device"), [({}, "1"), ({"CUDA_VISIBLE_DEVICES": "4,6"}, "6")])
def test_with_virtual_local_ranks_each_sees_its_own_gpu(
    environ: dict[str, str], device: str
) -> None:
    found = rank_environment(Group(virtual_local_rank=True), WORKER, 0, environ)  # type: ignore[arg-type]
    assert (found["LOCAL_RANK"], found["CUDA_VISIBLE_DEVICES"]) == ("0", device)


def an_attempt(*pids: int, num_nodes: int = 1) -> Attempt:
    processes = [
        Process(rank=number, local_rank=number, folder=Path(), pid=pid)
        for number, pid in enumerate(pids)
    ]
    num_ranks = len(pids)
    return Attempt(processes, num_ranks * num_nodes, 0, num_nodes, num_ranks, folder=Path())


def test_a_signal_that_comes_while_a_ranks_end_is_read_waits_until_it_is_noted() -> None:
    class ForkServer:
        has_ended = False

        def events(self, timeout: float) -> list[Event]:
            interrupts.interrupt(signal.SIGTERM)
            return [Event(0, 4321, 0)]

    attempt = an_attempt(4321)
    interrupts = Interrupts()
    ranks = LocalRanks(cast(Any, ForkServer()), None, interrupts)
    ranks.begin(attempt)
    with pytest.raises(SignalException):
        ranks.read_events()
    assert attempt.processes[0].code == 0
    ranks.read_events()  # a second signal ends nothing a second time
    assert interrupts.kill_at_once
    interrupts.received = None
    with pytest.raises(SignalException):
        interrupts.interrupt(signal.SIGTERM)


class ForkServerWithMessages(ForkServer):
    """Its process is this one, and the messages that it has sent are given."""

    def __init__(self, *messages: object) -> None:
        self.pid = os.getpid()
        self._code = None
        self._socket, servers_end = control_sockets()
        for message in messages:
            servers_end.send(json.dumps(message).encode())
        self.servers_end = servers_end

    def __enter__(self) -> ForkServerWithMessages:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self.servers_end.close()


def test_messages_about_an_earlier_attempt_are_not_taken_for_those_of_the_present_one() -> None:
    """They come late if the launcher has given up waiting for them, and ranks are started again."""
    messages = [
        answer_on_left_behind(request=1, pids=[77]),
        Event(0, 1234, -signal.SIGKILL),  # a process on which the launcher has given up
        Event(3, 1235, -signal.SIGKILL),  # the present attempt has no rank 3
        Event(0, 4321),
    ]
    attempt = an_attempt(0, 0)
    for process in attempt.processes:
        process.pid = None
    with ForkServerWithMessages(*messages) as fork_server:
        ranks = LocalRanks(fork_server, None, Interrupts())
        ranks.begin(attempt)
        ranks.read_events()
    assert [(process.pid, process.code) for process in attempt.processes] == [
        (4321, None),
        (None, None),
    ]


def test_a_late_answer_is_not_taken_for_that_to_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ForkServerWithMessages() as fork_server:
        monkeypatch.setattr(fork_server_module, "_LEFT_BEHIND_TIMEOUT_S", 0.0)
        assert fork_server.end_left_behind() == []  # no answer in time
        late = answer_on_left_behind(request=1, pids=[77])
        in_time = answer_on_left_behind(request=2, pids=[78, 79])
        for message in (late, in_time):
            fork_server.servers_end.send(json.dumps(message).encode())
        monkeypatch.setattr(fork_server_module, "_LEFT_BEHIND_TIMEOUT_S", 60.0)
        assert fork_server.end_left_behind() == [78, 79]


def test_a_signal_that_comes_in_a_block_that_fails_ends_the_run_there() -> None:
    """Kept until another block, it would cut off the end of the ranks, in the middle."""
    interrupts = Interrupts()
    with pytest.raises(SignalException) as caught, interrupts.delayed():
        interrupts.interrupt(signal.SIGTERM)
        raise OSError("the socket is gone")
    assert isinstance(caught.value.__context__, OSError)
    with interrupts.delayed():
        pass


class Memory(StepMemory):
    """Has the given seals."""

    def __init__(self, *seals: bytes) -> None:
        super().__init__(0)
        self.found = [frozenset(seals)]

    def kept_steps(self) -> list[frozenset[bytes]]:
        return self.found


@pytest.mark.parametrize("why", ["hang", "ended elsewhere", "lost"])
def test_ranks_that_can_make_no_step_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Before they are ended because a machine joins, they hang, or those of another one end."""
    attempt = an_attempt(4321, num_nodes=2)
    report = ExitReport(host="b", complete=why == "ended elsewhere")
    rendezvous: Any = SimpleNamespace(
        departed_nodes=list,
        published=lambda key: {1: report.to_values()},
        has_node_left_attempt=lambda: why == "lost",
    )
    agent: Any = object.__new__(Agent)
    agent.attempts, agent._rdzv, agent._step_memory = [attempt], rendezvous, Memory()
    agent._exit_reports = ExitReports(rendezvous, attempt, [], OomCounts(None, None), Interrupts())
    plan: Any = SimpleNamespace(timeout=None, hang=None)
    record: Any = SimpleNamespace(find=None)
    unused: Any = None
    watch: Any = RankWatch(attempt, plan, rendezvous, agent._exit_reports, unused, record, unused)
    watch._next_slow_checks = math.inf
    watch._snapshot_exchange = SimpleNamespace(answer=lambda: None)
    watch._supervisor = SimpleNamespace(check=lambda: why == "hang", verdict=None)
    agent._watch = watch
    agent.ranks = SimpleNamespace(read_events=lambda timeout: None)
    clock = itertools.count()
    monkeypatch.setattr(agent_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(agent_module, "_MAX_WAIT_FOR_KEPT_STEP_S", 10_000)
    agent._wait_for_kept_step(attempt)
    assert next(clock) < 100


@pytest.mark.parametrize(
    ("steps_before", "steps_in_attempt", "a_machine_was_lost", "expected"),
    [
        (1, 1, False, signal.SIGKILL),
        (1, 0, False, signal.SIGTERM),  # only an earlier attempt has kept steps
        (0, 0, False, signal.SIGTERM),
        (1, 0, True, signal.SIGKILL),  # they wait for the lost machine, and could not save
        (0, 0, True, signal.SIGTERM),
    ],
)
def test_ranks_that_keep_no_steps_may_save_before_a_machine_joins(
    monkeypatch: pytest.MonkeyPatch,
    steps_before: int,
    steps_in_attempt: int,
    a_machine_was_lost: bool,
    expected: int,
) -> None:
    monkeypatch.setattr(agent_module, "_MAX_WAIT_FOR_KEPT_STEP_S", 0.0)
    memory = Memory(*[b"an earlier step"] * steps_before)
    monkeypatch.setattr(Memory, "is_used", steps_before > 0)
    signals = []
    agent: Any = object.__new__(Agent)
    agent.attempts = [an_attempt(4321, num_nodes=2)]
    agent._rdzv = SimpleNamespace(elastic=True, request_restart=lambda: None)
    agent._step_memory, agent._steps_kept_before = memory, memory.kept_steps()
    if steps_in_attempt:
        memory.found = [frozenset([b"step of this attempt"])]
    agent._end_ranks = lambda number, before_restart: signals.append(number)
    agent._end_ranks_for_other_machines(a_machine_was_lost=a_machine_was_lost)
    assert signals == [expected]


@pytest.mark.parametrize(
    ("state", "announced"),
    [
        (WorkerState.FAILED, "starting all ranks again (--max-restarts: 1 left after this)"),
        (
            WorkerState.HEALTHY,
            "starting all ranks again, as the machines of the run have changed, which uses up no "
            "restart (--max-restarts: 1 left)",
        ),
    ],
)
def test_a_restart_is_counted_only_if_ranks_have_failed(state: WorkerState, announced: str) -> None:
    """In both cases a failure is reported: ranks may also hang while a machine is awaited."""
    attempt = an_attempt(4321, num_nodes=2)
    attempt.failure = FirstFailure(
        kind="deadlock", time=5.0, headline="deadlock: rank 0 waits in barrier", ranks=(0,)
    )
    lines: list[str] = []
    agent: Any = object.__new__(Agent)
    agent.attempts = [attempt]
    agent._failed_attempts = 2
    agent._rdzv = SimpleNamespace(elastic=True, describe_lost_nodes=lambda: "")
    agent._end_ranks = lambda number, before_restart: None
    agent._end_ranks_for_other_machines = lambda a_machine_was_lost: None
    agent._gpus = SimpleNamespace(leave_out_held=lambda attempt: None)
    agent._console = SimpleNamespace(announce=lines.append)
    agent._record = SimpleNamespace(write=lambda *fields: None)
    group: Any = SimpleNamespace(state=state, spec=SimpleNamespace(max_restarts=3))
    agent._stop_workers(group)
    assert "deadlock: rank 0 waits in barrier" in lines[0]
    assert lines[1:] == [announced]


@pytest.mark.parametrize(
    ("has_gpus", "interfaces", "value"),
    [
        (True, ["lo", "eth0", "veth1"], "=eth0"),
        (True, ["lo", "eth0", "eth1"], None),
        (False, ["lo", "eth0", "veth1"], None),
    ],
)
def test_ranks_are_told_nccls_interfaces_where_it_would_choose_wrong_ones(
    monkeypatch: pytest.MonkeyPatch, has_gpus: bool, interfaces: list[str], value: str | None
) -> None:
    monkeypatch.setattr(rank_environment_module, "running_interfaces", lambda: interfaces)
    spec = LaunchSpec(script=Script(path="train.py"))
    machine = Machine(cores=2, gpus=2 if has_gpus else 0, loopback="lo")
    plan = make_plan(spec, machine, {}, 2, one_node=False)
    said: list[str] = []
    variables = variables_of_all_ranks(plan, {}, "eth0", said.append)
    assert variables["GLOO_SOCKET_IFNAME"] == "eth0"
    assert variables.get("NCCL_SOCKET_IFNAME") == value
    if value is None:
        assert not said
    else:
        assert f"NCCL_SOCKET_IFNAME={value}: by itself NCCL would use veth1" in said[0]
