"""Options of `lockstep run` from lockstep.toml and pyproject.toml."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from launched import launch

from lockstep.cli import launch_file
from lockstep.cli.launch_file import find_launch_file
from lockstep.cli.main import main
from lockstep.cli.places import hosts as hosts_place
from lockstep.errors import SettingError
from lockstep.run.machines.hosts import HostsSpec
from lockstep.run.start import script
from lockstep.run.start.plan import LaunchSpec

pytestmark = pytest.mark.launcher


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("import lockstep\n")
    return tmp_path


@pytest.fixture
def asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[LaunchSpec]:
    """What would have been started."""
    specs: list[LaunchSpec] = []

    def remember(spec: LaunchSpec, say: object = None) -> int:
        specs.append(spec)
        return 0

    monkeypatch.setattr(script, "run_script", remember)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return specs


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", *arguments])


FILE = """
nproc = 3
precision = "bf16"
micro_batch_size = 4
warm = false
"hang-after" = 9
max-restarts = 2
"""


def test_options_of_lockstep_and_of_torchrun(folder: Path, asked: list[LaunchSpec]) -> None:
    (folder / "lockstep.toml").write_text(FILE)
    result = run("t.py")
    assert result.exit_code == 0, result.output
    (spec,) = asked
    assert spec.nproc == "3"
    assert spec.torchrun == ("--max-restarts", "2")
    assert spec.hang.after == 9
    assert not spec.warm
    names = "nproc, precision, micro-batch-size, warm, hang-after, max-restarts"
    assert spec.settings == {
        "precision": "bf16",
        "micro_batch_size": 4,
        "from_file": f"lockstep.toml: {names}",
    }


def test_the_command_line_overrides_the_environment_and_that_the_file(
    folder: Path, asked: list[LaunchSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "lockstep.toml").write_text(FILE + 'seed = 1\ndevice = "cpu"\nquiet = true\n')
    monkeypatch.setenv("LOCKSTEP_PRECISION", "fp16")
    monkeypatch.setenv("LOCKSTEP_SEED", "2")
    monkeypatch.setenv("LOCKSTEP_QUIET", "0")
    monkeypatch.setenv("PET_MAX_RESTARTS", "7")
    run("--seed", "3", "--nproc-per-node", "1", "--warm", "t.py")
    (spec,) = asked
    assert spec.settings == {
        "seed": 3,
        "micro_batch_size": 4,
        "device": "cpu",
        "from_file": "lockstep.toml: micro-batch-size, hang-after, device",
    }
    assert (spec.nproc, spec.warm, spec.torchrun, spec.quiet) == ("1", True, (), False)


def test_options_that_may_be_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "lockstep.toml").write_text(
        'hosts = "localhost:2"\nforward-env = ["A_1", "A_2"]\nprecision = "bf16"\n'
    )
    for name in ("A_1", "A_2", "A_3"):
        monkeypatch.setenv(name, "1")
    specs: list[HostsSpec] = []
    monkeypatch.setattr(hosts_place, "run_on_hosts", lambda spec, say: specs.append(spec) or 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert run("t.py").exit_code == 0
    assert {"A_1", "A_2"} <= specs[0].environment.keys()
    assert "A_3" not in specs[0].environment
    run("--forward-env", "A_3", "t.py")
    assert "A_3" in specs[1].environment
    assert "A_1" not in specs[1].environment


def test_the_launchers_of_other_machines_do_not_read_a_file(
    folder: Path, asked: list[LaunchSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "lockstep.toml").write_text('precision = "bf16"\nnproc = 2\nmax-restarts = 1\n')
    hosts: list[HostsSpec] = []
    monkeypatch.setattr(hosts_place, "run_on_hosts", lambda spec, say: hosts.append(spec) or 0)
    run("--hosts", "localhost", "t.py")
    slurm = run("--slurm", "--dry-run", "t.py").output
    # On the other machine the file says something else, or there is none.
    (folder / "lockstep.toml").write_text('precision = "fp64"\nseed = 3\n')
    CliRunner().invoke(main, hosts[0].launcher_arguments(0, "", 0))
    (spec,) = asked
    source = "lockstep.toml: precision, nproc, max-restarts"
    assert spec.settings == {"precision": "bf16", "from_file": source}
    assert (spec.nproc, spec.torchrun) == ("2", ("--standalone", "--max-restarts", "1"))
    assert f"'--from-file={source}' --precision bf16 --max-restarts 1 t.py" in slurm
    assert "--nproc=2" in slurm


def test_another_place_on_the_command_line_replaces_the_hosts(folder: Path) -> None:
    (folder / "lockstep.toml").write_text('hosts = "localhost"\n')
    result = run("--slurm", "--dry-run", "t.py")
    assert result.exit_code == 0, result.output
    assert "#SBATCH" in result.output
    both = run("--slurm", "--hosts", "localhost", "--dry-run", "t.py")
    assert "--hosts with --slurm" in both.output


def test_a_file_of_another_user_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "pyproject.toml").write_text("[tool.lockstep]\nseed = 1\n")
    folder.chmod(0o1777)
    assert find_launch_file(folder).values == {"seed": 1}
    monkeypatch.setattr(os, "getuid", lambda: (folder / "pyproject.toml").stat().st_uid + 1)
    is_root_s = (folder / "pyproject.toml").stat().st_uid == 0
    if is_root_s:  # the files of the tests are root's, which count as one's own
        os.chown(folder / "pyproject.toml", 12345, -1)
    assert find_launch_file(folder) is None
    (folder / "lockstep.toml").write_text("seed = 2\n")
    (folder / "lockstep.toml").chmod(0o666)
    with pytest.raises(SettingError, match="another user may have written it"):
        find_launch_file(folder)
    folder.chmod(0o755)
    assert find_launch_file(folder).values == {"seed": 2}


@pytest.mark.parametrize("text", ["tool = 3\n", "not TOML", "[tool]\nruff = 1\n", "[tool.ruff\n"])
def test_a_pyproject_that_does_not_name_lockstep_is_no_launch_file(folder: Path, text: str) -> None:
    (folder / "pyproject.toml").write_text(text)
    assert find_launch_file(folder) is None


@pytest.mark.parametrize("text", ['[tool]\nlockstep = "x"\n', "[tool.lockstep\nseed = 1\n"])
def test_a_table_of_lockstep_that_cannot_be_read_is_told(folder: Path, text: str) -> None:
    (folder / "pyproject.toml").write_text(text)
    with pytest.raises(SettingError, match=r"pyproject\.toml"):
        find_launch_file(folder)


def test_where_it_is_looked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = folder / "a" / "b"
    inner.mkdir(parents=True)
    assert find_launch_file(inner) is None
    (folder / "pyproject.toml").write_text("[tool.lockstep]\nseed = 1\n")
    file = find_launch_file(inner)
    assert file is not None
    assert (file.values, file.name) == ({"seed": 1}, "pyproject.toml")
    # One without the table is that of another tool.
    (folder / "a" / "pyproject.toml").write_text("[tool.ruff]\nline-length = 100\n")
    assert find_launch_file(inner) == file
    (folder / "lockstep.toml").write_text("seed = 2\n")
    assert find_launch_file(inner).values == {"seed": 2}
    (inner / "lockstep.toml").write_text("seed = 3\n")
    assert find_launch_file(inner).values == {"seed": 3}
    # Everybody may write into the folder above.
    (inner / "lockstep.toml").unlink()
    (folder / "a").chmod(0o777)
    assert find_launch_file(inner) is None
    assert find_launch_file(folder / "a") is not None  # the user is there


def test_a_file_of_another_name(folder: Path, asked: list[LaunchSpec]) -> None:
    (folder / "lockstep.toml").write_text("seed = 1\n")
    (folder / "eight.toml").write_text("nproc = 8\n")
    run("--launch-file", "eight.toml", "t.py")
    assert (asked[0].nproc, asked[0].from_file) == ("8", "eight.toml: nproc")
    assert asked[0].settings == {"from_file": "eight.toml: nproc"}
    run("--launch-file", "/dev/null", "t.py")
    assert asked[1].settings == {}
    result = run("--launch-file", "nine.toml", "t.py")
    assert result.exit_code == 2
    assert "the launch file nine.toml\n  found: No such file" in result.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("precison = 1", "precison in lockstep.toml, line 3\n  found: lockstep run has no such"),
        ("precison = 1", "do:    did you mean 'precision'?"),
        ("max-restart = 1", "did you mean 'max-restarts'?"),
        ("launch-file = 'x'", "lockstep run has no such option"),
        ("zzz = 1", "lockstep run --help lists them"),
        ("[run]\nnproc = 2", "the table [run] in lockstep.toml\n  found: options do not stand in"),
        ('precision = "float16"', 'precision = "float16" (lockstep.toml, line 3)\n  found: prec'),
        ('precision = "float16"', "did you mean 'fp16'?"),
        ('seed = "x"', "seed = \"x\" (lockstep.toml, line 3)\n  found: 'x' is not a valid int"),
        ('nproc = "two"', 'nproc = "two" (lockstep.toml, line 3)\n  found: not a number of proc'),
        ("nproc = true", "nproc = true (lockstep.toml, line 3)\n  found: it takes a number"),
        ("shares = [1, 2]", "it takes a number or a text"),
        ('warm = "yes"', "write true or false"),
        ("sbatch = [1]", 'write sbatch = ["first", "second"]'),
        ('on-hang = "wait"', "'wait' is not one of 'stop', 'report'"),
        ("oops", "it is not TOML: Expected '='"),
    ],
)
def test_what_is_refused(folder: Path, line: str, message: str) -> None:
    (folder / "lockstep.toml").write_text(f"# of the project\n\n{line}\n")
    result = run("t.py")
    assert result.exit_code == 2
    assert message in result.output


def test_a_line_of_pyproject(folder: Path) -> None:
    (folder / "pyproject.toml").write_text(
        '[project]\nsede = 1\n[tool.lockstep]\nnproc = 2\n"sede" = 1\n[tool.x]\nsede = 1\n'
    )
    assert "sede in pyproject.toml, line 5" in run("t.py").output


def test_how_a_value_is_written_in_messages(tmp_path: Path) -> None:
    path = tmp_path / "lockstep.toml"
    path.write_text("a.b = 1\n")  # its line is not found
    file = launch_file.read_launch_file(path)
    assert file.entry_and_place("a") == f"a = {{'b': 1}} ({path})"


def test_the_block_of_choices_and_a_contradiction_name_the_file(folder: Path) -> None:
    (folder / "lockstep.toml").write_text('nproc = 2\nprecision = "bf16"\ndevice = "cpu"\n')
    (folder / "t.py").write_text(
        "import lockstep, os, torch\n"
        "with lockstep.init() as world:\n"
        "    world.prepare(torch.nn.Linear(1, 1))\n"
        "lockstep.init(precision='fp32')\n"
    )
    done = launch(["run", "t.py"], folder, env={**os.environ, "COLUMNS": "200"})
    assert "lockstep: 2 x t.py: nproc, precision, device from lockstep.toml; " in done.stderr
    assert "  settings     precision=bf16, device=cpu  from lockstep.toml\n" in done.stdout
    assert "precision='fp32' in the script and bf16 in lockstep.toml\n" in done.stderr
    assert done.returncode == SettingError.exit_code
