"""What the agent takes from torch elastic, not all of it public: a change of it shows up here."""

from __future__ import annotations

import inspect
import itertools
import math
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from older_torch import needs_torchrun_flag
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, Worker, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from lockstep.run.machines.static_rendezvous import StaticRendezvous
from lockstep.run.start import agent as agent_module
from lockstep.run.start.agent import Agent
from lockstep.run.start.machine import Machine
from lockstep.run.start.plan import LaunchSpec, make_plan
from lockstep.run.start.process import Attempt, Process
from lockstep.run.start.rank_environment import rank_environment
from lockstep.run.start.worker import Script
from lockstep.run.start.zygote_messages import Event
from lockstep.run.watch.exit_status import ExitReport

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


def test_a_signal_that_comes_while_a_ranks_end_is_read_waits_until_it_is_noted() -> None:
    class Zygote:
        def events(self, timeout: float) -> list[Event]:
            agent.interrupt(signal.SIGTERM)
            return [Event(0, 4321, 0)]

    process = Process(rank=0, local_rank=0, folder=Path(), pid=4321)
    agent: Any = object.__new__(Agent)
    agent.attempts = [Attempt([process], world_size=1, node=0, num_nodes=1, folder=Path())]
    agent.received_signal, agent._delayed_interrupt, agent._zygote = None, None, Zygote()
    with pytest.raises(SignalException):
        agent._read_events()
    assert process.code == 0
    agent._read_events()  # a second signal ends nothing a second time
    assert agent._kill_at_once
    agent.received_signal = None
    with pytest.raises(SignalException):
        agent.interrupt(signal.SIGTERM)


def test_a_signal_that_comes_in_a_block_that_fails_ends_the_run_there() -> None:
    """Kept until another block, it would cut off the end of the ranks, in the middle."""

    class Zygote:
        def events(self, timeout: float) -> list[Event]:
            agent.interrupt(signal.SIGTERM)
            raise OSError("the socket is gone")

    agent: Any = object.__new__(Agent)
    agent.attempts = [Attempt([], world_size=1, node=0, num_nodes=1, folder=Path())]
    agent.received_signal, agent._delayed_interrupt, agent._zygote = None, None, Zygote()
    with pytest.raises(SignalException) as caught:
        agent._read_events()
    assert isinstance(caught.value.__context__, OSError)
    agent._zygote = SimpleNamespace(events=lambda timeout: [])
    agent._read_events()


@pytest.mark.parametrize("why", ["hang", "ended elsewhere", "lost"])
def test_ranks_that_can_make_no_step_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Before they are ended because a machine joins, they hang, or those of another one end."""
    process = Process(rank=0, local_rank=0, folder=Path(), pid=4321)
    attempt = Attempt([process], world_size=2, node=0, num_nodes=2, folder=Path())
    agent: Any = object.__new__(Agent)
    agent._timeout_at, agent._next_slow_checks = math.inf, math.inf
    report = ExitReport(host="b", complete=why == "ended elsewhere")
    agent._rdzv = SimpleNamespace(
        departed_nodes=list,
        published=lambda key: {1: report.to_values()},
        has_node_left_attempt=lambda: why == "lost",
    )
    agent._step_memory = SimpleNamespace(seals=lambda: [frozenset()])
    agent._snapshot_exchange = SimpleNamespace(answer=lambda: None)
    agent._supervisor = SimpleNamespace(check=lambda: why == "hang")
    clock = itertools.count()
    monkeypatch.setattr(agent_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    agent._read_events = lambda timeout: None
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
    seals = [frozenset([b"an earlier step"] * steps_before)]
    signals = []
    agent: Any = object.__new__(Agent)
    process = Process(rank=0, local_rank=0, folder=Path(), pid=4321)
    agent.attempts = [Attempt([process], world_size=2, node=0, num_nodes=2, folder=Path())]
    agent._rdzv = SimpleNamespace(elastic=True, request_restart=lambda: None)
    agent._seals_at_start = seals
    if steps_in_attempt:
        seals = [frozenset([b"step of this attempt"])]
    agent._step_memory = SimpleNamespace(seals=lambda: seals, is_used=steps_before > 0)
    agent._end_ranks = lambda number, before_restart: signals.append(number)
    agent._end_ranks_for_other_machines(a_machine_was_lost=a_machine_was_lost)
    assert signals == [expected]


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
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(agent_module, "running_interfaces", lambda: interfaces)
    spec = LaunchSpec(script=Script(path="train.py"))
    machine = Machine(cores=2, gpus=2 if has_gpus else 0, loopback="lo")
    plan = make_plan(spec, machine, {}, 2, one_node=False)
    said: list[str] = []
    console: Any = SimpleNamespace(announce=said.append, environment={})
    rendezvous: Any = SimpleNamespace(interface="eth0")
    variables = agent_module._variables_of_all_ranks(plan, console, rendezvous)
    assert variables["GLOO_SOCKET_IFNAME"] == "eth0"
    assert variables.get("NCCL_SOCKET_IFNAME") == value
    if value is None:
        assert not said
    else:
        assert f"NCCL_SOCKET_IFNAME={value}: by itself NCCL would use veth1" in said[0]
