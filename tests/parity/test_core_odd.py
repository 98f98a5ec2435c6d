"""What people do in a training loop beyond the plain one: the same numbers, or a clear refusal."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import Augmented, difference, mean_loss, mlp, tensors, weights
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, get_worker_info

import lockstep
from lockstep.errors import LockstepError, LockstepWarning, SettingError, UsageError
from lockstep.machine.topology import detect, first_host

pytestmark = pytest.mark.ranks

Found = dict[str, Tensor]
UNUSED = lockstep.strategies.DDP(find_unused_parameters=True)


def ready(world: lockstep.World, model: nn.Module) -> Any:
    return world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train(world: lockstep.World, model: nn.Module, loader: Any) -> Found:
    model, optimizer = ready(world, model)
    for batch in loader:
        optimizer.zero_grad()
        world.backward(mean_loss(model, batch))
        optimizer.step()
    return weights(model)


def one_epoch(world: lockstep.World, model: nn.Module, optimizer: Any, loader: Any) -> None:
    for batch in loader:
        world.backward(mean_loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()


# --- the same numbers on any number of ranks


def two_losses(world: lockstep.World) -> Found:
    """Two backward passes of one forward pass, then two of two."""
    model, optimizer = ready(world, mlp())
    for x, y in world.loader(tensors(21), 8):
        optimizer.zero_grad()
        out = model(x)
        world.backward(F.cross_entropy(out, y), retain_graph=True)
        world.backward(out.square().mean())
        one, other = mean_loss(model, (2 * x, y)), mean_loss(model, (x - 1, y))
        world.backward(one)
        world.backward(other)
        optimizer.step()
    return weights(model)


class Heads(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = trunk.double()
        self.a, self.b = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()

    def forward(self, x: Tensor, which: str) -> list[Tensor]:
        x = self.trunk(x)
        return [{"a": self.a, "b": self.b}[head](x) for head in which]


def heads(world: lockstep.World, trunk: nn.Module, *calls: str) -> Found:
    """A backward pass for each head."""
    model, optimizer = ready(world, Heads(trunk))
    for x, y in world.loader(tensors(21), 8):
        optimizer.zero_grad()
        outs = [out for which in calls for out in model(x, which)]
        for loss in [F.cross_entropy(out, y) for out in outs]:
            world.backward(loss, retain_graph=True)
        optimizer.step()
    return weights(model)


def adversaries(world: lockstep.World) -> Found:
    torch.manual_seed(0)
    maker, judge = nn.Linear(6, 6).double(), nn.Sequential(nn.Tanh(), nn.Linear(6, 1)).double()
    makes, judges = (torch.optim.Adam(m.parameters(), 1e-2) for m in (maker, judge))
    maker, judge, makes, judges = world.prepare(maker, judge, makes, judges)
    for x, _ in world.loader(tensors(21), 8):
        fake = maker(x)
        judges.zero_grad()
        real, false = F.softplus(-judge(x)).mean(), F.softplus(judge(fake.detach())).mean()
        world.backward(real)
        world.backward(false)
        judges.step()
        makes.zero_grad()
        world.backward(F.softplus(-judge(fake)).mean())
        makes.step()
    return {**weights(maker), **{f"judge {k}": v for k, v in weights(judge).items()}}


def closure(world: lockstep.World) -> Found:
    """The line search decides by the loss, which has to be that of the global batch."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, 4, line_search_fn="strong_wolfe")
    model, optimizer = world.prepare(model, optimizer)
    for batch in world.loader(tensors(17), 8):

        def loss(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            found = mean_loss(model, batch)
            world.backward(found)
            return found

        optimizer.step(loss)
    return weights(model)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(6, 4).double(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale

    def best(self, x: Tensor) -> Tensor:
        return self.layer(x).argmax(1)


def attributes(world: lockstep.World) -> Found:
    """Those of the user's model are read and set through what `prepare` returned."""
    model, optimizer = ready(world, Scaled())
    for batch in world.loader(tensors(16), 8):
        model.scale += 1.0
        optimizer.zero_grad()
        world.backward(mean_loss(model, batch))
        optimizer.step()
    with torch.no_grad():
        return {**weights(model), "best": model.best(tensors(9)[:][0])}


def averaged(world: lockstep.World) -> Found:
    model, optimizer = ready(world, mlp(batch_norm=True))
    mean = AveragedModel(model, avg_fn=lambda a, b, _: 0.9 * a + 0.1 * b)
    loader = world.loader(tensors(24), 8)
    for batch in loader:
        optimizer.zero_grad()
        world.backward(mean_loss(model, batch))
        optimizer.step()
        mean.update_parameters(model)
    update_bn(loader, mean)
    twin = copy.deepcopy(model)
    return {**weights(mean.eval()), **{f"twin {k}": v for k, v in weights(twin).items()}}


def odd_tensors(world: lockstep.World) -> Found:
    """Dtypes that no backend knows, memory with holes, and memory that is used twice."""
    model = mlp()
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    model.register_buffer("short", torch.arange(3, dtype=torch.int16) + world.rank)
    model.register_buffer("eighth", torch.full((3,), 1.0 + world.rank).to(torch.float8_e5m2))
    model.register_buffer("expanded", torch.full((1,), 5.0 + world.rank).expand(4))
    frozen = copy.deepcopy(model).requires_grad_(False)
    found = train(world, model, world.loader(tensors(12), 4))
    teacher = weights(world.prepare(frozen))
    return {
        k: v.double()
        for k, v in {**found, **{f"frozen {k}": v for k, v in teacher.items()}}.items()
    }


class Backwards(Sampler[int]):
    def __len__(self) -> int:
        return 9

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter([-1, -2, -3, 4, 5, 6, -4, 0, 1])


def counted_from_the_end(world: lockstep.World) -> Found:
    loader = world.prepare(DataLoader(tensors(20), batch_size=4, sampler=Backwards()))
    part = world.prepare(DataLoader(Subset(tensors(20), [-1, 3, -5]), batch_size=2))
    model = mlp()
    return {**train(world, model, loader), "sum": seen(world, part)}


def seen(world: lockstep.World, loader: Any) -> Tensor:
    with torch.no_grad():
        return world.sum(sum((batch[0].sum() for batch in loader), torch.zeros(()).double()))


def of_lists(samples: list[Any]) -> Any:
    return [x for x, _ in samples], tuple({"y": y} for _, y in samples)


def lists_of_samples(world: lockstep.World) -> Found:
    """As detection models take them; a rank without samples gets empty ones."""
    model, optimizer = ready(world, mlp())
    count = 0
    for xs, targets in world.prepare(DataLoader(tensors(9), batch_size=4, collate_fn=of_lists)):
        count += len(xs)
        optimizer.zero_grad()
        losses = [
            mean_loss(model, (x[None], t["y"][None])) for x, t in zip(xs, targets, strict=True)
        ]
        empty = model(torch.empty(0, 6, dtype=torch.float64)).sum()
        world.backward((sum(losses) + empty) / max(1, len(xs)))
        optimizer.step()
    return {**weights(model), "count": torch.tensor(world.sum(count))}


def of_arrays(samples: list[Any]) -> dict[str, Any]:
    return {
        "x": np.stack([x.numpy() for x, _ in samples]),
        "y": np.array([int(y) for _, y in samples]),
    }


def arrays(world: lockstep.World) -> Found:
    model, optimizer = ready(world, mlp())
    count = 0
    for batch in world.prepare(DataLoader(tensors(9), batch_size=4, collate_fn=of_arrays)):
        count += len(batch["x"])
        optimizer.zero_grad()
        world.backward(
            mean_loss(model, (torch.from_numpy(batch["x"]), torch.from_numpy(batch["y"])))
        )
        optimizer.step()
    return {**weights(model), "count": torch.tensor(world.sum(count))}


SAME: dict[str, tuple[Callable[[lockstep.World], Found], dict[str, Any]]] = {
    "two losses": (two_losses, {}),
    "two losses, micro-batches": (two_losses, {"micro_batch_size": 2}),
    "heads apart": (lambda w: heads(w, nn.Identity(), "ab"), {}),
    "heads on a trunk": (lambda w: heads(w, nn.Linear(6, 6), "a", "b"), {"strategy": UNUSED}),
    "adversaries": (adversaries, {}),
    "closure": (closure, {}),
    "attributes": (attributes, {}),
    "averaged": (averaged, {}),
    "odd tensors": (odd_tensors, {}),
    "counted from the end": (counted_from_the_end, {}),
    "lists of samples": (lists_of_samples, {}),
    "arrays": (arrays, {}),
}


def same_numbers() -> dict[str, Found]:
    found = {}
    for name, (case, settings) in SAME.items():
        with lockstep.init(seed=1, **settings) as world:
            found[name] = case(world)
    return found


@pytest.fixture(scope="module")
def results() -> dict[int, list[dict[str, Found]]]:
    return {size: run_ranks(same_numbers, size) for size in (1, 2, 3)}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", SAME)
def test_the_numbers_are_those_of_one_process(results, name, size):
    for of_rank in results[size]:
        assert difference(results[1][0][name], of_rank[name]) < 1e-11


# --- refused, or warned of


def clipped(world: lockstep.World) -> None:
    model, optimizer = ready(world, mlp())
    for batch in world.loader(tensors(), 8, micro_batch_size=2):
        world.backward(mean_loss(model, batch))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def cleared_to_zero(world: lockstep.World) -> None:
    model, optimizer = ready(world, mlp())
    for batch in world.loader(tensors(), 8, micro_batch_size=2):
        model.zero_grad(set_to_none=False)
        world.backward(mean_loss(model, batch))
        optimizer.step()


def own_scaler(world: lockstep.World) -> None:
    model, optimizer = ready(world, mlp())
    scaler = torch.amp.GradScaler("cpu")
    for batch in world.loader(tensors(), 8, micro_batch_size=2):
        world.backward(scaler.scale(mean_loss(model, batch)))
        scaler.step(optimizer)
        scaler.update()


def clip_of_parameters(world: lockstep.World) -> None:
    world.clip_grad_norm_(world.prepare(mlp()).parameters(), 1.0)


def renewed_statistics(world: lockstep.World) -> None:
    """11 samples in batches of 10: rank 1 has none of the last."""
    model = copy.deepcopy(world.prepare(mlp(batch_norm=True)))
    update_bn(world.loader(tensors(11), 10), model)


def shared(world: lockstep.World) -> None:
    trunk = nn.Linear(6, 6)
    world.prepare(nn.Sequential(trunk, nn.Linear(6, 1)), nn.Sequential(trunk))


def frozen_on_some(world: lockstep.World) -> None:
    world.prepare(mlp().requires_grad_(world.is_main))


def other_buffers(world: lockstep.World) -> None:
    model = mlp()
    model.register_buffer("table", torch.zeros(3 + world.rank))
    world.prepare(model)


def sparse_buffer(world: lockstep.World) -> None:
    model = mlp()
    model.register_buffer("edges", torch.eye(3).to_sparse())
    world.prepare(model)


ALONE: dict[Callable[[lockstep.World], None], str] = {
    clipped: "written to between the micro-batches",
    cleared_to_zero: "written to between the micro-batches",
    own_scaler: "a GradScaler of your own",
    clip_of_parameters: "clip_grad_norm_ of a generator",
}
TOGETHER: dict[Callable[[lockstep.World], None], str] = {
    **ALONE,
    renewed_statistics: "in training mode in an evaluation loop",
    shared: "two modules with the same parameters",
    frozen_on_some: "rank 1: Sequential of 180 parameters",
    other_buffers: "rank 1: Sequential of 180 parameters",
    sparse_buffer: "a sparse tensor",
}


def refuse(cases: dict[Callable[[lockstep.World], None], str]) -> None:
    for case, text in cases.items():
        with lockstep.init() as world, pytest.raises(LockstepError, match=text):
            case(world)


def test_refused_on_one_process():
    refuse(ALONE)
    with lockstep.init() as world, pytest.raises(UsageError, match="lazy layers"):
        world.prepare(nn.Sequential(nn.LazyLinear(4)))


def on_two() -> tuple[str, list[str]]:
    refuse(TOGETHER)
    return multiplied_by_nothing(), evaluation_on_rank_0()


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.log_variance = nn.Linear(6, 4).double(), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return self.layer(x), self.log_variance


def multiplied_by_nothing() -> str:
    """The mean over no samples, which a parameter is multiplied with."""
    with lockstep.init() as world:
        model = world.prepare(Weighed())
        said = ""
        for x, y in world.loader(tensors(1), 2):
            try:
                scores, _ = model(x)
                world.backward(F.cross_entropy(scores, y) * (-model.module.log_variance).exp())
            except UsageError as error:
                said = str(error)
        return said


def evaluation_on_rank_0() -> list[str]:
    with lockstep.init() as world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = ready(world, mlp())
        loader, test = world.loader(tensors(8), 4), world.loader(tensors(8), 4)
        for _ in world.epochs(3):
            one_epoch(world, model, optimizer, loader)
            with torch.no_grad():
                if world.is_main:
                    list(test)
                next(iter(test))
    return [str(w.message) for w in caught if issubclass(w.category, LockstepWarning)]


def test_on_two_processes():
    (nothing, said), (of_nothing, silent) = run_ranks(on_two, 2)
    assert "on a rank without samples" in of_nothing
    assert not nothing
    assert len(said) == 1
    assert "only rank 0 iterated it" in said[0]
    assert not silent


def test_gradients_are_not_written_to_while_they_are_scaled():
    with lockstep.init(precision="fp16") as world:
        model, optimizer = ready(world, mlp(dtype=torch.float32))
        for number, batch in enumerate(world.loader(tensors(dtype=torch.float32), 10)):
            world.backward(mean_loss(model, batch))
            if number < 2:
                world.clip_grad_norm_(model, float("inf"))
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if number == 2:
                with pytest.raises(UsageError, match="written to before optimizer"):
                    optimizer.step()
                break
            optimizer.step()
            optimizer.zero_grad()


# --- loaders


@pytest.mark.parametrize("left", ["whole", "broken off"])
def test_a_pass_inside_a_pass_with_persistent_workers(left):
    with lockstep.init(seed=1) as world:
        loader = world.loader(Augmented(20), 4, num_workers=1, persistent_workers=True)
        expected = [x.tolist() for x, _ in world.loader(Augmented(20), 4)]
        found = []
        for step, (x, _) in enumerate(loader):
            found.append(x.tolist())
            if step == 1:
                with torch.no_grad():
                    list(loader) if left == "whole" else next(iter(loader))
        assert found == expected
        assert len(list(loader)) == 5


class Opened(Dataset[Any]):
    file: str | None = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        assert self.file == "opened 0"
        return index


def open_file(worker: int) -> None:
    get_worker_info().dataset.file = f"opened {worker}"  # type: ignore[union-attr]


def test_a_worker_finds_the_users_dataset():
    with lockstep.init() as world:
        loader = world.loader(Opened(), 2, num_workers=1, worker_init_fn=open_file)
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_an_evaluation_with_gradients_is_no_part_of_the_epoch():
    with lockstep.init() as world:
        model, optimizer = ready(world, mlp())
        loader, test = world.loader(tensors(8), 4), world.loader(tensors(8), 4)
        for epoch in world.epochs(3):
            one_epoch(world, model, optimizer, loader)
            assert world.state_dict()["epoch"] == epoch + 1
            list(test)


# --- joining


def test_numbers_that_cannot_be():
    with pytest.raises(SettingError, match="RANK=1 and LOCAL_RANK=3"):
        detect({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"})
    with pytest.raises(SettingError, match="host list"):
        first_host("n[3-1")


def test_a_port_in_words_beside_a_rank_of_the_script(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "abc")
    with pytest.raises(SettingError, match="MASTER_PORT=abc"):
        lockstep.init(rank=0, world_size=2)
