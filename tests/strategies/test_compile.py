"""`torch.compile` before and after `world.prepare`, in place and block by block.

The matrix of strategies, precisions and ways, with inductor, is measured by
`benchmarks/bench_compile.py` and takes minutes; here one of its cells runs with a backend that
compiles nothing. The rest is thorough.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from problems import difference, tensors
from ranks import run_ranks
from torch import Tensor, nn

import benchmarks.bench_compile as bench_compile
import lockstep
from benchmarks.bench_compile import TOLERANCE, WAYS, Counts, compiled_after, compiled_before
from lockstep.errors import UsageError
from lockstep.strategies import DP, HSDP

pytestmark = pytest.mark.ranks


def breaks_of_plain_torch() -> dict[tuple[str, str], int]:
    """The graph breaks that the benchmark has counted with plain torch, by strategy and way."""
    results = Path(bench_compile.__file__).with_name("results") / "compile.json"
    rows = json.loads(results.read_text())["rows"]
    return {(row["strategy"], row["way"]): row["plain"]["breaks"] for row in rows if row["plain"]}


def check(rows: list[dict[str, Any]]) -> None:
    """What must hold of each way of compiling, on one rank."""
    for row in rows:
        assert row["difference"] <= TOLERANCE[row["precision"]], row
        assert row["late"] == 0, row


def without_inductors_threads() -> None:
    """Has inductor compile in this thread alone: threads of its own would outlive the training."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1


def measured(strategy: str, precision: str, ways: tuple[str, ...], backend: str) -> Any:
    without_inductors_threads()
    return bench_compile.without_plain_torch(strategy, precision, ways, backend)


def one_cell() -> tuple[dict[str, Any], list[Any]]:
    """A cell of the matrix, and what models have learned that were compiled twice."""
    warnings.simplefilter("ignore")  # torch's, of its compiler
    cell = bench_compile.with_lockstep("fsdp", "bf16", "in place before", "eager")
    return cell, [
        compiled_twice(strategy, "bf16", "before", "after") for strategy in ("ddp", "fsdp")
    ]


def compiled_twice(strategy: str, precision: str, first: str, second: str) -> Any:
    """How far a model that was compiled before and after `world.prepare` is from a plain one."""
    weights = []
    for ways in ((bench_compile.NOT_COMPILED, bench_compile.NOT_COMPILED), (first, second)):
        with lockstep.init(strategy, precision=precision, seed=0) as world:
            torch._dynamo.reset()
            torch.manual_seed(3)
            model = compiled_before(bench_compile.Net(), ways[0], "eager")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = world.prepare(model, optimizer)
            call = compiled_after(model, ways[1], "eager")
            assert isinstance(call, nn.Module)  # whose `eval`, for example, can be called
            data = torch.utils.data.TensorDataset(*bench_compile.samples())
            for x, y in world.loader(data, bench_compile.BATCH):
                world.backward(F.cross_entropy(call(x), y))
                optimizer.step()
                optimizer.zero_grad()
            weights.append(bench_compile.whole_weights(call))
    return strategy, precision, first, second, bench_compile.difference(*weights)


def test_a_compiled_model_trains_in_bf16_without_recompilation_or_graph_breaks():
    for found, twice in run_ranks(one_cell, 2):
        assert (found["breaks"], found["late"]) == (0, 0), found["reasons"]
        assert found["graphs"] > 0
        assert [difference for *_, difference in twice] == [0, 0], twice


def all_compiled_twice(strategy: str) -> list[Any]:
    warnings.simplefilter("ignore")  # torch's, of its compiler
    found = []
    for precision in (*bench_compile.PRECISIONS, "fp64"):
        for first in ("before", "in place before", "block by block"):
            for second in ("after", "in place after"):
                found.append(compiled_twice(strategy, precision, first, second))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("ddp", 2), ("fsdp", 3)])
def test_a_model_may_be_compiled_before_and_after_prepare(strategy: str, size: int) -> None:
    for rows in run_ranks(all_compiled_twice, size, strategy):
        assert [row for row in rows if row[-1] != 0] == []


@pytest.mark.thorough
@pytest.mark.parametrize("precision", bench_compile.PRECISIONS)
@pytest.mark.parametrize("strategy", bench_compile.STRATEGIES)
def test_the_whole_matrix_with_inductor(strategy: str, precision: str) -> None:
    size = 1 if strategy in ("single", "dp") else 2
    plain = breaks_of_plain_torch()
    for rows in run_ranks(measured, size, strategy, precision, WAYS, "inductor"):
        check(rows)
        for row in rows:
            assert row["breaks"] <= plain.get((strategy, row["way"]), row["breaks"]), row


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_three_ranks_are_as_two(strategy: str) -> None:
    for rows in run_ranks(measured, 3, strategy, "bf16", WAYS, "aot_eager"):
        check(rows)


@dataclasses.dataclass
class Output:
    """A model's output that torch's pytree does not know."""

    logits: Tensor
    hidden: Tensor


class Returns(nn.Module):
    """Two layers, and the output in a container of some kind."""

    def __init__(self, kind: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 4)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).tanh()
        logits = self.second(hidden)
        if self.kind == "dict":
            return {"logits": logits, "hidden": [hidden], "count": 2, "nothing": None}
        if self.kind == "dataclass":
            return Output(logits, hidden)
        return logits


def outputs_of_one_graph() -> list[Any]:
    """For each kind of output and way: graphs, graph breaks, the largest difference, dtypes."""
    x, _ = tensors(8, torch.float32).tensors
    found = []
    with lockstep.init("single", precision="bf16", seed=0) as world:
        for kind in ("tensor", "dict", "dataclass", "sequential"):
            for way in ("after", "in place after", "in a compiled function"):
                counts = Counts()
                plain = nn.Sequential(nn.Linear(6, 4)) if kind == "sequential" else Returns(kind)
                model = world.prepare(plain)
                want = _tensors_in(model(x))
                options: dict[str, Any] = {"backend": "eager", "fullgraph": True}
                call: Any = model
                if way == "after":
                    call = torch.compile(model, **options)
                elif way == "in place after":
                    model.compile(**options)
                else:
                    whole = kind != "dataclass"  # where torch's pytree ends, the graph does
                    call = torch.compile(
                        lambda t, model=model: model(t), backend="eager", fullgraph=whole
                    )
                got = _tensors_in(call(x))
                done = counts.close()
                same = all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
                dtypes = {tensor.dtype for tensor in got}
                found.append((kind, way, done["graphs"], done["breaks"], same, dtypes))
    return found


def _tensors_in(output: Any) -> list[Tensor]:
    if isinstance(output, Output):
        return [output.logits, output.hidden]
    return [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor)]


@pytest.mark.thorough
def test_the_forward_pass_is_one_graph_whatever_it_returns():
    [found] = run_ranks(outputs_of_one_graph, 1)
    for kind, way, graphs, breaks, same, dtypes in found:
        case = kind, way
        # Torch itself compiles nothing of a layer of its own that is compiled in place.
        assert graphs == 1 or case == ("sequential", "in place after"), case
        assert breaks == (case == ("dataclass", "in a compiled function")), case
        assert same, case
        assert dtypes == {torch.float32}, case


def odd_options(backend: str) -> list[Any]:
    """Differences from the model that is not compiled, and graphs that were compiled."""
    without_inductors_threads()
    found = []
    x, _ = tensors(12, torch.float32).tensors
    with lockstep.init("single", precision="bf16", seed=0) as world:
        # Not "max-autotune", after which threads of inductor's remain.
        for options in ({"dynamic": True}, {"mode": "reduce-overhead"}):
            if backend != "inductor" and "mode" in options:
                continue
            counts = Counts()
            model = world.prepare(Returns())
            call = torch.compile(model, backend=backend, fullgraph=True, **options)
            worst = 0.0
            for size in (12, 5, 7):
                batch = x[:size].clone()  # of a view, torch would compile for the whole tensor too
                worst = max(worst, (call(batch) - model(batch)).abs().max().item())
            found.append((worst, counts.close()["graphs"]))
    return found


@pytest.mark.thorough
def test_the_options_of_torch_compile_hold():
    [found] = run_ranks(odd_options, 1, "inductor")
    assert all(worst < 0.02 for worst, _ in found)
    assert found[0][1] == 1  # dynamic: one graph for all sizes


def trained(
    world: Any, way: str, *, accumulate: bool = False, checkpointed: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights of a training, with passes that train nothing in between."""
    counts = Counts()
    torch.manual_seed(3)
    model = compiled_before(bench_compile.Net(), way, "aot_eager")
    if checkpointed:
        lockstep.checkpoint_activations(model, bench_compile.Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.prepare(model, optimizer)
    call = compiled_after(model, way, "aot_eager")
    data = torch.utils.data.TensorDataset(*bench_compile.samples())
    micro_batch_size = 4 if accumulate else None
    loader = world.loader(data, bench_compile.BATCH, micro_batch_size=micro_batch_size)
    for number, (x, y) in enumerate(loader, 1):
        with torch.inference_mode():
            call(x)
        world.backward(F.cross_entropy(call(x), y))
        optimizer.step()
        optimizer.zero_grad()
        counts.after_step(number)
    return bench_compile.whole_weights(model), counts.close()


def neighbours(strategy: str) -> list[Any]:
    found = []
    for precision in ("bf16", "fp16"):
        with lockstep.init(strategy, precision=precision, seed=0) as world:
            for options in ({"accumulate": True}, {"checkpointed": True}):
                want, _ = trained(world, bench_compile.NOT_COMPILED, **options)
                for way in WAYS:
                    got, counts = trained(world, way, **options)
                    apart = bench_compile.difference(want, got)
                    found.append((precision, *options, way, apart, counts["late"]))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_micro_batches_inference_and_checkpointed_activations(strategy: str) -> None:
    for rows in run_ranks(neighbours, 1 if strategy == "single" else 2, strategy):
        for row in rows:
            precision, *_, apart, late = row
            assert apart <= TOLERANCE[precision], row
            assert late == 0, row


def wrap_blocks(model: nn.Module, backend: str) -> None:
    """Puts what `torch.compile(block)` gives in the place of each block."""
    blocks = getattr(model, "module", model).blocks
    for number, block in enumerate(blocks):
        blocks[number] = torch.compile(block, backend=backend)


def compile_blocks(model: nn.Module, backend: str) -> None:
    """Compiles each block in place."""
    for block in getattr(model, "module", model).blocks:
        block.compile(backend=backend)


def blocks_trained(
    world: Any, blocks: str, whole: str, backend: str, *, checkpointed: bool = False
) -> tuple[dict[str, Tensor], int]:
    """The weights of a training whose blocks are compiled in some way, and the model in another.

    Returns:
        The weights, and how often a hook of a block was called.
    """
    torch._dynamo.reset()
    torch.manual_seed(3)
    calls: list[int] = []
    model: Any = bench_compile.Net()
    for block in model.blocks:
        # Not traced: a graph would be bound to the length of the list.
        block.register_forward_hook(torch.compiler.disable(lambda *_: calls.append(1)))
    if checkpointed:
        lockstep.checkpoint_activations(model, bench_compile.Block)
    change = {"wrapped": wrap_blocks, "in place": compile_blocks}.get(blocks.partition(",")[0])
    if change is not None and blocks.endswith("before"):
        change(model, backend)
    model = compiled_before(model, whole, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.prepare(model, optimizer)
    if change is not None and blocks.endswith("after"):
        change(model, backend)
    call = compiled_after(model, whole, backend)
    data = torch.utils.data.TensorDataset(*bench_compile.samples())
    for x, y in world.loader(data, bench_compile.BATCH):
        world.backward(F.cross_entropy(call(x), y))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            call(x)
    return bench_compile.whole_weights(model), len(calls)


BLOCKS = ("wrapped, before", "wrapped, after", "in place, before", "in place, after")


def blocks_in_every_way(strategy: str, precision: str, backend: str) -> list[Any]:
    """For each way: the difference from the training that is not compiled, and lost calls."""
    warnings.simplefilter("ignore")  # torch's, of its compiler
    without_inductors_threads()
    found = []
    plain = bench_compile.NOT_COMPILED
    wholes = (plain, "before", "after", "in place before", "in place after")
    with lockstep.init(strategy, precision=precision, seed=0) as world:
        for checkpointed in (False, True):
            options: dict[str, Any] = {"checkpointed": checkpointed}
            want, calls = blocks_trained(world, plain, plain, backend, **options)
            for blocks in BLOCKS:
                for whole in (plain,) if checkpointed else wholes:
                    got, own = blocks_trained(world, blocks, whole, backend, **options)
                    apart = bench_compile.difference(want, got)
                    found.append((blocks, whole, checkpointed, apart, calls - own))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("strategy", "precision", "backend", "size"),
    [
        ("single", "bf16", "aot_eager", 1),
        ("ddp", "fp16", "aot_eager", 2),
        ("fsdp", "fp32", "aot_eager", 3),
        ("fsdp", "bf16", "aot_eager", 2),
        ("fsdp", "bf16", "inductor", 2),
        ("fsdp", "fp16", "inductor", 2),
    ],
)
def test_compiled_blocks_are_called_with_their_hooks(
    strategy: str, precision: str, backend: str, size: int
) -> None:
    for rows in run_ranks(blocks_in_every_way, size, strategy, precision, backend):
        for row in rows:
            *_, apart, lost = row
            assert apart <= TOLERANCE[precision], row
            assert lost == 0, row


def sharded_in_groups() -> Any:
    strategy = HSDP(shard_size=1)
    with lockstep.init(strategy, precision="bf16", seed=0) as world:
        want, _ = trained(world, bench_compile.NOT_COMPILED)
        return [bench_compile.difference(want, trained(world, way)[0]) for way in WAYS]


@pytest.mark.thorough
def test_hsdp():
    for found in run_ranks(sharded_in_groups, 2):
        assert max(found) <= TOLERANCE["bf16"]


class Normalised(nn.Module):
    """A BatchNorm layer between two others; it has the names of the benchmark's model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Returns()])
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks[0](x[:, :6])).relu())


def normalised(strategy: str) -> list[Any]:
    warnings.simplefilter("ignore")  # torch's, of its compiler
    plain, bench_compile.Net = bench_compile.Net, Normalised  # type: ignore[assignment, misc]
    try:
        ways = ("before", "after", "in place before")
        return bench_compile.without_plain_torch(strategy, "bf16", ways, "aot_eager")
    finally:
        bench_compile.Net = plain  # type: ignore[misc]


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_batchnorm_over_the_ranks_is_left_out_of_the_graphs(strategy: str) -> None:
    for rows in run_ranks(normalised, 2, strategy):
        check(rows)
        for row in rows:
            reasons = [reason for reason in row["reasons"] if "_forward_over_ranks" in reason]
            assert len(reasons) == 1, row
            assert row["graphs"] > 0, row


def replicas_that_are_compiled() -> list[str]:
    said = []
    with lockstep.init(DP(replicas=2), precision="bf16", seed=0) as world:
        x, _ = tensors(8, torch.float32).tensors
        for way in ("before", "in place before"):
            model = Returns()
            model = torch.compile(model, backend="eager") if way == "before" else model
            if way == "in place before":
                model.compile(backend="eager")
            with pytest.raises(UsageError, match="compiled; such code is bound to") as error:
                world.prepare(model)(x)
            said.append(str(error.value))
    return said


@pytest.mark.thorough
def test_replicas_cannot_be_compiled_before_they_are_made():
    assert len(run_ranks(replicas_that_are_compiled, 1)[0]) == 2


def two_prepared() -> tuple[Any, ...]:
    """A prepared model that calls another one, compiled from outside."""
    counts = Counts()
    with lockstep.init("single", precision="bf16", seed=0) as world:
        inner = world.prepare(Returns())

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.head = nn.Linear(4, 2)

            def forward(self, x: Tensor) -> Tensor:
                return self.head(inner(x))

        outer = world.prepare(Outer())
        x, _ = tensors(8, torch.float32).tensors
        got = torch.compile(outer, backend="eager", fullgraph=True)(x)
        same = torch.equal(got, outer(x))
    return same, got.dtype, counts.close()["graphs"]


def test_a_prepared_model_in_a_compiled_one_is_traced_with_it():
    assert run_ranks(two_prepared, 1) == [(True, torch.float32, 1)]


def whole_steps(is_compiled: bool) -> list[Tensor]:
    """The weights of a training in uneven micro-batches, whose steps a script may compile whole."""
    with lockstep.init(num_micro_batches=3) as world:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = world.prepare(net, optimizer)

        def step(rows: Tensor) -> None:
            world.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        make_step = torch.compile(step, backend="aot_eager") if is_compiled else step
        rows = torch.linspace(-1, 1, 6 * 45).view(45, 6)
        for (batch,) in world.loader(torch.utils.data.TensorDataset(rows), 16):
            make_step(batch)
        return [parameter.detach().clone() for parameter in net.parameters()]


def differences_of_compiled_steps() -> list[float]:
    pairs = zip(whole_steps(False), whole_steps(True), strict=True)
    return [float((plain - compiled).abs().max()) for plain, compiled in pairs]


@pytest.mark.thorough
def test_a_script_may_compile_its_whole_step():
    (differences,) = run_ranks(differences_of_compiled_steps, 1)
    assert max(differences) == 0.0


def pickled(strategy: str) -> list[Any]:
    """For each precision and way, how far what is loaded is from the prepared model."""
    found = []
    for precision in ("fp32", "bf16", "fp16"):
        with lockstep.init(strategy, precision=precision, seed=0) as world:
            for way in (bench_compile.NOT_COMPILED, *WAYS):
                torch._dynamo.reset()
                model = compiled_before(bench_compile.Net(), way, "eager")
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                model, optimizer = world.prepare(model, optimizer)
                call = compiled_after(model, way, "eager")
                data = torch.utils.data.TensorDataset(*bench_compile.samples())
                for x, y in world.loader(data, bench_compile.BATCH):
                    world.backward(F.cross_entropy(call(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                made = pickle.loads(pickle.dumps(call))
                with torch.no_grad():
                    apart = (made(x) - call(x)).abs().max().item()
                made(x).sum().backward()
                found.append((precision, way, apart))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("ddp", 2), ("ddp", 3)])
def test_a_prepared_model_is_pickled_whole(strategy: str, size: int) -> None:
    for rows in run_ranks(pickled, size, strategy):
        assert [row for row in rows if row[-1] != 0] == []


def saved_and_resumed(folder: str, strategy: str, way: str, precision: str) -> Any:
    """The weights of an uninterrupted training, of one that was resumed, and a weights file."""
    paths = [Path(folder) / name for name in ("whole", "parted")]
    found = []
    for path, interruptions in ((paths[0], [6]), (paths[1], [3, 6])):
        for until in interruptions:
            with lockstep.init(strategy, precision=precision, seed=0) as world:
                torch._dynamo.reset()
                torch.manual_seed(3)
                model = compiled_before(bench_compile.Net(), way, "aot_eager")
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                model, optimizer = world.prepare(model, optimizer)
                call = compiled_after(model, way, "aot_eager")
                data = torch.utils.data.TensorDataset(*bench_compile.samples())
                loader = world.loader(data, bench_compile.BATCH)
                state = {"model": model, "optimizer": optimizer, "loader": loader}
                checkpoint = world.checkpoint(str(path), **state)
                checkpoint.resume()
                for x, y in loader:
                    world.backward(F.cross_entropy(call(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                    if world.step == until:
                        checkpoint.save()  # in the middle of the epoch, or at its end
                        break
                checkpoint.wait()
                last = bench_compile.whole_weights(model)
                lockstep.save_weights(call, str(path) + ".safetensors")
        if world.is_main:  # which has written the file; the others do not wait for it
            fresh = bench_compile.Net()
            lockstep.load_weights(fresh, str(path) + ".safetensors")
            found.append((last, bench_compile.whole_weights(fresh)))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", bench_compile.STRATEGIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpoints_and_weights_have_plain_names(
    tmp_path: Path, precision: str, strategy: str, way: str
) -> None:
    size = 1 if strategy in ("single", "dp") else 2
    cell = (str(tmp_path), strategy, way, precision)
    [whole, resumed] = run_ranks(saved_and_resumed, size, *cell)[0]
    assert difference(whole[0], resumed[0]) == 0
    assert difference(whole[0], whole[1]) == 0
