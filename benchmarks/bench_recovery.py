"""What a failure costs: how long until training goes on, how many steps are lost, and what the
precautions cost when nothing fails.

    kills    A random rank is killed with SIGKILL at a random moment, again and again. Measured is
             the time until rank 0 of the next attempt has finished an optimizer step, in parts, and
             how many steps were made a second time. Also while two other processes are busy.
    useful   Ranks are killed every 60 s and every 15 s on average. Counted are the steps by which
             the training has got on, in parts of those of the same run's undisturbed rate.
    cost     Steps with and without memory for them, in blocks that alternate in one run; and the
             memory that the launcher holds, beside what the run has announced.

Contestants of `useful`, all on two processes with one thread each and the same global batch:

    memory    Lockstep as it comes with --max-restarts
    disk      Lockstep with memory=False
    torchrun  torchrun with DDP, torch.save on rank 0
    torchft   two replica groups of one process, if torchft is installed; its step counts in part
              while one replica trains alone. A process that was killed is started again at once.

The first three save when 30 s have passed since the last checkpoint, also across restarts. Kills
come at the same moments for all. Time begins just before the first kill, when each has trained for
a while, and ends just before the kill after the last.

    python benchmarks/bench_recovery.py [--parts kills useful cost] [--quick] [--out FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SCRIPT = Path(__file__).with_name("recovery_training.py").resolve()
CONTESTANTS = ["memory", "disk", "torchrun", "torchft"]
BIN = Path(sys.executable).parent
MODELS = {"digits": "digits", "transformer 6x256": "transformer 4"}
"""As printed, and as in recovery_training.py."""
INTERVALS = {60: (52, 68), 15: (11, 19, 13, 17)}
"""Seconds between kills. Checkpoints come every 30 s, so equal intervals would meet them at the
same moment each time."""
QUIET_PART = 0.4
"""The undisturbed rate is that of the last 40 % of the time before each kill."""
COST_CASES = {
    "MLP": ("mlp", 32),
    "digits": ("digits", 32),
    "transformer 6x256, 4 samples": ("transformer 4", 4),
    "transformer 6x256, 32 samples": ("transformer 4", 32),
}
"""Models of recovery_training.py and samples per rank: steps of about 0.5, 5, 20 and 80 ms."""
PARTS_OF_RECOVERY = ("forked", "script", "imported", "init", "prepared", "resumed", "step")
TIMEOUT_S = 120.0


class Line(NamedTuple):
    """A step that was finished."""

    attempt: int
    step: int
    at: float
    weight: float
    """1, or the part of the global batch that was trained on."""


# Arithmetic


def read_lines(text: str) -> list[Line]:
    """Reads the steps that the ranks have written down; the last line may be half written."""
    complete = text[: text.rfind("\n") + 1]
    found = []
    for line in complete.splitlines():
        attempt, step, at, weight = line.split()
        found.append(Line(int(attempt), int(step), float(at), float(weight)))
    return found


def step_at(lines: Sequence[Line], moment: float) -> int:
    """Returns the step that was finished last at a moment; 0 before the first."""
    steps = [line.step for line in lines if line.at <= moment]
    return steps[-1] if steps else 0


def progress(lines: Sequence[Line], begin: float, end: float) -> float:
    """Returns by how many steps the training has got on between two moments.

    Steps that were made a second time count once, those that were lost at the end do not count.
    """
    first = step_at(lines, begin)
    last = step_at(lines, end)
    weights: dict[int, float] = {}
    for line in lines:
        if first < line.step <= last and line.at <= end:
            weights[line.step] = max(line.weight, weights.get(line.step, 0.0))
    # A training that has lost more than it has made has gone back.
    return sum(weights.values()) if last >= first else float(last - first)


def quiet_rate(lines: Sequence[Line], moments: Sequence[float]) -> float:
    """Returns steps per second in the last part of the time before each kill.

    Left out is where the rank that was killed had not yet come back.

    Args:
        lines: the steps.
        moments: the beginning, the kills, and at last the end.
    """
    steps = 0.0
    seconds = 0.0
    for attempt, (before, kill) in enumerate(itertools.pairwise(moments)):
        begin = kill - QUIET_PART * (kill - before)
        is_back = any(line.attempt >= attempt for line in lines if line.at <= begin)
        if is_back:
            steps += progress(lines, begin, kill)
            seconds += kill - begin
    return steps / seconds


def useful_part(lines: Sequence[Line], moments: Sequence[float]) -> float:
    """Returns the part of the steps that count, of those that were possible without failures.

    What counts is the time from the first kill to the end.

    Args:
        lines: the steps.
        moments: the beginning, the kills, and at last the end.
    """
    possible = quiet_rate(lines, moments) * (moments[-1] - moments[1])
    return progress(lines, moments[1], moments[-1]) / possible


def parts_of_recovery(kill: float, marks: dict[str, float]) -> dict[str, float]:
    """Returns how long each part of a recovery took."""
    parts = {}
    before = kill
    for name in PARTS_OF_RECOVERY:
        parts[name] = marks[name] - before
        before = marks[name]
    return parts


def foretold_bytes(said: str) -> float:
    """Returns how much memory the run has announced for its machine."""
    found = re.search(r"every step is kept in memory: .*?, ([\d.]+) ([KM])iB on a machine", said)
    assert found, said
    return float(found[1]) * {"K": 2**10, "M": 2**20}[found[2]]


# Processes that measure


class Training:
    """A contestant that trains until it is ended."""

    def __init__(self, kind: str, model: str, size: int, folder: Path) -> None:
        self.kind, self.size, self.folder = kind, size, folder
        self.script = [str(SCRIPT), kind, model, str(folder)]
        self.said = (folder / "said").open("w")
        self.lighthouse: Any = None
        self.replicas: dict[int, subprocess.Popen[bytes]] = {}
        self.environment = environment()
        self.restarts = 0
        if kind == "torchft":
            from torchft.coordination import LighthouseServer

            self.lighthouse = LighthouseServer(
                bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000
            )
            address = self.lighthouse.address().replace(os.uname().nodename, "localhost")
            self.environment["LIGHTHOUSE"] = address
            self.look_after()
            return
        command = [str(BIN / "lockstep"), "run"]
        if kind == "torchrun":
            command = [str(BIN / "torchrun"), "--standalone"]
        command += ["--max-restarts", "1000", "--nproc-per-node", str(size), *self.script]
        self.replicas[0] = self.started(command, self.environment)

    def started(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=env, stdout=self.said, stderr=subprocess.STDOUT)

    def look_after(self) -> None:
        """Starts replicas of torchft's that have ended; what launchers do by themselves."""
        for rank in range(self.size) if self.lighthouse is not None else ():
            replica = self.replicas.get(rank)
            if replica is None or replica.poll() is not None:
                own = {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(self.restarts)}
                command = [sys.executable, *self.script]
                self.replicas[rank] = self.started(command, {**self.environment, **own})

    def lines(self) -> list[Line]:
        path = self.folder / "steps"
        return read_lines(path.read_text()) if path.exists() else []

    def marks(self, attempt: int) -> dict[str, float]:
        rows = [line.split() for line in (self.folder / "marks").read_text().splitlines()]
        return {name: float(at) for number, name, at in rows if int(number) == attempt}

    def wait_for_step(self, *, attempt: int, steps: int = 1) -> None:
        """Waits until an attempt has made so many steps."""
        deadline = time.monotonic() + TIMEOUT_S
        while sum(line.attempt == attempt for line in self.lines()) < steps:
            self.look_after()
            if time.monotonic() > deadline or self.replicas[0].poll() is not None:
                raise RuntimeError((self.folder / "said").read_text()[-3000:])
            time.sleep(0.05)

    def pause(self, until: float) -> None:
        """Waits until a moment of time.time()."""
        while (left := until - time.time()) > 0:
            self.look_after()
            time.sleep(min(0.05, left))

    def kill(self, drawn: random.Random) -> float:
        """Kills one of the ranks that are there; when."""
        latest = {}
        for line in (self.folder / "ranks").read_text().splitlines():
            _, rank, pid = line.split()
            latest[rank] = int(pid)
        victim = latest[str(drawn.randrange(self.size))]
        self.restarts += 1
        at = time.time()
        with contextlib.suppress(ProcessLookupError):  # it is being started at this moment
            os.kill(victim, signal.SIGKILL)
        return at

    def end(self) -> None:
        for replica in self.replicas.values():
            replica.send_signal(signal.SIGKILL if self.lighthouse is not None else signal.SIGTERM)
        for replica in self.replicas.values():
            try:
                replica.wait(40)
            except subprocess.TimeoutExpired:
                replica.kill()
                replica.wait()
        if self.lighthouse is not None:
            self.lighthouse.shutdown()
        self.said.close()


def environment() -> dict[str, str]:
    """Of every process that trains; compiled once, as what is installed is."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@contextlib.contextmanager
def training(kind: str, model: str, size: int) -> Iterator[Training]:
    with tempfile.TemporaryDirectory() as folder:
        begun = Training(kind, model, size, Path(folder))
        try:
            yield begun
        finally:
            begun.end()


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many other processes compute all the time."""
    started = []
    for _ in range(processes):
        started.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure_kills(model: str, size: int, kills: int, drawn: random.Random) -> dict[str, Any]:
    """Recoveries of one training."""
    found: dict[str, Any] = {"seconds": [], "again": [], "parts": []}
    with training("memory", MODELS[model], size) as run:
        for number in range(kills):
            run.wait_for_step(attempt=number, steps=15)
            run.pause(time.time() + drawn.uniform(0, 0.5))
            at = run.kill(drawn)
            run.wait_for_step(attempt=number + 1)
            lines = run.lines()
            first = next(line for line in lines if line.attempt == number + 1)
            before = [line.step for line in lines if line.attempt <= number]
            found["seconds"].append(first.at - at)
            found["again"].append(before[-1] - first.step + 1)
            found["parts"].append(parts_of_recovery(at, run.marks(number + 1)))
    return found


def measure_useful(kind: str, intervals: Sequence[float], warm_up: float) -> dict[str, Any]:
    """Steps of one contestant whose ranks are killed after each of the intervals."""
    drawn = random.Random(1)
    with training(kind, MODELS["transformer 6x256"], 2) as run:
        run.wait_for_step(attempt=0)
        moments = [time.time()]
        run.pause(moments[0] + warm_up)
        for interval in intervals:
            moments.append(run.kill(drawn))
            run.pause(moments[-1] + interval)
        moments.append(time.time())
        lines = run.lines()
    return {
        "useful": useful_part(lines, moments),
        "rate": quiet_rate(lines, moments),
        "steps": progress(lines, moments[1], moments[-1]),
        "kills": len(intervals),
        "load": os.getloadavg()[1],
        "seconds": moments[-1] - moments[1],
    }


def measure_undisturbed(name: str, rounds: int) -> dict[str, Any]:
    model, samples = COST_CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        command = [str(BIN / "lockstep"), "run", "--nproc", "2", "--max-restarts", "1", str(SCRIPT)]
        command += [f"{samples},{rounds}", model, folder]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    found["foretold"] = foretold_bytes(done.stdout + done.stderr)
    return found


def show_kills(results: dict[str, Any], drawn: random.Random, kills: int) -> None:
    names = " | ".join(PARTS_OF_RECOVERY)
    print("\nkill -9 to the next finished step, s; then medians of its parts")
    print(f"| | kills | median | worst | steps again: median | worst | {names} |")
    for load in (0, 2):
        with busy(load):
            for model in MODELS:
                for size in (2, 8):
                    title = f"{model}, {size} ranks{', 2 busy processes' if load else ''}"
                    found = measure_kills(model, size, kills if not load else kills // 2, drawn)
                    results.setdefault("kills", {})[title] = found
                    seconds, again = found["seconds"], found["again"]
                    medians = []
                    for part in PARTS_OF_RECOVERY:
                        middle = statistics.median(each[part] for each in found["parts"])
                        medians.append(f"{middle:.2f}")
                    print(
                        f"| {title} | {len(seconds)} | {statistics.median(seconds):.2f} | "
                        f"{max(seconds):.2f} | {statistics.median(again):.0f} | {max(again)} | "
                        f"{' | '.join(medians)} |",
                        flush=True,
                    )


def show_useful(
    results: dict[str, Any], kinds: list[str], chosen_intervals: list[int], quick: bool
) -> None:
    print("\nuseful steps, transformer 6x256, 2 processes")
    print("| failure every | contestant | useful | steps | undisturbed steps/s | kills |")
    for every in chosen_intervals:
        for kind in kinds:
            intervals = (10, 14) if quick else INTERVALS[every]
            title = f"{every} s, {kind}"
            try:
                found = measure_useful(kind, intervals, warm_up=3 if quick else 10)
            except Exception as error:
                results.setdefault("useful", {})[title] = str(error)
                print(f"| {every} s | {kind} | {type(error).__name__}: {error} | | | |", flush=True)
                continue
            results.setdefault("useful", {})[title] = found
            print(
                f"| {every} s | {kind} | {found['useful']:.1%} | {found['steps']:.0f} | "
                f"{found['rate']:.2f} | {found['kills']} |",
                flush=True,
            )


def show_cost(results: dict[str, Any], rounds: int) -> None:
    print("\nundisturbed, 2 ranks: a step with memory beside one without")
    print("| | step, ms | kept | cost, median [quartiles] | memory foretold, MiB | held |")
    for name in COST_CASES:
        found = measure_undisturbed(name, rounds)
        results.setdefault("cost", {})[name] = found
        pairs = zip(found["times"]["with"], found["times"]["without"], strict=True)
        ratios = [with_memory / without - 1 for with_memory, without in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"| {name} | {statistics.median(found['times']['without']) * 1e3:.2f} | "
            f"every {found['every']} | {middle:.1%} [{low:.1%}, {high:.1%}] | "
            f"{found['foretold'] / 2**20:.2f} | {found['held'] / 2**20:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="See the head of the file.")
    parser.add_argument("--parts", nargs="+", default=["kills", "useful", "cost"])
    parser.add_argument("--contestants", nargs="+", default=CONTESTANTS, choices=CONTESTANTS)
    parser.add_argument("--every", nargs="+", type=int, default=list(INTERVALS), choices=INTERVALS)
    parser.add_argument("--kills", type=int, default=10, help="of each case; under load half")
    parser.add_argument("--rounds", type=int, default=10, help="of blocks with and without memory")
    parser.add_argument("--quick", action="store_true", help="short, to see whether all works")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kinds = options.contestants
    if importlib.util.find_spec("torchft") is None and "torchft" in kinds:
        kinds = [kind for kind in kinds if kind != "torchft"]
        print("torchft is not installed")
    results: dict[str, Any] = {}
    if options.out and options.out.exists():  # parts may be measured one after the other
        results = json.loads(options.out.read_text())
    results["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    results["load"] = {**results.get("load", {}), ", ".join(options.parts): os.getloadavg()[0]}
    print(f"{results['machine']}, load {os.getloadavg()[0]:.1f} before the first measurement")
    if "kills" in options.parts:
        show_kills(results, random.Random(options.seed), 2 if options.quick else options.kills)
    if "useful" in options.parts:
        show_useful(results, kinds, options.every, options.quick)
    if "cost" in options.parts:
        show_cost(results, 3 if options.quick else options.rounds)
    if options.out:
        options.out.parent.mkdir(exist_ok=True)
        options.out.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
