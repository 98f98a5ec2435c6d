"""Ranks, loader workers and the process that starts the ranks are killed at random moments, and
ranks also when they have copied half of a step.

`TEST_KILLS=200` kills as often as that, and `TEST_KILLS_SEED=1` at other moments.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from launched import Launched, launch
from ranks import HANG_S

from lockstep.extensions.ledger.judge import judge

pytestmark = [pytest.mark.launcher, pytest.mark.thorough]

KILLS = int(os.environ.get("TEST_KILLS", "6"))
SEED = int(os.environ.get("TEST_KILLS_SEED", "0"))
MAX_DELAY_S = 0.7
NOT_OURS = re.compile(r"lockstep-logs-.*|torchinductor_.*|pymp-.*|(tmp)?[a-z0-9_]{8}")
"""Files that are kept (logs, torch's cache), or that processes leave in the temporary folder when
they are killed: the socket of a loader worker; the file by which Python tries whether it can write
there; those by which torch's DataLoader tries, when a worker has died, whether files can be opened
at all."""
STEPS_AHEAD = 20
"""More than a loader worker reads ahead: if the training makes them, it goes on without it."""

SCRIPT = """
import hashlib, os, signal, sys
import torch, torch.nn.functional as F, lockstep
from torch.utils.data import DataLoader, TensorDataset
from lockstep.checkpoint import state_copier

torch.set_num_threads(1)
copy_all = state_copier.copy_to_each


def copy_or_die(places, sources):
    half = len(places) // 2
    copy_all(places[:half], sources[:half])
    try:
        os.unlink("kill one that copies")
    except FileNotFoundError:
        copy_all(places[half:], sources[half:])
    else:  # this rank was the first to see the file
        os.kill(os.getpid(), signal.SIGKILL)


state_copier.copy_to_each = copy_or_die
random = torch.Generator().manual_seed(0)
data = TensorDataset(
    torch.randn(960, 32, generator=random), torch.randint(5, (960,), generator=random)
)
with lockstep.init(seed=0, device="cpu") as world:
    layers = [torch.nn.Linear(32, 300), torch.nn.BatchNorm1d(300), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1), torch.nn.Linear(300, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(sys.argv[1]) * 20)
    workers = {"num_workers": 1, "multiprocessing_context": "fork"}
    loader = DataLoader(data, batch_size=48, shuffle=True, **workers)
    model, optimizer, schedule, loader = world.prepare(model, optimizer, schedule, loader)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    checkpoint = world.checkpoint("checkpoints", memory=True, **state)
    checkpoint.resume()
    for epoch in world.epochs(int(sys.argv[1])):
        for x, y in loader:
            world.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if world.is_main:
                with open("steps", "a") as file:
                    file.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {world.step}\\n")
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(whole.numpy().tobytes())
    world.print("WEIGHTS", found.hexdigest())
"""


def descendants(pid: int) -> dict[str, list[psutil.Process]]:
    """The fork server of a launcher, its ranks, and their loader workers."""
    (fork_server,) = psutil.Process(pid).children()
    ranks = fork_server.children()
    workers = [worker for rank in ranks for worker in rank.children()]
    return {"fork server": [fork_server], "ranks": ranks, "workers": workers}


def num_files(process: psutil.Process) -> dict[str, int]:
    """How many files a process has open, of each kind: files in memory, sockets, pipes."""
    counted: dict[str, int] = {}
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            target = os.readlink(descriptor)  # such as "socket:[123]", or the path of a log
            kind = target.partition(":[")[0].partition(" ")[0]
            if kind.endswith(".log"):  # each attempt has its own
                kind = "log"
            counted[kind] = counted.get(kind, 0) + 1
    return counted


def attempt_and_step(folder: Path) -> tuple[int, int]:
    """The last line that rank 0 has written."""
    lines = (folder / "steps").read_text().splitlines() if (folder / "steps").exists() else []
    if not lines:
        return -1, 0
    attempt, step = lines[-1].split()
    return int(attempt), int(step)


def sockets(process: psutil.Process) -> list[str]:
    """What the sockets of a process are connected to, for the message of a failed test."""
    return sorted(
        f"{connection.laddr} {connection.raddr} {connection.status}"
        for connection in process.net_connections("all")
    )


@pytest.mark.parametrize(("size", "strategy"), [(2, "ddp"), (3, "fsdp")])
def test_kills_at_random_moments(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, size: int, strategy: str
) -> None:
    drawn = random.Random(size + 10 * SEED)  # no two runs have the same one
    epochs = str(5 * KILLS)  # of 20 steps each: more than are made until the last kill
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "script.py").write_text(SCRIPT)
    (tmp_path / "script.py").write_text(SCRIPT)
    run = ["run", "--virtual-ranks=3"]
    whole = launch([*run, "script.py", epochs], tmp_path / "whole")
    (expected,) = [line.split()[-1] for line in whole.stdout.splitlines() if "WEIGHTS" in line]

    flags = [f"--nproc={size}", f"--strategy={strategy}", "--ledger=ledger"]
    flags += [f"--max-restarts={KILLS}"]
    files_of_launcher = []
    sockets_of_launcher = []
    files_of_fork_servers: dict[int, list[dict[str, int]]] = {}
    kinds: list[str] = []
    kept: list[int] = []
    temporary = tmp_path_factory.mktemp("t")  # loader workers bind sockets there: 107 characters
    env = {**os.environ, "TMPDIR": str(temporary)}
    with Launched([*run, *flags, "script.py", epochs], cwd=tmp_path, env=env) as launched:
        for number in range(KILLS):
            deadline = time.monotonic() + HANG_S
            while attempt_and_step(tmp_path)[0] < number:  # this attempt has finished a step
                assert time.monotonic() < deadline, launched.said
                assert launched.wait(0.01) is None, launched.said
            found = descendants(launched.pid)
            # Nothing of the attempt before is left: neither processes nor open files.
            assert len(found["ranks"]) == size
            assert len(found["workers"]) <= size
            files_of_launcher.append(num_files(psutil.Process(launched.pid)))
            sockets_of_launcher.append(sockets(psutil.Process(launched.pid)))
            (fork_server,) = found["fork server"]
            files_of_fork_servers.setdefault(fork_server.pid, []).append(num_files(fork_server))
            time.sleep(drawn.uniform(0, MAX_DELAY_S))
            found = descendants(launched.pid)
            kinds.append(drawn.choice(["rank", "copying", "two ranks", "worker", "fork server"]))
            if kinds[-1] == "copying":
                kept.append(attempt_and_step(tmp_path)[1])
                (tmp_path / "kill one that copies").touch()
                continue
            victims = {
                "rank": drawn.sample(found["ranks"], 1),
                "two ranks": found["ranks"][:2],
                "worker": found["workers"][:1],
                "fork server": found["fork server"],
            }[kinds[-1]]
            kept.append(attempt_and_step(tmp_path)[1])
            for victim in victims:
                with contextlib.suppress(psutil.NoSuchProcess):  # the epoch of a worker has ended
                    victim.send_signal(signal.SIGKILL)
            # A worker that has nothing more to do is not missed.
            while kinds[-1] == "worker" and attempt_and_step(tmp_path)[0] == number:
                step = attempt_and_step(tmp_path)[1]
                if step > kept[-1] + STEPS_AHEAD:
                    kept[-1] = step
                    found["ranks"][0].send_signal(signal.SIGKILL)
                    break
                time.sleep(0.01)
        done = launched.finish()
    assert done.returncode == 0, done.stderr
    (weights,) = [line.split()[-1] for line in done.stdout.splitlines() if "WEIGHTS" in line]
    assert weights == expected
    report = judge(tmp_path / "ledger")
    assert report.findings == []
    # Each attempt goes on with the step under way, or the one before if that was being kept.
    begun = [each["first"] for each in report.attempts][1:]
    assert len(begun) == KILLS
    for step, seen in zip(begun, kept, strict=True):
        assert step >= seen - 1, (begun, kept)
    assert all(files == files_of_launcher[0] for files in files_of_launcher), (
        files_of_launcher,
        kinds,
        sockets_of_launcher,
    )
    for files_of_one in files_of_fork_servers.values():
        assert all(files == files_of_one[0] for files in files_of_one), files_of_one
    left = {path.name for path in temporary.iterdir()}
    assert {name for name in left if not NOT_OURS.fullmatch(name)} == set()
