"""What the checks that are always on cost, as a share of a training step under ddp.

Two processes (Gloo, one thread each) train with Lockstep as in bench_step.py, over a prepared
loader, at the default settings. Checks of every step are timed where they happen, in the loop, and
the steps around them too. Those of every 200 steps are then called in a row, after a barrier each,
and count by as much less. All times are medians of rank 0; the clock's own cost is taken off.

    python benchmarks/bench_checks.py [--out benchmarks/results/checks.json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

STEPS = {"mlp": 2000, "digits": 400, "resnet18": 30}


def timed(owner: Any, name: str, times: list[float]) -> None:
    """Calls of a method are timed from now on."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            times.append(time.perf_counter() - begun)

    setattr(owner, name, call)


def train(kind: str) -> dict[str, Any]:
    """The times of one problem, in seconds, on this rank."""
    import torch
    import torch.nn.functional as F
    from bench_step import problem

    import lockstep
    from lockstep.data.coverage import Coverage
    from lockstep.guards.parameters import ParameterGuard
    from lockstep.guards.replicas import EVERY, check_replicas
    from lockstep.strategies.ddp import ExactDDP

    torch.set_num_threads(1)
    clock: list[float] = []
    nothing = argparse.Namespace(call=lambda: None)
    timed(nothing, "call", clock)
    for _ in range(1000):
        nothing.call()
    every_step: dict[str, list[float]] = {"samples counted": [], "gradients looked at": []}
    timed(Coverage, "add", every_step["samples counted"])
    timed(ExactDDP, "check_gradients", every_step["gradients looked at"])
    steps: list[float] = []
    with lockstep.init(seed=0, strategy="ddp") as world:
        model, data, local = problem(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(data, local * world.size, shuffle=True)
        begun = time.perf_counter()
        while len(steps) < STEPS[kind]:
            for images, labels in loader:
                world.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
                now = time.perf_counter()
                steps.append(now - begun)
                begun = now
        kept = ParameterGuard(model, alone=False)
        looks: dict[str, Callable[[], Any]] = {
            "replicas compared": lambda: check_replicas(model.module, "benchmark"),
            "parameters compared with those prepared": kept.check,
        }
        now_and_then: dict[str, list[float]] = {name: [] for name in looks}
        for name, look in looks.items():
            for _ in range(30):
                world.barrier()
                begun = time.perf_counter()
                look()
                now_and_then[name].append(time.perf_counter() - begun)
    own = median(clock)
    return {
        "step": median(steps),
        "parameters": sum(p.numel() for p in model.parameters()),
        "every step": {name: max(0.0, median(t) - own) for name, t in every_step.items()},
        "now and then": {name: median(t) for name, t in now_and_then.items()},
        "steps between": EVERY,
    }


def main() -> None:
    """Runs all problems and prints a table."""
    import lockstep

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for kind in STEPS:
        results[kind] = found = lockstep.launcher(train, (kind,), nproc=2)[0]
        step, every = found["step"], found["steps between"]
        print(f"\n{kind}: {found['parameters']:,} parameters, a step takes {step * 1e3:.2f} ms")
        rows = [(name, seconds, "") for name, seconds in found["every step"].items()]
        rows += [
            (name, seconds / every, f"  {seconds * 1e3:.2f} ms each {every} steps")
            for name, seconds in found["now and then"].items()
        ]
        rows.append(("all", sum(seconds for _, seconds, _ in rows), ""))
        for name, seconds, note in rows:
            print(f"  {name:<40}{seconds * 1e6:9.2f} µs  {seconds / step:8.3%}{note}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
