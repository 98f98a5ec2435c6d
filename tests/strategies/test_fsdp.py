"""Strategies fsdp and hsdp: the same numbers as one device, with a part of the model on each."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from problems import difference, mean_loss, mlp, tensors
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import TensorDataset

import lockstep
from lockstep import torch_compat
from lockstep.errors import SettingError, UsageError
from lockstep.strategies import DDP, FSDP, HSDP

pytestmark = pytest.mark.ranks

BATCH, STEPS = 16, 4
TOKENS, WIDTH, LENGTH, PAD = 11, 8, 5, -100
SHARES = {1: "1", 2: "1:2", 3: "1:2:1"}
MICRO = {(1, False): 6, (2, False): 3, (3, False): 2, (1, True): 6, (2, True): 4, (3, True): 3}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.sharpness = nn.Parameter(torch.tensor(WIDTH**-0.5))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).chunk(3, -1)
        x = x + (q @ k.transpose(1, 2) * self.sharpness).softmax(-1) @ v
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """With tied weights, a frozen parameter, and some that not all ranks can have a part of."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(1))
        self.logit_scale = nn.Parameter(torch.tensor(0.1))  # no dimension to cut
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) + self.place
        for block in [*self.blocks, *self.blocks][: 4 if self.twice else 2]:
            x = block(x)
        return self.head(x) * self.scale * self.logit_scale.exp()


class Residual(nn.Module):
    """Without biases before BatchNorm: their gradients are rounding alone, which Adam enlarges."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.norm(self.first(x))))


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    if name == "residual":
        blocks = nn.Sequential(Residual(), Residual())
        first, last = nn.Linear(6, 8, bias=False), nn.Linear(8, 4)
        return nn.Sequential(first, blocks, nn.BatchNorm1d(8), last).to(dtype)
    return Transformer(twice=name == "twice").to(dtype)


def data(name: str, samples: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    if name == "residual":
        return tensors(samples, dtype)
    generator = torch.Generator().manual_seed(11)
    x = torch.randint(TOKENS, (samples, LENGTH), generator=generator)
    y = torch.randint(TOKENS, (samples, LENGTH), generator=generator)
    return TensorDataset(x, y.where(torch.rand(y.shape, generator=generator) < 0.7, PAD))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], weighted: bool) -> Tensor:
    x, y = batch
    if y.dim() == 1:
        return F.cross_entropy(model(x), y)
    each = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
    if weighted:
        return each.sum() / (y != PAD).sum().clamp(min=1)
    return each.view(y.shape).mean()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers in whole; all ranks call it."""
    plain = getattr(model, "module", model)
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in plain.state_dict().items()
    }


def train(
    strategy: Any,
    kind: str = "transformer",
    *,
    samples: int = 54,
    micro: bool = False,
    clip: float | None = None,
    uneven: bool = False,
    weighted: bool = False,
    recompute: str = "",
    precision: str | None = None,
    steps: int = STEPS,
    optimizer_class: Any = torch.optim.SGD,
) -> dict[str, Tensor]:
    """What comes out must not depend on the strategy."""
    dtype = torch.float32 if precision else torch.float64
    norms = []
    with lockstep.init(strategy, seed=5, precision=precision) as world:
        model = build(kind, dtype)
        if recompute == "before":
            lockstep.checkpoint_activations(model, (Block, Residual))
        options = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
        optimizer = optimizer_class(model.parameters(), lr=0.05, **options)
        model, optimizer = world.prepare(model, optimizer)
        if recompute == "after":
            lockstep.checkpoint_activations(model, (Block, Residual))
        loader = world.loader(
            data(kind, samples, dtype),
            BATCH,
            shuffle=True,
            shares=SHARES[world.size] if uneven else None,
            micro_batch_size=MICRO[world.size, uneven] if micro else None,
            weight=(lambda batch: (batch[1] != PAD).sum()) if weighted else None,
        )
        assert loader.micro_batches == (3 if micro else 1)
        while world._run.step.number < steps:
            for batch in loader:
                world.backward(loss_of(model, batch, weighted))
                if clip is not None:
                    norms.append(world.clip_grad_norm_(model, clip))
                optimizer.step()
                optimizer.zero_grad()
                if world._run.step.number == steps:
                    break
        found = whole(model)
    kept = [norm for norm in norms if norm is not None]
    assert not any(isinstance(norm, DTensor) for norm in kept)
    return {**found, **({"norms": torch.stack(kept)} if kept else {})}


# Precisions, micro-batches, tails and clipping are in tests/parity/test_matrix.py.
CASES: dict[str, dict[str, Any]] = {
    "all together": {"kind": "residual", "samples": 54, "micro": True, "clip": 0.05},
    "shares": {"uneven": True, "kind": "residual"},
    "shares, micro-batches": {"uneven": True, "kind": "residual", "micro": True},
    "tokens": {"weighted": True, "uneven": True, "micro": True, "clip": 0.05},
    "blocks that run twice": {"kind": "twice", "micro": True},
    "recomputed": {"recompute": "before", "kind": "residual"},
    "Adam": {"optimizer_class": torch.optim.Adam, "micro": True},
}
OPTIONS: dict[str, Any] = {
    "kept whole": (FSDP(reshard_after_forward=False), {"micro": True, "kind": "residual"}),
    "shards add up": (FSDP(accumulate_shards=True), {"micro": True, "kind": "residual"}),
    "by name": (FSDP(blocks="blocks.1"), {"micro": True}),
    "hsdp on one machine": ("hsdp", {"micro": True}),
    "hsdp of one": (HSDP(shard_size=1), {"micro": True}),
    "kept whole, recomputed": (FSDP(reshard_after_forward=False), {"recompute": "after"}),
}
FINDS_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
if FINDS_UNUSED:
    OPTIONS["unused"] = FSDP(find_unused_parameters=True), {"micro": True}


def on_one() -> dict[str, Any]:
    return {
        "cases": {name: train("single", **case) for name, case in CASES.items()},
        "options": {name: train("single", **case) for name, (_, case) in OPTIONS.items()},
        "course": in_the_course_of_a_training("single"),
    }


def on_two() -> dict[str, Any]:
    """All that needs two ranks; starting them takes longer than most of it."""
    return {
        "cases": {name: train("fsdp", **case) for name, case in CASES.items()},
        "options": {name: train(strategy, **case) for name, (strategy, case) in OPTIONS.items()},
        "course": in_the_course_of_a_training("fsdp"),
        "sent": sent(),
        "refusals": refusals(),
        "half": half_precisions(),
        "overflow": {
            "ddp": overflow("ddp"),
            "autocast": overflow(FSDP(autocast=True)),
            "fsdp": overflow("fsdp"),
        },
        "groups": process_groups(),
        "whole parameters": whole_parameters(),
        "gates": gates(),
        "loaded": loaded(),
    }


def on_three() -> dict[str, Any]:
    """The cases in which the ranks' parts differ in size."""
    return {name: train("fsdp", **case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    [found] = run_ranks(on_one, 1)
    return found


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(on_two, 2)


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    return run_ranks(on_three, 3)


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_one_device(one, two, three, case):
    for found in [*(of_rank["cases"] for of_rank in two), *three]:
        assert difference(one["cases"][case], found[case]) < 1e-9


def test_the_cases_differ_from_each_other(one):
    by_kind: dict[str, list[dict[str, Tensor]]] = {}
    for name, case in CASES.items():
        weights = {key: v for key, v in one["cases"][name].items() if key != "norms"}
        by_kind.setdefault(case.get("kind", "transformer"), []).append(weights)
    for kind in ("transformer", "residual"):
        assert difference(by_kind[kind][0], by_kind[kind][-1]) > 1e-6


@pytest.mark.parametrize("option", OPTIONS)
def test_options_change_no_number(one, two, option):
    for of_rank in two:
        assert difference(one["options"][option], of_rank["options"][option]) < 1e-9


def in_the_course_of_a_training(strategy: str) -> dict[str, Any]:
    """What a loop may do between its steps; the numbers are those of one device."""
    found: dict[str, Any] = {}
    with lockstep.init(strategy, seed=5) as world:
        model = build("transformer")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        model, optimizer = world.prepare(model, optimizer)
        test = world.loader(data("transformer", 7), 3)

        def evaluate() -> tuple[float, int]:
            total = torch.zeros((), dtype=torch.float64)
            for batches, (x, _) in enumerate(test):  # noqa: B007
                total = total + model(x).square().sum()
            return float(world.sum(total)), batches

        with torch.inference_mode():
            found["before"] = evaluate()
        loader = world.loader(data("transformer", 32), 16, micro_batch_size=8 // world.size)
        for number, batch in enumerate(loader):
            world.backward(loss_of(model, batch, False))
            if number == 2:  # in the middle of the second global batch
                break
            optimizer.step()
            optimizer.zero_grad()
        for batch in loader:
            world.backward(loss_of(model, batch, False))
            norm = world.clip_grad_norm_(model, 0.1, float("inf"))
            found["norm"] = norm if norm is not None else found.get("norm")
            with torch.no_grad():  # what it gathers must not outlive the step
                found["between"] = evaluate()
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model, loader.dataset[:3], False)  # and never goes backward
        for batch in world.loader(data("transformer", 16), 16):
            loss_of(model, batch, False).backward()
            optimizer.step()
            model.zero_grad()
        with torch.no_grad():
            found["after"] = evaluate()
        found["weights"] = whole(model)
    return found


def test_passes_between_steps_and_batches_left_in_the_middle(one, two):
    expected = one["course"]
    for found in (of_rank["course"] for of_rank in two):
        assert difference(expected["weights"], found["weights"]) < 1e-9
        assert torch.allclose(expected["norm"], found["norm"], rtol=1e-9)
        for when in ("before", "between", "after"):
            assert found[when][0] == pytest.approx(expected[when][0], rel=1e-9), when
            assert found[when][1] == 2  # batches of a rank, empty ones among them


def sent() -> dict[str, list[int]]:
    """Gathers and averages of each micro-batch, by option."""
    counts: dict[str, list[int]] = {}
    options = {
        "default": {},
        "whole": {"reshard_after_forward": False},
        "shards": {"accumulate_shards": True},
    }
    for option, values in options.items():
        with lockstep.init(FSDP(**values)) as world:
            model = world.prepare(build("transformer"))
            counts[option] = []
            for batch in world.loader(data("transformer", 16), 16, micro_batch_size=4):
                with CommDebugMode() as seen:
                    world.backward(loss_of(model, batch, False))
                calls = {str(call): n for call, n in seen.get_comm_counts().items()}
                for name in ("gather", "reduce_scatter"):
                    counts[option].append(sum(n for call, n in calls.items() if name in call))
    return counts


def test_what_is_sent_in_micro_batches(two):
    for counts in (of_rank["sent"] for of_rank in two):
        # Two blocks and the rest: forward gathers three, backward two more.
        assert counts["default"] == [5, 0, 5, 3]
        assert counts["whole"] == [3, 0, 0, 3]
        assert counts["shards"] == [5, 3, 5, 3]


class Gates(nn.Module):
    """Uses the layer whose number it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 4)])

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.layers[number](x)


def gates() -> tuple[list[bool] | str, list[bool]]:
    """Which layers have a gradient: with the option, and without."""
    x, y = tensors(4, torch.float32)[:]
    used: list[bool] | str
    try:
        with lockstep.init(FSDP(find_unused_parameters=True)) as world:
            model = world.prepare(Gates())
            world.backward(F.cross_entropy(model(x, world.rank), y))
            used = [layer.weight.grad is not None for layer in model.layers]
    except SettingError as error:
        used = str(error)
    with lockstep.init(FSDP()) as world:
        model = world.prepare(Gates())
        world.backward(F.cross_entropy(model(x, 1), y))
        return used, [layer.weight.grad is not None for layer in model.layers]


def test_parameters_that_are_not_used(two):
    for used, has in (of_rank["gates"] for of_rank in two):
        if FINDS_UNUSED:
            assert used == [True, True, False]
        else:
            assert "or torch 2.13 or later" in used
        assert has == [False, True, False]


def loaded() -> tuple[float, float]:
    """Whole weights from a file, into shards; and a model in another memory format."""
    saved = build("transformer")
    with tempfile.TemporaryDirectory() as folder, lockstep.init("fsdp") as world:
        for p in saved.parameters():
            p.data += 1.0
        lockstep.save_weights(saved, f"{folder}/w.safetensors")
        model = world.prepare(build("transformer"))
        lockstep.load_weights(model, f"{folder}/w.safetensors")
        x, _ = data("transformer", 4)[:]
        same = float((model(x) - saved(x)).abs().max())
        torch.manual_seed(1)
        images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
        x = torch.randn(2, 3, 8, 8)
        expected = images(x).detach()
        found = world.prepare(images.to(memory_format=torch.channels_last))(x)
        return same, float((found - expected).abs().max())


def test_weights_and_memory_formats(two):
    for of_rank in two:
        assert max(of_rank["loaded"]) < 1e-6


class Odd(nn.Module):
    """With what `case` says; the forward pass is of no matter."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        if case == "scalar":
            self.temperature = nn.Parameter(torch.tensor(1.0))
        elif case == "dtypes":
            self.other = nn.Linear(4, 4).double()


def refusals() -> dict[str, str]:
    found: dict[str, str] = {}

    def attempt(name: str, work: Any) -> None:
        try:
            work()
        except (SettingError, UsageError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    attempt("offload", lambda: lockstep.init(FSDP(cpu_offload=True)))
    attempt("groups", lambda: lockstep.init(HSDP(shard_size=3)))
    attempt("no group", lambda: HSDP(shard_size=0))
    with lockstep.init("fsdp") as world:
        attempt("dtypes", lambda: world.prepare(Odd("dtypes")))
        with patch.object(torch_compat, "can_ignore_fsdp_parameters", return_value=False):
            attempt("scalar", lambda: world.prepare(Odd("scalar")))  # as with torch 2.6
        model = mlp()
        model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        attempt("twice", lambda: world.prepare(nn.Sequential(model)))
        model[0].extra = nn.Linear(2, 2)
        for batch in world.loader(tensors(16), 16):
            world.backward(mean_loss(model, batch))
            attempt("added", optimizer.step)
        stepped = mlp()
        adam = torch.optim.Adam(stepped.parameters())
        stepped(tensors()[:4][0]).sum().backward()
        adam.step()
        attempt("stepped", lambda: world.prepare(stepped, adam))
    attempt("closed", lambda: model(tensors()[:4][0]))
    return found


def test_what_cannot_be_sharded_is_refused(two):
    for found in (of_rank["refusals"] for of_rank in two):
        assert "the device is the CPU" in found["offload"]
        assert "2 ranks cannot be cut into groups of 3" in found["groups"]
        assert "SettingError" in found["no group"]
        assert "'temperature'" in found["scalar"]
        assert "shape (1,)" in found["scalar"]
        assert "torch.float64" in found["dtypes"]
        assert "sharded already" in found["twice"]
        assert "extra.weight" in found["added"]
        assert "after it has stepped" in found["stepped"]
        assert "after world.close()" in found["closed"]


def half_precisions() -> dict[str, dict[str, Tensor]]:
    return {
        f"{name} {precision}": train(strategy, "residual", precision=precision)
        for name, strategy in (("ddp", DDP()), ("fsdp", FSDP(autocast=True)))
        for precision in ("bf16", "fp16")
    }


def test_half_precisions_under_autocast_are_those_of_ddp(two):
    for found in (of_rank["half"] for of_rank in two):
        for precision in ("bf16", "fp16"):
            assert difference(found[f"ddp {precision}"], found[f"fsdp {precision}"]) < 1e-5


def overflow(strategy: Any) -> tuple[list[bool], list[float], dict[str, Tensor]]:
    """The third step has an infinite gradient, on the last rank alone."""
    skipped, scales = [], []
    with lockstep.init(strategy, precision="fp16", seed=1) as world:
        model = build("residual", torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer = world.prepare(model, optimizer)
        for number, batch in enumerate(world.loader(data("residual", 64, torch.float32), 16)):
            loss = mean_loss(model, batch)
            if number == 2 and world.rank == world.size - 1:
                loss = loss * float("inf")
            world.backward(loss)
            world.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(optimizer.skipped)
            scales.append(world._preparer.precision.scaler.get_scale())
        found = whole(model)
    return skipped, scales, found


def test_an_overflow_on_one_rank_skips_the_step_on_all(two):
    for of_rank in two:
        of_ddp = of_rank["overflow"]["ddp"]
        for way, tolerance in {"autocast": 1e-5, "fsdp": 0.02}.items():
            skipped, scales, weights = of_rank["overflow"][way]
            assert skipped == of_ddp[0]
            assert skipped[2]
            assert not all(skipped)
            assert scales == of_ddp[1]
            assert difference(of_ddp[2], weights) < tolerance


def num_gathered(calls: CommDebugMode) -> int:
    return sum(n for call, n in calls.get_comm_counts().items() if "gather" in str(call))


def whole_parameters() -> list[str]:
    """What is wrong with the parameters that forward passes use, of which prepare gathers none."""
    wrong = []
    for precision in ("fp32", "bf16"):
        with lockstep.init(FSDP(blocks=Block), precision=precision) as world:
            model = build("transformer")
            expected = {name: (p.shape, p.requires_grad) for name, p in model.named_parameters()}
            with CommDebugMode() as calls:
                model = world.prepare(model)
            if num_gathered(calls):
                wrong.append(f"{precision}: prepare has gathered a unit")
            whole_parameters = world._preparer.wrapped[model].unsharded_parameters
            for whole in whole_parameters:
                if whole.untyped_storage().nbytes():
                    wrong.append(f"{precision}: a parameter of shape {whole.shape} has memory")

            ids = {id(whole) for whole in whole_parameters}
            units = [*model.blocks, model]
            with CommDebugMode() as calls:
                for unit in units:
                    unit.unshard()
            assert num_gathered(calls) == len(units)
            for name, whole in model.named_parameters():
                is_same = (whole.shape, whole.requires_grad) == expected[name]
                if whole.dim() and not (id(whole) in ids and is_same):
                    wrong.append(f"{precision}: torch uses another {name}")
            for unit in units:
                unit.reshard()
    return wrong


def process_groups() -> tuple[list[str], list[str]]:
    """What torch keeps of process groups: nothing after closing, though the model is still there.

    `run_ranks` fails where the group's threads are.
    """
    with lockstep.init(HSDP(shard_size=2)) as world:
        model = world.prepare(build("transformer"))
        wrapped = world._preparer.wrapped[model]
        group = model._get_fsdp_state()._fsdp_param_group
        before = [k for k, v in vars(group.mesh_info).items() if isinstance(v, dist.ProcessGroup)]
        assert isinstance(model, FSDPModule)
        assert len(wrapped.unsharded_parameters) == len([p for p in model.parameters() if p.dim()])
    after = [k for k, v in vars(group.mesh_info).items() if isinstance(v, dist.ProcessGroup)]
    return before, after


def test_prepare_makes_the_whole_parameters_without_gathering_them(two):
    assert [of_rank["whole parameters"] for of_rank in two] == [[], []]


def test_private_parts_of_torch_are_as_expected(two):
    for before, after in (of_rank["groups"] for of_rank in two):
        assert set(before) == {"shard_process_group", "replicate_process_group"}
        assert after == []


class Adds(nn.Module):
    """Its output is a view, and the loop adds to it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


def added_in_place() -> dict[str, Tensor]:
    with lockstep.init("fsdp", seed=1) as world, warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(1)
        model = Adds().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        x = torch.arange(30, dtype=torch.float64).view(2, 5, 3) / 30
        for _ in range(3):
            output = model(x)
            output += 1.0
            world.backward(output.square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)


def test_outputs_may_be_changed_in_place():
    """Torch warns of it, which is an error here, and drops its hook."""
    expected = run_ranks(added_in_place, 1)[0]
    for found in run_ranks(added_in_place, 2):
        assert difference(expected, found) < 1e-9
