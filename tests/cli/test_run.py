from __future__ import annotations

import os
import re
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import click
import pytest
from click.testing import CliRunner, Result
from launched import launch
from older_torch import needs_torchrun_flag

from lockstep import strategies
from lockstep.cli import run as run_command, run_help
from lockstep.cli.main import main
from lockstep.cli.place_options import WHY_NOT_WITH_ANOTHER_PLACE, PlaceOption
from lockstep.cli.places import hosts as hosts_place
from lockstep.cli.torchrun_options import torchrun_options
from lockstep.errors import SettingError
from lockstep.extensions.journal.writer import check_strategy
from lockstep.familiar_names import ADVICE_FOR_FLAG
from lockstep.machine.topology import SCHEDULERS
from lockstep.run.machines import slurm
from lockstep.run.machines.hosts import HostsSpec
from lockstep.run.start import script
from lockstep.run.start.plan import LaunchSpec
from lockstep.run.start.worker import Script
from lockstep.strategies import registry
from lockstep.strategies.find import find_strategy

pytestmark = pytest.mark.launcher


SLURM_STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
"""The variables of the second of two tasks that srun has started, on two machines."""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", *arguments])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[LaunchSpec]:
    """What would have been started."""
    specs: list[LaunchSpec] = []

    def remember(spec: LaunchSpec, say: object = None) -> int:
        specs.append(spec)
        return 7

    monkeypatch.setattr(script, "run_script", remember)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return specs


@pytest.mark.parametrize(
    "nproc", [("--nproc", "2"), ("--nproc-per-node=2",), ("--nproc_per_node=2",)]
)
def test_our_flags_and_torchruns_in_any_order(
    asked: list[LaunchSpec], nproc: tuple[str, ...]
) -> None:
    line = ["--max-restarts", "1", *nproc, "--standalone", "--seed=3", "--rdzv_conf", "a=1"]
    result = run(*line, "--shares", "1:2", "--join-timeout", "5", "t.py", "--seed", "4", "--", "-x")
    assert result.exit_code == 7, result.output
    assert asked == [
        LaunchSpec(
            script=Script(path="t.py", arguments=("--seed", "4", "--", "-x")),
            nproc="2",
            settings={"join_timeout": 5.0, "shares": "1:2", "seed": 3},
            torchrun=("--max-restarts", "1", "--standalone", "--rdzv-conf", "a=1"),
        )
    ]


def test_module(asked: list[LaunchSpec]) -> None:
    run("-m", "pkg.mod", "--help")
    program = Script(path="pkg.mod", arguments=("--help",), module=True)
    assert asked == [LaunchSpec(script=program)]


def test_every_strategy_can_be_asked_for() -> None:
    for entry in registry.ENTRIES:
        strategy, _ = find_strategy(entry.name, 1)
        assert type(strategy) is getattr(strategies, entry.class_name)
        assert strategy.name == entry.name


def test_a_strategy_over_another_one_inherits_what_the_code_asks_it() -> None:
    @dataclass(frozen=True, kw_only=True)
    class MyDiLoCo(strategies.DiLoCo):
        name: ClassVar[str] = "my_diloco"

    assert not MyDiLoCo().computes_batch_side_by_side
    with pytest.raises(SettingError, match="journal with strategy='my_diloco'"):
        check_strategy(MyDiLoCo())


def test_of_an_unknown_strategy_nothing_is_known() -> None:
    facts = asdict(registry.entry_of("mine:option=1"))
    assert facts.pop("name") == "mine"
    assert not any(facts.values())


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("single", strategies.Single()),
        ("dp:device_ids=0:1,dim=1", strategies.DP(device_ids=[0, 1], dim=1)),
        ("ddp:bucket_cap_mb=2.5,compress=bf16", strategies.DDP(bucket_cap_mb=2.5, compress="bf16")),
        ("ddp:static_graph=true", strategies.DDP(static_graph=True)),
        ("ddp:average_buffers=mean", strategies.DDP(average_buffers="mean")),
        ("ddp:average_buffers=mean:*.var", strategies.DDP(average_buffers=["mean", "*.var"])),
        ("fsdp:blocks=layers.*", strategies.FSDP(blocks="layers.*")),
        ("hsdp:shard_size=2,reshard_after_forward=false",
         strategies.HSDP(shard_size=2, reshard_after_forward=False)),
        ("pipeline:split=a:b.1", strategies.Pipeline(split=["a", "b.1"])),
        ("diloco:every=100,outer_lr=1", strategies.DiLoCo(every=100, outer_lr=1.0)),
    ],
    ids=str,
)  # fmt: skip
def test_options_may_follow_the_name_of_a_strategy(text: str, options: object) -> None:
    assert find_strategy(text, 2) == (options, "as set")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("diloco:evry=3", "options of diloco are replicas, .*did you mean 'every'"),
        ("diloco:every=soon", "every is a whole number"),
        ("diloco:every", "every is a whole number"),
        ("diloco:every=0", r"DiLoCo\(every=0\)"),
        ("diloco:outer_lr=high", "outer_lr is a number"),
        ("dp:device_ids=0:a", "device_ids is a whole number"),
        ("ddp:static_graph=yes", "static_graph is true or false"),
        ("ddp:compress=int9", "compressions are bf16"),
        ("single:every=3", "single has no options"),
        ("locl:every=3", "strategies are single, "),
    ],
)
def test_options_that_a_strategy_does_not_have(text: str, found: str) -> None:
    with pytest.raises(SettingError, match=f"(?s){found}"):
        find_strategy(text, 2)


@pytest.mark.parametrize(
    ("arguments", "code", "hinted"),
    [
        (("--nproc", "2"), 2, True),
        (("--nproc=2",), 2, True),
        (("--nproc", "2"), 1, False),
        (("--epochs", "2"), 2, False),
    ],
)
def test_an_option_after_the_script_that_the_script_does_not_know(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, hinted: bool
) -> None:
    monkeypatch.setattr(script, "run_script", lambda spec, say: code)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    result = run("t.py", *arguments)
    assert result.exit_code == code
    assert ("stands after t.py" in result.output) is hinted


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("import torch\n")
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "Missing argument 'SCRIPT'"),
        (("--max-restart", "1", "t.py"), "did you mean --max-restarts?"),
        (("--max-restart=1", "t.py"), "did you mean --max-restarts?"),
        (("--stratgy", "ddp", "t.py"), "did you mean --strategy?"),
        (("--epochs", "3", "t.py"), "neither Lockstep nor torchrun"),
        (("--epochs", "3", "t.py"), "after the script"),
        (("--nproc",), "requires an argument"),
        (("--standalone=1", "t.py"), "does not take a value"),
        (("--seed", "x", "t.py"), "Invalid value for '--seed'"),
        (("--hang-after", "nan", "t.py"), "--hang-after=nan"),
        (("--strategy", "dpp", "t.py"), "strategies are single, dp, ddp"),
        (("--strategy", "dpp", "t.py"), "did you mean 'dp' or 'ddp'?"),
        (("--strategy", "fspd", "t.py"), "did you mean 'fsdp'?"),
        (("--lr", "0.2", "t.py"), "do:    the script's own arguments go after the script"),
        (("--precision", "float16", "t.py"), "--precision float16\n  found: precisions are"),
        (("--shares", "1:2:3", "--nproc", "2", "t.py"), "--shares 1:2:3\n  found: 3 shares for"),
        (("--shares", "1:2:3", "--nproc", "2", "t.py"), "for example 1:2\n"),
        (("--shares", "1:2", "--nproc=3", "--strategy=fsdp", "t.py"), "for example 1:1:2\n"),
        (("--strategy", "dp", "--nproc", "2", "t.py"), "--strategy dp on 2 processes"),
        (("--strategy", "single", "--hosts", "a:1,b:1", "t.py"), "--strategy single on 2 processe"),
        (("--virtual-ranks", "2", "--nproc", "3", "t.py"), "3 processes, each of which"),
        (("--virtual-ranks", "2", "--shares", "auto", "t.py"), "what is measured differs"),
        (("--micro-batch-size", "2", "--num-micro-batches", "2", "t.py"), "either says how"),
        (("--join-timeout", "nan", "t.py"), "--join-timeout nan\n  found: it is not a time"),
        (("--nproc", "0", "t.py"), "--nproc 0"),
        (("--nproc", "gpus", "t.py"), "--nproc gpus"),
        (("--nnodes", "x", "t.py"), "not a number of machines"),
        (("--max-restarts", "x", "t.py"), "invalid int value"),
        (("--keep-in-memory", "t.py"), "nothing would read what is kept"),
        (("--slurm", "--keep-in-memory", "t.py"), "nothing would read what is kept"),
        (("--start-method", "magic", "t.py"), "invalid choice"),
        pytest.param(
            ("--signals-to-handle", "SIGFOO", "t.py"),
            "SIGFOO is no signal",
            marks=needs_torchrun_flag("--signals-to-handle"),
        ),
        (("--strategy", "DataParallel", "t.py"), "did you mean 'dp'?"),
        (("--strategy", "DistributedDataParallel", "t.py"), "did you mean 'ddp'?"),
        (("--strategy", "FullyShardedDataParallel", "t.py"), "did you mean 'fsdp'?"),
        (("--strategy", "deepspeed_stage_3", "t.py"), "did you mean 'fsdp'?"),
        (("--strategy", "zero3", "t.py"), "did you mean 'fsdp'?"),
        (("python", "t.py", "--lr", "1"), "leave python out: lockstep run t.py\n"),
        (("--nproc", "2", "python3.12", "-u", "t.py"), "out: lockstep run t.py\n"),
        (("--hosts", "a,b", "python", "-m", "t"), "leave python out: lockstep run -m t\n"),
        (("\u2014nproc", "2", "t.py"), "do:    type it anew: --nproc\n"),
        (("--seed", "1", "\u2013\u2013nproc", "2", "t.py"), "do:    type it anew: --nproc\n"),
        (("--nproc\uff1d2", "t.py"), "type them in half width: --nproc=2\n"),
        (("--hosts", "a\uff0cb", "t.py"), "type ',' in its place"),
        (("--hosts", "a", "b:2", "t.py"), "by commas: --hosts a,b:2 t.py\n"),
        (("--hosts", "a,", "b:2", "t.py"), "by commas: --hosts a,b:2 t.py\n"),
        (("--num_processes", "2", "t.py"), "use --nproc, which counts the processes of each"),
        (("--num-machines", "2", "t.py"), "do:    use --nnodes instead\n"),
        (("--machine_rank=2", "t.py"), "do:    use --node-rank instead\n"),
        (("--main_process_ip", "a", "t.py"), "do:    use --master-addr instead\n"),
        (("--mixed_precision", "bf16", "t.py"), "do:    use --precision instead\n"),
        (("-n", "2", "t.py"), "do:    use --nproc instead\n"),
        (("-np", "2", "t.py"), "do:    use --nproc instead\n"),
        (("--nproc=2", "-m", "torch.distributed.run", "t.py"), "it is a launcher too"),
        (("--nproc=2", "-m", "lockstep", "run", "t.py"), "it is a launcher too"),
        (("torchrun", "--nproc_per_node=2", "t.py"), ": lockstep run --nproc_per_node=2 t.py\n"),
        (("/opt/bin/mpirun", "-n", "2", "t.py"), "do:    leave it and its options out: "),
        ((sys.executable, "-u", "t.py"), "out: lockstep run t.py\n"),
        (("--report", "D:\\runs", "t.py"), "--report D:\\runs\n  found: D:\\runs is a path of Win"),
        (("--log-dir", "D:/runs", "t.py"), "--log-dir D:/runs\n  found: D:/runs is a path of Win"),
        (("D:\\work\\t.py",), "found: D:\\work\\t.py is a path of Windows"),
        (("s.py",), "did you mean t.py?"),
        (("t",), "did you mean t.py?"),
        (("elsewhere/t.py",), "there is no such file"),
        (("-m", "t.py"), "lockstep run t.py, or lockstep run -m t"),
        ((".",), "it is a folder without __main__.py"),
        (("--no-python", "no-such-program"), "there is no such program"),
        (("--no-python", "t.py"), "write ./t.py"),
        (("--no-python", "./t.py"), "chmod +x ./t.py"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], text: str) -> None:
    result = run("--dry-run", *arguments)
    assert result.exit_code == 2
    assert text in result.output
    assert "Traceback" not in result.output


def test_a_script_from_a_pipe_is_refused_unread() -> None:
    """Every rank would get another part of it, or nothing."""
    reads, writes = os.pipe()
    os.write(writes, b"print(1)")
    os.close(writes)
    try:
        # Of options after a script, its source may say that it does not read them.
        result = run("--dry-run", f"/dev/fd/{reads}", "--strategy", "ddp")
        assert result.exit_code == 2
        assert "it is a pipe or a device" in result.output
        assert os.read(reads, 100) == b"print(1)"
    finally:
        os.close(reads)


def test_each_option_that_chooses_a_place_has_its_place() -> None:
    options = [param for param in run_command.command.params if isinstance(param, PlaceOption)]
    choosing = [option.name for option in options if option.chooses_place]
    assert sorted(choosing) == sorted(run_command.PLACES)
    assert {*WHY_NOT_WITH_ANOTHER_PLACE, choosing[0]} == set(choosing)  # of two, the second is told
    for option in options:
        assert run_command.PLACES.keys() >= set(option.places)


@pytest.mark.usefixtures("folder")
def test_a_job_of_slurm_keeps_steps_in_memory() -> None:
    result = run(
        "--slurm", "--nproc=2", "--keep-in-memory", "--max-restarts=3", "--dry-run", "t.py"
    )
    assert result.exit_code == 0, result.output
    assert " --keep-in-memory --max-restarts 3 t.py" in result.output


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "arguments",
    [
        ("--strategy", "dp", "--shares", "2:3:3"),  # its devices have shares
        ("--shares", "1:2"),  # the script may start two processes
        ("--shares", "1:2", "--nproc", "4"),  # the script may ask for two pipelines
        ("--strategy", "pipeline", "--shares", "1:2", "--nproc", "4"),
        ("--strategy", "single", "--nproc", "2", "--nproc", "1"),
        ("--shares", "1:2:3", "--nnodes", "2", "--nproc", "2"),  # the other node may have one
        ("--check-devices", "3"),  # the script may set virtual_ranks
        ("--virtual-ranks", "2", "--nproc", "2"),
        ("--shares", "auto", "--nproc", "2"),
    ],
)
def test_what_may_be_right_is_left_to_the_ranks(
    asked: list[LaunchSpec], arguments: tuple[str, ...]
) -> None:
    result = run(*arguments, "t.py")
    assert result.exit_code == 7, result.output


@pytest.mark.usefixtures("folder", "asked")
@pytest.mark.parametrize(
    ("variables", "arguments"),
    [
        # The step of a job of Slurm has two machines.
        (SLURM_STEP, ("--shares", "1:2:3", "--nproc", "2")),
        ({"PET_NNODES": "2"}, ("--shares", "1:2:3", "--nproc", "2")),
        ({}, ("--nnodes=2", "--shares", "1:2:3", "--nproc", "2")),
    ],
)
def test_the_machines_of_a_run_are_known_however_they_are_given(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], arguments: tuple[str, ...]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = run(*arguments, "t.py")
    assert result.exit_code == 7, result.output


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("flag", ["--epoch", "--model", "--max-steps", "--log-interval"])
def test_an_option_of_the_script_is_not_taken_for_a_misspelt_one(flag: str) -> None:
    output = run(flag, "3", "t.py").output
    assert "did you mean" not in output
    assert f"lockstep run SCRIPT {flag}" in output


@pytest.mark.usefixtures("folder", "asked")
def test_variables_are_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_STRATEGY", "single")
    assert "LOCKSTEP_STRATEGY=single on 2 processes" in run("--nproc", "2", "t.py").output
    assert run("t.py").exit_code == 7
    assert run("--nproc", "2", "--strategy", "ddp", "t.py").exit_code == 7  # overrides it
    monkeypatch.setenv("LOCKSTEP_STRATEGY", "sinlge")
    assert "did you mean 'single'?" in run("t.py").output


def test_what_stands_for_a_flag_of_another_launcher_is_a_flag() -> None:
    known: set[str] = set()
    for param in (*run_command.command.params, *torchrun_options()):
        known.update(param.opts)
    for advice in ADVICE_FOR_FLAG.values():
        for flag in re.findall(r"--[\w-]+", advice):
            assert flag in known, advice


@pytest.mark.usefixtures("folder")
def test_a_language_of_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cn", "Chinese", "cn.UTF-8", "zh-CN", "zh_TW", "english"):
        monkeypatch.setenv("LOCKSTEP_LANG", name)
        output = run("--dry-run", "t.py").output
        if name.startswith("zh"):
            assert "languages are" not in output
        else:
            meant = "en" if name == "english" else "zh"
            assert f"languages are en, zh\n  do:    did you mean {meant!r}?" in output


def test_the_help_has_every_option_in_one_group() -> None:
    text = run("--help").output
    titles = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles == [
        "Examples:",
        "Processes:",
        "Several machines, by ssh:",
        "Several machines, one command on each:",
        "Ray:",
        "Slurm:",
        "Watching and restarts:",
        "Training settings (what the script leaves unset in lockstep.init):",
    ]
    for param in run_command.command.params:
        if isinstance(param, click.Option) and not param.hidden:
            shown = max(param.opts, key=len) if param.name != "nproc" else "--nproc"
            rows = re.findall(rf"^  (?:-\w, )?{shown}(?![\w-])", text, re.MULTILINE)
            assert len(rows) == 1, shown
    named = {name for names in run_help.GROUPS.values() for name in names}
    assert named <= {param.name for param in run_command.command.params}
    flags_of_torchrun = {name for option in torchrun_options() for name in option.opts}
    for rows in run_help.TORCHRUN_GROUPS.values():
        for flag, _ in rows:
            assert flag.partition(" ")[0] in flags_of_torchrun


@pytest.mark.usefixtures("folder")
def test_the_examples_of_the_help_are_accepted(
    asked: list[LaunchSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("train.py").touch()
    for example, _ in run_help.EXAMPLES:
        assert f"  {example}" in run("--help").output
        result = run("--dry-run", *example.split()[2:])
        assert result.exit_code == 0, result.output


def test_quiet_prints_the_scripts_output_and_failures_alone(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(QUIET_SCRIPT)
    done = launch(["run", "--quiet", "t.py"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "of the script\n", "")
    # The variable does the same. The run is resumed, which is not told, and fails, which is.
    environ = {**os.environ, "LOCKSTEP_QUIET": "1"}
    failing = launch(["run", "t.py", "fail"], tmp_path, env=environ)
    assert (failing.returncode, failing.stdout) == (1, "of the script\n")
    assert failing.stderr.startswith("Traceback")
    assert "lockstep: FIRST FAILURE: rank 0" in failing.stderr


@pytest.mark.usefixtures("folder")
def test_quiet_on_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[HostsSpec] = []
    monkeypatch.setattr(hosts_place, "run_on_hosts", lambda spec, say: specs.append(spec) or 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    run("--hosts", "a,b", "t.py")
    run("--hosts", "a,b", "-q", "t.py")
    monkeypatch.setenv("LOCKSTEP_QUIET", "1")  # it is sent to all machines
    run("--hosts", "a,b", "t.py")
    assert [spec.quiet for spec in specs] == [False, True, True]
    assert "-q" in specs[1].launcher_arguments(1, "", 0)
    assert specs[2].environment["LOCKSTEP_QUIET"] == "1"


QUIET_SCRIPT = """
import sys
import lockstep, torch
world = lockstep.init(device="cpu")
model = torch.nn.Linear(1, 1)
model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = world.loader(torch.utils.data.TensorDataset(torch.ones(4, 1)), 4)
checkpoint = world.checkpoint("saved", model=model, optimizer=optimizer, loader=loader)
checkpoint.resume()
for (x,) in loader:
    world.backward(model(x).mean())
    optimizer.step()
checkpoint.save()
world.print("of the script")
world.close()
if sys.argv[1:]:
    raise ValueError("no data")
"""


@pytest.mark.parametrize("name", ["lockstep.py", "torch.py", "numpy/__init__.py"])
def test_a_module_beside_the_script_that_hides_what_each_rank_imports(
    folder: Path, name: str
) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    result = run("t.py")
    assert result.exit_code == 2
    package = name.partition("/")[0].removesuffix(".py")
    assert f"{name} has the name of the package {package}" in result.output


@pytest.mark.usefixtures("folder")
def test_options_after_a_script_that_reads_no_arguments_are_warned_of(
    asked: list[LaunchSpec],
) -> None:
    text = "warning: --stategy has no effect, as t.py reads no arguments: if you meant --strategy,"
    assert text in run("--nproc", "2", "t.py", "--stategy", "fsdp").output
    text = "warning: --strategy fsdp has no effect, as it stands after t.py"
    assert text in run("--nproc", "2", "t.py", "--strategy", "fsdp").output
    assert "warning" not in run("--nproc", "2", "t.py", "--epochs", "3").output
    assert "warning" not in run("--from-file=", "t.py", "--strategy", "fsdp").output
    Path("t.py").write_text("import argparse")
    assert "warning" not in run("--nproc", "2", "t.py", "--strategy", "fsdp").output
    assert len(asked) == 5


@pytest.mark.usefixtures("folder")
def test_a_second_launcher_around_this_one_is_refused(
    asked: list[LaunchSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert run("t.py").exit_code == 7, "one process starts one training"

    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    output = run("--seed", "1", "t.py", "--lr", "1").output
    assert "in each of the 4 processes of torchrun\n" in output
    assert "lockstep run --nproc 2 t.py --lr 1. If a process" in output

    monkeypatch.setenv("LOCKSTEP_LAUNCHER", "lockstep run")
    assert run("t.py").exit_code == 7, "a rank of Lockstep's starts another run on purpose"

    for name in ("TORCHELASTIC_RUN_ID", "LOCKSTEP_LAUNCHER"):
        monkeypatch.delenv(name)
    for scheduler in SCHEDULERS:
        if not scheduler.local_size:
            continue
        monkeypatch.setenv(scheduler.local_size, "2")
        output = run("t.py").output
        assert f"in each of the 2 processes of {scheduler.command}\n" in output
        assert f"remove {scheduler.local_size} from its environment" in output
        monkeypatch.setenv(scheduler.local_size, "1")
        assert run("t.py").exit_code == 7, "one launcher on each machine"
    assert len(asked) == 4


@pytest.mark.usefixtures("folder")
def test_variables_of_torchrun_do_not_reach_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    output = run("--hosts", "a,b", "--dry-run", "t.py").output
    assert "PET_NPROC_PER_NODE=2 with --hosts\n" in output
    assert "write the option --nproc-per-node\n" in output


@pytest.mark.usefixtures("folder")
def test_a_single_host_is_taken_as_written_within_a_job(
    asked: list[LaunchSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"JOB_ID": "7", "JOB_NUM_NODES": "2", "NTASKS_PER_NODE": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(slurm, "exec_srun", lambda line: None)
    hosts: list[HostsSpec] = []
    monkeypatch.setattr(hosts_place, "run_on_hosts", lambda spec, say: hosts.append(spec) or 0)
    run("--hosts", "localhost:3", "t.py")
    CliRunner().invoke(main, hosts[0].launcher_arguments(0, "", 0))  # which is what it starts here
    assert [spec.nproc for spec in asked] == ["3"]


LOCAL_RANK = "parser.add_argument('--local_rank')"
OWN_PROCESSES = "mp.spawn(main, nprocs=2)"


@pytest.mark.parametrize(
    ("source", "flags", "note", "command"),
    [
        ("", "--nproc 2", "Gloo on", "torchrun --standalone --nproc-per-node=2 t.py 'a b'"),
        (
            LOCAL_RANK,
            "--nproc 2",
            "the script is given --local_rank",
            "torchrun --standalone --nproc-per-node=2 t.py '--local_rank=${local_rank}' 'a b'",
        ),
        (OWN_PROCESSES, "", "the script starts its own processes", "python t.py 'a b'"),
        ("", "--no-warm", "(--no-warm)", "--nproc-per-node=1 t.py 'a b'"),
        ("", "-m", "", "--module t.py 'a b'"),
        ("os.environ['OMP_NUM_THREADS'] = '2'", "", "sets OMP_NUM_THREADS", "t.py 'a b'"),
    ],
)
def test_dry_run_starts_nothing(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    flags: str,
    note: str,
    command: str,
) -> None:
    monkeypatch.setattr(script, "ForkServer", None)
    (folder / "t.py").write_text(source)
    name = "t" if "-m" in flags.split() else "t.py"
    result = run(*flags.split(), "--strategy", "ddp", "--dry-run", name, "a b")
    assert result.exit_code == 0, result.output
    assert "LOCKSTEP_STRATEGY=ddp" in result.output
    assert note in result.output
    assert result.output.endswith(command.replace("t.py", name) + "\n")


@pytest.mark.parametrize(
    ("line", "torchrun", "script", "arguments"),
    [
        ("train.py --nproc 9", (), "train.py", ("--nproc", "9")),
        ("--nproc 2 train.py -m", (), "train.py", ("-m",)),
        ("-m pkg.mod x", (), "pkg.mod", ("x",)),
        ("-r3 t.py", ("--redirects", "3"), "t.py", ()),
        ("--max-restarts -1 t.py", ("--max-restarts", "-1"), "t.py", ()),
        (
            "--standalone --max-restarts=1 t.py -- a",
            ("--standalone", "--max-restarts", "1"),
            "t.py",
            ("--", "a"),
        ),
        ("-- --odd-name.py a", (), "--odd-name.py", ("a",)),
    ],
)
def test_flags_stand_before_the_script(
    asked: list[LaunchSpec],
    line: str,
    torchrun: tuple[str, ...],
    script: str,
    arguments: tuple[str, ...],
) -> None:
    run(*line.split())
    (spec,) = asked
    assert spec.torchrun == torchrun
    assert (spec.script.path, spec.script.arguments) == (script, arguments)


def test_every_flag_of_torchrun_is_known(asked: list[LaunchSpec]) -> None:
    options = torchrun_options()
    flags = {name: option for option in options for name in option.opts if not option.is_eager}
    assert {"--nnodes", "--node_rank", "--rdzv-endpoint", "--no-python", "-t"} <= set(flags)
    own = {"-m", "--module", "--nproc-per-node", "--nproc_per_node"}
    for name, option in flags.items():
        value = () if option.is_flag else ("value",)
        if "nproc" in name:
            value = ("2",)
        run(name, *value, "t.py")
        if name not in own:
            assert asked[-1].torchrun[1:] == value
            assert asked[-1].torchrun[0] in option.opts
    assert len(asked) == len(flags)
    for name in {name for option in options for name in option.opts} - flags.keys():
        assert name in ("--print-completion", "--print_completion")  # since torch 2.14
        done = run(name, "bash")
        assert (done.exit_code, "shtab" in done.output) in ((0, True), (1, True))


def test_the_name_of_a_tracker_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    line = ["--dry-run", "--report", "tensorboard", "t.py"]
    result = run(*line)
    assert result.exit_code == 2
    assert "lockstep report FOLDER --to tensorboard" in result.stderr
    (tmp_path / "tensorboard").mkdir()  # of TensorBoard's own
    assert run(*line).exit_code == 2
    (tmp_path / "tensorboard" / "1-a.rank0.record").touch()
    assert run(*line).exit_code == 0
