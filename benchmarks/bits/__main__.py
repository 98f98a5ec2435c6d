"""Compares the bits of 8 programs under 20 schedules: processes, strategies, resizes and kills.

A ninth program, which needs as many processes as virtual ranks, has 5 schedules of its own.

Each program (`programs.py`) trains 12 steps in two epochs with 8 virtual ranks (`train.py`). Its
weights, buffers, optimizer state and losses are hashed, and so is a random number that the script
draws after each epoch. A *schedule* says how the program is run: by a number of processes under a
strategy; resized, which ends it by a checkpoint in the middle of an epoch and goes on with another
number of processes; or killed, where a random rank ends itself by SIGKILL at a random moment, while
checkpoints are written after every step, and another number of processes goes on.

    python -m benchmarks.bits [--programs mlp,lora] [--schedules resized killed] [--seed 0]
        [--out benchmarks/results/same_bits.md]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.bits.programs import PROGRAMS, has_transformers

HERE = Path(__file__).parent
VIRTUAL_RANKS = 8
MAX_LAUNCHES = 4
"""Each program of a schedule with kills is launched at most this often."""
LAUNCH_TIMEOUT_S = 600.0
DIGITS_SHOWN = 8


class Part(NamedTuple):
    """How a run, or a part of one, is launched."""

    size: int
    strategy: str
    stop_at: int | None = None
    """The step at which it ends with a checkpoint. An even one ends in the middle of the global
    batch that follows the step."""


class Schedule(NamedTuple):
    """How programs are run: part after part, or with kills in turn, the first part killed."""

    title: str
    parts: list[Part]
    killed: bool = False


def whole(size: int, strategy: str) -> Schedule:
    """A schedule that nothing disturbs."""
    noun = "process" if size == 1 else "processes"
    return Schedule(f"{strategy}, {size} {noun}", [Part(size, strategy)])


def resized(title: str, strategies: list[str]) -> Schedule:
    """4 processes to the third step, 2 into the fifth, 1 to the ninth, 8 to the end."""
    sizes_and_stops = [(4, 3), (2, 4), (1, 9), (8, None)]
    parts = []
    for (size, stop_at), strategy in zip(sizes_and_stops, strategies, strict=True):
        parts.append(Part(size, strategy, stop_at))
    return Schedule(f"resized 4, 2, 1, 8: {title}", parts)


def killed(*parts: Part) -> Schedule:
    titles = [f"{part.strategy} on {part.size}" for part in parts]
    return Schedule(f"killed: {' then '.join(titles)}", list(parts), killed=True)


SCHEDULES = [
    whole(1, "single"),
    whole(1, "dp"),
    whole(1, "fsdp"),
    *[whole(size, "ddp") for size in (2, 3, 4, 8)],
    *[whole(size, "fsdp") for size in (2, 3, 4, 8)],
    whole(4, "hsdp:shard_size=2"),
    whole(8, "hsdp:shard_size=4"),
    resized("ddp", ["ddp", "ddp", "single", "ddp"]),
    resized("fsdp", ["fsdp", "fsdp", "fsdp", "fsdp"]),
    resized("hsdp, ddp, single, fsdp", ["hsdp:shard_size=2", "ddp", "single", "fsdp"]),
    killed(Part(4, "ddp"), Part(2, "ddp")),
    killed(Part(2, "fsdp"), Part(4, "fsdp")),
    killed(Part(3, "ddp"), Part(1, "single")),
    killed(Part(4, "hsdp:shard_size=2"), Part(3, "fsdp")),
]
SCHEDULES_ON_ALL_PROCESSES = [
    whole(8, "ddp"),
    whole(8, "fsdp"),
    whole(8, "hsdp:shard_size=4"),
    Schedule(
        "resumed on 8: ddp, fsdp, ddp", [Part(8, "ddp", 3), Part(8, "fsdp", 9), Part(8, "ddp")]
    ),
    killed(Part(8, "ddp"), Part(8, "fsdp")),
]
"""For programs that need as many processes as virtual ranks."""


def launch(part: Part, folder: Path, programs: list[str], arguments: list[str]) -> str:
    """Runs programs under `lockstep run`.

    Returns:
        "", or the end of its output if it has failed.
    """
    command = [str(Path(sys.executable).with_name("lockstep")), "run"]
    command += ["--nproc", str(part.size), "--strategy", part.strategy]
    command += ["--virtual-ranks", str(VIRTUAL_RANKS), str(HERE / "train.py"), str(folder)]
    command += ["--programs", ",".join(programs), *arguments]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=LAUNCH_TIMEOUT_S, check=False
    )
    return (done.stdout + done.stderr)[-4000:] if done.returncode else ""


def run_schedule(schedule: Schedule, folder: Path, programs: list[str], seed: int) -> str:
    """Runs programs as a schedule says.

    Returns:
        "", or the output of a launch that has failed and was not killed.
    """
    if not schedule.killed:
        for part in schedule.parts:
            arguments = [] if part.stop_at is None else ["--stop-at", str(part.stop_at)]
            output = launch(part, folder, programs, arguments)
            if output:
                return output
        return ""
    for program in programs:
        # Each program is killed in its first launch, so the next one goes on with it.
        for number in range(MAX_LAUNCHES):
            part = schedule.parts[number % len(schedule.parts)]
            was_killed = (folder / f"{program}.killed").exists()
            output = launch(part, folder, [program], ["--kill", str(seed)])
            if not output:
                break
            if was_killed or not (folder / f"{program}.killed").exists():
                return output
    return ""


def hashes_in(folder: Path, programs: list[str]) -> Iterator[str]:
    """Yields the hash of each program, or what stands in its place."""
    for program in programs:
        file = folder / f"{program}.hash"
        yield file.read_text() if file.exists() else "none"


def table(programs: list[str], rows: dict[str, list[str]]) -> str:
    """Returns the hashes as a table in Markdown, a row for each schedule."""
    titles = [PROGRAMS[name].title for name in programs]
    lines = ["| | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for title, hashes in rows.items():
        shown = [text if text == "none" else f"`{text[:DIGITS_SHOWN]}`" for text in hashes]
        lines.append(f"| {title} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


class Compared(NamedTuple):
    """The hashes of programs under schedules, the first of which the others are compared with."""

    programs: list[str]
    rows: dict[str, list[str]]
    """The hashes of the programs, by the title of the schedule."""
    num_killed: int

    @property
    def num_hashes(self) -> int:
        return len(self.rows) * len(self.programs)

    @property
    def num_equal(self) -> int:
        """How many hashes equal those of the first schedule."""
        expected = next(iter(self.rows.values()))
        num_equal = 0
        for hashes in self.rows.values():
            for found, wanted in zip(hashes, expected, strict=True):
                num_equal += found == wanted and found != "none"
        return num_equal


def compare(
    programs: list[str], schedules: list[Schedule], wanted: list[str], seed: int
) -> Compared:
    """Runs programs under schedules.

    Args:
        programs: their names.
        schedules: the first one is run in any case.
        wanted: parts of the titles of the others.
        seed: of the moments of the kills.
    """
    chosen = [schedules[0]]
    for schedule in schedules[1:]:
        if any(part in schedule.title for part in wanted):
            chosen.append(schedule)
    begin = time.perf_counter()
    rows: dict[str, list[str]] = {}
    num_killed = 0
    for schedule in chosen:
        with tempfile.TemporaryDirectory() as name:
            output = run_schedule(schedule, Path(name), programs, seed)
            rows[schedule.title] = list(hashes_in(Path(name), programs))
            num_killed += len(list(Path(name).glob("*.killed")))
        print(f"{time.perf_counter() - begin:5.0f} s  {schedule.title}", flush=True)
        if output:
            print(output, flush=True)
    return Compared(programs, rows, num_killed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--schedules", nargs="*", default=[""], help="parts of their titles")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    anywhere = []
    on_all_processes = []
    for name in options.programs.split(","):
        needs_all = PROGRAMS[name].sync_batchnorm
        (on_all_processes if needs_all else anywhere).append(name)
    texts = []
    all_equal = True
    for programs, schedules, compared_with in (
        (anywhere, SCHEDULES, "one process"),
        (on_all_processes, SCHEDULES_ON_ALL_PROCESSES, f"{VIRTUAL_RANKS} processes under ddp"),
    ):
        if not programs:
            continue
        compared = compare(programs, schedules, options.schedules, options.seed)
        all_equal = all_equal and compared.num_equal == compared.num_hashes
        texts.append(
            f"{table(programs, compared.rows)}\n\n"
            f"{compared.num_equal} of {compared.num_hashes} hashes equal those of {compared_with}; "
            f"runs that were killed: {compared.num_killed}.\n"
        )
    llama = "a Llama of transformers" if has_transformers() else "a transformer of its own"
    texts.append(
        f"{VIRTUAL_RANKS} virtual ranks; torch {torch.__version__}, CPU with "
        f"{torch.backends.cpu.get_cpu_capability()}, one thread a process; LoRA on {llama}.\n"
    )
    text = "\n".join(texts)
    print(text)
    if options.out is not None:
        options.out.write_text(f"Written by `make bits`, see `benchmarks/bits`.\n\n{text}")
    sys.exit(not all_equal)


if __name__ == "__main__":
    main()
