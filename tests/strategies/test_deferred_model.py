"""Models on the meta device train as those that were built on the CPU, under every strategy."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import CheckpointError, RanksDifferError, UsageError
from lockstep.optim.deferred_init import Recording
from lockstep.strategies import FSDP, HSDP
from lockstep.torch_compat import to_local

pytestmark = pytest.mark.ranks


class Block(nn.Module):
    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.up = nn.Linear(8, 17)
        self.norm = nn.LayerNorm(17)
        self.down = nn.Linear(17, 8)
        if buffer:
            self.gain = nn.Parameter(torch.tensor(0.9))  # cannot be sharded
            scales = torch.arange(1, 9).float() / 8
            self.register_buffer("scales", scales, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.norm(self.up(x)).relu())
        return x * self.gain * self.scales.to(x.dtype) if hasattr(self, "scales") else x


class Net(nn.Module):
    def __init__(self, *, own_init: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(buffer=own_init) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.words.weight
        if own_init:
            self.apply(self.draw)
            self.register_buffer("noise", torch.rand(3))

    def draw(self, layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layers = nn.LSTM(8, 8, 2, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.layers(self.words(x[:, None]))
        x, _ = self.attention(x, x, x)
        return self.head(x[:, 0])


def data(size: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    samples = torch.randint(11, (size, 2), generator=generator)
    return TensorDataset(samples[:, 0], samples[:, 1])


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """As accelerate's `init_empty_weights`: values are dropped as they are registered."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None:
            dropped = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            original(module, name, dropped)

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = original


CONTEXTS: dict[str, Callable[[], Any]] = {
    "cpu": contextlib.nullcontext,
    "deferred_init": lockstep.deferred_init,
    "meta": lambda: torch.device("meta"),
    "empty": parameters_on_meta,
}


def model_in(context: str, build: Callable[[], nn.Module]) -> nn.Module:
    with CONTEXTS[context]():
        return build()


def weights_of(model: nn.Module, folder: str | Path) -> dict[str, Tensor]:
    """The whole weights of a prepared model, on every rank."""
    path = Path(folder) / "weights.safetensors"
    lockstep.save_weights(model, path)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return load_file(path)


def train(world: lockstep.World, model: nn.Module) -> tuple[list[float], nn.Module]:
    """Trains three steps, with an optimizer that has the parameters from before `prepare`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = world.prepare(model, optimizer)
    losses = []
    for x, y in world.loader(data(), 8):
        world.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if world.is_last_micro_batch:
            losses.append(world.loss())
    return losses, model


def runs(folder: str, cases: list[tuple[str, str, str, dict[str, Any]]]) -> list[Any]:
    """Losses of a few steps, and the weights after them, for each case."""
    builds = {
        "net": Net,
        "plain": lambda: Net(own_init=False),
        "tied": lambda: Net(tied=True),
        "recurrent": Recurrent,
        "float16": lambda: Net().to(torch.bfloat16),
    }
    results = []
    for strategy, kind, context, options in cases:
        with lockstep.init(strategy, seed=3, **options) as world:
            losses, model = train(world, model_in(context, builds[kind]))
            results.append((losses, weights_of(model, folder)))
    return results


def assert_same(found: Any, expected: Any) -> None:
    losses, weights = found
    expected_losses, expected_weights = expected
    assert weights.keys() == expected_weights.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, expected_weights[name]), name
    assert losses == expected_losses
    assert len(losses) == 3


MICRO_BATCHES = {"num_micro_batches": 2}


def test_values_and_losses_are_those_of_a_model_built_on_the_cpu(tmp_path: Path) -> None:
    cases = []
    for strategy in ("fsdp", "pipeline"):
        for context in ("cpu", "deferred_init"):
            cases.append((strategy, "net", context, MICRO_BATCHES))
    results = run_ranks(runs, 2, str(tmp_path), cases)[0]
    for number in range(0, len(cases), 2):
        assert_same(results[number + 1], results[number])


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_kind_of_model_under_every_strategy(tmp_path: Path, size: int) -> None:
    """What is drawn depends neither on the number of ranks nor on the strategy."""
    strategies = {
        1: ["single", "ddp", "fsdp", "dp", "pipeline"],
        2: ["ddp", "fsdp", "hsdp", "pipeline", "diloco"],
        3: ["ddp", "fsdp", "pipeline"],
    }[size]
    contexts = {
        "net": ["deferred_init"],
        "plain": ["deferred_init", "meta"],
        "tied": ["deferred_init"],
        "recurrent": ["deferred_init", "meta"],
        "float16": ["deferred_init"],
    }
    cases = []
    for strategy in strategies:
        for kind, others in contexts.items():
            # A pipeline needs its layers one after the other, each with tensors of its own.
            if strategy == "pipeline" and kind in ("tied", "recurrent"):
                continue
            options = {"precision": "bf16"} if kind == "net" else {}
            for context in ["cpu", *others]:
                cases.append((strategy, kind, context, {**MICRO_BATCHES, **options}))
    results = run_ranks(runs, size, str(tmp_path), cases)[0]
    expected = None
    for case, result in zip(cases, results, strict=True):
        if case[2] == "cpu":
            expected = result
        else:
            assert_same(result, expected)


@pytest.mark.thorough
def test_virtual_ranks_have_the_same_bits_on_any_number_of_processes(tmp_path: Path) -> None:
    options = {"virtual_ranks": 3}
    found = []
    for size, strategy in ((1, "single"), (2, "fsdp"), (3, "ddp"), (3, "fsdp")):
        cases = [(strategy, "net", "deferred_init", options), (strategy, "net", "cpu", options)]
        found += run_ranks(runs, size, str(tmp_path), cases)[0]
    for result in found[1:]:
        assert_same(result, found[0])


# Files


def write_folder(folder: Path, *, tied: bool = False, num_files: int = 1) -> dict[str, Tensor]:
    """Writes a folder as transformers does; a tied weight has one name in it."""
    torch.manual_seed(9)
    state = Net(own_init=False, tied=tied).state_dict()
    if tied:
        del state["head.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    names = list(state)
    weight_map = {}
    for number in range(num_files):
        file = "model.safetensors"
        if num_files > 1:
            file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        part = {name: state[name].contiguous() for name in names[number::num_files]}
        weight_map |= dict.fromkeys(part, file)
        save_file(part, folder / file)
    if num_files > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return state


def load_in(folder: str, strategy: str, context: str, when: str, tied: bool) -> dict[str, Tensor]:
    """The weights of a model that is filled from a folder; nothing may be drawn for it."""
    with lockstep.init(strategy, num_micro_batches=2) as world:
        model = model_in(context, lambda: Net(own_init=False, tied=tied))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if when == "before":
            report = lockstep.load_weights(model, folder)
            assert not report.missing or tied
            copies = copy.deepcopy(model)
        model, optimizer = world.prepare(model, optimizer)
        if when == "after":
            lockstep.load_weights(model, folder)
        else:
            copies = world.prepare(copies)
            losses = [float(p.sum()) for p in copies.parameters() if not p.is_meta]
            assert all(loss == loss for loss in losses)  # not NaN
        for x, y in world.loader(data(), 8):
            world.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            break
        return weights_of(model, Path(folder).parent)


def refuse_to_draw() -> None:
    """From here on this process fails where values are drawn at random."""
    original = Recording.replay

    def replay(recording: Recording, keys: set[int], *arguments: Any) -> None:
        assert not recording.draws(keys), "something is drawn"
        original(recording, keys, *arguments)

    Recording.replay = replay


def many_loads(folder: str, cases: list[tuple[str, str, str, bool]]) -> list[dict[str, Tensor]]:
    refuse_to_draw()
    return [load_in(folder, *case) for case in cases]


def test_each_rank_reads_its_part_of_a_folder(tmp_path: Path) -> None:
    state = write_folder(tmp_path / "base", num_files=3)
    cases = [("fsdp", "deferred_init", "before", False), ("pipeline", "meta", "before", False)]
    for found in run_ranks(many_loads, 2, str(tmp_path / "base"), cases)[0]:
        for name, value in found.items():
            if "running" not in name and "num_batches" not in name:
                assert torch.equal(value, state[name]), name


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_folders_under_every_strategy(tmp_path: Path, size: int, tied: bool) -> None:
    state = write_folder(tmp_path / "base", tied=tied)
    cases = []
    for strategy in ["single", "fsdp"] if size == 1 else ["ddp", "fsdp", "hsdp", "pipeline"]:
        if strategy == "pipeline" and tied:
            continue
        for context in ("deferred_init", "meta", "empty"):
            if context == "empty" and tied:  # it unties what is tied
                continue
            for when in ("before", "after"):
                cases.append((strategy, context, when, tied))
    for found in run_ranks(many_loads, size, str(tmp_path / "base"), cases)[0]:
        for name, value in state.items():
            if "running" not in name and "num_batches" not in name:
                assert torch.equal(found[name], value), name


def test_a_folder_that_does_not_fit(tmp_path: Path) -> None:
    """Says it where `load_weights` is called, without a run."""
    state = write_folder(tmp_path)
    model = model_in("deferred_init", lambda: Net(own_init=False))
    file = tmp_path / "model.safetensors"
    save_file({**state, "head.weight": torch.ones(3, 8)}, file)
    with pytest.raises(CheckpointError, match=r"head.weight *\[3, 8\] in the file, \[11, 8\]"):
        lockstep.load_weights(model, tmp_path)
    del state["head.weight"]
    save_file(state, file)
    with pytest.raises(CheckpointError, match=r"missing *head.weight"):
        lockstep.load_weights(model, tmp_path)
    report = lockstep.load_weights(model, tmp_path, strict=False)
    assert report.missing == ("head.weight",)
    file.unlink()
    with pytest.raises(CheckpointError, match="without one safetensors file or index"):
        lockstep.load_weights(model, tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")  # torch's own format is read, too
    lockstep.load_weights(model, tmp_path, strict=False)
    with lockstep.init("single") as world:
        found = weights_of(world.prepare(model), tmp_path)
    for name, value in state.items():
        assert torch.equal(found[name], value), name
    assert not found["head.weight"].isnan().any()  # drawn


# Checkpoints


def resume_in(folder: str, strategy: str, context: str) -> dict[str, Tensor]:
    with lockstep.init(strategy, seed=4, num_micro_batches=2) as world:
        model = world.prepare(model_in(context, Net))
        checkpoint = world.checkpoint(folder, model=model)
        if not checkpoint.resume():
            checkpoint.save()
        return weights_of(model, Path(folder).parent)


def save_and_resume(folder: str) -> list[dict[str, Tensor]]:
    found = [resume_in(folder, "fsdp", "deferred_init")]
    refuse_to_draw()
    for strategy in ("fsdp", "pipeline", "ddp"):
        found.append(resume_in(folder, strategy, "deferred_init"))
    return found


def test_a_checkpoint_is_resumed_without_drawing(tmp_path: Path) -> None:
    first, *others = run_ranks(save_and_resume, 2, str(tmp_path / "run"))[0]
    for found in others:
        for name, value in first.items():
            assert torch.equal(found[name], value), name


# Combinations


def error_of(call: Callable[[], Any], kind: type[Exception] = UsageError) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "no error"


def step(world: lockstep.World, model: nn.Module, optimizer: Any) -> None:
    for x, y in world.loader(data(8), 8):
        world.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


def averages(folder: str, strategy: str, context: str) -> list[dict[str, Tensor]]:
    """Moving averages: a copy of the model, and torch's wrapper of one, prepared with it."""
    with lockstep.init(strategy, seed=3) as world:
        model = model_in(context, Net)
        ema = AveragedModel(model, use_buffers=True)
        copied = copy.deepcopy(model).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, ema, copied, optimizer = world.prepare(model, ema, copied, optimizer)
        ema.update_parameters(model)
        step(world, model, optimizer)
        ema.update_parameters(model)
        return [weights_of(each, folder) for each in (model, ema, copied)]


def compiled(folder: str, strategy: str, context: str) -> list[dict[str, Tensor]]:
    with lockstep.init(strategy, seed=3) as world:
        found = []
        for in_place in (True, False):
            torch.manual_seed(3)
            model = model_in(context, Net)
            if in_place:
                model.compile(backend="eager")
            else:
                model = torch.compile(model, backend="eager")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            model, optimizer = world.prepare(model, optimizer)
            step(world, model, optimizer)
            found.append(weights_of(model, folder))
        return found


def two_models(folder: str, strategy: str, context: str) -> list[dict[str, Tensor]]:
    """The second is built and prepared when the ranks have random streams of their own."""
    with lockstep.init(strategy, seed=3) as world:
        found = []
        for _ in range(2):
            model = model_in(context, Net)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            model, optimizer = world.prepare(model, optimizer)
            step(world, model, optimizer)
            found.append(weights_of(model, folder))
        assert not torch.equal(found[0]["head.weight"], found[1]["head.weight"])
        return found[:1]  # what is drawn after the context is not what is drawn on the CPU


def partly_on_meta(folder: str, strategy: str, context: str) -> list[dict[str, Tensor]]:
    """A real backbone that is frozen, and a head; adapters are trained beside it."""
    with lockstep.init(strategy, seed=3) as world:
        model = Net()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        torch.manual_seed(5)
        model.head = model_in(context, lambda: nn.Linear(8, 11))
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.5)
        model, optimizer = world.prepare(model, optimizer)
        step(world, model, optimizer)
        return [weights_of(model, folder)]


COMBINATIONS = {
    "averages": averages,
    "compiled": compiled,
    "two models": two_models,
    "partly on meta": partly_on_meta,
}


def combined(folder: str, strategy: str) -> None:
    for name, function in COMBINATIONS.items():
        if strategy == "pipeline" and name in ("averages", "compiled"):
            continue
        strategy_here: Any = strategy
        if strategy == "pipeline":
            strategy_here = lockstep.strategies.Pipeline(num_micro_batches=1)
        expected = function(folder, strategy_here, "cpu")
        found = function(folder, strategy_here, "deferred_init")
        for weights, expected_weights in zip(found, expected, strict=True):
            assert weights.keys() == expected_weights.keys()
            for key, value in weights.items():
                assert torch.equal(value, expected_weights[key]), (name, key)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_combinations(tmp_path: Path, strategy: str) -> None:
    run_ranks(combined, 2, str(tmp_path), strategy)


def uses(folder: str) -> dict[str, str]:
    """What makes values be computed, or is refused until then."""
    said = {}
    with lockstep.init("fsdp", seed=3) as world:
        torch.manual_seed(0)
        expected = Net().state_dict()

        def fresh(build: Callable[[], nn.Module] = Net, context: str = "deferred_init") -> Any:
            torch.manual_seed(0)
            return world.prepare(model_in(context, build))

        model = fresh()
        assert model.head.weight.to_local().isnan().all(), "nothing is computed yet"
        assert torch.equal(model.state_dict()["head.weight"].full_tensor(), expected["head.weight"])
        model = fresh()
        with torch.no_grad():  # on one rank alone, each of the two could be first
            model.eval()(torch.arange(4))
        assert torch.equal(model.words.weight.full_tensor(), expected["words.weight"])
        model = fresh()
        with torch.no_grad():
            model.head.weight.fill_(2.0)  # the user's values stay
            model.words.weight.mul_(2.0)  # computed from nothing
        said["changed"] = error_of(model.state_dict)
        model = fresh()
        sums = [parameter.square().sum() for parameter in model.parameters()]
        assert all(to_local(part).isfinite() for part in sums)
        model = fresh()
        with torch.no_grad():
            model.head.weight.fill_(2.0)
        assert (model.state_dict()["head.weight"].full_tensor() == 2.0).all()

        class Bare(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 4)
                self.gain = nn.Parameter(torch.ones(4))

        class Own(Bare):
            def __init__(self) -> None:
                super().__init__()
                del self.gain
                self.init_weights()

            def init_weights(self) -> None:
                nn.init.normal_(self.layer.weight)

        bare = fresh(Bare, "meta")
        said["unknown"] = error_of(bare.state_dict)
        file = f"{folder}/bare.safetensors"
        lockstep.save_weights(fresh(Bare), file)
        world.barrier()
        lockstep.load_weights(bare, file)
        assert bare.state_dict()["gain"].full_tensor().tolist() == [1.0] * 4
        said["own"] = error_of(fresh(Own, "meta").state_dict)
        said["buffer"] = error_of(lambda: fresh(lambda: Block(buffer=True), "meta"))
        fresh(lambda: nn.Linear(7, 5), "meta").state_dict()
        said["twins"] = error_of(fresh(lambda: nn.Linear(7, 5), "meta").state_dict)
        if world.is_main:
            with lockstep.deferred_init():
                pass
        model = model_in("deferred_init", Net)
        said["ranks"] = error_of(lambda: world.prepare(model), RanksDifferError)
    return said


def test_when_values_are_computed(tmp_path: Path) -> None:
    said = run_ranks(uses, 2, str(tmp_path))[0]
    assert "a change of words.weight between world.prepare and its first use" in said["changed"]
    assert "nothing has given values to gain" in said["unknown"]
    assert "load_weights(model, folder) or checkpoint.resume()" in said["unknown"]
    assert "first use of an Own that" in said["own"]
    assert "layer.weight, layer.bias would be drawn by reset_parameters" in said["own"]
    assert "a method init_weights" in said["own"]
    assert "scales would have no values" in said["buffer"]
    assert "whether one is a copy of the other" in said["twins"]
    assert "ranks have called lockstep.deferred_init, or have seeded inside" in said["ranks"]


def test_copies_on_one_process_have_values() -> None:
    with lockstep.init("single", seed=3) as world:
        torch.manual_seed(3)
        expected = Net()
        torch.manual_seed(3)
        model = world.prepare(model_in("deferred_init", Net))
        copied = copy.deepcopy(model)
        for (name, value), own in zip(
            copied.named_parameters(), expected.parameters(), strict=True
        ):
            assert torch.equal(value, own), name
        copy.deepcopy(model)  # as any other module


def draw_as_another_processor() -> None:
    """From here on this process draws other last bits."""
    torch.backends.cpu.get_cpu_capability = lambda: "another"
    original = Recording.replay

    def replay(recording: Recording, keys: Any, others: Any, deliver: Any, *rest: Any) -> None:
        def deliver_other(key: int, content: torch.UntypedStorage) -> None:
            torch.empty(0).set_(content).add_(1)
            deliver(key, content)

        original(recording, keys, others, deliver_other, *rest)

    Recording.replay = replay


def drawn(rank_differs: bool) -> list[list[Tensor]]:
    found = []
    for strategy in ("ddp", lockstep.strategies.HSDP(shard_size=1)):
        with lockstep.init(strategy, seed=3) as world:
            if rank_differs and world.rank == 1 and not found:
                draw_as_another_processor()
            model = world.prepare(model_in("deferred_init", lambda: nn.Linear(4, 4)))
            values = [parameter.detach() for parameter in model.parameters()]
            if strategy != "ddp":
                values = [value.to_local() for value in values]
            found.append([value.clone() for value in values])
    return found


@pytest.mark.thorough
def test_ranks_with_other_processors_draw_what_the_first_draws() -> None:
    expected = run_ranks(drawn, 2, False)[0]
    for found in run_ranks(drawn, 2, True):
        for values, expected_values in zip(found, expected, strict=True):
            for value, expected_value in zip(values, expected_values, strict=True):
                assert torch.equal(value, expected_value)


# How much memory it takes

PEAK_WIDTH = 1024
PEAK_BLOCKS = 4
BYTES_OF_UNIT = (8 * PEAK_WIDTH**2 + 5 * PEAK_WIDTH) * 4


def cannot_reset_peak() -> str:
    """Why the peak of the resident memory cannot be measured here; empty if it can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        return f"the peak of the resident memory cannot be reset: {error}"
    return ""


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def large_model(width: int, blocks: int) -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    return nn.Sequential(*(block() for _ in range(blocks)))


def fill(world: Any, folder: str, when: str, width: int, blocks: int) -> Any:
    """A prepared model whose values are drawn, or loaded `before` or `after` prepare."""
    with lockstep.deferred_init():
        model: Any = large_model(width, blocks)
    if when == "before":
        lockstep.load_weights(model, folder)
    model = world.prepare(model)
    if when == "after":
        lockstep.load_weights(model, folder)
    list(model.parameters())
    return model


def units_above_shards(strategy: str, when: str, folder: str, small_folder: str) -> float:
    """How much more than its shards a rank held at most, in units of the model."""
    torch.set_num_threads(1)
    options = {"blocks": nn.Sequential}
    kind = HSDP(**options, shard_size=2) if strategy == "hsdp" else FSDP(**options)
    with lockstep.init(kind, seed=0) as world:
        fill(world, small_folder, when, 8, 2)  # what is imported for a first model is not counted
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes("VmRSS")
        model = fill(world, folder, when, PEAK_WIDTH, PEAK_BLOCKS)
        peak = resident_bytes("VmHWM") - before
        shards = sum(to_local(parameter).nbytes for parameter in model.parameters())
        assert shards > PEAK_BLOCKS * BYTES_OF_UNIT / 2.1
        return (peak - shards) / BYTES_OF_UNIT


def write_models(folder: Path, small_folder: Path) -> None:
    lockstep.save_weights(large_model(PEAK_WIDTH, PEAK_BLOCKS), folder / "model.safetensors")
    lockstep.save_weights(large_model(8, 2), small_folder / "model.safetensors")


@pytest.mark.parametrize(
    ("strategy", "when"),
    [
        ("fsdp", "drawn"),
        pytest.param("fsdp", "before", marks=pytest.mark.thorough),
        ("fsdp", "after"),
        pytest.param("hsdp", "drawn", marks=pytest.mark.thorough),
    ],
)
def test_a_rank_holds_its_shards_and_one_unit_at_most(
    strategy: str, when: str, tmp_path: Path
) -> None:
    reason = cannot_reset_peak()
    if reason:
        pytest.skip(reason)
    folder, small_folder = tmp_path / "large", tmp_path / "small"
    if when != "drawn":
        run_ranks(
            write_models, 1, folder, small_folder
        )  # not here: ranks are copies of this process
    found = run_ranks(units_above_shards, 2, strategy, when, str(folder), str(small_folder))
    assert max(found) <= 1.0, found
