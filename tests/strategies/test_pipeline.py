"""The pipeline computes what one device computes: over stages, copies, schedules and forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import RankFailed, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import LockstepError, SettingError
from lockstep.strategies import Pipeline

pytestmark = pytest.mark.ranks

WORDS, WIDTH, LENGTH = 17, 8, 5


class Block(nn.Module):
    """Attention and a small network, each with a connection around it; takes a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.query(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9)
        x = x + self.out(scores.softmax(-1) @ v)
        return x + self.net(x)


class Language(nn.Module):
    """Its own parameter, a mask made of the input, code between the blocks, a dictionary out."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=words.device).tril()
        mask = mask & (words != 0)[:, None, :] | torch.eye(LENGTH, dtype=torch.bool)
        x = self.embed(words) + self.position
        for number, block in enumerate(self.blocks):
            x = block(x, mask=mask) if number else block(x * 1.5, mask=mask)
        return {"logits": self.head(self.norm(x))}


def text(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randint(WORDS, (samples, LENGTH), generator=generator))


def count_words(batch: tuple[Tensor]) -> Tensor:
    return (batch[0][:, 1:] > 8).sum()


def weighted_loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """The mean over the words that count."""
    words = batch[0]
    logits = model(words)["logits"]
    each = F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten(), reduction="none")
    counts = (words[:, 1:] > 8).flatten()
    return (each * counts).sum() / count_words(batch).clamp(min=1)


def leave_in_the_middle(model: nn.Module, loader: Any, world: Any, loss_of: Any) -> None:
    """Begins a global batch and breaks off; nothing of it may remain."""
    for number, batch in enumerate(loader):
        world.backward(loss_of(model, batch))
        if number == 1:
            break
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "step": 0})


def language_loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    words = batch[0]
    logits = model(words)["logits"]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def images(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(samples, 2, 5, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (samples,), generator=generator))


def residual_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), Residual(4), Residual(4),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def synchronised_net() -> nn.Module:
    """Layers that share statistics with all ranks, unless they are told otherwise."""
    net = residual_net()
    net[1] = lockstep.SyncBatchNorm(4)
    net[3].body[1], net[4].body[1] = nn.SyncBatchNorm(4), lockstep.SyncBatchNorm(4)
    return net


def image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


PROBLEMS: dict[str, Any] = {
    "language": (Language, text, language_loss),
    "weighted": (Language, text, weighted_loss),
    "images": (residual_net, images, image_loss),
    "synchronised": (synchronised_net, images, image_loss),
}
BATCH, STEPS = 12, 6


def train(
    problem: str,
    samples: int,
    micro_batches: int,
    clip: float | None = None,
    shares: str | None = None,
    weighted: bool = False,
    broken_off: bool = False,
    meets: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Some steps; the weights of this rank, the losses and a sum over an evaluation."""
    make, data, loss_of = PROBLEMS[problem]
    strategy = Pipeline(num_micro_batches=micro_batches, **options)
    with lockstep.init(strategy, seed=3) as world:
        torch.manual_seed(1 + world.rank)  # the weights of rank 0 are taken
        model = make().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        example = DataLoader(data(4), 2)
        model, optimizer, _ = world.prepare(model, optimizer, example)
        loader = world.loader(
            data(samples),
            BATCH,
            shuffle=True,
            micro_batch_size=None if world.size > 1 else math.ceil(BATCH / micro_batches),
            shares=shares if world._run.collectives.data_parallel.size > 1 else None,
            weight=count_words if weighted else None,
        )
        assert loader.micro_batches == micro_batches
        if broken_off:
            leave_in_the_middle(model, loader, world, loss_of)
        losses, norms = [], []
        while world._run.step.number < STEPS:
            for batch in loader:
                if meets:  # in something else: all ranks, three times in each turn
                    world.sum(1.0)
                loss = loss_of(model, batch)
                if meets:
                    with torch.no_grad():
                        model(batch[0])
                world.backward(loss)
                if meets:
                    world.barrier()
                losses.append(loss.item())
                if clip is not None:
                    norms.append(world.clip_grad_norm_(model, clip))
                optimizer.step()
                optimizer.zero_grad()
                if world._run.step.number == STEPS:
                    break
        model.eval()
        evaluated = 0.0
        with torch.no_grad():
            for batch in world.loader(data(7), 3):
                output = model(batch[0])
                evaluated += (output["logits"] if isinstance(output, dict) else output).norm(1)
        held = {
            name.removeprefix("module."): value.clone()
            for name, value in model.state_dict().items()
            if not value.is_meta
        }
        return {
            "weights": held,
            "losses": losses,
            "evaluated": float(world.sum(evaluated)),
            "norms": [float(norm) for norm in norms if norm is not None],
        }


CASES: dict[str, dict[str, Any]] = {
    "language": {"problem": "language", "samples": 36, "micro_batches": 4},
    "language, gpipe": {
        "problem": "language", "samples": 36, "micro_batches": 3, "schedule": "gpipe",
    },
    "language, short batches, clipped": {
        "problem": "language", "samples": 31, "micro_batches": 3, "clip": 0.3,
    },
    "language, interleaved": {
        "problem": "language", "samples": 31, "micro_batches": 4, "interleave": 2,
    },
    "language, gpipe interleaved": {
        "problem": "language", "samples": 36, "micro_batches": 4, "interleave": 2,
        "schedule": "gpipe",
    },
    "language, interleaved, met by all": {
        "problem": "language", "samples": 31, "micro_batches": 4, "interleave": 2, "meets": True,
    },
    "language, broken off": {
        "problem": "language", "samples": 36, "micro_batches": 4, "broken_off": True,
    },
    "language, weighted by words": {
        "problem": "weighted", "samples": 31, "micro_batches": 3, "weighted": True, "clip": 1.0,
    },
    "images": {"problem": "images", "samples": 36, "micro_batches": 2},
    "synchronised": {"problem": "synchronised", "samples": 24, "micro_batches": 2},
    "images, short batches, clipped": {
        "problem": "images", "samples": 32, "micro_batches": 2, "clip": 0.1,
    },
}  # fmt: skip


def train_all(names: list[str]) -> dict[str, Any]:
    return {name: train(**CASES[name]) for name in names}


def agree(found: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """All stages together hold the weights of one process; rank 0 has its losses."""
    held: dict[str, Tensor] = {}
    for rank in found:
        held |= rank["weights"]
    assert held.keys() == one["weights"].keys()
    for name, value in one["weights"].items():
        torch.testing.assert_close(held[name], value, rtol=1e-9, atol=1e-11, msg=name)
    for rank in found:
        assert rank["evaluated"] == pytest.approx(one["evaluated"], rel=1e-9)
        assert rank["norms"] == pytest.approx(one["norms"], rel=1e-9)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_ranks(train_all, 1, list(CASES))[0]


@pytest.mark.parametrize(
    ("size", "part"),
    [
        (2, slice(None)),
        pytest.param(3, slice(0, None, 2), marks=pytest.mark.thorough),
        pytest.param(3, slice(1, None, 2), marks=pytest.mark.thorough),
    ],
)
def test_stages_compute_what_one_device_computes(alone, size, part):
    names = [n for n, case in CASES.items() if size == 2 or "interleave" not in case][part]
    results = run_ranks(train_all, size, names)
    for name in names:
        found = [rank[name] for rank in results]
        agree(found, alone[name])
        assert found[0]["losses"] == pytest.approx(alone[name]["losses"], rel=1e-9)
        assert all(math.isnan(loss) for rank in found[1:] for loss in rank["losses"])


COPIES: dict[str, dict[str, Any]] = {
    "language": {"problem": "language", "samples": 31, "micro_batches": 3, "clip": 0.3},
    "images": {"problem": "images", "samples": 32, "micro_batches": 2, "shares": "1:2"},
    "weighted": {
        "problem": "weighted", "samples": 31, "micro_batches": 3, "weighted": True, "shares": "2:1",
    },
    "synchronised, interleaved": {
        "problem": "synchronised", "samples": 25, "micro_batches": 2, "interleave": 2,
    },
}  # fmt: skip


def train_copies(stages: int) -> dict[str, Any]:
    return {name: train(**case, stages=stages) for name, case in COPIES.items()}


def test_two_pipelines_side_by_side():
    one = run_ranks(train_copies, 1, 1)[0]
    results = run_ranks(train_copies, 4, 2)
    for name in COPIES:
        found = [rank[name] for rank in results]
        agree(found, one[name])
        for a, b in ((0, 1), (2, 3)):
            assert found[a]["weights"].keys() == found[b]["weights"].keys()
            for key, value in found[a]["weights"].items():
                assert torch.equal(value, found[b]["weights"][key]), key


def refused(fn: Any, *args: Any, **kwargs: Any) -> str:
    """What a call is refused with."""
    try:
        fn(*args, **kwargs)
    except LockstepError as error:
        return str(error)
    raise AssertionError("it was not refused")


def wrong_uses() -> dict[str, str]:
    """Those that every rank notices by itself."""
    found = {}
    for name, options, settings in (
        ("stages", {"stages": 3}, {}),
        ("cuts", {"split": ["a", "b"]}, {}),
        ("fp16", {}, {"precision": "fp16"}),
    ):
        found[name] = refused(lockstep.init, Pipeline(**options), **settings)
    with lockstep.init("pipeline") as world:
        found["norm"] = refused(world.prepare, residual_net())
        found["few"] = refused(world.prepare, nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with lockstep.init(Pipeline(split=["head"], num_micro_batches=2)) as world:
        inner = Language()
        model = world.prepare(inner)
        optimizer = world.prepare(torch.optim.SGD(model.parameters(), 0.1))
        words = text(4).tensors[0]
        found["nothing"] = refused(world.backward, torch.ones((), requires_grad=True))
        found["inside"] = refused(inner, words)
        loss = language_loss(model, (words,))
        found["two"] = refused(model, words)
        found["step"] = refused(optimizer.step)
        world.backward(loss)
        optimizer.step()
    found["closed"] = refused(model, words)
    return found


def test_wrong_uses_are_refused_on_every_rank():
    expected = {
        "stages": "the world size 2 is not a multiple of it",
        "cuts": "begin at 1 cut",
        "fp16": "use precision='bf16'",
        "norm": "Pipeline(num_micro_batches=...)",
        "few": "the model can be cut into 1 parts: 0",
        "nothing": "world.backward without a forward pass",
        "inside": "no rank holds the whole model",
        "two": "two forward passes with gradients for one world.backward",
        "step": "call world.backward(loss)",
        "closed": "after world.close()",
    }
    for found in run_ranks(wrong_uses, 2):
        assert found.keys() == expected.keys()
        for name, text_ in expected.items():
            assert text_ in found[name], (name, found[name])


class Settled(Language):
    """With what models of libraries have beside their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": WIDTH}
        self.scale = 1.0

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(words)["logits"] * self.scale}

    def generate(self, words: Tensor) -> Tensor:
        return self(words)["logits"].argmax(-1)


def reach() -> dict[str, Any]:
    """What the user's module has, asked of the wrapper."""
    said: dict[str, Any] = {}
    with lockstep.init("pipeline") as world:
        model = world.prepare(Settled())
        words = text(2)[:][0]
        for name in ("generate", "head", "position", "absent"):
            try:
                said[name] = getattr(model, name)
            except AttributeError as error:
                said[name] = type(error).__name__, str(error)
            assert not hasattr(model, name)
        with torch.no_grad():
            try:
                model.module.generate(words)
            except LockstepError as error:
                said["around"] = error.do
            before = model(words)["logits"]
            model.scale = 2.0
            said["doubled"] = torch.equal(model(words)["logits"], 2 * before)
        said["config"], said["device"] = model.config, str(model.device)
    return said


def test_what_a_stage_has_not_is_refused_with_advice_and_settings_are_those_of_the_model():
    for rank, said in enumerate(run_ranks(reach, 2)):
        for name, kind in (("generate", "a method"), ("head", "a Linear"), ("position", "a Param")):
            error, message = said[name]
            assert error == "NotOnStageError"
            assert (
                f"{name} of a Settled under strategy='pipeline'\n  found: it is {kind}" in message
            )
            assert "this rank has 1 stage of 2\n" in message
            for advice in ("save_weights(model, path) on all ranks", "from_pretrained", "'ddp'"):
                assert advice in message
            assert f"at:    rank {rank}, test_pipeline.py:" in message
        assert said["absent"] == ("AttributeError", "'Settled' object has no attribute 'absent'")
        assert "save_weights" in said["around"]
        assert said["doubled"], "what is set on the wrapper is set in the model"
        assert (said["config"], said["device"]) == ({"width": WIDTH}, "cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "dapple"}, "schedules are 1f1b, gpipe"),
        ({"interleave": 0}, "at least 1"),
        ({"stages": True}, "at least 1"),
        ({"split": "head"}, "give a list of names"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(SettingError, match=message):
        Pipeline(**options)


class Skipping(nn.Module):
    """Its last layer uses what the first has given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(self.b(x) + x)


class Backwards(nn.Module):
    """Registered in another order than it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class LeavesOutTheLast(nn.Module):
    """Its last layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.spare = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def cut_without_the_spare() -> list[Any]:
    with lockstep.init("pipeline", micro_batch_size=1) as world:
        data = TensorDataset(torch.ones(4, 3))
        made = LeavesOutTheLast()
        made.spare = nn.Linear(3, 3000)  # by its size it would be a stage
        model, _ = world.prepare(made, DataLoader(data, 2))
        world.backward(model(torch.ones(2, 3)).sum())
        compiled = torch.compile(LeavesOutTheLast(), backend="eager")
        after = torch.compile(model, backend="eager")
        with torch.no_grad():
            same = torch.equal(after(torch.ones(2, 3)), model(torch.ones(2, 3)))
        return [refused(world.prepare, compiled), same]


@pytest.mark.thorough
def test_a_submodule_that_is_not_called_begins_no_stage_and_a_compiled_whole_is_refused():
    for refusal, same in run_ranks(cut_without_the_spare, 2):
        assert "with LeavesOutTheLast compiled" in refusal
        assert same


def graphs_of_compiled_blocks() -> int:
    """The number of graphs that this process compiles, of two blocks on two stages."""
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with lockstep.init(Pipeline(split=["1"], num_micro_batches=2)) as world:
        blocks = [torch.compile(nn.Linear(3, 3), backend=backend) for _ in range(2)]
        model = nn.Sequential(*blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        for (x,) in world.loader(TensorDataset(torch.ones(4, 3)), 4):
            world.backward(model(x).sum())
            optimizer.step()
    return len(graphs)


def test_the_blocks_of_each_stage_are_compiled():
    """The rank of the second stage runs the code of the first one, too, to compute shapes."""
    assert run_ranks(graphs_of_compiled_blocks, 2) == [1, 1]


def use(make: Any, cut: str) -> None:
    with lockstep.init(Pipeline(split=[cut], num_micro_batches=1)) as world:
        model = world.prepare(make())
        world.backward(model(torch.ones(2, 3)).sum())


@pytest.mark.parametrize(
    ("make", "cut", "message"),
    [
        (Skipping, "b", "a skip connection"),
        (Backwards, "first", "not called in the order they are registered"),
        (LeavesOutTheLast, "spare", "the forward pass ended without a call of spare"),
    ],
)
def test_models_that_cannot_be_cut_there(make, cut, message):
    with pytest.raises(RankFailed, match=message):
        run_ranks(use, 2, make, cut)


def half_precision() -> list[float]:
    """The losses in bf16; under autocast a stage sends what the layer before it gives."""
    with lockstep.init(Pipeline(num_micro_batches=3), precision="bf16", seed=3) as world:
        torch.manual_seed(1)
        model = Language()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        pieces = None if world.size > 1 else 4
        losses = []
        for batch in world.loader(text(36), BATCH, shuffle=True, micro_batch_size=pieces):
            loss = language_loss(model, batch)
            losses.append(loss.item())
            world.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return losses


def test_in_bf16_the_stages_compute_the_same_bits():
    """Each layer is computed by one rank, on one micro-batch: no sum has another order."""
    alone = run_ranks(half_precision, 1)[0]
    assert run_ranks(half_precision, 2)[0] == alone
