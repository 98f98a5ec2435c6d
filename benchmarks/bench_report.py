"""What the record of a run (`--report`) costs, as a share of a training step under ddp.

Two processes (Gloo, one thread each) train as in bench_checks.py. All that the recorder does is
timed where it happens, in the loop: at the phases of a step, and when it has stepped. Times are
medians of rank 0 over the steps that only count and over those that write a row, which are
fewer the longer a run is. What timing itself costs there is taken off: in the last third of the
steps the recorder is called in the same way and does nothing.

Then: how large the page is for an hour at 8 ranks (steps of 0.2 s, made up), and how long it takes.

    python benchmarks/bench_report.py [--out benchmarks/results/report.json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

STEPS = {"mlp": 3000, "digits": 1200, "resnet18": 60}


def train(kind: str, folder: str) -> dict[str, Any]:
    """The times of one problem, in seconds, on this rank."""
    import torch
    import torch.nn.functional as F
    from bench_checks import timed
    from bench_step import problem

    import lockstep
    from lockstep.extensions.report.phase_times import PhaseTimes
    from lockstep.extensions.report.record import Recorder

    torch.set_num_threads(1)
    spent: Counter[str] = Counter()
    records = [True]
    for owner, event in ((Recorder, "step_finished"), (PhaseTimes, "phase_entered")):
        silence(owner, event, records)
        timed(owner, event, spent, event)
    seconds, costs = [], []
    third = STEPS[kind] // 3
    with lockstep.init(seed=0, strategy="ddp", report=folder) as world:
        model, data, local = problem(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(data, local * world.size, shuffle=True)
        recorder = world._run.step.extensions.of_type(Recorder)
        begun, rows = time.perf_counter(), recorder._num_rows
        while len(seconds) < STEPS[kind]:
            for images, labels in loader:
                world.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
                now = time.perf_counter()
                seconds.append(now - begun)
                wrote, rows = recorder._num_rows > rows, recorder._num_rows
                costs.append((wrote, spent["step_finished"] + spent["phase_entered"]))
                spent.clear()
                begun = time.perf_counter()
                if len(seconds) == third:
                    recorder._steps_per_row = 10**9  # what steps without a row cost
                if len(seconds) == 2 * third:
                    records[0] = False  # what timing costs
    row = median(cost for wrote, cost in costs[5:third] if wrote)
    count = median(cost for _, cost in costs[third + 1 : 2 * third])
    timing = median(cost for _, cost in costs[2 * third + 1 : STEPS[kind]])
    return {"step": median(seconds), "with a row": row - timing, "without": count - timing}


def silence(owner: Any, name: str, records: list[bool]) -> None:
    """Makes a method do nothing while `records[0]` is False."""
    method = getattr(owner, name)

    def call(*arguments: Any) -> None:
        if records[0]:
            method(*arguments)

    setattr(owner, name, call)


def rows_of(steps: int) -> int:
    """Rows that so many steps are written in."""
    from lockstep.extensions.report.record import ROWS_BEFORE_DOUBLING

    rows, every = 0, 1
    while steps > 0:
        rows, steps = rows + 1, steps - every
        every *= 1 + (rows % ROWS_BEFORE_DOUBLING == 0)
    return rows


def page() -> dict[str, float]:
    """Megabytes and seconds of the page of an hour at 8 ranks."""
    from lockstep.extensions.report.page import render
    from lockstep.extensions.report.reading import Record
    from lockstep.extensions.report.record import ROWS_BEFORE_DOUBLING
    from lockstep.extensions.report.record_format import COLUMNS, FORMAT_VERSION, PHASES

    steps, every, at = 18_000, 1, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(8):
            about = {"record": FORMAT_VERSION, "rank": rank, "ranks": 8, "contributes": True}
            about |= {
                "host": "node",
                "device": "cpu",
                "time": 0.0,
                "command": ["train.py"],
                "columns": COLUMNS,
            }
            lines: list[Any] = [about]
            step, rows, every = 0, 0, 1
            for _ in range(rows_of(steps)):
                step, rows = step + every, rows + 1
                at = 0.2 * step
                phases = [0.2 * every / len(PHASES)] * len(PHASES)
                lines.append([step, every, at, 0.3, 1 / step, 0.1, 256, 10**9, 0, 0, *phases])
                every *= 1 + (rows % ROWS_BEFORE_DOUBLING == 0)
            text = "".join(json.dumps(line) + "\n" for line in lines)
            Path(folder, f"0-a.rank{rank}.record").write_text(text)
        begun = time.perf_counter()
        html = render(Record(folder))
    return {"megabytes": len(html.encode()) / 1e6, "seconds": time.perf_counter() - begun}


def main() -> None:
    """Runs all problems and prints a table."""
    import lockstep

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for kind in STEPS:
        with tempfile.TemporaryDirectory() as folder:
            found = lockstep.launch(train, (kind, folder), nproc=2)[0]
        results[kind] = found
        step, row, count = found["step"], found["with a row"], found["without"]
        print(f"\n{kind}: a step takes {step * 1e3:.2f} ms")
        for name, seconds in (
            ("a step with a row", row),
            ("a step without", count),
            *(
                (
                    f"mean of {n:,} steps ({rows_of(n):,} rows)",
                    count + (row - count) * rows_of(n) / n,
                )
                for n in (1000, 10_000, 1_000_000)
            ),
        ):
            print(f"  {name:<36}{seconds * 1e6:9.2f} µs  {seconds / step:8.3%}")
    if options.out:
        results["page"] = page()
        print("\npage: {megabytes:.2f} MB in {seconds:.1f} s".format(**results["page"]))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
