"""The listings of the tutorials: as given, by torch and by `lockstep run`, and converted.

`examples/tutorials` has them, and `docs/from_tutorials.md` says what becomes of each.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import namespaces
import pytest
import torch
from launched import launch
from ranks import HANG_S, RankFailed, run_ranks
from safetensors.torch import load_file
from torch import Tensor

pytestmark = pytest.mark.launcher

LISTINGS = Path(__file__).parents[2] / "examples" / "tutorials"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
LAUNCH = "--nproc_per_node=2 --nnodes=1 --node_rank=0 --master_addr=127.0.0.1 --master_port={port}"
BY_HAND = ("-bk", "gloo", "-rn", "{rank}")

Weights = dict[str, Tensor]


@pytest.fixture(autouse=True)
def temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torchrun leaves files in TMPDIR, and loader workers put sockets there: its name is short."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield


def assert_close(ours: Weights, theirs: Weights) -> None:
    """The weights are those of another run, up to rounding."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4)


def python(folder: Path, *line: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Starts `python ...` in a folder."""
    return subprocess.Popen(
        [sys.executable, *line],
        cwd=folder,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """Waits until a process ends; returns what it printed, and its standard error."""
    printed, said = process.communicate(timeout=HANG_S)
    assert process.returncode == code, said
    return printed, said


def run_python(folder: Path, *line: str, env: dict[str, str] | None = None) -> str:
    """Runs `python ...` in a folder; returns what it printed."""
    return finish(python(folder, *line, env=env))[0]


def lockstep_run(folder: Path, *line: str) -> str:
    """Runs `lockstep run ...` in a folder; returns what it printed."""
    done = launch(["run", *line], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def listing(name: str) -> str:
    return str(LISTINGS / name)


# Processes that are started by hand


def run_by_hand(folder: str, name: str, arguments: Sequence[str]) -> None:
    """Runs a listing as `python name ...` does, as the process whose number is in NUMBER."""
    os.chdir(folder)
    number = os.environ["NUMBER"]
    sys.argv = [listing(name), *(text.replace("{rank}", number) for text in arguments)]
    sys.path.insert(0, str(LISTINGS))
    runpy.run_path(sys.argv[0], run_name="__main__")


def start_by_hand(folder: Path, size: int, *arguments: str) -> Weights:
    """Runs `distributed_with_lockstep.py` in so many processes; returns the weights."""
    name = "distributed_with_lockstep.py"
    run_ranks(
        run_by_hand, size, str(folder), name, arguments, environment=lambda r: {"NUMBER": str(r)}
    )
    return load_file(folder / "distributed.safetensors")


@pytest.mark.parametrize(
    ("place", "size"),
    [
        ("tcp", 2),
        pytest.param("tcp", 3, marks=pytest.mark.thorough),
        pytest.param("file", 2, marks=pytest.mark.thorough),
        pytest.param("file", 3, marks=pytest.mark.thorough),
    ],
)
def test_each_process_gets_its_rank_as_an_argument_of_any_name(
    place: str, size: int, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    alone = start_by_hand(tmp_path, 1)
    where = f"file://{tmp_path}/meeting" if place == "file" else f"tcp://127.0.0.1:{free_port()}"
    together = start_by_hand(tmp_path, size, *BY_HAND, "-ws", str(size), "-im", where)
    assert_close(together, alone)


@pytest.mark.parametrize("value", ["0.{rank}1", pytest.param("{rank}", marks=pytest.mark.thorough)])
def test_another_argument_that_differs_is_told(
    value: str, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(RankFailed) as failed:
        start_by_hand(tmp_path, 2, *BY_HAND, "-ws", "2", "-im", where, "--lr", value)
    assert len(failed.value.errors) == 2
    for text in failed.value.errors.values():
        assert "RanksDifferError" in text
        assert f"--lr {value.replace('{rank}', '0')}', rank 1 has '" in text
        assert "-rn ... -ws 2" in text  # the rank itself is not told


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["distributed.py", "distributed_with_lockstep.py"])
@pytest.mark.parametrize("place", ["tcp", "file"])
def test_the_commands_of_two_machines(
    name: str, place: str, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    where = f"file://{tmp_path}/meeting" if place == "file" else f"tcp://127.0.0.1:{free_port()}"
    line = [listing(name), "-bk", "gloo", "-im", where, "-ws", "2", "-rn"]
    second = python(tmp_path, *line, "1")
    printed, _ = finish(python(tmp_path, *line, "0"))
    finish(second)
    assert "epoch 1: loss " in printed


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        ("python", "distributed_with_lockstep.py"),
        ("lockstep run", "distributed_with_lockstep.py"),
        ("lockstep run", "distributed.py"),  # without Lockstep, it depends on the launcher alone
    ],
)
def test_two_machines_whose_names_mean_loopback(launcher: str, name: str, tmp_path: Path) -> None:
    """As many systems are installed; of several interfaces, the address in `tcp://` says which."""
    command = {"python": [], "lockstep run": ["-m", "lockstep", "run"]}[launcher]
    processes = []
    with namespaces.two_machines() as machines, machines[0].with_container():
        for rank, machine in enumerate(machines):
            hosts = tmp_path / f"hosts-{rank}"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {machine.name}\n")
            named = f'hostname {machine.name} && mount --bind {hosts} /etc/hosts && exec "$0" "$@"'
            there = ["ip", "netns", "exec", str(machine.name), "unshare", "--mount", "--uts"]
            where = f"tcp://{machines[0].address}:12345"
            line = [listing(name), *BY_HAND[:2], "-im", where, "-ws", "2"]
            processes.append(
                subprocess.Popen(
                    [*there, "sh", "-c", named, sys.executable, *command, *line, "-rn", str(rank)],
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            (printed, said), _ = [finish(process) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert "epoch 1: loss " in printed, said
    if launcher == "python":
        assert f"lan ({machines[0].address}) reaches the master" in printed
    else:
        assert f"Gloo on lan (GLOO_SOCKET_IFNAME: it leads to {machines[0].address})" in said
    if name == "distributed_with_lockstep.py":
        assert "2 processes on 2 hosts" in printed


# One script for many listings


@pytest.mark.thorough
def test_the_converted_script_computes_the_same_on_any_number_of_devices(tmp_path: Path) -> None:
    lines = {"one": "", "two": "--nproc 2"}
    check_with_lockstep(tmp_path, lines)


@pytest.mark.thorough
def test_the_converted_script_as_each_launcher_starts_it(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    lines = {
        "one": "",
        "three": "--nproc 3",
        "DataParallel": "--strategy dp",
        "torchrun": "--standalone --nproc_per_node=2",
        "launch": LAUNCH.format(port=free_port()),
        "fsdp": "--nproc 2 --strategy fsdp",
    }
    check_with_lockstep(tmp_path, lines)
    weights = load_file(tmp_path / "one" / "weights.safetensors")
    (tmp_path / "torch").mkdir()
    run_python(tmp_path / "torch", *TORCHRUN, listing("with_lockstep.py"))
    assert_close(load_file(tmp_path / "torch" / "weights.safetensors"), weights)


def check_with_lockstep(folder: Path, lines: dict[str, str]) -> None:
    """Runs `with_lockstep.py` by `lockstep run`, and compares each run with the first one.

    Args:
        folder: gets a folder for each run.
        lines: the flags of `lockstep run`, by the name of the run.
    """
    weights = []
    accuracies = []
    for name, flags in lines.items():
        (folder / name).mkdir()
        printed = lockstep_run(folder / name, *flags.split(), listing("with_lockstep.py"))
        accuracies.append(re.findall(r"epoch .*% of the test images right", printed))
        weights.append(load_file(folder / name / "weights.safetensors"))
    assert len(accuracies[0]) == 2
    assert accuracies == [accuracies[0]] * len(lines)
    for other in weights[1:]:
        assert_close(other, weights[0])


# As given


def test_the_flags_of_torch_distributed_launch_are_those_of_lockstep_run(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    flags = LAUNCH.format(port=free_port()).split()
    printed = lockstep_run(tmp_path, *flags, listing("ddp_launch.py"))
    assert "epoch 1: local rank 0, loss " in printed


@pytest.mark.thorough
def test_torch_distributed_launch_passes_another_argument(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    launch_module = ("-W", "ignore", "-m", "torch.distributed.launch")
    script = (tmp_path / "images.py", tmp_path / "train.py")
    script[0].write_text((LISTINGS / "images.py").read_text())
    text = (LISTINGS / "ddp_launch.py").read_text()
    flags = LAUNCH.format(port=free_port()).split()

    script[1].write_text(text)
    _, said = finish(python(tmp_path, *launch_module, *flags, "train.py"), code=1)
    assert "unrecognized arguments: --local-rank=" in said

    script[1].write_text(text.replace('"--local_rank"', '"--local_rank", "--local-rank"'))
    flags = LAUNCH.format(port=free_port()).split()
    assert "epoch 1: local rank 0, " in run_python(tmp_path, *launch_module, *flags, "train.py")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["one_gpu.py", "data_parallel.py", "balanced.py"])
def test_listings_of_one_process(name: str, tmp_path: Path) -> None:
    printed = run_python(tmp_path, listing(name))
    assert "epoch 1: " in printed
    assert lockstep_run(tmp_path, listing(name)) == printed


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ddp_torchrun", "model_parallel", "memory", "checkpoints"])
def test_listings_for_torchrun_run_unchanged(name: str, tmp_path: Path) -> None:
    saved = {"checkpoints": "ddp_module"}.get(name, name) + ".pt"
    run_python(tmp_path, *TORCHRUN, listing(f"{name}.py"))
    by_torchrun = torch.load(tmp_path / saved)
    (tmp_path / saved).unlink()
    lockstep_run(tmp_path, *TORCHRUN[2:], listing(f"{name}.py"))
    assert_close(torch.load(tmp_path / saved), by_torchrun)


@pytest.mark.thorough
def test_padded_samples_are_counted_twice_as_given(tmp_path: Path) -> None:
    printed = lockstep_run(tmp_path, "--nproc", "3", listing("ddp_torchrun.py"))
    assert "of 51 test images right" in printed  # 50 samples, and one of them again


@pytest.mark.thorough
def test_mp_spawn_runs_unchanged(tmp_path: Path, free_port: Callable[[], int]) -> None:
    port = {"MASTER_PORT": str(free_port())}
    run_python(tmp_path, listing("ddp_spawn.py"), env=port)
    by_python = torch.load(tmp_path / "ddp_spawn.pt")
    (tmp_path / "ddp_spawn.pt").unlink()
    lockstep_run(tmp_path, listing("ddp_spawn.py"))
    assert_close(torch.load(tmp_path / "ddp_spawn.pt"), by_python)
    (tmp_path / "ddp_spawn.pt").unlink()
    # Two machines with a process each; the number of a rank is computed from the machine's.
    port = {"MASTER_PORT": str(free_port())}
    line = [listing("ddp_spawn.py"), "-n", "2", "-g", "1", "-nr"]
    second = python(tmp_path, *line, "1", env=port)
    finish(python(tmp_path, *line, "0", env=port))
    finish(second)
    assert_close(torch.load(tmp_path / "ddp_spawn.pt"), by_python)


# Converted


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["model_parallel", "memory"])
def test_converted_listings_compute_what_ddp_computes(name: str, tmp_path: Path) -> None:
    lockstep_run(tmp_path, "--nproc", "2", listing(f"{name}.py"))
    given = torch.load(tmp_path / f"{name}.pt")
    for size in ("1", "2", "3"):
        lockstep_run(tmp_path, "--nproc", size, listing(f"{name}_with_lockstep.py"))
        assert_close(load_file(tmp_path / f"{name}.safetensors"), given)


@pytest.mark.thorough
@pytest.mark.parametrize("flags", ["", "--lars"])
def test_a_large_batch(flags: str, tmp_path: Path) -> None:
    given = lockstep_run(tmp_path, "--nproc", "2", listing("large_batch.py"))
    name = listing("large_batch_with_lockstep.py")
    printed = []
    for size in ("1", "2", "3"):
        text = lockstep_run(tmp_path, "--nproc", size, name, *flags.split())
        lines = [line.partition("epoch")[2] for line in text.splitlines() if "epoch" in line]
        printed.append([line.rpartition(" ")[0] for line in lines])
        losses = [float(line.rpartition(" ")[2]) for line in lines]
        assert losses[-1] < losses[0]
    assert len(printed[0]) == 3
    assert printed == [printed[0]] * 3
    if not flags:  # the learning rates are those of the listing as given
        assert all(line in given for line in printed[0])


@pytest.mark.thorough
def test_a_first_gpu_that_computes_less(tmp_path: Path) -> None:
    name = listing("balanced_with_lockstep.py")
    flags = ["--shares", "1:2:2", "--num-micro-batches", "2"]
    three = lockstep_run(tmp_path, *flags, name, "--replicas", "3")
    one = lockstep_run(tmp_path, *flags[2:], name)
    results = re.findall(r"epoch .*% of the test images right", three)
    assert len(results) == 2
    assert re.findall(r"epoch .*% of the test images right", one) == results


@pytest.mark.thorough
def test_files_of_one_and_of_several_gpus(tmp_path: Path) -> None:
    lockstep_run(tmp_path, "--nproc", "2", listing("checkpoints.py"))
    given = torch.load(tmp_path / "single.pt")
    for size in ("1", "2", "3"):
        lockstep_run(tmp_path, "--nproc", size, listing("checkpoints_with_lockstep.py"))
        assert_close(torch.load(tmp_path / "plain.pt"), given)
        assert_close(load_file(tmp_path / "for_all.safetensors"), given)
