from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner
from ranks import HANG_S

from lockstep import __version__
from lockstep.cli import explain
from lockstep.cli.main import main
from lockstep.errors import UsageError
from lockstep.familiar_names import COMMANDS_OF_WORD

pytestmark = pytest.mark.launcher


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["runn"], " run?"),
        (["train.py", "--lr", "1"], " run train.py --lr 1?"),
        (["launch", "train.py"], " run train.py?"),
        (["diff", "a", "b"], "one of: "),
        (["version"], " --version?"),
        (["checkpoint", "compare", "a", "b c"], " checkpoint diff a 'b c'?"),
        (["checkpoint", "Show", "a"], " checkpoint inspect a?"),
        (["checkpoint", "merge-it"], "There are: "),
        (["checkpoint", "convrt", "a"], " checkpoint convert a?"),
        (["checkpoint", "."], " checkpoint inspect .?"),
        (["journal", "compare", "a"], " journal diff a?"),
        (["zzz"], "There are: run"),
    ],
)
def test_unknown_command(arguments: list[str], advice: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert advice in result.output


@pytest.mark.parametrize("group", COMMANDS_OF_WORD)
def test_words_of_other_tools_lead_to_commands_that_there_are(group: str) -> None:
    for word, commands in COMMANDS_OF_WORD[group].items():
        assert CliRunner().invoke(main, [*group.split()[1:], word]).exit_code == 2
        for command in commands:
            words = [*group.split()[1:], *command.split()]
            result = CliRunner().invoke(main, words if "--" in command else [*words, "--help"])
            assert result.exit_code == 0, words


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["verify", "--step", "5", "t.py"], "No such option '--step'. Did you mean --steps?"),
        (["verify", "--nprocs", "2", "t.py"], "Did you mean --nproc?"),
        (["verify", "--gpu-ids", "0", "t.py"], "--gpu-ids': set CUDA_VISIBLE_DEVICES"),
        (["checkpoint", "convert", "--shardsize", "5"], "Did you mean --shard-size?"),
        (["explain", "--xyzzy"], "No such option '--xyzzy'.\n"),
    ],
)
def test_unknown_option(arguments: list[str], advice: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert advice in result.output


def test_the_package_can_be_run_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "runn"], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 2
    assert "Usage: lockstep [OPTIONS]" in done.stderr
    assert " run?" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--help"], "run"), (["--version"], __version__), (["run", "--help"], "--nproc")],
)
def test_help_and_version_do_not_import_torch(arguments: list[str], expected: str) -> None:
    code = (
        "import sys\n"
        "from lockstep.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=HANG_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert expected in done.stdout


def test_our_errors_end_the_command_with_their_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise UsageError("a", "b", "c", code="LS303")

    monkeypatch.setattr(explain.command, "callback", fails)
    result = CliRunner().invoke(main, ["explain", "LS303"])
    assert result.exit_code == 2
    assert result.stderr == (
        "lockstep: a\n  found: b\n  do:    c\n  more:  [LS303: lockstep explain LS303]\n"
    )
