"""Torchrun's flags: all of them are known, and what cannot be honoured is refused in words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.distributed.argparse_util import check_env
from torch.distributed.run import get_args_parser

from lockstep.errors import SettingError
from lockstep.run.start import script
from lockstep.run.start.plan import LaunchSpec
from lockstep.run.start.torchrun_flags import (
    ON_OFF_FLAGS,
    TorchrunFlags,
    check_flags,
    node_numbers,
    parse_flags,
    rendezvous_parameters,
)
from lockstep.run.start.worker import Script

pytestmark = pytest.mark.launcher

# What `lockstep run` makes of each; a flag that torchrun gets one day must be looked at first.
HONOURED_BY = {
    "nnodes": "torchrun's own rendezvous",
    "nproc_per_node": "the plan",
    "rdzv_backend": "torchrun's own rendezvous",
    "rdzv_endpoint": "torchrun's own rendezvous",
    "rdzv_id": "torchrun's own rendezvous",
    "rdzv_conf": "torchrun's own rendezvous",
    "standalone": "torchrun's own rendezvous",
    "max_restarts": "torch elastic's agent",
    "monitor_interval": "torch elastic's agent",
    "start_method": "nothing: torchrun uses it with --run-path alone, and a script cannot tell",
    "role": "torch elastic's agent",
    "module": "rank_main",
    "no_python": "the fork server, which executes it",
    "run_path": "rank_main, as any script",
    "log_dir": "the folder of the run",
    "redirects": "the console",
    "tee": "the console",
    "local_ranks_filter": "the console",
    "node_rank": "torchrun's own rendezvous",
    "master_addr": "torchrun's own rendezvous",
    "master_port": "torchrun's own rendezvous",
    "local_addr": "torch elastic's agent",
    "logs_specs": "refused",
}
SINCE_2_8 = {"event_log_handler": "torch elastic's agent"}
SINCE_2_9 = {"numa_binding": "torch's own numactl command"}
SINCE_2_10 = {
    "duplicate_stdout_filters": "the console",
    "duplicate_stderr_filters": "the console",
    "signals_to_handle": "the launcher's handlers",
    "virtual_local_rank": "the variables of the ranks",
}
SINCE_2_12 = {"shutdown_timeout": "the agent"}
SINCE_2_14 = {
    "log_line_prefix_template": "the console",
    "print_completion": "torchrun's parser, which prints and exits",
}
POSITIONAL = {"training_script", "training_script_args", "help"}
KNOWN = {action.dest for action in get_args_parser()._actions} - POSITIONAL
FLAGS_OF_2_10 = SINCE_2_10.keys() <= KNOWN
SHUTDOWN_TIMEOUT = SINCE_2_12.keys() <= KNOWN


def test_every_flag_of_torchrun_is_accounted_for() -> None:
    newer = (SINCE_2_8, SINCE_2_9, SINCE_2_10, SINCE_2_12, SINCE_2_14)
    known = [flags.keys() for flags in newer if flags.keys() & KNOWN]
    assert set(HONOURED_BY).union(*known) == KNOWN


@pytest.mark.parametrize(
    "words", [("--node-rank", "3"), ("--node-rank=3",), ("--node_rank", "3"), ("--node_rank=3",)]
)
def test_a_flag_is_found_however_it_is_written(words: tuple[str, ...]) -> None:
    others = ("--standalone", "--rdzv-conf=a=1", "--role", "node-rank")
    earlier = ("--node-rank", "1")  # which the later one replaces
    flags = TorchrunFlags((*earlier, *others[:2], *words, *others[2:]), {"PET_NODE_RANK": "2"})
    assert flags.get("--node-rank") == "3"
    assert flags.get("--rdzv-conf") == "a=1"
    assert flags.get("--role") == "node-rank"
    assert flags.get("--standalone") == ""
    assert flags.get("--nnodes") is None
    assert flags.words_without("--node-rank") == list(others)
    assert flags.words_with("--role", "x") == [*earlier, *others[:2], *words, "--role", "x"]


def test_a_flag_may_be_given_by_a_variable() -> None:
    flags = TorchrunFlags((), {"PET_NODE_RANK": "2"})
    assert flags.get("--node-rank") == "2"
    assert flags.is_any_given
    assert flags.say_how_nodes_meet
    assert not TorchrunFlags((), {"HOME": "/"}).is_any_given


@pytest.mark.parametrize(("value", "is_given"), [("1", True), ("0", False), ("yes", True)])
def test_a_variable_may_switch_a_flag_off(value: str, is_given: bool) -> None:
    flags = TorchrunFlags((), {"PET_STANDALONE": value})
    assert flags.is_given("--standalone") == is_given
    assert flags.is_any_given == is_given
    assert flags.describe_nodes == is_given
    assert TorchrunFlags(("--standalone",), {"PET_STANDALONE": value}).is_given("--standalone")


def test_flags_that_a_variable_may_switch_off_are_those_of_torchruns_parser() -> None:
    actions = [each for each in get_args_parser()._actions if isinstance(each, check_env)]
    found = {"--" + action.dest.replace("_", "-") for action in actions}
    assert set(ON_OFF_FLAGS) == found | {"--virtual-local-rank"}  # torch 2.9 does not have this one


def test_torchruns_variable_says_early_how_many_ranks_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries that the ranks share read OMP_NUM_THREADS when they are imported."""

    class ForkServerIsStarted(Exception):
        pass

    def start_fork_server(run_rank: object, spares: int) -> None:
        raise ForkServerIsStarted(spares, os.environ["OMP_NUM_THREADS"])

    monkeypatch.setattr(script, "ForkServer", start_fork_server)
    monkeypatch.setattr(script, "import_for_ranks", lambda names: None)
    monkeypatch.setattr(script, "cores_allowed", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    (tmp_path / "t.py").touch()
    with pytest.raises(ForkServerIsStarted) as started:
        script.run_script(LaunchSpec(script=Script(path=str(tmp_path / "t.py"))), print)
    assert started.value.args == (2, "4")


def test_two_runs_on_one_machine_do_not_meet_at_a_port() -> None:
    # By default torch 2.11's --master-port is 29500.
    assert rendezvous_parameters(parse_flags(["t.py"])).endpoint == "localhost:0"
    chosen = parse_flags(["--master-port", "29500", "t.py"])
    assert rendezvous_parameters(chosen).endpoint == "127.0.0.1:29500"


def test_numa_binding_has_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    # With a variable for it, ranks would have to be fresh interpreters where that is set.
    monkeypatch.setenv("PET_NUMA_BINDING", "node")
    assert parse_flags(["script.py"]).numa_binding is None
    assert parse_flags(["--numa_binding=node", "script.py"]).numa_binding == "node"


@pytest.mark.parametrize(("asked", "numbers"), [("1", (1, 1)), ("1:4", (1, 4)), ("3:3", (3, 3))])
def test_nnodes_is_a_number_or_a_range(asked: str, numbers: tuple[int, int]) -> None:
    assert node_numbers(asked) == numbers


@pytest.mark.parametrize("asked", ["0", "2:1", "0:2", "x", "", "1:2:3", "-1", "1.5"])
def test_a_value_of_nnodes_that_is_no_number_of_machines_is_refused(asked: str) -> None:
    with pytest.raises(SettingError, match="--nnodes"):
        node_numbers(asked)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--max-restarts -1", "--max-restarts -1"),
        ("--max-restarts x", "invalid int value"),
        ("--start-method magic", "invalid choice"),
        ("--monitor-interval 0", "--monitor-interval 0.0"),
        *[("--shutdown-timeout -2", "--shutdown-timeout -2")] * SHUTDOWN_TIMEOUT,
        ("--rdzv-conf timeout", "timeout has no value"),
        ("--rdzv-conf a=1,", "an empty part has no value"),
        ("--nnodes 2:1", "not a number of machines"),
        *[("--signals-to-handle SIGFOO", "SIGFOO is no signal")] * FLAGS_OF_2_10,
        *[("--signals-to-handle SIGTERM,SIGKILL", "SIGKILL is no signal")] * FLAGS_OF_2_10,
        ("--event-log-handler none", "no handler of this name"),
        ("--redirects 9", "--redirects 9"),
        ("--tee 0:4", "--tee 0:4"),
        ("--local-ranks-filter a", "--local-ranks-filter a"),
        ("--log-dir /dev/null", "it is no folder"),
        ("--logs-specs mine", "--logs-specs mine"),
        ("-m --no-python", "-m with --no-python"),
        ("-m --run-path", "-m with --run-path"),
        *[("--virtual-local-rank", "CUDA_VISIBLE_DEVICES=3 has no device for each")]
        * FLAGS_OF_2_10,
    ],
)
def test_flags_that_cannot_be_honoured_are_refused(
    line: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(SettingError, match="do:") as caught:
        check_flags(parse_flags([*line.split(), "t.py"]), nproc=2)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "",
        *["--virtual-local-rank"] * FLAGS_OF_2_10,
        "--rdzv-conf timeout=3,join_timeout=4",
        *["--signals-to-handle SIGUSR1"] * FLAGS_OF_2_10,
        "--run-path --no-python",  # the first wins, as with torchrun
        "--log-dir .",
        *["--shutdown-timeout 0"] * SHUTDOWN_TIMEOUT,
    ],
)
def test_flags_that_can_be_honoured_are_accepted(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check_flags(parse_flags([*line.split(), "t.py"]), nproc=2)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("PET_STANDALONE", "yes", "neither 0 nor 1"),
        ("PET_MAX_RESTARTS", "-1", "--max-restarts -1"),
        ("PET_MAX_RESTARTS", "many", "invalid int value"),
        ("TORCHELASTIC_ENABLE_FILE_TIMER", "1", "does not serve the timers"),
    ],
)
def test_variables_that_cannot_be_honoured_are_refused(
    name: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match="do:") as caught:
        check_flags(parse_flags(["t.py"]), nproc=1)
    assert text in str(caught.value)


def test_a_file_as_log_dir_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="it is no folder"):
        check_flags(parse_flags(["--log-dir", str(tmp_path / "file"), "t.py"]), nproc=1)
