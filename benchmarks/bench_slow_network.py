"""Time to the same validation loss over a slow network: DDP, compressed gradients, and DiLoCo.

Two machines with one rank each, made as in bench_network.py (it takes root), train a GPT of ten
million parameters (`gpt-small`: of 0.2 million) on the characters of this project's pages, or
ResNet-18 on scikit-learn's digits at 28 px, turned, moved and with noise. What a method computes
does not depend on the link. So the loss against the step is found once for each method and seed,
on an unshaped cable, and seconds a step are found apart, on each link, over whole rounds of DiLoCo.
The time to the target is their product; two methods are trained to the target on the slowest link
as well, to check it. The target is the median loss over seeds that DDP reaches in `--steps`. With
`--out` a run that was broken off goes on with the next curve, also of methods that are new, and the
next link.

    python benchmarks/bench_slow_network.py PROBLEM [--seeds 5] [--out FILE] [--picture FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median, median_high
from typing import Any, NamedTuple

from bench_network import on_two_machines

HERE = Path(__file__).resolve()
PAGES = HERE.parent.parent / "docs"
LINKS = {"unshaped": None, "1 Gb/s": 1_000, "100 Mb/s": 100}
SLOWEST = "100 Mb/s"
TOKENS = 32
POWERSGD_START = 20
LOCAL_SGD = {"outer_lr": 1.0, "outer_momentum": 0.0}
STREAMING = {"every": 50, "fragments": 4, "delay": 1}
METHODS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp bf16": {"compress": "bf16"},
    "ddp int8": {"compress": "int8"},
    "ddp powersgd": {"compress": "powersgd", "powersgd_start": POWERSGD_START},
    "diloco every=20": {"every": 20},
    "diloco every=50": {"every": 50},
    "diloco every=50, int8": {"every": 50, "compress": "int8"},
    "diloco every=50, int4": {"every": 50, "compress": "int4"},
    "diloco every=100": {"every": 100},
    "diloco every=50, 4 fragments, delay 1": STREAMING,
    "diloco every=50, 4 fragments, delay 1, int8": {**STREAMING, "compress": "int8"},
    "diloco every=50, 4 fragments, delay 1, int4": {**STREAMING, "compress": "int4"},
    "local SGD every=20": {"every": 20, **LOCAL_SGD},
    "local SGD every=50": {"every": 50, **LOCAL_SGD},
    "local SGD every=50, int8": {"every": 50, "compress": "int8", **LOCAL_SGD},
}
TWO_RANKS = {"ddp, 2 ranks a machine": None, "the same, each rank by itself": "gloo"}
"""By the backend: the ranks of a machine send each gradient once, through shared memory, or not.
They compute what `ddp` computes, on four processes."""
AIMS = ("diloco", "1 Gb/s", 3.0), ("diloco", SLOWEST, 15.0), ("ddp int8", SLOWEST, 2.5)
"""Methods, link, and how many times as fast as DDP to the target."""
NEVER = 10**9
"""Steps, where a method does not come to the target."""
NO_NETWORK = "no network"
"""The limit: DDP's steps at the pace of replicas that never meet."""
CHECKED = "ddp int8", "local SGD every=50"
PALETTE = "#57606a", "#b8732b", "#8250df", "#cf222e", "#3572b0", "#3b8a43"


def options_of(method: str, timed: bool = False) -> Any:
    from lockstep.strategies import DDP, DiLoCo

    if method == NO_NETWORK:
        return DiLoCo(every=1_000_000)
    options = METHODS.get(method, {})
    if timed and "powersgd_start" in options:
        options = {**options, "powersgd_start": 0}
    return DiLoCo(replicas=2, **options) if "every" in options else DDP(**options)


class Problem(NamedTuple):
    """Targets are classes, `(N,)` or `(N, T)`; outputs are scores, with one dimension more."""

    model: Any
    optimizer: Any
    trained: Any
    validated: Any
    batch: int
    warm_up: int = 20


def gpt(width: int, layers: int, rate: float, batch: int, warm_up: int) -> Problem:
    """Blocks of characters; every tenth stretch of 40 blocks is for validation, of which the first
    64 blocks are used."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    pages = [page for page in sorted(PAGES.glob("*.md")) if ".zh" not in page.name]
    characters = "".join(page.read_text(encoding="utf-8") for page in pages)
    known = {each: number for number, each in enumerate(sorted(set(characters)))}
    codes = torch.tensor([known[each] for each in characters])
    blocks = codes[: len(codes) // (TOKENS + 1) * (TOKENS + 1)].view(-1, TOKENS + 1)
    held = torch.arange(len(blocks)) // 40 % 10 == 9
    trained, validated = (
        TensorDataset(part[:, :-1], part[:, 1:]) for part in (blocks[~held], blocks[held][:64])
    )

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(len(known), width)
            self.position = nn.Parameter(0.02 * torch.randn(TOKENS, width))
            layer = nn.TransformerEncoderLayer(
                width,
                4,
                4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(known)))
            nn.init.normal_(self.embed.weight, std=0.02)
            for name, parameter in self.blocks.named_parameters():
                if parameter.dim() == 2:  # as in GPT-2; torch's layers are copies of one another
                    out = name.endswith(("out_proj.weight", "linear2.weight"))
                    nn.init.normal_(parameter, std=0.02 / ((2 * layers) ** 0.5 if out else 1))
            mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
            self.register_buffer("mask", mask, persistent=False)

        def forward(self, x: Any) -> Any:
            x = self.embed(x) + self.position
            return self.head(self.blocks(x, mask=self.mask, is_causal=True))

    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, fused=True)
    return Problem(model, optimizer, trained, validated, batch, warm_up)


def resnet18() -> Problem:
    """Four images of each digit to train on, and one of every sixth digit to validate with."""
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch.utils.data import TensorDataset

    sys.path.insert(0, str(HERE.parent.parent / "examples" / "fashion_mnist"))
    from resnet import ResNet18

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    held = torch.arange(len(images)) % 6 == 5
    generator = torch.Generator().manual_seed(1)

    def made(which: Any, copies: int) -> TensorDataset:
        small, y = images[which].repeat(copies, 1, 1, 1), labels[which].repeat(copies)
        draw = torch.rand(len(small), 3, generator=generator) * 2 - 1
        turn, move = 0.5 * draw[:, 0], 0.25 * draw[:, 1:]
        rotation = torch.stack([turn.cos(), -turn.sin(), turn.sin(), turn.cos()], 1)
        grid = F.affine_grid(
            torch.cat([rotation.view(-1, 2, 2), move[..., None]], 2),
            [len(small), 1, 28, 28],
            align_corners=False,
        )
        x = F.grid_sample(small, grid, align_corners=False)
        x = x + 0.3 * torch.randn(x.shape, generator=generator)
        return TensorDataset(x.expand(-1, 3, -1, -1).contiguous(), y)

    trained, validated = made(~held, 4), made(held, 1)
    model = ResNet18(classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    return Problem(model, optimizer, trained, validated, 16)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "gpt": partial(gpt, 320, 8, rate=5e-4, batch=4, warm_up=20),
    "gpt-small": partial(gpt, 64, 4, rate=4e-3, batch=16, warm_up=50),
    "resnet18": resnet18,
}


class Training(NamedTuple):
    step: Callable[[], None]
    validate: Callable[[], float]
    parameters: int


@contextlib.contextmanager
def training(
    problem: str,
    options: Any,
    seed: int,
    said: io.StringIO | None = None,
    backend: str | None = None,
) -> Iterator[Training]:
    """A run of its own in the processes that are there; what it says goes to `said`, which has it
    measure the link."""
    import torch
    import torch.nn.functional as F
    from torch.optim.swa_utils import update_bn
    from torch.utils.data import DataLoader

    import lockstep

    torch.set_num_threads(1)
    measure_link = said is not None
    said = said or io.StringIO()
    with (
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        lockstep.init(
            options,
            seed=seed,
            device="cpu",
            backend=backend,
            measure_link=measure_link,
            sync_batchnorm=False,
        ) as world,
    ):
        model, optimizer, trained, validated, batch, warm_up = PROBLEMS[problem]()
        parameters = sum(each.numel() for each in model.parameters())
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warm_up, 1.0, warm_up)
        data = DataLoader(trained, batch_size=batch, shuffle=True, drop_last=True)
        rest = DataLoader(validated, batch_size=64)
        model, optimizer, schedule, data, rest = world.prepare(
            model, optimizer, schedule, data, rest
        )

        def loss_of(x: Any, y: Any, reduction: str = "mean") -> Any:
            return F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction=reduction)

        def steps() -> Iterator[None]:
            model.train()
            for _ in world.epochs(1_000):
                for x, y in data:
                    world.backward(loss_of(x, y))
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                    yield

        @torch.no_grad()
        def validate() -> float:
            # Running statistics do not fit the shared weights of DiLoCo with momentum.
            update_bn(trained.tensors[0][:160].split(16), model)
            model.eval()
            total = sum(float(loss_of(x, y, "sum")) for x, y in rest)
            model.train()
            return float(world.sum(total)) / validated.tensors[1].numel()

        with contextlib.closing(steps()) as stream:
            yield Training(lambda: next(stream), validate, parameters)


def curve(
    problem: str, method: str, seed: int, least: int, most: int, target: float
) -> dict[str, Any]:
    """Losses after steps, until the target and `least` steps are reached, and seconds without
    validation."""
    options = METHODS[method]
    every = 20 if "fragments" in options else options.get("every", 20)
    found: dict[str, Any] = {"steps": [], "losses": [], "seconds": 0.0}
    with training(problem, options_of(method), seed) as run:
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


def pace(problem: str, method: str, blocks: int) -> dict[str, Any]:
    """Seconds and bytes of each step, by block: a round of DiLoCo, or four steps."""
    import torch.distributed as dist

    sent = Path("/sys/class/net/lan/statistics/tx_bytes")
    found: dict[str, Any] = {"seconds": [], "bytes": []}
    steps = METHODS.get(method, {}).get("every", 20 if method == NO_NETWORK else 4)
    options, backend = options_of(method, timed=True), TWO_RANKS.get(method)
    with training(problem, options, 0, backend=backend) as run:
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


def advice(problem: str) -> dict[str, float]:
    """How many times as fast as DDP a run of DDP says that each method would be on this link."""
    said = io.StringIO()
    with training(problem, options_of("ddp"), 0, said) as run:
        for _ in range(20):
            run.step()
    pattern = r"; ([^;:]+): \w+ numbers, about ([\d.]+) times as fast"
    return {method: float(times) for method, times in re.findall(pattern, said.getvalue())}


def worker(problem: str, part: str, *arguments: str) -> None:
    """One part in each of the processes; what it has found goes to the last argument."""
    *values, out = arguments
    found: dict[str, Any]
    if part == "pace":
        found = {method: pace(problem, method, int(values[0])) for method in values[1:]}
    elif part == "advice":
        found = advice(problem)
    else:
        seed, least, most, target, *methods = values
        found = {
            method: curve(problem, method, int(seed), int(least), int(most), float(target))
            for method in methods
        }
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found))


def reached(made: dict[str, Any], target: float) -> int | None:
    """The first step after which the loss is no more than the target."""
    pairs = zip(made["steps"], made["losses"], strict=True)
    return next((step for step, loss in pairs if loss <= target), None)


def seconds_until(step: float, method: str, paces: dict[str, Any]) -> float:
    """By the medians of a step; PowerSGD's first steps are DDP's."""
    of = {each: median(found["seconds"]) for each, found in paces.items()}
    first = min(step, POWERSGD_START) if "powersgd" in method else 0
    return first * of["ddp"] + (step - first) * of[method]


def steps_needed(results: dict[str, Any], method: str) -> list[int]:
    """Of each seed, until the target is reached."""
    made = results["curves"][method if method in METHODS else "ddp"]
    return [reached(each, results["target"]) or NEVER for each in made]


def losses_of(results: dict[str, Any], method: str) -> list[float]:
    """Of each seed, after the steps that give DDP's target."""
    curves = results["curves"][method]
    return [dict(zip(c["steps"], c["losses"], strict=True))[results["steps"]] for c in curves]


def times_as_fast(results: dict[str, Any], method: str, link: str) -> float:
    """As DDP, to the target, by the medians."""
    ddp, own = (median_high(steps_needed(results, each)) for each in ("ddp", method))
    paces = results["links"][link]
    return seconds_until(ddp, "ddp", paces) / seconds_until(own, method, paces)


def table(results: dict[str, Any]) -> list[str]:
    """Markdown: what each method reaches, and when on each link, beside DDP."""
    target, steps, links = results["target"], results["steps"], results["links"]
    heads = ["", f"loss, step {steps}", f"steps to {target:.3f}", *links, "KB a step"]
    rows = [heads, ["---"] * len(heads)]
    for method in [*METHODS, *TWO_RANKS, NO_NETWORK]:
        needed = steps_needed(results, method)
        low, middle, high = min(needed), median_high(needed), max(needed)
        row = [method, "", ""]
        if method in METHODS:
            losses = losses_of(results, method)
            row[1] = f"{median(losses):.3f} ({min(losses):.3f}-{max(losses):.3f})"
            row[2] = f"{middle:.0f} ({low}-{high})".replace(str(NEVER), "never")
        for link, paces in links.items():
            took, least, most = (seconds_until(n, method, paces) for n in (middle, low, high))
            between = f"{least:.1f}-{most:.1f}" if high < NEVER else f"{least:.1f}-never"
            text = f"{took:.1f} s ({between}), {times_as_fast(results, method, link):.1f}"
            row.append(text if middle < NEVER else "never")
        row.append(f"{median(links[SLOWEST][method]['bytes']) / 1e3:.0f}")
        rows.append(row)
    return ["| " + " | ".join(row) + " |" for row in rows]


def aims_of(results: dict[str, Any]) -> list[str]:
    """What was aimed at, beside what was found and what is possible at all."""
    lines = []
    for kind, link, wanted in AIMS:
        found = {m: times_as_fast(results, m, link) for m in METHODS if m.startswith(kind)}
        best = max(found, key=lambda method: found[method])
        limit = times_as_fast(results, NO_NETWORK, link)
        word = "met" if found[best] >= wanted else "missed"
        text = f"{kind} at {link}: {wanted} times as fast as ddp was aimed at, {word}: {best}"
        lines.append(f"{text}, {found[best]:.1f}; without any network {limit:.1f}")
    pairs = zip(losses_of(results, "ddp bf16"), losses_of(results, "ddp"), strict=True)
    ddp = losses_of(results, "ddp")
    apart = ", ".join(f"{bf16 - fp32:+.4f}" for bf16, fp32 in pairs)
    lines.append(f"loss of ddp bf16 less that of ddp, by seed: {apart}")
    lines.append(f"seeds of ddp differ by {max(ddp) - min(ddp):.4f}")
    return lines


def paces_of(results: dict[str, Any]) -> list[str]:
    """Markdown: milliseconds a step, the median of the blocks and their range."""
    links = results["links"]
    rows = [["ms a step", *links], ["---"] * (1 + len(links))]
    for method in [*METHODS, *TWO_RANKS, NO_NETWORK]:
        row = [method]
        for paces in links.values():
            found = [1e3 * each for each in paces[method]["seconds"]]
            row.append(f"{median(found):.1f} ({min(found):.1f}-{max(found):.1f})")
        rows.append(row)
    return ["| " + " | ".join(row) + " |" for row in rows]


def advised(results: dict[str, Any]) -> list[str]:
    """What runs of DDP said of each link, beside what was measured."""
    lines = []
    for name, said in results.get("advice", {}).items():
        took = {m: median(found["seconds"]) for m, found in results["links"][name].items()}
        for method, times in said.items():
            came = took["ddp"] / took[method if method in took else f"ddp {method}"]
            text = f"said {times:.1f} times as fast as ddp, measured {came:.2f}"
            lines.append(f"{name}, {method}: {text} ({times / came - 1:+.0%})")
    return lines


def checked(results: dict[str, Any]) -> list[str]:
    """Whole runs on the slowest link beside what the product says of as many steps."""
    lines = []
    for method, found in results.get("check", {}).items():
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
    shown = ["ddp", "ddp bf16", "ddp int8", "diloco every=20", "diloco every=50"]
    shown.append("local SGD every=50")
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


def find_curves(
    options: argparse.Namespace, results: dict[str, Any], methods: list[str], most: int
) -> None:
    """Adds the curves of the seeds that are missing."""
    curves, target = results["curves"], results.get("target", 0.0)
    for seed in range(options.seeds):
        for method in methods:
            if len(curves[method]) <= seed:
                found = run(options, None, "train", seed, results["steps"], most, target, method)
                curves[method].append(found[method])
                save(options, results, "curves")


def run(
    options: argparse.Namespace, mbits: int | None, part: str, *values: Any, ranks: int = 1
) -> Any:
    """The part's result, with so many ranks on each of two machines."""
    texts = [str(each) for each in values]
    return on_two_machines(mbits, ranks, HERE, "--worker", options.problem, part, *texts)


def save(options: argparse.Namespace, results: dict[str, Any], part: str) -> None:
    results.setdefault("load", {})[part] = os.getloadavg()[0]
    if options.out:
        options.out.write_text(json.dumps(results) + "\n")


def measure(options: argparse.Namespace, results: dict[str, Any]) -> None:
    steps = results.setdefault("steps", options.steps)
    curves = results.setdefault("curves", {})
    for method in METHODS:
        curves.setdefault(method, [])
    if "curves" in options.parts:
        tensors = PROBLEMS[options.problem]().trained.tensors
        data = hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest()
        if results.setdefault("data", data) != data:
            sys.exit(f"{options.out} has curves of other data; the GPT's are the pages in docs/")
        find_curves(options, results, ["ddp"], steps * 6 // 5)
        ends = [dict(zip(c["steps"], c["losses"], strict=True))[steps] for c in curves["ddp"]]
        results["target"] = median(ends)
        find_curves(options, results, [each for each in METHODS if each != "ddp"], 2 * steps)
    if "pace" in options.parts:
        for name, mbits in LINKS.items():
            if name in results.get("links", {}):
                continue
            alone = [*METHODS, NO_NETWORK]
            paces = run(options, mbits, "pace", options.blocks, *alone)
            paces |= run(options, mbits, "pace", options.blocks, *TWO_RANKS, ranks=2)
            results.setdefault("links", {})[name] = paces
            results.setdefault("advice", {})[name] = run(options, mbits, "advice")
            save(options, results, "pace")
    if "check" in options.parts:
        limits = 0, 0, 2 * steps, results["target"]
        results["check"] = run(options, LINKS[SLOWEST], "train", *limits, *CHECKED)
        save(options, results, "check")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problem", choices=PROBLEMS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="a multiple of 100")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--parts", nargs="*", default=["curves", "pace", "check"])
    parser.add_argument("--out", type=Path, help="what it holds of other parts is kept")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    import torch

    out = options.out
    results: dict[str, Any] = json.loads(out.read_text()) if out and out.exists() else {}
    results["machine"] = f"{platform.machine()}, {os.cpu_count()} cores; torch {torch.__version__}"
    measure(options, results)
    if not {"target", "links"} <= results.keys():
        return  # the table needs both
    lines = [f"{results['machine']}; load {results['load']}", ""]
    lines += [*table(results), "", *paces_of(results), ""]
    lines += [*aims_of(results), "", *advised(results), "", *checked(results)]
    print("\n".join(lines))
    if options.picture:
        options.picture.write_text(picture(results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        main()
