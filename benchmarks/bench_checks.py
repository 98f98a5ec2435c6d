"""What the checks that are always on cost, as a share of a training step under ddp.

Two processes (Gloo, one thread each) train with Lockstep as in bench_step.py, over a prepared
loader, at the default settings. Each check is timed where it happens, in the loop, and the steps
around it too. What a check takes in the steps in which it compares the ranks, waiting for the other
one among it, counts by as much less as these are rarer. All times are medians of rank 0; the
clock's own cost is taken off.

    python benchmarks/bench_checks.py [--out benchmarks/results/checks.json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

STEPS = {"mlp": 2000, "digits": 400, "resnet18": 30}


def timed(owner: Any, name: str, spent: Counter[str], check: str) -> None:
    """Adds up what the calls of a method take from now on."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[check] += time.perf_counter() - begun

    setattr(owner, name, call)


def train(kind: str) -> dict[str, Any]:
    """The times of one problem, in seconds, on this rank."""
    import torch
    import torch.nn.functional as F
    from bench_step import problem

    import lockstep
    from lockstep.batch.coverage import Coverage
    from lockstep.extensions.checks import CHECKS
    from lockstep.session.check_schedule import CHECK_EVERY, check_due
    from lockstep.session.extension import EVENTS, Extension
    from lockstep.strategies.ddp import ExactDDP

    torch.set_num_threads(1)
    spent: Counter[str] = Counter()
    nothing = argparse.Namespace(call=lambda: None)
    timed(nothing, "call", spent, "clock")
    for _ in range(1000):
        nothing.call()
    clock = spent["clock"] / 1000
    hooks = [(Coverage, "add"), (ExactDDP, "check_gradients")]
    hooks += [
        (check, event)
        for check in CHECKS
        for event in EVENTS
        if getattr(check, event) is not getattr(Extension, event)
    ]
    for owner, event in hooks:
        timed(owner, event, spent, f"{owner.__name__}.{event}")
    seconds: list[float] = []
    checks: list[dict[str, float]] = []
    with lockstep.init(seed=0, strategy="ddp") as world:
        model, data, local = problem(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(data, local * world.size, shuffle=True)
        spent.clear()
        begun = time.perf_counter()
        while len(seconds) < STEPS[kind]:
            for images, labels in loader:
                world.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
                now = time.perf_counter()
                seconds.append(now - begun)
                checks.append(dict(spent))
                spent.clear()
                begun = time.perf_counter()
        parameters = sum(p.numel() for p in model.parameters())
    usual = [found for n, found in enumerate(checks, 1) if not check_due(n)]
    due = [found for n, found in enumerate(checks, 1) if check_due(n)]
    names = sorted({name for found in checks for name in found})
    every = {n: max(0.0, median(found.get(n, 0.0) for found in usual) - clock) for n in names}
    return {
        "step": median(seconds),
        "parameters": parameters,
        "every step": every,
        "now and then": {
            name: max(0.0, median(found.get(name, 0.0) for found in due) - every[name])
            for name in names
        },
        "steps between": CHECK_EVERY,
    }


def main() -> None:
    """Runs all problems and prints a table."""
    import lockstep

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for kind in STEPS:
        results[kind] = found = lockstep.launch(train, (kind,), nproc=2)[0]
        step, every = found["step"], found["steps between"]
        print(f"\n{kind}: {found['parameters']:,} parameters, a step takes {step * 1e3:.2f} ms")
        rows = [(name, seconds, "") for name, seconds in found["every step"].items()]
        rows += [
            (name, seconds / every, f"  {seconds * 1e3:.2f} ms each {every} steps")
            for name, seconds in found["now and then"].items()
            if seconds >= 1e-4
        ]
        rows.append(("all", sum(seconds for _, seconds, _ in rows), ""))
        for name, seconds, note in rows:
            print(f"  {name:<40}{seconds * 1e6:9.2f} µs  {seconds / step:8.3%}{note}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
