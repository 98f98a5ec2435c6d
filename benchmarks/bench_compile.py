"""`torch.compile` in each of its ways, under each strategy and precision, against plain torch.

Two processes (one for `single` and `dp`) train a small model of repeated blocks for a few steps:
not compiled, and compiled in each of five ways. Each step is followed by a forward pass without
gradients. What is compared:

- the weights in the end with those of the training that is not compiled;
- compilations that have begun after the third step (there should be none);
- graph breaks with those of the same model in plain torch: `torch.autocast` around the call,
  `DistributedDataParallel`, `fully_shard` of each block and of the model, in half precision by its
  `MixedPrecisionPolicy`.

    python benchmarks/bench_compile.py [--backend inductor] [--strategy ddp] [--precision bf16]
        [--out benchmarks/results/compile.json]
"""

from __future__ import annotations

import argparse
import io
import json
import os
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch._dynamo
import torch._dynamo.callback
import torch._dynamo.utils
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

STRATEGIES = ("single", "ddp", "fsdp", "dp")
PRECISIONS = ("fp32", "bf16", "fp16")
WAYS = ("before", "after", "in place before", "in place after", "block by block")
NOT_COMPILED = "not compiled"

STEPS = 6
WARM_STEPS = 3
"""Steps after which nothing may be compiled any more."""
BATCH = 16
WIDTH = 32
CLASSES = 4

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 4e-3}
"""The largest difference of a weight, as a share of the tensor's largest weight."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS * BATCH, WIDTH, generator=generator)
    y = torch.randint(CLASSES, (STEPS * BATCH,), generator=generator)
    return x, y


def compiled_before(model: nn.Module, way: str, backend: str) -> nn.Module:
    """The model as it is given to `world.prepare`, DDP or `fully_shard`."""
    if way == "before":
        return torch.compile(model, backend=backend)
    if way == "in place before":
        model.compile(backend=backend)
    if way == "block by block":
        for block in model.blocks:
            block.compile(backend=backend)
    return model


def compiled_after(model: nn.Module, way: str, backend: str) -> nn.Module:
    """What is called in the training loop."""
    if way == "after":
        return torch.compile(model, backend=backend)
    if way == "in place after":
        model.compile(backend=backend)
    return model


class Counts:
    """What torch's compiler does from now on; to be closed."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.begun = 0
        """Compilations that have begun."""
        self.begun_when_warm = 0
        torch._dynamo.callback.callback_handler.register_start_callback(self._count)

    def _count(self, *_: Any) -> None:
        self.begun += 1

    def after_step(self, number: int) -> None:
        if number == WARM_STEPS:
            self.begun_when_warm = self.begun

    def close(self) -> dict[str, Any]:
        torch._dynamo.callback.callback_handler.remove_start_callback(self._count)
        counters = torch._dynamo.utils.counters
        return {
            "graphs": int(counters["stats"]["unique_graphs"]),
            "late": self.begun - self.begun_when_warm,
            "breaks": sum(counters["graph_break"].values()),
            "reasons": {str(k)[:300]: v for k, v in counters["graph_break"].items()},
        }


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters under plain names, whole where they are sharded."""
    whole = {}
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        plain = name.replace("_orig_mod.", "").removeprefix("module.")
        whole[plain] = value.detach().clone()
    return whole


def with_lockstep(strategy: str, precision: str, way: str, backend: str) -> dict[str, Any]:
    """One training with Lockstep, in a run that is open."""
    import lockstep

    with lockstep.init(strategy, precision=precision, seed=0) as world:
        counts = Counts()
        torch.manual_seed(3)
        model = compiled_before(Net(), way, backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        call = compiled_after(model, way, backend)
        loader = world.loader(torch.utils.data.TensorDataset(*samples()), BATCH)
        for number, (x, y) in enumerate(loader, 1):
            world.backward(F.cross_entropy(call(x), y))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                call(x)
            counts.after_step(number)
        return {**counts.close(), "weights": whole_weights(model)}


def with_plain_torch(strategy: str, precision: str, way: str, backend: str) -> dict[str, Any]:
    """One training with plain torch, where the process group is open."""
    counts = Counts()
    torch.manual_seed(3)
    model = compiled_before(Net(), way, backend)
    if strategy == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        dtype = DTYPES.get(precision)
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=None if dtype is None else torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    if strategy == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = compiled_after(model, way, backend)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    rank, size = dist.get_rank(), dist.get_world_size()
    x_all, y_all = samples()
    batches = zip(x_all.split(BATCH), y_all.split(BATCH), strict=True)
    for number, (x_batch, y_batch) in enumerate(batches, 1):
        x = x_batch.chunk(size)[rank]
        y = y_batch.chunk(size)[rank]

        def lower() -> Any:
            dtype = DTYPES.get(precision)
            if dtype is None or strategy == "fsdp":
                return nullcontext()
            return torch.autocast("cpu", dtype)

        with lower():
            output = call(x)
        scaler.scale(F.cross_entropy(output.float(), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with torch.no_grad(), lower():
            call(x)
        counts.after_step(number)
    return {**counts.close(), "weights": whole_weights(model)}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest one of a weight, as a share of the tensor's largest weight."""
    assert one.keys() == other.keys()
    shares = [((other[n] - t).abs().max() / t.abs().max()).item() for n, t in one.items()]
    return max(shares)


def compare(
    strategy: str, precision: str, ways: Sequence[str] = WAYS, backend: str = "inductor"
) -> list[dict[str, Any]]:
    """All ways of compiling, with Lockstep and with plain torch, on this rank.

    Returns:
        A row for each way: what the compiler did (`graphs`, `late`, `breaks`), what it did with
        plain torch (`plain`; None: torch has nothing of the kind on this machine), and how far the
        weights are from those of the training that is not compiled (`difference`).
    """
    rows = without_plain_torch(strategy, precision, ways, backend)
    if strategy == "dp":  # torch's DataParallel needs GPUs
        return rows
    dist.init_process_group("gloo")
    try:
        for row in rows:
            found = with_plain_torch(strategy, precision, row["way"], backend)
            row["plain"] = {name: found[name] for name in ("graphs", "late", "breaks", "reasons")}
    finally:
        dist.destroy_process_group()
    return rows


def without_plain_torch(
    strategy: str, precision: str, ways: Sequence[str], backend: str
) -> list[dict[str, Any]]:
    """The rows of `compare`, not compared with plain torch yet."""
    warnings.simplefilter("ignore")  # torch's, of its compiler
    reference = with_lockstep(strategy, precision, NOT_COMPILED, backend)["weights"]
    rows = []
    for way in ways:
        row: dict[str, Any] = {"strategy": strategy, "precision": precision, "way": way}
        row |= with_lockstep(strategy, precision, way, backend)
        row["difference"] = difference(reference, row.pop("weights"))
        row["plain"] = None
        rows.append(row)
    return rows


def run_cell(strategy: str, precision: str, ways: Sequence[str], backend: str) -> list[Any]:
    """What `lockstep.launch` runs on each rank."""
    torch.set_num_threads(1)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # the blocks of choices
        return compare(strategy, precision, ways, backend)


def print_row(row: dict[str, Any]) -> None:
    fits = row["difference"] <= TOLERANCE[row["precision"]]
    print(
        f"{row['strategy']:<8}{row['precision']:<6}{row['way']:<16}"
        f"{row['graphs']:>8}{row['late']:>15}{_breaks(row):>16}"
        f"{row['difference']:>14.1e}{'' if fits else '  NOT AS UNCOMPILED'}",
        flush=True,
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as the table of docs/compile.md: one line a strategy and way."""
    lines = [
        "| strategy | way | graphs | late | breaks | fp32 | bf16 | fp16 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for strategy in STRATEGIES:
        for way in WAYS:
            found = [r for r in rows if (r["strategy"], r["way"]) == (strategy, way)]
            if not found:
                continue
            apart = {
                r["precision"]: f"{r['difference']:.0e}" if r["difference"] else "0" for r in found
            }
            cells = [
                f"`{strategy}`",
                way,
                _all_of([str(row["graphs"]) for row in found]),
                _all_of([str(row["late"]) for row in found]),
                _all_of([_breaks(row) for row in found]),
                *[apart.get(precision, "") for precision in PRECISIONS],
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _all_of(values: Sequence[str]) -> str:
    """The value of all precisions, or each, where they differ."""
    return " / ".join(dict.fromkeys(values))


def _breaks(row: dict[str, Any]) -> str:
    return str(row["breaks"]) + ("" if row["plain"] is None else f" ({row['plain']['breaks']})")


def main() -> None:
    """Runs the matrix and prints a table."""
    import lockstep

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--strategy", choices=STRATEGIES, action="append")
    parser.add_argument("--precision", choices=PRECISIONS, action="append")
    parser.add_argument("--way", choices=WAYS, action="append")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="prints the table of such a file instead")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.table:
        print(table(json.loads(options.table.read_text())["rows"]))
        return
    print(
        f"{'':<30}{'graphs':>8}{'after step 3':>15}{'breaks (plain)':>16}{'difference':>14}",
        flush=True,
    )
    for strategy in options.strategy or STRATEGIES:
        for precision in options.precision or PRECISIONS:
            cell = (strategy, precision, options.way or WAYS, options.backend)
            nproc = 1 if strategy in ("single", "dp") else 2
            for row in lockstep.launch(run_cell, cell, nproc=nproc)[0]:
                print_row(row)
                for found in (row, row["plain"] or {}):
                    found.pop("reasons", None)  # pages of text, with paths of this machine
                rows.append(row)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        found = {"torch": torch.__version__, "backend": options.backend, "rows": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
