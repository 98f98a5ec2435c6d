"""What the journal of hashes (`--journal`) costs, as a share of a training step.

With virtual ranks of 32 samples each (or of more, in the last line), with one thread a process. All
that the journal does is timed where it happens, in the loop, in time of the processor: the clock of
a thread stands still while other programs run. Given are means of rank 0 over the steps after the
first ones: with hashes of every tenth step and the losses of all (the default), and with hashes of
every step.

    python benchmarks/bench_journal.py [--out benchmarks/results/journal.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

EVENTS = ("begin", "leaf_gradient", "before_step", "step_finished", "after_step")
WARM_UP_STEPS = 10
DEFAULT_EVERY = 10


class Case(NamedTuple):
    """A training whose journal is timed."""

    problem: str
    """One of `bench_step.problem`."""
    num_steps: int
    virtual_ranks: int
    processes: int
    samples_of_virtual_rank: int = 32


CASES = [
    Case("mlp", 200, 2, 2),
    Case("mlp", 200, 8, 1),
    Case("digits", 100, 2, 2),
    Case("digits", 60, 8, 1),
    Case("transformer 16", 20, 2, 2),
    Case("resnet18", 20, 2, 2),
    Case("mlp", 60, 8, 1, samples_of_virtual_rank=512),
]


def train(case: Case, folder: str, every: int) -> dict[str, float]:
    """Returns seconds of a step, seconds of the journal in it, and bytes that a step adds.

    Args:
        case: what is trained.
        folder: of the journal.
        every: steps from one with hashes to the next.
    """
    import torch
    import torch.nn.functional as F
    from bench_step import problem
    from torch.utils.data import Dataset

    import lockstep
    from lockstep.extensions.journal.writer import Journal

    class Repeated(Dataset[Any]):
        """The samples of a problem, over and over again."""

        def __init__(self, samples: Any, length: int) -> None:
            self.samples = samples
            self.length = length

        def __len__(self) -> int:
            return self.length

        def __getitem__(self, index: int) -> Any:
            return self.samples[index % len(self.samples)]

    spent: Counter[str] = Counter()
    for event in EVENTS:
        time_event(Journal, event, spent)
    with lockstep.init(
        seed=0, journal=folder, journal_every=every, virtual_ranks=case.virtual_ranks
    ) as world:
        torch.set_num_threads(1)
        model, samples, _ = problem(case.problem)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = world.prepare(model, optimizer)
        batch_size = case.virtual_ranks * case.samples_of_virtual_rank
        num_steps = WARM_UP_STEPS + case.num_steps
        loader = world.loader(
            Repeated(samples, batch_size * num_steps), batch_size, sample_rng=False
        )
        begun = 0.0
        for images, labels in loader:
            if world.step == WARM_UP_STEPS and begun == 0.0:
                gc.disable()  # it would fall on whatever allocates at that moment
                begun = time.thread_time()
                spent.clear()
            world.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.thread_time() - begun
        journal = sum(spent.values())
    num_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
    return {
        "step": (seconds - journal) / case.num_steps,
        "journal": journal / case.num_steps,
        "bytes": num_bytes / num_steps,
    }


def time_event(owner: Any, name: str, spent: Counter[str]) -> None:
    """Adds up the processor's time in a method from now on."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        begun = time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            spent[name] += time.thread_time() - begun

    setattr(owner, name, call)


def main() -> None:
    """Runs all cases and prints a table."""
    import lockstep

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    print(f"{'':<44}{'step':>10}{'default':>12}{'share':>9}{'every step':>13}{'share':>9}{'KB':>9}")
    for case in CASES:
        found: dict[int, dict[str, float]] = {}
        for every in (DEFAULT_EVERY, 1):
            with tempfile.TemporaryDirectory() as folder:
                arguments = case, folder, every
                found[every] = lockstep.launch(train, arguments, nproc=case.processes)[0]
        rarely = found[DEFAULT_EVERY]
        always = found[1]
        results.append({**case._asdict(), "default": rarely, "every step": always})
        samples = case.virtual_ranks * case.samples_of_virtual_rank
        name = f"{case.problem}, {samples} samples, V = {case.virtual_ranks}, P = {case.processes}"
        step = min(rarely["step"], always["step"])
        print(
            f"{name:<44}{step * 1e3:7.2f} ms"
            f"{rarely['journal'] * 1e6:9.0f} µs{rarely['journal'] / step:9.2%}"
            f"{always['journal'] * 1e6:10.0f} µs{always['journal'] / step:9.1%}"
            f"{always['bytes'] / 1e3:9.1f}"
        )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
