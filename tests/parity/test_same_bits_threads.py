"""With virtual ranks the number of threads does not follow from the cores of a process."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from digests import digest_of
from launched import launch
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import LockstepWarning, RanksDifferError
from lockstep.machine.topology import threads_set_by_user

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "4"}, 4),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": "many"}, None),
        ({"OMP_NUM_THREADS": "0"}, None),
        ({"OMP_NUM_THREADS": "4", "LOCKSTEP_CHOSEN_THREADS": "4"}, None),
        ({"OMP_NUM_THREADS": "3", "LOCKSTEP_CHOSEN_THREADS": "4"}, 3),
    ],
)
def test_a_launchers_number_of_threads_is_not_the_users(
    environ: dict[str, str], number: int | None
) -> None:
    assert threads_set_by_user(environ) == number


def train(world: lockstep.World, *, threads: int | None = None, folder: Path | None = None) -> str:
    """Trains two steps of a CNN.

    Args:
        world: the world.
        threads: the number of threads that the script sets in the second step, after which it
            saves.
        folder: the folder to save to or to resume from.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(64, 3, 16, 16), torch.randint(10, (64,)))
    model, optimizer, loader = world.prepare(model, optimizer, DataLoader(data, batch_size=32))
    checkpoint = None
    if folder is not None:
        checkpoint = world.checkpoint(folder, model=model, loader=loader)
    if checkpoint is not None and threads is None:
        checkpoint.resume()
    for images, labels in loader:
        if threads is not None and world.step == 1:
            torch.set_num_threads(threads)
        optimizer.zero_grad()
        world.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
    if checkpoint is not None and threads is not None:
        checkpoint.save()
    return digest_of(model)


def train_on_cores(numbers_of_cores: list[int]) -> list[tuple[str, int, str]]:
    """Trains where the process may use so many cores; returns hashes, threads and the summary."""
    results = []
    for num_cores in numbers_of_cores:
        os.sched_getaffinity = lambda pid, num_cores=num_cores: set(range(num_cores))  # type: ignore[misc]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), lockstep.init(virtual_ranks=2) as world:
            results.append((train(world), torch.get_num_threads()))
        results[-1] = (*results[-1], printed.getvalue())
    return results


def test_cores_do_not_change_the_bits() -> None:
    """A lone process sees 8 cores; two tasks of Slurm see 4 each, or 2."""
    chosen_by_launcher = {"OMP_NUM_THREADS": "8", "LOCKSTEP_CHOSEN_THREADS": "8"}
    (results,) = run_ranks(train_on_cores, 1, [8, 4, 2, 1], env=chosen_by_launcher)
    assert {(digest, threads) for digest, threads, _ in results} == {(results[0][0], 1)}
    on_8_cores, on_1_core = results[0][2], results[-1][2]
    assert "each process could use 8 cores" in on_8_cores
    assert "pinned: the same on any machine" in on_1_core
    assert "process could use" not in on_1_core


def test_a_number_of_threads_of_the_users_is_kept() -> None:
    (results,) = run_ranks(train_on_cores, 1, [8, 1], env={"OMP_NUM_THREADS": "3"})
    assert {(digest, threads) for digest, threads, _ in results} == {(results[0][0], 3)}
    assert "3         OMP_NUM_THREADS; it decides the order of sums" in results[0][2]


def join_with_threads(threads_of_ranks: list[str], chosen_by_launcher: bool) -> str:
    """Joins with another OMP_NUM_THREADS on each rank; returns the error, or nothing."""
    threads = threads_of_ranks[int(os.environ["RANK"])]
    os.environ["OMP_NUM_THREADS"] = threads
    if chosen_by_launcher:
        os.environ["LOCKSTEP_CHOSEN_THREADS"] = threads
    try:
        with lockstep.init():
            return ""
    except RanksDifferError as error:
        return str(error)


def test_machines_with_other_numbers_of_cores_train_together() -> None:
    assert run_ranks(join_with_threads, 2, ["8", "4"], True) == ["", ""]


def test_ranks_for_which_the_user_has_set_other_threads_differ() -> None:
    for error in run_ranks(join_with_threads, 2, ["8", "4"], False):
        assert "threads: rank 0 has '8', rank 1 has '4'" in error


def change_threads(folder: Path) -> tuple[list[str], list[str]]:
    """Sets two threads in the second step, saves, and resumes; returns the warnings of both."""
    with warnings.catch_warnings(record=True) as of_change:
        warnings.simplefilter("always")
        with lockstep.init(virtual_ranks=2) as world:
            train(world, threads=2, folder=folder)
    with warnings.catch_warnings(record=True) as of_resumed:
        warnings.simplefilter("always")
        with lockstep.init(virtual_ranks=2) as world:
            train(world, folder=folder)
            assert torch.get_num_threads() == 2
    warned = [of_change, of_resumed]
    of_change_texts, of_resumed_texts = (
        [str(each.message) for each in some if each.category is LockstepWarning] for some in warned
    )
    return of_change_texts, of_resumed_texts


def test_a_change_of_threads_in_training_is_said(tmp_path: Path) -> None:
    for of_change, of_resumed in run_ranks(change_threads, 2, tmp_path):
        (text,) = of_change
        assert "torch.set_num_threads(2) with virtual_ranks" in text
        assert "the run began with 1 thread" in text
        assert "set OMP_NUM_THREADS=2" in text
        assert of_resumed == []


SCRIPT = """
import os, torch, lockstep
with lockstep.init(virtual_ranks=1) as world:
    print("threads:", torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], flush=True)
"""


@pytest.mark.parametrize(
    ("options", "users", "printed"),
    [([], None, "1"), (["--virtual-ranks=1"], None, "1 1"), ([], "3", "3 3")],
)
def test_threads_of_a_launched_run(
    options: list[str], users: str | None, printed: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": users or ""}
    if users is None:
        del environment["OMP_NUM_THREADS"]
    done = launch(["run", "--nproc=1", *options, "script.py"], tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert f"threads: {printed}" in done.stdout
