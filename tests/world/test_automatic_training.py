"""`"auto"` in training loops: nothing is lost or repeated, and nothing that is computed changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from problems import CLASSES, FEATURES, Augmented, difference, weights
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

import lockstep
from lockstep.batch import shares
from lockstep.errors import SettingError, UsageError
from lockstep.extensions.profiling import ProfilingRun
from lockstep.strategies import DP

pytestmark = pytest.mark.ranks

BATCH = 24
SLOW, FITS = 1, 5


class Recorded(Dataset[tuple[Tensor, Tensor, int]]):
    """Augmented samples that know their number."""

    def __init__(self, samples: int = 50) -> None:
        self.data = Augmented(samples)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return *self.data[index], index


class Net(nn.Module):
    """Slow on one rank, with a small memory on another, and with a buffer that moves."""

    def __init__(self, *, batch_norm: bool = False, slow: int | None, fits: int | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        middle = [nn.BatchNorm1d(16)] if batch_norm else []
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 16), *middle, nn.Tanh(), nn.Linear(16, CLASSES)
        ).double()
        self.slow, self.fits = slow, fits
        self.rank = 0
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        if self.fits is not None and len(x) > self.fits and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. (a test)")
        return self.layers(x)


_seconds = ProfilingRun.seconds_per_sample


def seconds_as_if(run: ProfilingRun, samples: int, device: int | None = None) -> float:
    """Computes as ever; what it takes is said by the model, as a busy machine says anything."""
    _seconds(run, samples, device)
    nets = [m for call in run._calls for m in call.module.modules() if isinstance(m, Net)]
    return 4.0 if any(net.rank == net.slow for net in nets) else 1.0


@contextmanager
def quick_and_sure() -> Iterator[None]:
    """Few times are taken, which do not vary: how noise is met is tested in `data.test_shares`."""
    with (
        patch.object(shares, "MAX_TIMES", 3),
        patch.object(ProfilingRun, "seconds_per_sample", seconds_as_if),
    ):
        yield


def train(
    steps: int = 20,
    *,
    batch_norm: bool = False,
    slow: int | None = None,
    fits: dict[int, int] | None = None,
    shares: Any = None,
    micro_batch_size: Any = None,
    weighted: bool = False,
    resume_after: int = 0,
    own_batches: bool = False,
    evaluate: bool = False,
    options: dict[str, Any] | None = None,
    init: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains; what comes out must not depend on what is found."""
    said = StringIO()
    turns: list[tuple[bool, list[int]]] = []
    with redirect_stdout(said), lockstep.init(seed=5, **(init or {})) as world:
        net = Net(batch_norm=batch_norm, slow=slow, fits=(fits or {}).get(world.rank))
        net.rank = world.rank
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)
        model, optimizer, scheduler = world.prepare(net, optimizer, scheduler)
        data, weight = Recorded(), (lambda b: (b[1] + 1).sum()) if weighted else None
        given = {"shares": shares, "micro_batch_size": micro_batch_size, "weight": weight}
        if own_batches:
            batches = BatchSampler(SequentialSampler(data), BATCH, drop_last=False)
            loader = world.loader(DataLoader(data, batch_sampler=batches), **given)
        else:
            loader = world.loader(data, BATCH, shuffle=True, **given, **(options or {}))
        test = world.loader(data, BATCH)
        if evaluate:
            with torch.no_grad():
                assert world.sum(sum(len(model(x)) for x, _, _ in test)) == 50
        turns_expected = len(loader)
        while world._run.step.number < steps:
            before = len(turns)
            for x, y, index in loader:
                now = loader.current
                turns.append((now.first, index.tolist()))
                losses = F.cross_entropy(model(x), y, reduction="none")
                if weighted:
                    losses = losses * (y + 1)
                    loss = losses.sum() / (y + 1).sum().clamp(min=1)
                else:
                    loss = losses.mean()
                optimizer.zero_grad()
                world.backward(loss)
                optimizer.step()
                scheduler.step()
                if world._run.step.number == steps:
                    break
                if now.last and world._run.step.number == resume_after:
                    state = loader.state_dict()
                    assert state["step"] == resume_after % 3
                    break
            else:
                assert len(turns) - before >= turns_expected
                turns_expected = len(loader)
            if world._run.step.number == resume_after:
                loader.load_state_dict(state)
                resume_after = -1
        if evaluate:
            with torch.no_grad():
                assert world.sum(sum(len(model(x)) for x, _, _ in test)) == 50
        shares = loader.shares
        found = loader._plan.micro_batch_size
        gradients = [p.grad is not None for p in net.parameters()]
    return {
        "weights": weights(net),
        "turns": turns,
        "said": said.getvalue(),
        "shares": shares,
        "micro_batch_size": found,
        "evaluation": test.shares,
        "sizes": net.sizes,
        "gradients": all(gradients),
    }


def records(ranks: list[dict[str, Any]]) -> list[list[int]]:
    """The samples of each global batch, in the order in which it lays them out."""
    found: list[list[int]] = []
    for parts in zip(*(rank["turns"] for rank in ranks), strict=True):
        if parts[0][0]:
            found.append([])
        found[-1] += sum((indices for _, indices in parts), [])
    return found


AUTO = {"shares": "auto", "micro_batch_size": "auto"}
CASES: dict[str, dict[str, Any]] = {
    "shares": {"init": {"shares": "auto"}, "slow": SLOW},
    "shares with BatchNorm": {"init": {"shares": "auto"}, "slow": SLOW, "batch_norm": True},
    "shares and a given micro-batch": {
        "init": {"shares": "auto", "micro_batch_size": 4},
        "slow": SLOW,
    },
    "the whole part fits": {"init": {"micro_batch_size": "auto"}},
    "a small memory": {"init": {"micro_batch_size": "auto"}, "fits": {0: FITS}},
    "both": {"init": AUTO, "slow": SLOW, "fits": {0: FITS}},
    "of one loader, resumed in mid-epoch": {
        **AUTO,
        "slow": SLOW,
        "fits": {0: FITS},
        "steps": 7,
        "resume_after": 1,
    },
    "weighted": {"init": AUTO, "slow": SLOW, "fits": {0: FITS}, "weighted": True},
    "workers": {
        "init": AUTO,
        "slow": SLOW,
        "fits": {0: FITS},
        "weighted": True,
        "options": {
            "num_workers": 1,
            "persistent_workers": True,
            "multiprocessing_context": "fork",
        },
        "steps": 6,
    },
    "own batches, evaluation first": {
        "init": AUTO,
        "slow": SLOW,
        "fits": {0: FITS},
        "steps": 7,
        "own_batches": True,
        "evaluate": True,
    },
    "small on one, shares alone": {"init": {"shares": "auto"}, "steps": 7, "fits": {0: 8}},
}
SEVERAL = {"small on one, shares alone"}
PLAIN = ("batch_norm", "weighted", "options", "own_batches", "steps")


def call(case: dict[str, Any], *, plainly: bool = False) -> dict[str, Any]:
    if plainly:
        return train(**{name: case[name] for name in PLAIN if name in case})
    with quick_and_sure():
        return train(**case)


class Wrong(nn.Module):
    """What cannot be tried, by kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.calls = 0
        self.world: Any = None

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if self.kind == "size" and len(x) > 2:
            raise ValueError("two samples, not more")
        if self.kind == "collective" and self.calls > 1:
            self.world.sum(1)
        if self.kind == "arguments":
            return self.layer(self.given)
        return self.layer(x)


def refused(kind: str, rank: int | None, **init: Any) -> str:
    with lockstep.init(seed=5, **init) as world, pytest.raises(UsageError) as caught:
        net = Wrong(kind if rank in (None, world.rank) else "")
        object.__setattr__(net, "world", world)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model, optimizer = world.prepare(net, optimizer)
        numbers = torch.randn(24, FEATURES, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(numbers)
        for (x,) in world.loader(data, 12):
            net.given = x
            used = torch.zeros(()) if kind == "arguments" else x
            loss = (net.layer(x) if kind == "around" else model(used)).mean()
            if kind == "plain":
                loss.backward()
            else:
                world.backward(loss)
            optimizer.step()
    return str(caught.value)


def gan(shares: Any) -> list[dict[str, Tensor]]:
    """Two models, each with an optimizer and a backward pass of its own."""
    with lockstep.init(seed=5, shares=shares) as world:
        pairs = []
        for slow in (SLOW, None):
            net = Net(slow=slow, fits=None)
            net.rank = world.rank
            pairs.append(world.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1)))
        loader = world.loader(Recorded(), BATCH)
        for x, y, _ in loader:
            for model, optimizer in pairs:
                optimizer.zero_grad()
                world.backward(F.cross_entropy(model(x), y))
                optimizer.step()
        assert shares is None or loader.shares[SLOW] < loader.shares[1 - SLOW]
        return [weights(model) for model, _ in pairs]


def with_closure(kind: type[torch.optim.Optimizer], shares: Any) -> dict[str, Tensor]:
    """The weights after an epoch in which the optimizer evaluates a closure."""
    with lockstep.init(seed=5, shares=shares) as world:
        net = Net(slow=None, fits=None)
        model, optimizer = world.prepare(net, kind(net.parameters(), lr=0.1))
        for x, y, _ in world.loader(Recorded(), BATCH):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                world.backward(loss)
                return loss

            optimizer.step(closure)
        return weights(model)


def closures() -> dict[str, Any]:
    """What becomes of a closure with shares "auto", and with the advice of the error followed."""
    with quick_and_sure():
        with pytest.raises(UsageError) as caught:
            with_closure(torch.optim.SGD, "auto")
        return {
            "refused": str(caught.value),
            "numbers": with_closure(torch.optim.SGD, (1, 1)),
            "LBFGS": with_closure(torch.optim.LBFGS, "auto"),
        }


def train_all(several: bool) -> dict[str, Any]:
    found = {name: call(case) for name, case in CASES.items() if several or name not in SEVERAL}
    if not several:
        return found
    refusals = [refused("size", 1, shares="auto"), refused("collective", None, shares="auto")]
    with quick_and_sure():
        return {**found, "gan": gan("auto"), "refused": refusals, "closures": closures()}


def train_plainly() -> dict[str, dict[str, Any]]:
    return {name: call(case, plainly=True) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return run_ranks(train_plainly, 1)[0]


@pytest.fixture(scope="module")
def results() -> dict[int, list[Any]]:
    return {1: run_ranks(train_all, 1, False), 2: run_ranks(train_all, 2, True)}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_the_weights_and_the_order_of_the_samples_are_those_of_one_device(
    results, expected, case, size
):
    if size == 1 and case in SEVERAL:
        pytest.skip("one device has nobody to give samples to")
    ranks = [result[case] for result in results[size]]
    assert records(ranks) == records([expected[case]])
    for found in ranks:
        assert difference(expected[case]["weights"], found["weights"]) < 1e-9
        assert found["gradients"]


def test_on_three_ranks(expected):
    ranks = run_ranks(call, 3, CASES["weighted"])
    assert records(ranks) == records([expected["weighted"]])
    for found in ranks:
        assert difference(expected["weighted"]["weights"], found["weights"]) < 1e-9
        assert found["shares"][SLOW] < min(found["shares"][0], found["shares"][2])
        assert found["micro_batch_size"] == FITS


@pytest.mark.parametrize("case", [name for name, c in CASES.items() if "slow" in c])
def test_the_slow_rank_gets_less(results, case):
    for rank in range(2):
        shares = results[2][rank][case]["shares"]
        assert shares[SLOW] < shares[1 - SLOW]
        assert shares == results[2][0][case]["shares"]
    said = results[2][0][case]["said"]
    shown = ":".join(map(str, shares))
    assert re.search(rf"changed from 1:1 to {shown} \(time per sample: rank 0 .*, rank 1 ", said)
    assert "auto" not in results[2][1][case]["said"]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", [n for n, c in CASES.items() if c.get("fits") == {0: FITS}])
def test_the_smallest_memory_counts(results, case, size):
    for found in (results[size][rank][case] for rank in range(size)):
        assert found["micro_batch_size"] == FITS
        assert all(len(indices) <= FITS for _, indices in found["turns"])
    assert f"micro_batch_size auto: {FITS} samples at a time" in results[size][0][case]["said"]


def pieces(result: dict[str, Any]) -> list[int]:
    """Turns of the training loop for each global batch."""
    begins = [place for place, (first, _) in enumerate(result["turns"]) if first]
    return [b - a for a, b in zip(begins, [*begins[1:], len(result["turns"])], strict=True)]


@pytest.mark.parametrize("size", [1, 2])
def test_where_the_whole_part_fits_only_the_first_batch_is_cut(results, size):
    found = results[size][0]["the whole part fits"]
    assert found["micro_batch_size"] is None
    assert pieces(found)[:4] == [2, 1, 1, 1]
    assert f"micro_batch_size auto: {BATCH // size}, the whole part of a rank fits" in found["said"]


def test_batchnorm_sees_the_planned_batch(results):
    assert set(pieces(results[2][0]["shares with BatchNorm"])) == {1}


def test_an_evaluation_takes_up_what_was_found(results):
    found = results[2][0]["both"]
    assert found["evaluation"] == found["shares"] != (1, 1)


def test_no_rank_gets_more_than_fits_where_shares_alone_are_open(results):
    for rank in range(2):
        found = results[2][rank]["small on one, shares alone"]
        largest = max(len(indices) for _, indices in found["turns"])
        assert largest <= 8 if rank == 0 else largest >= BATCH - 8


def test_what_cannot_be_tried_is_said_on_all_ranks(results):
    of_rank_0, of_rank_1 = (rank["refused"] for rank in results[2])
    not_tried = "the model could not be tried at other sizes: "
    assert f"found: rank 1: {not_tried}ValueError: two samples, not more\n" in of_rank_0[0]
    assert f"found: {not_tried}ValueError: two samples, not more\n" in of_rank_1[0]
    for texts in (of_rank_0, of_rank_1):
        assert f"found: {not_tried}world.sum" in texts[1]
        assert "tried at several sizes" in texts[1]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("arguments", "no tensor among its arguments has 2 as its first dimension"),
        ("around", "no forward pass of a prepared model"),
        ("plain", "loss.backward()"),
    ],
)
def test_what_cannot_be_tried_is_said(kind, said):
    assert said in refused(kind, None, micro_batch_size="auto")


def test_the_settings_from_outside(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_MICRO_BATCH_SIZE", "auto")
    monkeypatch.setenv("LOCKSTEP_SHARES", "auto")
    found = train(3, fits={0: FITS})
    assert found["micro_batch_size"] == FITS
    monkeypatch.setenv("LOCKSTEP_MICRO_BATCH_SIZE", "many")
    with pytest.raises(SettingError, match="not a valid whole number or auto"):
        train(3)


def test_strategies_that_cannot_try_refuse(monkeypatch):
    plan = lockstep.strategies.Single.plan
    monkeypatch.setattr(
        lockstep.strategies.Single, "plan", lambda *a: replace(plan(*a), can_autotune=False)
    )
    for setting in ("shares", "micro_batch_size"):
        with pytest.raises(SettingError, match=f"{setting}='auto'(.|\n)*strategy 'single'"):
            lockstep.init(**{setting: "auto"})
    with lockstep.init() as world, pytest.raises(SettingError, match="cannot try"):
        world.loader(Recorded(), 4, micro_batch_size="auto")


def test_several_optimizers(results):
    expected = gan(None)
    for rank in results[2]:
        for one, other in zip(expected, rank["gan"], strict=True):
            assert difference(one, other) < 1e-9


def test_a_closure_that_would_see_the_measured_part_is_refused_with_advice_that_helps(results):
    for found in (rank["closures"] for rank in results[2]):
        assert "if shares are 'auto', give numbers instead" in found["refused"]
        assert difference(found["numbers"], with_closure(torch.optim.SGD, None)) < 1e-9
        assert difference(found["LBFGS"], with_closure(torch.optim.LBFGS, None)) < 1e-9


def on_replicas(**init: Any) -> tuple[dict[str, Tensor], Any, Any, str]:
    said = StringIO()
    with redirect_stdout(said), lockstep.init(seed=5, **init) as world:
        model = Net(slow=None, fits=FITS if "micro_batch_size" in init else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(Recorded(), BATCH, shuffle=True)
        for _ in range(2):
            for x, y, _ in loader:
                world.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        return weights(model), getattr(model, "shares", None), loader, said.getvalue()


@pytest.mark.parametrize(
    "settings", [{"shares": "auto"}, pytest.param(AUTO, marks=pytest.mark.thorough)]
)
def test_the_devices_of_one_process(monkeypatch, settings):
    expected = on_replicas()[0]
    assert difference(expected, on_replicas(strategy=DP(replicas=2), **settings)[0]) < 1e-9
    times = [2.0, 1.0]
    monkeypatch.setattr(
        ProfilingRun, "seconds_per_sample", lambda run, samples, device: times[device]
    )
    found, shares, loader, said = on_replicas(strategy=DP(replicas=2), **settings)
    assert difference(expected, found) < 1e-9
    assert shares == (1, 2)
    line = "shares auto: changed from 1:1 to 1:2 (time per sample: device 0 2 s, device 1 1 s)"
    assert line in said
    assert loader.shares == (1,)
    if settings is AUTO:  # of 8 samples 3 and 5
        assert f"micro_batch_size auto: 8 samples at a time, of a part of {BATCH}" in said
        assert loader.micro_batches == 3


def test_a_given_micro_batch_of_devices_whose_shares_are_open():
    with pytest.raises(SettingError, match="set micro_batch_size='auto' too"):
        on_replicas(strategy=DP(replicas=2), shares="auto", micro_batch_size=4)
