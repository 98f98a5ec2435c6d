from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import in_clean_process
from torch import nn

import lockstep.launch.spec
from lockstep.errors import RankFailedError, SettingError, UsageError
from lockstep.launch import spawn
from lockstep.launch.spawn import launch


def sum_of_ranks(offset: float) -> dict[str, Any]:
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    dist.destroy_process_group()
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
    return {
        "rank": int(os.environ["RANK"]),
        "total": total,
        "variables": {name: os.environ[name] for name in names},
        "mark": "LOCKSTEP_LAUNCH_STARTING" in os.environ,
        "method": multiprocessing.process.current_process().__class__.__name__,
    }


def fail_on_rank_1(how: str) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("a bad sample")
        if how == "exit":
            sys.exit(5)
        os._exit(3)
    dist.barrier()  # rank 0 then fails too: the connection is closed
    dist.barrier()


def test_values_come_back_by_rank() -> None:
    results = launch(sum_of_ranks, (1.5,), nproc=2)
    threads = os.environ["OMP_NUM_THREADS"]  # set by the tests, and left alone
    for rank, result in enumerate(results):
        assert result.pop("total").tolist() == [4.0]
        assert result == {
            "rank": rank,
            "variables": {
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "2",
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": threads,
            },
            "mark": False,
            "method": "SpawnProcess",
        }


def test_the_package_can_be_called_like_the_function() -> None:
    package: Any = sys.modules["lockstep.launch"]
    assert lockstep.launch.spec.__name__ == "lockstep.launch.spec"
    assert package(os.getpid, nproc=1, timeout=60) != [os.getpid()]


@in_clean_process
def test_a_closure_trains_in_copies_of_a_process_that_has_used_openmp() -> None:
    data = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (data.T @ data).exp().sum()
        nn.Linear(300, 300)(data).sum().backward()

        def train() -> tuple[int, list[float]]:
            dist.init_process_group("gloo")
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for _ in range(3):
                model(data).square().mean().backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                optimizer.step()
                optimizer.zero_grad()
            dist.destroy_process_group()
            return torch.get_num_threads(), model[2].bias.tolist()

        results = launch(train, nproc=2, timeout=60)
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1]
    assert results[0][0] == 1


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "rank 1 raised ValueError: a bad sample"),
        ("exit", "rank 1 raised SystemExit: 5"),
        ("die", "rank 1 died without a Python exception (exit code 3)"),
    ],
)
@in_clean_process
def test_the_first_failure_is_raised_and_the_others_are_ended(how: str, text: str) -> None:
    def run() -> None:  # by fork, which starts at once
        fail_on_rank_1(how)

    with pytest.raises(RankFailedError) as caught:
        launch(run, nproc=3, timeout=60)
    assert text in str(caught.value)
    assert caught.value.rank == 1
    assert ("in fail_on_rank_1" in caught.value.remote_traceback) == (how != "die")
    assert "rank_process.py" not in caught.value.remote_traceback


@in_clean_process
def test_a_rank_that_ignores_sigterm_is_killed_when_time_is_over() -> None:
    def run() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while os.environ["RANK"] == "1":
            time.sleep(1)

    with pytest.raises(RankFailedError, match="rank 1 had not ended in time"):
        launch(run, nproc=2, timeout=1.0)


@in_clean_process
def test_what_cannot_be_returned_is_said() -> None:
    with pytest.raises(RankFailedError, match=r"rank 0 raised .*pickle"):
        launch(lambda: lambda: None, nproc=1)


@in_clean_process
def test_launch_inside_a_rank_is_refused() -> None:
    with pytest.raises(RankFailedError, match="this process is rank 0 of 1 already"):
        launch(lambda: launch(os.getpid, nproc=1), nproc=1)


@pytest.mark.parametrize("nproc", [0, -1, "many"])
def test_a_wrong_number_of_processes(nproc: int | str) -> None:
    with pytest.raises(SettingError, match="not a number of processes"):
        launch(sum_of_ranks, (1,), nproc=nproc)


def test_copies_are_refused_once_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UsageError, match="CUDA") as caught:
        launch(lambda: None, nproc=1)
    assert "cannot be sent to a fresh process" in str(caught.value)


@pytest.mark.parametrize(
    ("file", "module", "fresh"),
    [
        (None, "__main__", False),  # a notebook's own function
        (None, "os", True),  # an imported one
        ("<stdin>", "os", False),
        (__file__, "__main__", True),
    ],
)
def test_where_a_fresh_process_can_import_the_function(
    monkeypatch: pytest.MonkeyPatch, file: str | None, module: str, fresh: bool
) -> None:
    def own() -> None: ...

    own.__module__, own.__qualname__ = "__main__", "own"
    main = ModuleType("__main__")
    main.__dict__.update(__file__=file, own=own)
    monkeypatch.setitem(sys.modules, "__main__", main)
    call = spawn.Call(own if module == "__main__" else os.getpid, ())
    assert isinstance(spawn._callable_elsewhere(call, "launch(f)"), bytes) == fresh


SCRIPT = """
import os, sys, time
from lockstep.launch.spawn import launch
def main():
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(300)
if GUARD:
    launch(main, nproc=2)
"""


def test_a_script_without_the_main_guard(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("GUARD", "True"))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert 'if __name__ == "__main__":' in done.stderr
    assert "UsageError" in done.stderr.splitlines()[-4]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("GUARD", '__name__ == "__main__"'))
    with subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        started = [psutil.Process(int(launcher.stdout.readline())) for _ in range(2)]
        launcher.send_signal(number)
        launcher.wait(timeout=60)
    assert launcher.returncode == (143 if number == signal.SIGTERM else -signal.SIGINT)
    assert psutil.wait_procs(started, timeout=5)[1] == []
