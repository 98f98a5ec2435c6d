"""Models and loops that are unusual but right compute under a pipeline what one device computes."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import RankFailed, run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import LockstepError
from lockstep.strategies import Pipeline
from lockstep.strategies.gradient_average import average_gradients
from lockstep.strategies.pipeline.wire import Wire

pytestmark = pytest.mark.ranks

WIDTH, LENGTH = 4, 3


class WritesToInput(nn.Module):
    """Begins with an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.linear(self.act(x))


def writing() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), WritesToInput(), WritesToInput())


def weight_normed() -> nn.Module:
    """Each weight is made in a hook that runs before the forward of its module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the newer one is a parametrization
        layers = [nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
    layers[2] = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(*layers)


def hooked() -> nn.Module:
    """The user's hooks change what goes in and out of the first module of a stage."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[1].register_forward_hook(lambda module, args, output: output + args[0])
    model[1].register_full_backward_hook(lambda module, into, out: (into[0] * 3,))
    return model


def compiled() -> nn.Module:
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return nn.Sequential(*(torch.compile(linear, backend="eager") for linear in linears))


def parametrized() -> nn.Module:
    layers = [nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    layers[1] = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(*layers)


class Rotary(nn.Module):
    """No parameters; a table that is no part of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", torch.tensor([1.0, 0.1]).double(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.cat([positions[:, None] * self.rates] * 2, -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class DecoderBlock(nn.Module):
    """Gives a tuple, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, table: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        turned = self.query(x) * table[0] + torch.roll(x, 1, -1) * table[1]
        return x + torch.tanh(turned), None


class Decoder(nn.Module):
    """Asks an activation where it is, to make what every block is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.rotary = Rotary()
        self.layers = nn.ModuleList(DecoderBlock() for _ in range(5))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        table = self.rotary(x, torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x, table=table)[0]
        return self.head(x)


class Encoder(nn.Module):
    """Torch's own, with padding; in evaluation it has a fast path."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[::2, -1] = True
        return self.encoder(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0.0)


class Masked(nn.Module):
    """Draws which values it hides, and is judged by these alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.rand(x.shape[:2]) < 0.5
        y = x.masked_fill(hidden[..., None], 0.0)
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return y, hidden


class SeveralKinds(nn.Module):
    """An integer tensor, a boolean one, none, a view and one tensor twice go between its stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = Taking()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y.transpose(0, 1), [y, y], count=torch.arange(LENGTH), flag=x > 0)


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, more: list[Tensor], *, count: Tensor, flag: Tensor, none: None = None
    ) -> Tensor:
        assert none is None
        added = x.transpose(0, 1) * count[None, :, None] + more[0] * more[1]
        return self.linear(added * flag)


class Detaching(nn.Module):
    """Trains only what comes after a frozen beginning, which it has not frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Detached()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Detached(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class Unused(nn.Module):
    """Of three outputs of its first part one is never used, and one sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.second = Choosing()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(*(each(x) for each in self.each))


class Choosing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor, sometimes: Tensor, never: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x + sometimes if 5 < self.calls < 8 else x)


class MaskedByNeed(nn.Module):
    """Makes a mask only where there is something to hide, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MaskedLayer() for _ in range(4))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        mask = None if keep.all() else keep.to(x.dtype)
        for layer in self.layers:
            x = layer(x, mask)
        return x


class MaskedLayer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = torch.tanh(super().forward(x))
        return y if mask is None else y * mask


def normed() -> nn.Module:
    """No parameters, but statistics that move."""
    norms = [nn.BatchNorm1d(LENGTH, affine=False, momentum=None) for _ in range(4)]
    return nn.Sequential(*(m for norm in norms for m in (nn.Linear(WIDTH, WIDTH), norm)))


def twice() -> nn.Module:
    """A submodule stands in two places, in the first stage and in the second."""
    first, a, b, last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
    return nn.Sequential(first, a, nn.Tanh(), a, b, nn.Tanh(), b, last)


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


MODELS: dict[str, tuple[Any, list[str], dict[str, Any]]] = {
    "in place": (writing, ["1"], {}),
    "weight_norm": (weight_normed, ["2"], {}),
    "weight_norm first": (weight_normed, ["1"], {}),
    "parametrized": (parametrized, ["1"], {}),
    "rotary": (Decoder, ["layers.1"], {}),
    "encoder": (Encoder, ["encoder.layers.1"], {}),
    "hooks": (hooked, ["1"], {}),
    "compiled": (compiled, ["2"], {}),
    "kinds": (SeveralKinds, ["second"], {}),
    "normed": (normed, ["4"], {}),
    "normed, interleaved": (normed, ["2", "4", "6"], {}),
    "detached": (Detaching, ["second"], {}),
    "unused": (Unused, ["second"], {}),
    "twice": (twice, ["4"], {}),
    "twice, interleaved": (twice, ["1", "4", "7"], {}),
    "unfrozen": (layers, ["3"], {"frozen": 6}),
    "recomputed": (layers, ["3"], {"recompute": nn.Linear}),
    "interrupted": (layers, ["3"], {"interrupt": True}),
    "masked by the loop": (layers, ["3"], {"mask": True}),
    "lengths": (layers, ["3"], {"lengths": True}),
    "masked by need": (MaskedByNeed, ["layers.2"], {"keep": True}),
    "masked by need, interleaved": (
        MaskedByNeed, ["layers.1", "layers.2", "layers.3"], {"keep": True}
    ),
    "autocast, interleaved": (layers, ["1", "3", "4"], {"autocast": True}),
}  # fmt: skip


def train(name: str) -> dict[str, Any]:
    """A few steps: the weights of this rank, and outputs of evaluations."""
    make, cuts, ways = MODELS[name]
    outputs = []
    strategy = Pipeline(split=cuts, num_micro_batches=3, interleave=(len(cuts) + 1) // 2)
    with lockstep.init(strategy, seed=5) as world:
        torch.manual_seed(2)
        model, data = make().double(), torch.randn(24, LENGTH, WIDTH, dtype=torch.float64)
        if "autocast" in ways:
            model, data = model.float(), data.float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        frozen = list(model.parameters())[: ways.get("frozen", 0)]
        for parameter in frozen:
            parameter.requires_grad_(False)
        model, optimizer = world.prepare(model, optimizer)
        if "recompute" in ways:
            lockstep.checkpoint_activations(model, ways["recompute"])
        loader = world.loader(
            TensorDataset(data), 6, micro_batch_size=None if world.size > 1 else 2, shuffle=True
        )
        test = world.loader(TensorDataset(data), 8)
        for turn, (x,) in enumerate(loader):
            model.train()
            if turn == 6:
                model.requires_grad_(True)
            wanted = x.roll(1, 1)
            if "lengths" in ways:
                x = x[:, : turn % 3 + 1]
                wanted = x
            if "mask" in ways:
                hidden = torch.rand(x.shape[:2]) < 0.5
                x = x.masked_fill(hidden[..., None], 0.0)
                wanted = wanted.masked_fill(~hidden[..., None], 0.0)
            with torch.autocast("cpu", enabled="autocast" in ways and turn % 3 == 1):
                output = model(x, *kept(ways, x, full=FULL[turn % len(FULL)]))
            world.backward(F.mse_loss(output.to(wanted.dtype), wanted))
            if "interrupt" in ways:
                outputs += evaluate(model, test, ways)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        outputs += evaluate(model, test, ways)
        state = {k.removeprefix("module."): v.clone() for k, v in model.state_dict().items()}
        return {"weights": {k: v for k, v in state.items() if not v.is_meta}, "outputs": outputs}


FULL = (1, 1, 1, 1, 0, 1, 0, 0, 0)
"""Which micro-batches hide nothing: the form of what is sent repeats at times, and changes."""


def kept(ways: dict[str, Any], x: Tensor, *, full: int) -> list[Tensor]:
    """What a model with a mask is called with besides the input."""
    if "keep" not in ways:
        return []
    keep = torch.ones(*x.shape[:2], 1, dtype=torch.int64)
    keep[:, -1] = full
    return [keep]


def evaluate(model: nn.Module, loader: Any, ways: dict[str, Any]) -> list[Tensor]:
    with torch.inference_mode():
        return [model(x, *kept(ways, x, full=turn % 2)).clone() for turn, (x,) in enumerate(loader)]


def train_all(names: list[str]) -> dict[str, Any]:
    return {name: train(name) for name in names}


@pytest.mark.thorough
def test_odd_models_compute_what_one_device_computes():
    names = list(MODELS)
    alone = run_ranks(train_all, 1, names)[0]
    found = run_ranks(train_all, 2, names)
    for name in names:
        held: dict[str, Tensor] = {}
        for rank in found:
            for a, b in zip(rank[name]["outputs"], alone[name]["outputs"], strict=True):
                torch.testing.assert_close(a, b, msg=name)
            held |= rank[name]["weights"]
        assert held.keys() == alone[name]["weights"].keys()
        for key, value in alone[name]["weights"].items():
            torch.testing.assert_close(held[key], value, msg=f"{name}: {key}")


class Half(nn.Module):
    """Gives half of what it gets, drawn anew."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.scale, 0.5)


def random_numbers() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with lockstep.init(Pipeline(split=["layers.1"], num_micro_batches=1)) as world:
        model = Masked()
        for layer in model.layers:
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)
        model = world.prepare(model)
        y, hidden = model(torch.ones(50, 20, WIDTH))
        if world.rank == 0:
            found["hidden where it is judged"] = torch.equal((y == 0).all(-1), hidden)
        world.backward(y.sum())
        found["of the loop"] = torch.rand(4).tolist()
    with lockstep.init(Pipeline(split=["1"], num_micro_batches=1)) as world:
        model = world.prepare(nn.Sequential(Half(), Half()))
        kept = []
        for _ in range(2):
            y = model(torch.ones(1000))
            kept.append(y != 0)
            world.backward(y.sum())
        if world.rank == 0:
            found["kept"] = kept[0].float().mean().item()
            found["drawn anew"] = not torch.equal(*kept)
    return found


def test_random_numbers_are_shared_where_they_must_be_and_differ_where_they_should():
    first, second = run_ranks(random_numbers, 2)
    assert first.pop("of the loop") == second.pop("of the loop")
    assert 0.15 < first.pop("kept") < 0.35  # a quarter; half, where both stages drop the same
    assert first == {"hidden where it is judged": True, "drawn anew": True}


def test_a_form_that_depends_on_values():
    name = "masked by need"
    alone = run_ranks(train, 1, name)[0]
    for rank in run_ranks(train, 2, name):
        for a, b in zip(rank["outputs"], alone["outputs"], strict=True):
            torch.testing.assert_close(a, b)
        for key, value in rank["weights"].items():
            torch.testing.assert_close(value, alone["weights"][key], msg=key)


def refused(fn: Any, *args: Any, **kwargs: Any) -> str:
    """What a call is refused with."""
    try:
        fn(*args, **kwargs)
    except LockstepError as error:
        return str(error)
    raise AssertionError("it was not refused")


def uses() -> None:
    with lockstep.init(Pipeline(split=["3"], num_micro_batches=1)) as world:
        model = nn.Sequential(*layers(), lockstep.SyncBatchNorm(WIDTH))
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        model, optimizer = world.prepare(model, optimizer)
        x = torch.ones(2, WIDTH)
        average = copy.deepcopy(model)
        for whole in (model, average):
            assert "lockstep.save_weights(model, path)" in refused(pickle.dumps, whole)
        with torch.no_grad():
            before = model(x).clone()
        loss = model(x).pow(2).mean()
        for option in ({"inputs": list(model.parameters())}, {"create_graph": True}):
            assert "last stage alone" in refused(world.backward, loss, **option)
        world.backward(loss)
        held = [p for p in model.parameters() if p.grad is not None]
        assert len(held) == (8 if world.rank == 0 else 6)
        for norm_type in (2.0, float("inf"), float("-inf")):
            for p in held:
                p.grad.fill_(torch.nan if world.rank == 1 else 1.0)
            assert world.clip_grad_norm_(model, 1e9, norm_type).isnan()
        for p in held:
            p.grad.fill_(1.0 + world.rank)
        for part, smallest, largest in ((model, 1, 2), (model.module[0], 2, 2)):
            assert world.clip_grad_norm_(part, 1e9, float("-inf")) == smallest
            assert world.clip_grad_norm_(part, 1e9, float("inf")) == largest
        for p in held:
            p.grad.fill_(1.0)
        optimizer.param_groups[0]["lr"] += world.rank
        assert "rank 0 has [0.5], rank 1 has [1.5]" in refused(optimizer.step)
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
        with torch.no_grad():
            assert torch.equal(average(x), before)
            assert not torch.equal(model(x), before)
        if world.rank == 1:  # rank 0 would wait for what was not sent
            fails = model.module[0].register_forward_hook(lambda *_: torch.zeros(-1))
            with pytest.raises(RuntimeError, match="non-negative"):
                model(x)
            fails.remove()
            assert "a RuntimeError on this rank" in refused(model, x)
        embedding = nn.Embedding(3, 2, sparse=True)
        embedding(torch.tensor([1])).sum().backward()
        assert "sparse" in refused(average_gradients, [embedding.weight], dist.group.WORLD)
    assert "after world.close()" in refused(average, x)
    assert "use strategy='ddp'" in refused(lockstep.init, Pipeline(stages=1))


def test_copies_options_and_norms_of_nan():
    run_ranks(uses, 2)


class Scattered(nn.Module):
    """What it holds lies in memory with gaps and overlaps, in dtypes that Gloo does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = nn.Parameter(torch.rand(WIDTH, 2 * WIDTH)[:, ::2])
        self.first.weight = nn.Parameter(torch.rand(WIDTH, WIDTH).t())
        self.register_buffer("turned", torch.rand(WIDTH).to(torch.complex64), persistent=False)
        self.register_buffer("rows", torch.rand(1, WIDTH).expand(2, WIDTH))
        self.register_buffer("short", torch.randint(9, (WIDTH,)).to(torch.uint16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.turned.real * self.rows
        return self.second(x) + self.short.float()


def take_weights() -> list[float]:
    with lockstep.init(Pipeline(split=["second"], num_micro_batches=1)) as world:
        torch.manual_seed(7 + world.rank)
        model = world.prepare(Scattered())
        assert getattr(model, "module", model).first.weight.stride() == (1, WIDTH)
        with torch.no_grad():
            return model(torch.ones(2, WIDTH)).flatten().tolist()


def test_all_weights_are_those_of_rank_0():
    (alone,) = run_ranks(take_weights, 1)
    for found in run_ranks(take_weights, 2):
        assert found == pytest.approx(alone, rel=1e-6)


def break_off() -> tuple[float, float]:
    """Left in the middle of a global batch; then all ranks meet in something else."""
    strategy = Pipeline(split=["1", "2", "4"], num_micro_batches=4, interleave=2)
    with lockstep.init(strategy) as world:
        model = world.prepare(nn.Sequential(*layers(), nn.BatchNorm1d(WIDTH)))
        lockstep.checkpoint_activations(model, nn.Linear)
        loader = world.loader(TensorDataset(torch.ones(16, WIDTH)), 8)
        for (x,) in loader:
            world.backward(model(x).sum())
            model.eval()
            assert "switch between two global batches" in refused(model, x)
            model.train()
            break
        met = world.sum(1.0)
        with torch.inference_mode():
            evaluated = world.sum(model(torch.ones(2, WIDTH)).sum())
        assert all(p.grad is None for p in model.parameters())
        for (x,) in loader:
            world.backward(model(x).sum())
        return met, float(evaluated)


def test_interleaved_stages_that_are_left_in_the_middle():
    results = run_ranks(break_off, 2)
    assert results[0] == results[1]
    assert results[0][0] == 1.0


def fail_alone() -> None:
    with lockstep.init(Pipeline(interleave=2, num_micro_batches=4)) as world:
        model = world.prepare(layers())
        for turn, (x,) in enumerate(world.loader(TensorDataset(torch.ones(16, WIDTH)), 8)):
            output = model(x)
            if turn == 2 and world.rank == 1:
                raise ValueError("of the loss")
            world.backward(output.sum())


def test_an_exception_of_one_rank_is_not_kept_from_leaving_the_loop():
    """The passes that are left would wait for the other rank, which waits for this one."""
    with pytest.raises(RankFailed) as failed:
        run_ranks(fail_alone, 2, timeout=20.0)
    assert "of the loss" in failed.value.errors[1]


LENGTHS = (2, 2, 2, 3, 3, 2, 2, 3, 1, 1)
"""Of what the first micro-batches carry: some repeat, some do not."""


def train_two(schedule: str) -> list[dict[str, Tensor]]:
    """Two models in one loop, lengths that change, a break, evaluations between micro-batches;

    micro-batches that are left out, others that are used twice.
    """
    with lockstep.init(Pipeline(schedule=schedule, num_micro_batches=5)) as world:
        torch.manual_seed(3)
        models = [layers().double(), layers().double()]
        optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
        data = torch.randn(40, LENGTH, WIDTH, dtype=torch.float64)
        *models, optimizer = world.prepare(*models, optimizer)
        loader = world.loader(
            TensorDataset(data), 10, micro_batch_size=None if world.size > 1 else 2, shuffle=True
        )
        for epoch in range(3):
            for turn, (x,) in enumerate(loader):
                if epoch == 2 and turn % 5 in (1, 2) and turn % 3:
                    continue
                x = x[:, : LENGTHS[turn % len(LENGTHS)]]
                for target, model in enumerate(models * (1 + epoch // 2)):
                    world.backward((model(x) - target).square().mean())
                    if epoch == 1 and turn % 2:
                        with torch.no_grad():
                            model(x[:1])
                optimizer.step()
                optimizer.zero_grad()
                if epoch == 0 and turn == 6:  # while one more is asked for already
                    break
        return [{k: v.clone() for k, v in m.state_dict().items() if not v.is_meta} for m in models]


@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=pytest.mark.thorough), "1f1b"])
def test_two_models_and_messages_of_changing_form(schedule):
    alone = run_ranks(train_two, 1, schedule)[0]
    for size in (2, 3):
        held: list[dict[str, Tensor]] = [{}, {}]
        for rank in run_ranks(train_two, size, schedule):
            for whole, part in zip(held, rank, strict=True):
                whole |= {name.removeprefix("module."): value for name, value in part.items()}
        for wanted, found in zip(alone, held, strict=True):
            assert wanted.keys() == found.keys()
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, msg=f"{size}: {name}")


def forget() -> int:
    """Every call is of a kind of its own: what is remembered of kinds has an end."""
    with lockstep.init(Pipeline(split=["second"], num_micro_batches=1)) as world:
        model = world.prepare(Scaled())
        with torch.no_grad():
            for number in range(300):
                y = model(torch.ones(1, WIDTH), number / 7)
            assert torch.equal(y, model(torch.ones(1, WIDTH), number / 7))
        return sum(len(wire._specs_of_kind) for wire in model._activation_wires)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return self.second(self.first(x) * scale)


def test_what_is_remembered_of_kinds_of_input_has_an_end():
    assert all(0 < kinds <= 256 for kinds in run_ranks(forget, 2))


def count_messages() -> int:
    """Returns how many messages this rank sends for the four micro-batches of a global batch."""
    messages = 0

    def counting(send: Callable[..., Any]) -> Callable[..., Any]:
        def send_and_count(wire: Wire, data: Tensor | list[Tensor], to: int) -> None:
            nonlocal messages
            tensors = data if isinstance(data, list) else [data]
            messages += sum(len(tensor) > 0 for tensor in tensors)
            send(wire, data, to)

        return send_and_count

    with lockstep.init(Pipeline(split=["1"], num_micro_batches=4)) as world:
        model = nn.Sequential(nn.Embedding(10, WIDTH), nn.Linear(WIDTH, WIDTH))
        model = world.prepare(model)
        words = torch.arange(8).repeat(3)
        for number, (x,) in enumerate(world.loader(TensorDataset(words), 8)):
            first_of_last_batch = number == 8
            if first_of_last_batch:  # by now both sides know the form of all messages
                Wire._send_batch = counting(Wire._send_batch)
                Wire._send_from_cpu = counting(Wire._send_from_cpu)
            world.backward(model(x).square().mean())
        return messages


def test_over_gloo_marks_are_no_messages_of_their_own():
    # Integer inputs: the activations have a mark, as the gradients do. The first rank sends
    # activations, the second one gradients.
    assert run_ranks(count_messages, 2) == [4, 4]
