"""LARS and LAMB against the formulas of their papers, written out in numpy."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from problems import difference, mean_loss, mlp, tensors, weights
from ranks import in_gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard  # imported inside a group, it would keep the group
from torch.optim import Optimizer

import lockstep
from lockstep.errors import SettingError, UsageError
from lockstep.optim import LAMB, LARS

pytestmark = pytest.mark.ranks

Array = np.ndarray
SHAPES = [(4, 3), (2, 3, 2, 2), (5,), ()]
STEPS = 6
RATES = [0.5, 1.0, 1.5, 2.0, 0.7, 0.1]


def ratio_or_1(ratio: Callable[[], float], norms: list[float], largest: float | None) -> float:
    found = ratio() if min(norms) > 0 else 1.0
    return found if largest is None else min(found, largest)


def treat(array: Array, adapt: bool | None, weight_decay: float) -> tuple[bool, float]:
    """Whether a tensor gets a ratio, and its weight decay."""
    if adapt is None:
        adapt = array.ndim >= 2
        return adapt, weight_decay if adapt else 0.0
    return adapt, weight_decay


def naive_lars(
    w: Array,
    gradients: list[Array],
    rates: list[float],
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    trust_coefficient: float = 0.001,
    eps: float = 1e-8,
    max_ratio: float | None = None,
    adapt: bool | None = None,
) -> Array:
    adapted, decay = treat(w, adapt, weight_decay)
    w, v = w.copy(), np.zeros_like(w)
    for g, lr in zip(gradients, rates, strict=True):
        ratio = 1.0
        if adapted:
            of_w, of_g = math.sqrt((w**2).sum()), math.sqrt((g**2).sum())
            against = of_g + decay * of_w + eps
            ratio = ratio_or_1(
                lambda of_w=of_w, against=against: trust_coefficient * of_w / against,
                [of_w, of_g],
                max_ratio,
            )
        d = ratio * (g + decay * w)
        v = momentum * v + d
        w = w - lr * (d + momentum * v if nesterov else v)
    return w


def naive_lamb(
    w: Array,
    gradients: list[Array],
    rates: list[float],
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    max_ratio: float | None = None,
    adapt: bool | None = None,
) -> Array:
    adapted, decay = treat(w, adapt, weight_decay)
    w, m, v = w.copy(), np.zeros_like(w), np.zeros_like(w)
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        u = m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + eps) + decay * w
        ratio = 1.0
        if adapted:
            of_w, of_u = math.sqrt((w**2).sum()), math.sqrt((u**2).sum())
            ratio = ratio_or_1(lambda of_w=of_w, of_u=of_u: of_w / of_u, [of_w, of_u], max_ratio)
        w = w - lr * ratio * u
    return w


NAIVE: dict[type[Optimizer], Callable[..., Array]] = {LARS: naive_lars, LAMB: naive_lamb}


def draws(seed: int = 1) -> Iterator[tuple[Array, list[Array]]]:
    """Tensors and their gradients in each step; some of them are 0."""
    draw = np.random.default_rng(seed)
    for shape in SHAPES:
        yield (
            np.asarray(draw.normal(size=shape)),
            [np.asarray(draw.normal(size=shape)) for _ in range(STEPS)],
        )
    yield np.zeros((3, 2)), [np.asarray(draw.normal(size=(3, 2))) for _ in range(STEPS)]
    yield draw.normal(size=(3, 2)), [np.zeros((3, 2)), *draw.normal(size=(STEPS - 1, 3, 2))]


def train(
    kind: type[Optimizer], made: list[tuple[Array, list[Array]]], **options: Any
) -> list[Array]:
    parameters = [nn.Parameter(torch.from_numpy(w.copy())) for w, _ in made]
    optimizer = kind(parameters, lr=RATES[0], **options)
    for step, lr in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = lr
        for parameter, (_, gradients) in zip(parameters, made, strict=True):
            parameter.grad = torch.from_numpy(gradients[step].copy())
        optimizer.step()
        for parameter, (_, gradients) in zip(parameters, made, strict=True):
            assert (parameter.grad.numpy() == gradients[step]).all(), "gradients are the user's"
    return [parameter.detach().numpy() for parameter in parameters]


LARS_OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.03},
    {"momentum": 0.0, "weight_decay": 0.03},
    {"momentum": 0.7, "nesterov": True, "weight_decay": 0.03},
    {"trust_coefficient": 0.5, "eps": 0.1, "max_ratio": 0.2, "weight_decay": 0.03},
    {"adapt": True, "weight_decay": 0.03},
    {"adapt": False, "weight_decay": 0.03},
]
LAMB_OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.0},
    {"betas": (0.5, 0.9), "eps": 0.01},
    {"max_ratio": 0.6},
    {"adapt": True},
    {"adapt": False},
]


@pytest.mark.parametrize(
    ("kind", "options"), [(LARS, o) for o in LARS_OPTIONS] + [(LAMB, o) for o in LAMB_OPTIONS]
)
def test_the_formulas(kind: type[Optimizer], options: dict[str, Any]) -> None:
    made = list(draws())
    for found, (w, gradients) in zip(train(kind, made, **options), made, strict=True):
        expected = NAIVE[kind](w, gradients, RATES, **options)
        assert np.abs(expected - w).max() > 1e-5, "nothing has moved"
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_the_options_matter(kind: type[Optimizer]) -> None:
    """Formulas that are all the same would prove nothing."""
    made = list(draws())
    options = LARS_OPTIONS if kind is LARS else LAMB_OPTIONS
    results = [train(kind, made, **o) for o in options]
    for one, other in itertools.combinations(results, 2):
        assert max(np.abs(a - b).max() for a, b in zip(one, other, strict=True)) > 1e-6


def test_without_a_ratio_they_are_sgd_and_adamw() -> None:
    made = list(draws())
    for nesterov in (False, True):
        options = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
        mine = train(LARS, made, adapt=False, **options)
        torchs = train(torch.optim.SGD, made, **options)
        assert all((a == b).all() for a, b in zip(mine, torchs, strict=True))
    mine = train(LAMB, made, adapt=False, eps=1e-3)
    for a, b in zip(mine, train(torch.optim.AdamW, made, weight_decay=0.01, eps=1e-3), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_a_larc_step_is_never_longer_than_that_of_sgd() -> None:
    made = list(draws())
    free = train(LARS, made, trust_coefficient=1e3, momentum=0.0)
    held = train(LARS, made, trust_coefficient=1e3, momentum=0.0, max_ratio=1.0)
    sgd = train(torch.optim.SGD, made, momentum=0.0)
    for f, h, s in zip(free[:2], held, sgd, strict=False):
        np.testing.assert_allclose(h, s, rtol=1e-12, atol=1e-12)
        assert np.abs(f - s).max() > 1


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_nothing_is_read_back_from_the_device(kind: type[Optimizer]) -> None:
    """A tensor of the meta device has no values: to read one raises."""
    parameters = [nn.Parameter(torch.empty(shape, device="meta")) for shape in SHAPES]
    optimizer = kind(parameters, lr=0.1, weight_decay=0.1, max_ratio=2.0)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_step_on_a_gpu_does_not_wait(kind: type[Optimizer]) -> None:
    made = list(draws())
    parameters = [nn.Parameter(torch.from_numpy(w.copy()).cuda()) for w, _ in made]
    optimizer = kind(parameters, lr=0.1, weight_decay=0.1, max_ratio=2.0)
    for parameter, (_, gradients) in zip(parameters, made, strict=True):
        parameter.grad = torch.from_numpy(gradients[0]).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for parameter, (w, gradients) in zip(parameters, made, strict=True):
        options = {"weight_decay": 0.1, "max_ratio": 2.0}
        expected = NAIVE[kind](w, gradients[:1], [0.1], **options)
        np.testing.assert_allclose(parameter.detach().cpu(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_small_gradients_in_half_precision_have_a_norm(kind: type[Optimizer]) -> None:
    parameter = nn.Parameter(torch.full((64, 64), 1e-3, dtype=torch.float16))
    parameter.grad = torch.full_like(parameter, 1e-5)
    before = parameter.detach().float().norm()
    kind(
        [parameter], lr=1.0, weight_decay=0.0, **({"momentum": 0.0} if kind is LARS else {})
    ).step()
    moved = before - parameter.detach().float().norm()
    fraction = 0.001 if kind is LARS else 1.0
    assert float(moved / before) == pytest.approx(fraction, rel=0.05)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_state_dict_goes_on_where_it_was_taken(kind: type[Optimizer]) -> None:
    def build() -> tuple[nn.Module, Optimizer]:
        model = mlp()
        return model, kind(model.parameters(), lr=0.1)

    def steps(model: nn.Module, optimizer: Optimizer, numbers: range) -> None:
        x, y = tensors()[:]
        for number in numbers:
            mean_loss(model, (x[number::3], y[number::3])).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build()
    steps(model, optimizer, range(2))
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps(model, optimizer, range(2, 5))
    other, resumed = build()
    other.load_state_dict(state[0])
    resumed.load_state_dict(state[1])
    steps(other, resumed, range(2, 5))
    assert difference(weights(model), weights(other)) == 0
    fresh, forgetful = build()
    fresh.load_state_dict(state[0])
    steps(fresh, forgetful, range(2, 5))
    assert difference(weights(model), weights(fresh)) > 1e-6


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_closure_is_called_with_gradients(kind: type[Optimizer]) -> None:
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.1)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mean_loss(model, tensors()[:])
        loss.backward()
        losses.append(loss)
        return loss

    before = weights(model)
    with torch.no_grad():
        assert optimizer.step(closure) is losses[0]
    assert difference(before, weights(model)) > 1e-6
    assert optimizer.step() is None


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_groups_have_options_of_their_own(kind: type[Optimizer]) -> None:
    made = list(draws())
    parameters = [nn.Parameter(torch.from_numpy(w.copy())) for w, _ in made]
    optimizer = kind([{"params": parameters[:1], "lr": 0.2}], lr=0.1, adapt=True)
    optimizer.add_param_group({"params": parameters[1:], "weight_decay": 0.3, "adapt": None})
    unused = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [unused]})
    for parameter, (_, gradients) in zip(parameters, made, strict=True):
        parameter.grad = torch.from_numpy(gradients[0].copy())
    optimizer.step()
    for i, (parameter, (w, gradients)) in enumerate(zip(parameters, made, strict=True)):
        options = {"weight_decay": 0.3} if i else {"adapt": True}
        expected = NAIVE[kind](w, gradients[:1], [0.1 if i else 0.2], **options)
        np.testing.assert_allclose(parameter.detach(), expected, rtol=1e-12, atol=1e-12)
    assert (unused == 1).all()
    assert unused not in optimizer.state


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_what_has_no_dense_real_gradient(kind: type[Optimizer]) -> None:
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UsageError, match="a sparse gradient"):
        kind(table.parameters(), lr=0.1).step()
    number = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    number.abs().sum().backward()
    with pytest.raises(UsageError, match="a complex gradient"):
        kind([number], lr=0.1).step()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (LARS, {"lr": -0.1}, r"LARS\(lr=-0\.1\)"),
        (LARS, {"lr": math.nan}, r"LARS\(lr=nan\)"),
        (LARS, {"lr": None}, r"LARS\(lr=None\)"),
        (LARS, {"lr": torch.tensor(0.1)}, r"LARS\(lr=tensor"),
        (LARS, {"momentum": 1.0}, r"momentum=1\.0"),
        (LARS, {"momentum": True}, "momentum=True"),
        (LARS, {"momentum": 0.0, "nesterov": True}, "momentum above 0"),
        (LARS, {"weight_decay": -1e-4}, "a number from 0 up"),
        (LARS, {"trust_coefficient": 0.0}, r"trust_coefficient=0\.0"),
        (LARS, {"eps": -1.0}, r"eps=-1\.0"),
        (LARS, {"max_ratio": 0}, "max_ratio=0"),
        (LARS, {"adapt": "all"}, "adapt='all'"),
        (LAMB, {"lr": math.inf}, r"LAMB\(lr=inf\)"),
        (LAMB, {"betas": (0.9, 1.0)}, r"LAMB\(beta=1\.0\)"),
        (LAMB, {"betas": 0.9}, r"betas=0\.9"),
        (LAMB, {"betas": (0.9,)}, r"betas=\(0\.9,\)"),
        (LAMB, {"weight_decay": "0.1"}, "weight_decay='0.1'"),
        (LAMB, {"adapt": 1}, "adapt=1"),
    ],
)
def test_options_that_cannot_be(
    kind: type[Optimizer], options: dict[str, Any], message: str
) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(SettingError, match=message):
        kind([parameter], **{"lr": 0.1, **options})
    optimizer = kind([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(SettingError, match=message):
        optimizer.add_param_group({"params": [parameter], **options})
    assert len(optimizer.param_groups) == 1


def sharded_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def sharded_steps(
    model: nn.Module, kind: type[Optimizer], x: Tensor, around: Any = contextlib.nullcontext
) -> Optimizer:
    optimizer = kind(model.parameters(), lr=0.2, weight_decay=0.05)
    for _ in range(4):
        model(x).square().mean().backward()
        with around():
            optimizer.step()
        optimizer.zero_grad()
    return optimizer


@in_gloo_group
def train_sharded() -> dict[str, Any]:
    calls: list[Any] = []

    @contextlib.contextmanager
    def counting() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            own = dist.all_reduce
            patch.setattr(dist, "all_reduce", lambda *a, **k: calls.append(a) or own(*a, **k))
            yield

    found: dict[str, Any] = {}
    x = tensors()[:][0]
    for shape, kind in itertools.product([(2,), (1, 2), (2, 1)], [LARS, LAMB]):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = sharded_net()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        calls.clear()
        optimizer = sharded_steps(model, kind, x, counting)
        whole = {n: p.full_tensor().detach().numpy() for n, p in model.named_parameters()}
        state = {n: type(p).__name__ for n, p in model.named_parameters()}
        buffers = [s[key] for s in optimizer.state.values() for key in s if key != "step"]
        assert {type(b).__name__ for b in buffers} == set(state.values()) == {"DTensor"}
        found[f"{kind.__name__} {shape}"] = whole, len(calls)
        # Torch's caches keep the mesh, and it the groups: nothing public lets go of them.
        getattr(mesh, "_pg_registry", {}).clear()
    return found


def test_the_norms_of_sharded_parameters_are_those_of_whole_tensors() -> None:
    found = run_ranks(train_sharded, 2)
    assert len(found[0]) == 6
    for kind in (LARS, LAMB):
        model = sharded_net()
        sharded_steps(model, kind, tensors()[:][0])
        for rank, shape in itertools.product(range(2), [(2,), (1, 2), (2, 1)]):
            whole, calls = found[rank][f"{kind.__name__} {shape}"]
            for name, parameter in model.named_parameters():
                np.testing.assert_allclose(whole[name], parameter.detach(), rtol=0, atol=1e-12)
            assert calls == 4, "one all-reduce a step, for both matrices"


def train_prepared(folder: str) -> dict[str, dict[str, Tensor]]:
    """Ten steps of each, with a stop and a resume in the middle of the second epoch."""
    found = {}
    for kind in (LARS, LAMB):
        for part in range(2):
            with lockstep.init(seed=5) as world:
                model = mlp(batch_norm=True)
                optimizer = kind(model.parameters(), lr=1.0 if kind is LARS else 0.01)
                schedule = lockstep.optim.warmup(optimizer, steps=5, start=0.1)
                model, optimizer, schedule = world.prepare(model, optimizer, schedule)
                shares = {1: "1", 2: "1:2"}[world.size]
                loader = world.loader(tensors(), 9, shuffle=True, shares=shares)
                checkpoint = world.checkpoint(
                    f"{folder}/{kind.__name__}",
                    model=model,
                    optimizer=optimizer,
                    schedule=schedule,
                    loader=loader,
                )
                checkpoint.resume()
                for _ in world.epochs(2):
                    for batch in loader:
                        world.backward(mean_loss(model, batch))
                        world.clip_grad_norm_(model, 0.5)
                        optimizer.step()
                        schedule.step()
                        optimizer.zero_grad()
                        if part == 0 and world._run.step.number == 8:
                            checkpoint.save()
                            break
                    if part == 0 and world._run.step.number == 8:
                        break
                assert world._run.step.number == (8 if part == 0 else 12)
                found[kind.__name__] = weights(model)
    return found


def test_prepared_they_do_not_depend_on_the_world_size(tmp_path: Path) -> None:
    [one] = run_ranks(train_prepared, 1, str(tmp_path / "one"))
    two = run_ranks(train_prepared, 2, str(tmp_path / "two"))
    assert difference(one["LARS"], one["LAMB"]) > 1e-3
    for kind, expected in one.items():
        assert difference(weights(mlp(batch_norm=True)), expected) > 1e-3
        for rank in range(2):
            assert difference(expected, two[rank][kind]) < 1e-9
