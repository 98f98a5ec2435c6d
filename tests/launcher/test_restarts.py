"""Restarts: those that cannot help are not made, and failures that repeat are told briefly."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched, launch

pytestmark = pytest.mark.launcher

FAILS = """
import os, sys
import torch, lockstep
from torch.utils.data import DataLoader, TensorDataset
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
kind = sys.argv[1]
data = TensorDataset(torch.arange(48.0).view(48, 1))
world = lockstep.init(seed=0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
loader = DataLoader(data, batch_size=4)
model, optimizer, loader = world.prepare(model, optimizer, loader)
checkpoint = world.checkpoint("checkpoints", model=model, optimizer=optimizer, loader=loader)
checkpoint.resume()
print("FROM", world.step, flush=True)
def fail():
    if kind == "raises":
        raise ValueError("no data")
    if kind == "network":
        raise ConnectionError("no route")
    os.abort()
with world:
    for epoch in world.epochs(2):
        for (x,) in loader:
            world.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            last = 5 + attempt if "goes-on" in sys.argv else 5
            if world.step == last - 1:
                checkpoint.save()
            if world.step == last and world.rank == 1:
                fail()
"""
VAIN = "the same failure twice after step 5 of the training: restarting will not help"


def run(folder: Path, *arguments: str, restarts: int) -> tuple[int, str, list[str]]:
    """The exit code, what the launcher has said, and the lines of the ranks."""
    (folder / "script.py").write_text(FAILS)
    flags = ["run", "--nproc=2", "--device=cpu", f"--max-restarts={restarts}", "script.py"]
    done = launch([*flags, *arguments], folder)
    starts = [line for line in done.stdout.splitlines() if line.startswith("[rank 1] FROM")]
    return done.returncode, done.stderr, starts


def test_the_same_failure_twice_ends_the_run(tmp_path: Path) -> None:
    code, said, starts = run(tmp_path, "raises", restarts=5)
    assert code == 1
    assert starts == ["[rank 1] FROM 0", "[rank 1] FROM 4"], said
    assert VAIN in said
    assert said.count("FIRST FAILURE: rank 1") == 2
    assert said.count("starting all ranks again") == 1


@pytest.mark.thorough
def test_with_progress_between_or_causes_outside_all_restarts_are_made(tmp_path: Path) -> None:
    cases = [("raises", "goes-on"), ("network",), ("aborts",)]
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        code, said, starts = run(folder, *case, restarts=4)
        assert code == (71 if case == ("aborts",) else 1)
        assert len(starts) == 5, said
        assert "will not help" not in said
        # The first three and the last one in full.
        assert said.count("FIRST FAILURE: rank 1") == 5
        assert said.count("traceback and logs: ") == 4
        brief = [line for line in said.splitlines() if "failure 4 of this kind" in line]
        assert len(brief) == 1
        assert "starting all ranks again (--max-restarts: 0 left after this)" in brief[0]


WRONG_SETTING = """
import lockstep
print("START", flush=True)
lockstep.init(precision="fp61")
"""
WRONG_ARGUMENTS = """
import os, sys
import lockstep
print("START", flush=True)
sys.argv += ["--lr", os.environ["RANK"] + ".1"]
lockstep.init()
"""
# What an operating system says may be over when the ranks are started again.
NO_ROOM = """
import lockstep
from lockstep.distributed.rank_files import cannot_write_error
print("START", flush=True)
raise cannot_write_error("ledger", "folder", "no space is left")
"""
CANNOT_PASS = "the same command would fail again in the same way: restarting will not help"


def starts_of(script: str, folder: Path) -> tuple[int, int, str]:
    """The exit code, how often two ranks were started, and what the launcher has said."""
    folder.mkdir()
    (folder / "script.py").write_text(script)
    flags = ["run", "--nproc=2", "--device=cpu", "--max-restarts=2", "script.py"]
    done = launch(flags, folder)
    return done.returncode, done.stdout.count("START") // 2, done.stderr


def test_a_wrong_setting_is_not_started_again(tmp_path: Path) -> None:
    code, starts, said = starts_of(WRONG_SETTING, tmp_path / "setting")
    assert (code, starts) == (2, 1), said
    assert CANNOT_PASS in said
    assert said.count("FIRST FAILURE") == 1


@pytest.mark.thorough
def test_what_the_command_says_is_not_started_again_and_what_may_pass_is(tmp_path: Path) -> None:
    code, starts, said = starts_of(WRONG_ARGUMENTS, tmp_path / "arguments")
    assert (code, starts) == (4, 1), said
    assert CANNOT_PASS in said
    code, starts, said = starts_of(NO_ROOM, tmp_path / "room")
    assert code == 2
    assert starts == 3, said
    assert CANNOT_PASS not in said


PLAIN = "import os\nprint('START', flush=True)\nNone + 1\n"


@pytest.mark.thorough
def test_a_script_without_lockstep_that_fails_at_its_start_is_started_twice(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PLAIN)
    done = launch(["run", "--nproc=1", "--max-restarts=5", "script.py"], tmp_path)
    assert done.returncode == 1
    assert done.stdout.count("START") == 2
    assert "the same failure twice before the first step: restarting will not help" in done.stderr


@pytest.mark.thorough
@pytest.mark.netns
def test_machines_end_alike_also_one_that_has_seen_one_failure_only(
    free_port: Callable[[], int], tmp_path: Path
) -> None:
    """A second machine comes after the first failure; both of them end at the second.

    The server waits `last_call` seconds for the second machine in each round. That is long, so that
    it also comes in time on a busy machine; the second round ends as soon as it is there.
    """
    script = FAILS.replace("world.rank == 1", "world.rank == world.size - 1")
    (tmp_path / "script.py").write_text(script)
    flags = ["run", "--nnodes=1:2", "--device=cpu", "--max-restarts=5", "--rdzv-backend=c10d"]
    flags += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=x", "--local-addr=127.0.0.1"]

    def node(serves: int, last_call: int) -> Launched:
        more = f"--rdzv-conf=is_host={serves},last_call_timeout={last_call}"
        env = {**os.environ, "LOCKSTEP_TOKEN": "a token of the tests"}
        arguments = [*flags, more, "script.py", "raises"]
        return Launched(arguments, cwd=tmp_path, env=env, merged=True)

    with node(1, 20) as server:
        server.until("starting all ranks again")
        with node(0, 20) as joiner:
            assert [server.wait(), joiner.wait()] == [1, 1], server.said
    assert VAIN in server.said
    assert VAIN in joiner.said


# The module with the training is imported from a script that does not name Lockstep.
SCRIPT_OF_MODULE = "from training import train\ntrain()\n"
MODULE = """
import copyreg, os, random, signal, sys, warnings
random.seed(5)
warnings.simplefilter("ignore")
import html.entities  # scikit-learn imports it, too
facts = ["sklearn" in sys.modules, len(copyreg.dispatch_table), len(warnings.filters)]
facts += [random.random(), "KMP_INIT_AT_FORK" in os.environ]
import sklearn
facts += [random.random(), len(warnings.filters), "KMP_INIT_AT_FORK" in os.environ]

def train():
    import torch, lockstep
    world = lockstep.init(device="cpu")
    model = torch.nn.Linear(1, 1)
    model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    world.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    print("FACTS", facts, flush=True)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    world.close()
"""


@pytest.mark.thorough
def test_a_script_that_is_started_again_finds_what_it_found_at_first(tmp_path: Path) -> None:
    """Modules, random numbers, warning filters, variables: no attempt knows of another one."""
    (tmp_path / "script.py").write_text(SCRIPT_OF_MODULE)
    (tmp_path / "training.py").write_text(MODULE)
    done = launch(["run", "--nproc=1", "--max-restarts=1", "script.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = [line for line in done.stdout.splitlines() if "FACTS" in line]
    assert first == second
