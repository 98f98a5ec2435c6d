"""What sample-exact randomness costs: three streams seeded for each sample, and kept around it.

python benchmarks/bench_sample_rng.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.utils.data import Dataset, default_collate

from lockstep.batch.fetch import Fetch
from lockstep.distributed.seeding import preserve_rng_state, seed_sample

COUNT, BATCH = 20_000, 64


class Sample(Dataset[torch.Tensor]):
    """The cheapest dataset there is, so that the seeding stands out."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return ROW


ROW = torch.zeros(16)


def microseconds(act: Callable[[int], object], count: int) -> float:
    begin = time.perf_counter()
    for index in range(count):
        act(index)
    return (time.perf_counter() - begin) / count * 1e6


def keep(_: int) -> None:
    with preserve_rng_state():
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = torch.arange(BATCH).numpy()
    seeded, plain = (Fetch(Sample(), default_collate, 0, exact) for exact in (True, False))
    rest = {
        "seeding one sample": lambda: microseconds(lambda i: seed_sample(0, 1, i), COUNT),
        "keeping the streams around a micro-batch": lambda: microseconds(keep, COUNT // 50),
        f"reading {BATCH} samples, seeded": lambda: microseconds(lambda i: seeded[0, rows], 200),
        f"reading {BATCH} samples, sample_rng=False": lambda: microseconds(
            lambda i: plain[0, rows], 200
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in rest}
    for _ in range(rounds):
        for name, measure in rest.items():
            times[name].append(measure())
    for name, found in times.items():
        print(f"{name:<44}{statistics.median(found):9.1f} us (lowest {min(found):.1f})")


if __name__ == "__main__":
    main()
