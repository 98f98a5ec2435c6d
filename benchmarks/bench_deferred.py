"""What a rank holds in host memory until the first step of a model of some gigabytes.

    cpu       the model is built on the CPU by every rank, as a plain script does, and prepared
    drawn     it is built in `lockstep.deferred_init`, and its values are drawn when it is prepared
    read      so, and `lockstep.load_weights` gives it the values of a folder of safetensors
    read after   the folder is read after `world.prepare`
    cpu read  built on the CPU, and the folder is read before `world.prepare`

Every run is of fresh processes (Gloo, one thread each). `peak` is the largest resident memory of a
rank beyond that before the model was built; memory that is mapped from files counts, too. Before,
each rank has prepared a model of some kilobytes in the same way: what is imported and opened for
the first model is not the model's. The model has blocks of two linear layers; a unit of FSDP is a
block.

    python benchmarks/bench_deferred.py [--gigabytes 2] [--out benchmarks/results/deferred.json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTH = 1024
WIDTH_OF_WARM_UP = 8
NUM_BLOCKS_OF_WARM_UP = 4
RESET_PEAK = "5"
"""Written to /proc/self/clear_refs, this sets VmHWM to the present resident memory (Linux)."""
ELEMENTS_OF_A_PIECE = 2**18
STRATEGIES = (("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("pipeline", 2))
"""Each with the number of its ranks; `hsdp` has two copies of two shards each."""
CASES = ("cpu", "drawn", "cpu read", "read", "read after")


def make_model(num_blocks: int, width: int = WIDTH) -> Any:
    """Blocks of two linear layers, one after the other."""
    from torch import Tensor, nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(x).relu())

    return nn.Sequential(*(Block() for _ in range(num_blocks)))


def status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def build_and_fill(world: Any, case: str, num_blocks: int, width: int, folder: str) -> Any:
    """Returns a prepared model whose parameters have values."""
    import lockstep

    if case.startswith("cpu"):
        model = make_model(num_blocks, width)
    else:
        with lockstep.deferred_init():
            model = make_model(num_blocks, width)
    if case in ("read", "cpu read"):
        lockstep.load_weights(model, folder)
    model = world.prepare(model)
    if case == "read after":
        lockstep.load_weights(model, folder)
    list(model.parameters())  # values are computed here
    return model


def strategy_of(name: str) -> Any:
    """The strategy of a name, with the options of this benchmark."""
    from lockstep.strategies import HSDP

    return HSDP(shard_size=2) if name == "hsdp" else name


def sum_in_pieces(tensor: Any) -> float:
    """The sum in fp64, without a copy of the whole tensor in fp64."""
    import torch

    pieces = tensor.reshape(-1).split(ELEMENTS_OF_A_PIECE)
    return sum(float(piece.sum(dtype=torch.float64)) for piece in pieces)


def measure(
    strategy: str, case: str, num_blocks: int, folder: str, small_folder: str
) -> dict[str, float]:
    """What one rank needs until its parameters have values."""
    import torch

    import lockstep

    torch.set_num_threads(1)
    with lockstep.init(strategy_of(strategy), seed=0) as world:
        build_and_fill(world, case, NUM_BLOCKS_OF_WARM_UP, WIDTH_OF_WARM_UP, small_folder)
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        before = status("VmRSS")
        begin = time.perf_counter()
        model = build_and_fill(world, case, num_blocks, WIDTH, folder)
        parameters = [p for p in model.parameters() if not p.is_meta]
        locals_ = [
            p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in parameters
        ]
        peak = status("VmHWM") - before
        return {
            "seconds": time.perf_counter() - begin,
            "peak": peak,
            "held": sum(local.nbytes for local in locals_),
            "sum": world.sum(sum(sum_in_pieces(local) for local in locals_)),
        }


def write_folder(folder: str, num_blocks: int, width: int) -> None:
    """Writes the folder that is read, some blocks a file, so that the model is in memory once."""
    import torch

    import lockstep

    torch.manual_seed(1)
    model = make_model(num_blocks, width)
    lockstep.save_weights(model, f"{folder}/model.safetensors", shard_size="500MB")


def main(arguments: argparse.Namespace) -> None:
    """Runs every case and prints a line for each."""
    import lockstep

    block_bytes = 8 * WIDTH * WIDTH * 4
    num_blocks = round(arguments.gigabytes * 1e9 / block_bytes)
    results: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        tempfile.TemporaryDirectory(dir=arguments.folder) as small_folder,
    ):
        lockstep.launch(write_folder, (folder, num_blocks, WIDTH), nproc=1)
        of_warm_up = (small_folder, NUM_BLOCKS_OF_WARM_UP, WIDTH_OF_WARM_UP)
        lockstep.launch(write_folder, of_warm_up, nproc=1)
        for strategy, nproc in STRATEGIES:
            for case in arguments.cases.split(","):
                options = (strategy, case, num_blocks, folder, small_folder)
                ranks = lockstep.launch(measure, options, nproc=nproc)
                result = {"strategy": strategy, "nproc": nproc, "case": case, "ranks": ranks}
                results.append(result)
                held = max(rank["held"] for rank in ranks) / 1e6
                peaks = ", ".join(f"{rank['peak'] / 1e6:.0f}" for rank in ranks)
                seconds = max(rank["seconds"] for rank in ranks)
                print(
                    f"{strategy:8} {nproc} ranks  {case:10} peak {peaks} MB; a rank keeps "
                    f"{held:.0f} MB, a unit has {block_bytes / 1e6:.0f} MB; {seconds:.1f} s",
                    flush=True,
                )
    if arguments.out:
        report = {"block_bytes": block_bytes, "num_blocks": num_blocks, "results": results}
        Path(arguments.out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--folder", default=None, help="for the weights; default: as tempfile")
    parser.add_argument("--out", default=None)
    main(parser.parse_args())
