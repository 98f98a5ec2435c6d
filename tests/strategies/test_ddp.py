from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from problems import difference, mean_loss, mlp, tensors, weights
from ranks import run_ranks
from torch import nn

import lockstep
from lockstep.errors import UsageError
from lockstep.strategies import DDP
from lockstep.strategies.base import move_to_device

pytestmark = pytest.mark.ranks


def ready(world: lockstep.World, model: nn.Module | None = None) -> Any:
    model = mlp() if model is None else model
    return world.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def loaded(model: nn.Module) -> Any:
    """What `torch.load` gives of what `torch.save` has written of a whole model."""
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=False)


class Calls(nn.Module):
    """Fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4).double()
        self.fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fail:
            raise ValueError("told to")
        return self.layer(x)


def around() -> list[Any]:
    """Whether forward passes of `.module` and of copies of it are refused."""
    found: list[Any] = []

    def refused(module: nn.Module) -> bool:
        try:
            module(x)
        except UsageError:
            return True
        return False

    x, _ = tensors()[:4]
    with lockstep.init() as world:
        torch.manual_seed(0)
        own: list[str] = []
        inner = Calls()
        inner.register_forward_pre_hook(lambda *_: own.append("before"))
        inner.register_forward_hook(lambda *_: own.append("after"))
        model, _ = ready(world, inner)
        found.append([refused(inner), refused(model), refused(inner)])
        inner.fail = True
        try:
            model(x)
        except ValueError:
            found.append(list(own))
        inner.fail = False
        found.append([refused(inner), refused(model)])
        with torch.no_grad():
            found.append([refused(inner), refused(model)])
        found.append([refused(inner.eval()), refused(inner.train())])
        plain, _ = ready(world)
        plain(x)  # from its first pass on it also has what sends gradients
        copies = [copy.deepcopy(plain.module), loaded(plain.module), loaded(plain)]
        copies += [copy.copy(plain), copy.deepcopy(plain)]
        found.append([refused(plain.module), *map(refused, copies)])
        found.append({type(each) for each in copies} == {type(plain.module)})
        found.append(
            all(
                torch.equal(a, b)
                for c in copies
                for a, b in zip(c.parameters(), plain.parameters(), strict=True)
            )
        )
    return found


def test_forward_passes_around_the_wrapper_are_seen_those_of_copies_are_free():
    for found in run_ranks(around, 2):
        assert found == [
            [True, False, True],
            # Once refused before it, once through, once refused, once begun.
            ["before", "before", "after", "before", "before"],
            [True, False],
            [False, False],
            [False, True],
            [True, False, False, False, False, False],
            True,
            True,
        ]


def compiled() -> list[Any]:
    found: list[Any] = []
    with lockstep.init(seed=1) as world:
        for where in ("nowhere", "inside", "in place", "outside"):
            torch.manual_seed(0)
            torch._dynamo.reset()  # it would take the graph of the case before
            torch._dynamo.utils.counters.clear()
            model = Calls()
            if where == "inside":
                model = torch.compile(model, backend="eager")
            elif where == "in place":
                model.compile(backend="eager")
            model, optimizer = ready(world, model)
            if where == "outside":
                model = torch.compile(model, backend="eager")
            for batch in world.loader(tensors(14), 7):
                world.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            found.append((graphs, [p.detach().clone() for p in model.parameters()]))
    return found


def test_compiled_models_train_and_know_that_they_are_inside():
    for found in run_ranks(compiled, 2):
        assert [graphs for graphs, _ in found] == [0, 1, 1, 1]
        for _, parameters in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0][1], parameters, strict=True))


class OnTwo(nn.Module):
    """Its halves are on two devices."""

    def __init__(self, first: str = "cpu", second: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16).double().to(first)
        self.second = nn.Linear(16, 4).double().to(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.to(self.first.weight.device)).tanh()
        return self.second(x.to(self.second.weight.device)).to("cpu")


def test_a_module_on_several_gpus_stays_there(monkeypatch):
    model = OnTwo()
    where = {id(p): f"cuda:{int(i > 1)}" for i, p in enumerate(model.parameters())}
    moved: list[Any] = []
    monkeypatch.setattr(
        nn.Parameter, "device", property(lambda p: torch.device(where[id(p)])), raising=False
    )
    monkeypatch.setattr(OnTwo, "to", lambda self, device: moved.append(device) or self)
    [choice] = move_to_device(model, torch.device("cuda:0"))
    assert (choice.value, moved) == ("cuda:0, cuda:1", [])
    where = dict.fromkeys(where, "cuda:0")
    assert move_to_device(model, torch.device("cuda:0")) == []
    assert moved == [torch.device("cuda:0")]


def train_on_two(devices: tuple[str, str]) -> dict[str, torch.Tensor]:
    """Both ranks on the same two devices: Gloo minds no sharing."""
    options = {} if devices[0] == "cpu" else {"backend": "gloo", "device": devices[0]}
    with lockstep.init(**options) as world:
        model = OnTwo(*devices)
        model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in world.loader(tensors(), 7):
            world.backward(nn.functional.cross_entropy(model(x), y.cpu()))
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.cpu() for name, value in weights(model).items()}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ddp_of_a_module_on_two_gpus():
    expected = run_ranks(train_on_two, 1, ("cpu", "cpu"))[0]
    for found in run_ranks(train_on_two, 2, ("cuda:0", "cuda:1")):
        assert difference(expected, found) < 1e-9


class Tables(nn.Module):
    """The second table is not used by rank 1, or by none."""

    def __init__(self, sparse: bool, *, trained: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(8, 4, sparse=True)
        self.tags = nn.Embedding(8, 4, sparse=sparse).requires_grad_(trained)

    def forward(self, x: torch.Tensor, tags: bool) -> torch.Tensor:
        out = self.words(x)
        return out + self.tags(x) if tags else out


def unused_tables() -> dict[str, Any]:
    """What is said of a table that is not used, and the weights where the advice is followed."""
    unused = DDP(find_unused_parameters=True)
    cases: dict[str, Any] = {
        "nowhere": (None, Tables(True), False),
        "nowhere, with the option": (unused, Tables(True), False),
        "static": (DDP(static_graph=True), Tables(True), False),
        "not sparse": (unused, Tables(False), True),
        "frozen": (None, Tables(True, trained=False), True),
    }
    found: dict[str, Any] = {}
    for name, (strategy, model, used) in cases.items():
        try:
            with lockstep.init(strategy) as world:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                prepared, optimizer = world.prepare(model, optimizer)
                x = torch.tensor([1, 2, 3]) + world.rank
                for _ in range(2):
                    loss = prepared(x, used and world.rank == 0).square().mean()
                    world.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                found[name] = weights(prepared)
        except UsageError as error:
            found[name] = error.message
    return found


def test_what_is_advised_for_unused_sparse_tables_works():
    one, other = run_ranks(unused_tables, 2)
    for found in (one, other):
        assert "build tags.weight without sparse=True" in found["nowhere"]
        for name in ("nowhere, with the option", "static"):
            assert "the loss does not use all of words.weight, tags.weight" in found[name], name
    for name in ("not sparse", "frozen"):
        assert difference(one[name], other[name]) == 0
    assert not torch.equal(one["not sparse"]["tags.weight"], Tables(False).tags.weight)
