"""Time to the same validation loss over a slow network: DDP, compressed gradients, and DiLoCo.

Two machines with one rank each, made as in bench_network.py (it takes root), train a small GPT on
the characters of this project's pages. What a method computes does not depend on the link. So the
loss against the step is found once for each method and seed, on an unshaped cable, and seconds a
step are found apart, on each link, over whole rounds of DiLoCo. The time to the target is their
product; two methods are trained to the target on the slowest link as well, to check it. The target
is the median loss over seeds that DDP reaches in `--steps`.

    python benchmarks/bench_slow_network.py [--seeds 5] [--out FILE] [--picture FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench_network import on_two_machines

HERE = Path(__file__).resolve()
PAGES = HERE.parent.parent / "docs"
LINKS = {"unshaped": None, "1 Gb/s": 1_000, "100 Mb/s": 100}
SLOWEST = "100 Mb/s"
WIDTH, TOKENS, BATCH, LEARNING_RATE, WARM_UP = 64, 32, 16, 4e-3, 50
POWERSGD_START = 20
METHODS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp bf16": {"compress": "bf16"},
    "ddp int8": {"compress": "int8"},
    "ddp powersgd": {"compress": "powersgd", "powersgd_start": POWERSGD_START},
    "diloco every=20": {"every": 20},
    "diloco every=50": {"every": 50},
    "diloco every=100": {"every": 100},
    "diloco every=50 int8": {"every": 50, "compress": "int8"},
    "diloco every=50 int4": {"every": 50, "compress": "int4"},
    "diloco every=50, 4 fragments, delay 1": {"every": 50, "fragments": 4, "delay": 1},
}
NO_NETWORK = "no network"
"""The limit: DDP's steps at the pace of replicas that never meet."""
CHECKED = "ddp int8", "diloco every=50"
PALETTE = "#57606a", "#b8732b", "#8250df", "#cf222e", "#3572b0", "#3b8a43"


def options_of(method: str, timed: bool = False) -> Any:
    from lockstep.strategies import DDP, DiLoCo

    if method == NO_NETWORK:
        return DiLoCo(every=1_000_000)
    options = METHODS[method]
    if timed and "powersgd_start" in options:
        options = {**options, "powersgd_start": 0}
    return DiLoCo(replicas=2, **options) if method.startswith("diloco") else DDP(**options)


def text() -> tuple[Any, Any, int]:
    """Blocks of characters to train on, others to validate with, and the number of characters.

    Every tenth stretch of 40 blocks is for validation, the first 128 of these blocks are used.
    """
    import torch

    pages = [page for page in sorted(PAGES.glob("*.md")) if not page.name.endswith(".zh-CN.md")]
    characters = "".join(page.read_text(encoding="utf-8") for page in pages)
    known = {each: number for number, each in enumerate(sorted(set(characters)))}
    codes = torch.tensor([known[each] for each in characters])
    blocks = codes[: len(codes) // (TOKENS + 1) * (TOKENS + 1)].view(-1, TOKENS + 1)
    validation = torch.arange(len(blocks)) // 40 % 10 == 9
    return blocks[~validation], blocks[validation][:128], len(known)


def gpt(characters: int) -> Any:
    """Four blocks of that width."""
    import torch
    from torch import nn

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(characters, WIDTH)
            self.position = nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
            layer = nn.TransformerEncoderLayer(
                WIDTH,
                4,
                4 * WIDTH,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))
            mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
            self.register_buffer("mask", mask, persistent=False)

        def forward(self, x: Any) -> Any:
            x = self.embed(x) + self.position
            return self.head(self.blocks(x, mask=self.mask, is_causal=True))

    return GPT()


class Training(NamedTuple):
    step: Callable[[], None]
    validate: Callable[[], float]
    parameters: int


@contextlib.contextmanager
def training(options: Any, seed: int) -> Iterator[Training]:
    """A run of its own in the processes that are there."""
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import lockstep

    torch.set_num_threads(1)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        lockstep.init(options, seed=seed, device="cpu", measure_link=False) as world,
    ):
        trained, validated, characters = text()
        model = gpt(characters)
        parameters = sum(each.numel() for each in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, 1.0, WARM_UP)
        data = DataLoader(TensorDataset(trained), batch_size=BATCH, shuffle=True, drop_last=True)
        rest = DataLoader(TensorDataset(validated), batch_size=64)
        model, optimizer, schedule, data, rest = world.prepare(
            model, optimizer, schedule, data, rest
        )

        def loss_of(blocks: Any, reduction: str = "mean") -> Any:
            out = model(blocks[:, :-1])
            return F.cross_entropy(out.flatten(0, 1), blocks[:, 1:].flatten(), reduction=reduction)

        def steps() -> Iterator[None]:
            model.train()
            for _ in world.epochs(1_000):
                for (blocks,) in data:
                    world.backward(loss_of(blocks))
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                    yield

        @torch.no_grad()
        def validate() -> float:
            model.eval()
            total = sum(float(loss_of(blocks, "sum")) for (blocks,) in rest)
            model.train()
            return float(world.sum(total)) / validated[:, 1:].numel()

        with contextlib.closing(steps()) as stream:
            yield Training(lambda: next(stream), validate, parameters)


def curve(method: str, seed: int, least: int, most: int, target: float) -> dict[str, Any]:
    """Losses after steps, until the target and `least` steps are reached, and seconds without
    validation."""
    options = METHODS[method]
    every = 20 if "fragments" in options else options.get("every", 20)
    found: dict[str, Any] = {"steps": [], "losses": [], "seconds": 0.0}
    with training(options_of(method), seed) as run:
        for number in range(1, most + 1):
            begin = time.perf_counter()
            run.step()
            found["seconds"] += time.perf_counter() - begin
            if number % every == 0:
                found["steps"].append(number)
                found["losses"].append(run.validate())
                if number >= least and min(found["losses"]) <= target:
                    break
    return found


def pace(method: str, blocks: int) -> dict[str, Any]:
    """Seconds and bytes of each step, by block: a round of DiLoCo, or ten steps."""
    import torch.distributed as dist

    sent = Path("/sys/class/net/lan/statistics/tx_bytes")
    found: dict[str, Any] = {"seconds": [], "bytes": []}
    steps = METHODS.get(method, {}).get("every", 10 if method in METHODS else 50)
    with training(options_of(method, timed=True), 0) as run:
        found["parameters"] = run.parameters
        for turn in range(blocks + 1):
            dist.barrier()
            begin, before = time.perf_counter(), int(sent.read_text())
            for _ in range(steps):
                run.step()
            dist.barrier()
            if turn:  # the first builds buckets
                found["seconds"].append((time.perf_counter() - begin) / steps)
                found["bytes"].append((int(sent.read_text()) - before) / steps)
    return found


def worker(part: str, *arguments: str) -> None:
    """One part in each of the processes; what it has found goes to the last argument."""
    *values, out = arguments
    if part == "pace":
        found = {method: pace(method, int(values[0])) for method in [*METHODS, NO_NETWORK]}
    else:
        seed, least, most, target, *methods = values
        found = {
            method: curve(method, int(seed), int(least), int(most), float(target))
            for method in methods
        }
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found))


def train(mbits: int | None, seed: int, least: int, most: int, target: float, *methods: str) -> Any:
    numbers = (str(each) for each in (seed, least, most, target))
    return on_two_machines(mbits, 1, HERE, "--worker", "train", *numbers, *methods)


def reached(made: dict[str, Any], target: float) -> int | None:
    """The first step after which the loss is no more than the target."""
    pairs = zip(made["steps"], made["losses"], strict=True)
    return next((step for step, loss in pairs if loss <= target), None)


def seconds_until(step: float, method: str, paces: dict[str, Any]) -> float:
    """By the medians of a step; PowerSGD's first steps are DDP's."""
    of = {each: median(found["seconds"]) for each, found in paces.items()}
    first = min(step, POWERSGD_START) if "powersgd" in method else 0
    return first * of["ddp"] + (step - first) * of[method]


def table(results: dict[str, Any]) -> list[str]:
    """Markdown: what each method reaches, and when on each link, beside DDP."""
    target, steps, links = results["target"], results["steps"], results["links"]
    never = 10**9
    counts = {
        method: [reached(each, target) or never for each in made]
        for method, made in results["curves"].items()
    }
    heads = ["", f"loss, step {steps}", f"steps to {target:.3f}", *links, "KB a step"]
    rows = [heads, ["---"] * len(heads)]
    base = median(counts["ddp"])
    for method in [*METHODS, NO_NETWORK]:
        own = counts["ddp" if method == NO_NETWORK else method]
        row = [method, "", ""]
        if method in METHODS:
            made = results["curves"][method]
            losses = [dict(zip(c["steps"], c["losses"], strict=True))[steps] for c in made]
            row[1] = f"{median(losses):.3f} ({min(losses):.3f}-{max(losses):.3f})"
            row[2] = f"{median(own):.0f} ({min(own)}-{max(own)})".replace(str(never), "never")
        for paces in links.values():
            took = seconds_until(median(own), method, paces)
            times = seconds_until(base, "ddp", paces) / took
            row.append(f"{took:.1f} s, {times:.1f}" if median(own) < never else "never")
        row.append(f"{median(links[SLOWEST][method]['bytes']) / 1e3:.0f}")
        rows.append(row)
    return ["| " + " | ".join(row) + " |" for row in rows]


def paces_of(results: dict[str, Any]) -> list[str]:
    """Markdown: milliseconds a step, the median of the blocks and their range."""
    links = results["links"]
    rows = [["ms a step", *links], ["---"] * (1 + len(links))]
    for method in [*METHODS, NO_NETWORK]:
        row = [method]
        for paces in links.values():
            found = [1e3 * each for each in paces[method]["seconds"]]
            row.append(f"{median(found):.1f} ({min(found):.1f}-{max(found):.1f})")
        rows.append(row)
    return ["| " + " | ".join(row) + " |" for row in rows]


def checked(results: dict[str, Any]) -> list[str]:
    """Whole runs on the slowest link beside what the product says of as many steps."""
    lines = []
    for method, found in results["check"].items():
        steps = found["steps"][-1]
        said = seconds_until(steps, method, results["links"][SLOWEST])
        took = found["seconds"]
        said = f"{said:.1f} s by the product ({said / took - 1:+.0%})"
        lines.append(f"{method}: {steps} steps took {took:.1f} s; {said}")
    return lines


def picture(results: dict[str, Any]) -> str:
    """An SVG: the median loss over seeds against seconds on the slowest link.

    A seed that has ended at the target stays there.
    """
    shown = ["ddp", "ddp bf16", "ddp int8", "ddp powersgd", "diloco every=50"]
    shown.append("diloco every=50, 4 fragments, delay 1")
    curves = {}
    for method in shown:
        made = results["curves"][method]
        steps = max((each["steps"] for each in made), key=len)
        curves[method] = [
            (
                seconds_until(step, method, results["links"][SLOWEST]),
                median(each["losses"][min(i, len(each["losses"]) - 1)] for each in made),
            )
            for i, step in enumerate(steps)
        ]
    top = results["target"] + 0.8  # what comes before is steep and much the same
    curves = {m: [each for each in points if each[1] <= top] for m, points in curves.items()}
    times = [x for points in curves.values() for x, _ in points]
    low, high = min(times), max(times)
    bottom = min(y for points in curves.values() for _, y in points)

    def at(x: float, y: float) -> str:
        across = math.log(x / low) / math.log(high / low)
        return f"{60 + 410 * across:.1f} {270 - 240 * (y - bottom) / (top - bottom):.1f}"

    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 330" role="img" '
        'aria-label="Validation loss against time at 100 Mb/s">',
        "<style>svg{background:#fff}text{font:12px system-ui,sans-serif;fill:#1b1f24}"
        "polyline{fill:none;stroke-width:2}.g{stroke:#d0d7de}</style>",
    ]
    ticks = [n * 10**e for e in range(-2, 5) for n in (1, 2, 5) if low <= n * 10**e <= high]
    for tick in ticks:
        x = at(tick, 0).split()[0]
        lines.append(f'<line class="g" x1="{x}" x2="{x}" y1="30" y2="270"/>')
        lines.append(f'<text x="{x}" y="287" text-anchor="middle">{tick:g}</text>')
    for tenth in range(math.ceil(bottom * 5), math.floor(top * 5) + 1):
        y = at(low, tenth / 5).split()[1]
        lines.append(f'<line class="g" x1="60" x2="470" y1="{y}" y2="{y}"/>')
        lines.append(
            f'<text x="52" y="{float(y) + 4:.1f}" text-anchor="end">{tenth / 5:.1f}</text>'
        )
    y = at(low, results["target"]).split()[1]
    lines.append(
        f'<line x1="60" x2="470" y1="{y}" y2="{y}" stroke="#1b1f24" stroke-dasharray="5 4"/>'
    )
    lines.append(f'<text x="64" y="{float(y) - 5:.1f}">target {results["target"]:.3f}</text>')
    for number, (method, points) in enumerate(curves.items()):
        path = ", ".join(at(*point) for point in points)
        lines.append(f'<polyline stroke="{PALETTE[number]}" points="{path}"/>')
        y = 44 + 18 * number
        line = f'<line x1="485" x2="505" y1="{y}" y2="{y}" stroke-width="3"'
        lines.append(f'{line} stroke="{PALETTE[number]}"/>')
        lines.append(f'<text x="511" y="{y + 4}">{method}</text>')
    lines.append('<text x="265" y="315" text-anchor="middle">seconds at 100 Mb/s</text>')
    lines.append('<text x="60" y="18">validation loss (median of seeds)</text></svg>')
    return "\n".join(lines) + "\n"


def curves_of(seeds: int, steps: int) -> dict[str, Any]:
    """Curves of each method by seed, and the target, on an unshaped cable."""
    made = [train(None, seed, steps, steps * 6 // 5, 0.0, "ddp")["ddp"] for seed in range(seeds)]
    target = median(dict(zip(c["steps"], c["losses"], strict=True))[steps] for c in made)
    others = [method for method in METHODS if method != "ddp"]
    found = [train(None, seed, steps, 2 * steps, target, *others) for seed in range(seeds)]
    curves = {"ddp": made} | {method: [each[method] for each in found] for method in others}
    return {"steps": steps, "target": target, "curves": curves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500, help="a multiple of 100")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--parts", nargs="*", default=["curves", "pace", "check"])
    parser.add_argument("--out", type=Path, help="what it holds of other parts is kept")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    import torch

    out = options.out
    results: dict[str, Any] = json.loads(out.read_text()) if out and out.exists() else {}
    results["machine"] = f"{platform.machine()}, {os.cpu_count()} cores; torch {torch.__version__}"
    for part in options.parts:
        if part == "curves":
            results |= curves_of(options.seeds, options.steps)
        elif part == "pace":
            pace_on = ["pace", str(options.blocks)]
            results["links"] = {
                name: on_two_machines(mbits, 1, HERE, "--worker", *pace_on)
                for name, mbits in LINKS.items()
            }
        else:
            limits = 0, 0, 2 * results["steps"], results["target"]
            results["check"] = train(LINKS[SLOWEST], *limits, *CHECKED)
        results.setdefault("load", {})[part] = os.getloadavg()[0]
        if out:
            out.write_text(json.dumps(results) + "\n")
    if not {"curves", "links", "check"} <= results.keys():
        return  # the table needs all parts
    lines = [f"{results['machine']}; load {results['load']}", ""]
    lines += [*table(results), "", *paces_of(results), "", *checked(results)]
    print("\n".join(lines))
    if options.picture:
        options.picture.write_text(picture(results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        main()
