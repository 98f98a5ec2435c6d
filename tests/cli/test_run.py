from __future__ import annotations

import signal

import pytest
from click.testing import CliRunner, Result

from lockstep.cli.main import main
from lockstep.launch import local
from lockstep.launch.spec import LaunchSpec, Settings


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", *arguments])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[LaunchSpec]:
    """What would have been started."""
    specs: list[LaunchSpec] = []

    def remember(spec: LaunchSpec, say: object = None) -> int:
        specs.append(spec)
        return 7

    monkeypatch.setattr(local, "run", remember)
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
            script="t.py",
            arguments=("--seed", "4", "--", "-x"),
            nproc="2",
            settings=Settings(seed=3, shares="1:2", timeout=5.0),
            torchrun=("--max-restarts", "1", "--standalone", "--rdzv_conf", "a=1"),
        )
    ]


def test_module(asked: list[LaunchSpec]) -> None:
    run("-m", "pkg.mod", "--help")
    assert asked == [LaunchSpec(script="pkg.mod", arguments=("--help",), module=True)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "Missing argument 'SCRIPT'"),
        (("--max-restart", "1", "t.py"), "did you mean --max-restarts?"),
        (("--stratgy", "ddp", "t.py"), "did you mean --strategy?"),
        (("--seed", "x", "t.py"), "Invalid value for '--seed'"),
        (("--nproc", "0", "t.py"), "--nproc 0"),
        (("--nproc", "gpus", "t.py"), "--nproc gpus"),
        (("--nnodes", "x", "t.py"), "not a number of machines"),
        (("--max-restarts", "x", "t.py"), "invalid int value"),
        (("--start-method", "magic", "t.py"), "invalid choice"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert text in result.output
    assert "Traceback" not in result.output


def test_dry_run_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "Zygote", None)
    result = run("--nproc", "2", "--strategy", "ddp", "--dry-run", "missing.py", "a b")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("2 processes on this machine\n")
    assert "LOCKSTEP_STRATEGY=ddp" in result.output
    assert result.output.endswith("--nproc-per-node=2 missing.py 'a b'\n")


def test_every_flag_of_torchrun_is_known(asked: list[LaunchSpec]) -> None:
    flags = local.torchrun_flags()
    assert {"--nnodes", "--node_rank", "--rdzv-endpoint", "--no-python", "-t"} <= set(flags)
    own = {"-m", "--module", "--nproc-per-node", "--nproc_per_node"}
    for name, takes_value in flags.items():
        run(name, *(["value"] if takes_value else []), "t.py")
        if name not in own:
            assert asked[-1].torchrun == ((name, "value") if takes_value else (name,))
    assert len(asked) == len(flags)
