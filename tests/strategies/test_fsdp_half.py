"""Strategies fsdp and hsdp in half precision: the numbers of FSDP2 with the same policy.

Units are gathered and computed in bf16 or fp16, gradients are averaged in fp32, and nothing of the
size of the model is kept from the forward pass to the backward pass.
"""

from __future__ import annotations

import gc
import io
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from problems import difference, mean_loss, tensors
from ranks import run_ranks
from test_fsdp import BATCH, FINDS_UNUSED, Block, Gates, build, data, loss_of, whole
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import lockstep
from lockstep import torch_compat
from lockstep.optim.precision import HALF_DTYPES
from lockstep.strategies import FSDP, HSDP

pytestmark = pytest.mark.ranks

STEPS = 2
MICRO_BATCHES = 2


# Parity with torch's own FSDP2


def build_without_scalars() -> Any:
    """The transformer with one-element vectors for its scalars, which torch's FSDP2 refuses."""
    model = build("transformer", torch.float32)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 0:
                vector = nn.Parameter(parameter.detach().reshape(1))
                setattr(module, name, vector)
    return model


def with_lockstep(
    precision: str, strategy: Any, micro_batches: int = 1, recompute: bool = False
) -> dict[str, Tensor]:
    """Weights, optimizer state and losses after some steps."""
    losses = []
    with lockstep.init(strategy, seed=5, precision=precision) as world:
        model = build_without_scalars()
        if recompute:
            lockstep.checkpoint_activations(model, Block)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = world.prepare(model, optimizer)
        micro_batch_size = BATCH // world.size // micro_batches
        samples = data("transformer", STEPS * BATCH, torch.float32)
        for batch in world.loader(samples, BATCH, micro_batch_size=micro_batch_size):
            loss = loss_of(model, batch, False)
            losses.append(loss.detach())
            world.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return {**whole(model), **state_of(optimizer), "losses": torch.stack(losses)}


def with_torch(
    precision: str, options: dict[str, Any], micro_batches: int = 1
) -> dict[str, Tensor]:
    """The same with torch's own FSDP2."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    policy = MixedPrecisionPolicy(HALF_DTYPES[precision], reduce_dtype=torch.float32)
    reshards = None if options.get("reshard_after_forward", True) else False
    model = build_without_scalars()
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")  # it opens no group of its own
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    losses = []
    x_all, y_all = data("transformer", STEPS * BATCH, torch.float32).tensors
    for x_batch, y_batch in zip(x_all.split(BATCH), y_all.split(BATCH), strict=True):
        parts = zip(x_batch.chunk(micro_batches), y_batch.chunk(micro_batches), strict=True)
        for number, (x_part, y_part) in enumerate(parts, 1):
            x = x_part.chunk(size)[rank]
            y = y_part.chunk(size)[rank]
            is_last = number == micro_batches
            model.set_is_last_backward(is_last)
            if not options.get("accumulate_shards"):
                model.set_requires_gradient_sync(is_last)
            if reshards is False:
                model.set_reshard_after_backward(is_last)
            output = model(x)
            assert output.dtype == policy.param_dtype
            each = F.cross_entropy(output.float().flatten(0, 1), y.flatten(), reduction="none")
            loss = each.view(y.shape).mean()
            losses.append(loss.detach())
            scaler.scale(loss * (1 / micro_batches)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found = {**whole(model), **state_of(optimizer), "losses": torch.stack(losses)}
    torch_compat.drop_fsdp_groups([*model.blocks, model], mesh)
    return found


def state_of(optimizer: Any) -> dict[str, Tensor]:
    """The state of an optimizer, whole, by the number of the parameter and the name."""
    found = {}
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            found[f"{number}.{name}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return found


Cases = dict[str, tuple[str, dict[str, Any], int]]
"""The precision, options of FSDP, and the number of micro-batches, by name."""
PARITY: Cases = {
    "bf16": ("bf16", {}, 1),
    "bf16, micro-batches": ("bf16", {}, MICRO_BATCHES),
    "fp16, micro-batches": ("fp16", {}, MICRO_BATCHES),
}
MORE_PARITY: Cases = {
    "bf16, kept whole": ("bf16", {"reshard_after_forward": False}, MICRO_BATCHES),
    "bf16, shards add up": ("bf16", {"accumulate_shards": True}, MICRO_BATCHES),
    "fp16": ("fp16", {}, 1),
    "bf16, recomputed": ("bf16", {}, 1),
}


def parity(cases: Cases) -> dict[str, list[dict[str, Tensor]]]:
    """For each case what Lockstep gives, and what torch alone."""
    warnings.simplefilter("ignore")  # torch's, of outputs that are views
    found = {}
    for name, (precision, options, micro_batches) in cases.items():
        recompute = "recomputed" in name
        found[name] = [with_lockstep(precision, FSDP(**options), micro_batches, recompute)]
    with lockstep.init("ddp"):  # it opens the process group
        for name, (precision, options, micro_batches) in cases.items():
            found[name].append(with_torch(precision, options, micro_batches))
        gc.collect()  # torch's models must be gone before the process group is closed
    return found


def of_two_groups() -> list[dict[str, Tensor]]:
    """What hsdp gives on four ranks, with one group of four and with two groups of two."""
    return [with_lockstep("bf16", HSDP(shard_size=size)) for size in (4, 2)]


# What is kept and sent


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


WIDTH, LAYERS = 128, 8


class CountedGather:
    """An all-gather of a unit that counts the bytes that this rank gives."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, *, input_tensor: Tensor, **options: Any) -> Any:
        self.num_bytes += input_tensor.nbytes
        return dist.all_gather_into_tensor(input_tensor=input_tensor, **options)


def prepare(world: Any, model: nn.Module) -> tuple[Any, Any, str]:
    """The prepared model and optimizer, and what rank 0 says about the precision."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        model, optimizer = world.prepare(model, optimizer)
    lines = [line for line in printed.getvalue().splitlines() if " precision " in line]
    return model, optimizer, " ".join(lines)


@dataclass
class Step:
    kept: int
    """Bytes that are saved for the backward pass."""
    sent: int
    """Bytes of this rank's that are gathered."""
    counted: int
    """Bytes of the largest unit as `world.memory` has it: whole, its gradient, what is sent."""
    said: str
    """What the run says about the precision."""


def one_step(precision: str, strategy: FSDP, **settings: Any) -> Step:
    gather = CountedGather()
    with lockstep.init(strategy, precision=precision, **settings) as world:
        torch.manual_seed(0)
        # The head is gathered with the whole model, which keeps it until the backward pass.
        layers = [Layer(WIDTH) for _ in range(LAYERS)]
        model: Any = nn.Sequential(*layers, nn.Linear(WIDTH, 4))
        model, optimizer, said = prepare(world, model)
        for unit in (*model[:LAYERS], model):
            unit.set_custom_all_gather(gather)
        samples = TensorDataset(torch.ones(2, WIDTH), torch.tensor([1, 2]))
        saved: list[Tensor] = []

        def save(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        for x, y in world.loader(samples, 2):
            with saved_tensors_hooks(save, lambda tensor: tensor):
                output = model(x)
            storages = [tensor.untyped_storage() for tensor in saved]
            kept = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
            world.backward(F.cross_entropy(output, y))
            optimizer.step()
        counted = world.memory(model).devices[world.rank].gathered
    return Step(kept, gather.num_bytes, counted, said)


# What a script may do


@dataclass
class Inputs:
    x: Tensor
    number: Tensor
    note: str = field(init=False, default="")


class Attributes(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Nested(nn.Module):
    """Returns in a dict of its own class what it was given, and what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.embedding = nn.Embedding(3, 4)
        self.norm = nn.LayerNorm(4)
        self.seen: list[torch.dtype] = []

    def forward(self, inputs: Any, *, scale: Tensor) -> Attributes:
        self.seen = [inputs.x.dtype, inputs.number.dtype, scale.dtype]
        sums = self.layer(inputs.x) * scale + self.embedding(inputs.number)
        normalised = self.norm(sums)
        self.seen += [self.layer.weight.dtype, normalised.dtype]
        # A loss in the model that converts to fp32.
        return Attributes(logits=normalised, exact=normalised.double(), loss=sums.float().mean())


def nests() -> list[Any]:
    x = tensors(4, torch.float32)[:][0]
    number = torch.tensor([0, 1, 2, 0])
    found: list[Any] = []
    with lockstep.init("fsdp", precision="bf16") as world:
        model = world.prepare(Nested())
        for inputs in (Inputs(x, number), Attributes(x=x, number=number)):
            output = model(inputs, scale=torch.ones(()))
            found.append((model.seen, {name: value.dtype for name, value in output.items()}))
    return found


class MixesDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.float())


def mixed_dtypes() -> tuple[list[str], torch.dtype]:
    """The notes of the error of a model that converts to fp32, and its output under autocast."""
    x = tensors(4, torch.float32)[:][0]
    with lockstep.init("fsdp", precision="bf16") as world:
        model = world.prepare(MixesDtypes())
        with pytest.raises(RuntimeError, match="dtype") as error:
            model(x)
    with lockstep.init(FSDP(autocast=True), precision="bf16") as world:
        return error.value.__notes__, world.prepare(MixesDtypes())(x).dtype


def normalised(synchronised: bool = True) -> list[Any]:
    """Dtypes of a model with BatchNorm, trained and evaluated, and how it is computed."""
    with lockstep.init("fsdp", precision="bf16", sync_batchnorm=synchronised) as world:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        model, optimizer, said = prepare(world, model)
        for batch in world.loader(tensors(32, torch.float32), 16, micro_batch_size=4):
            world.backward(mean_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            output = model(tensors(4, torch.float32)[:][0])
        finite = bool(torch.isfinite(output).all())
        norm = model[1]
        return [output.dtype, finite, norm.running_mean.dtype, norm.weight.dtype, said]


def broken_off() -> list[dict[str, Tensor]]:
    """Weights of a loop that leaves a global batch after a micro-batch, and of one that does not.

    The gradients of that micro-batch must not be added to the next global batch.
    """
    found = []
    for breaks in (True, False):
        with lockstep.init("fsdp", precision="bf16") as world:
            model = build("transformer", torch.float32)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = world.prepare(model, optimizer)
            samples = data("transformer", 2 * BATCH, torch.float32)
            loader = world.loader(samples, BATCH, micro_batch_size=2)
            for batch in loader:
                if breaks:
                    world.backward(loss_of(model, batch, False))
                break
            for batch in loader:
                world.backward(loss_of(model, batch, False))
                optimizer.step()
                optimizer.zero_grad()
            found.append(whole(model))
    return found


def lost_gradients() -> str:
    """The error of a step whose last micro-batch has not gone through the model."""
    with lockstep.init("fsdp", precision="bf16") as world:
        model = build("residual", torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(tensors(16, torch.float32), 16, micro_batch_size=4)
        for batch in loader:
            loss = mean_loss(model, batch)
            if loader.current.last:
                loss = torch.zeros((), requires_grad=True)
            world.backward(loss)
            try:
                optimizer.step()
            except lockstep.errors.UsageError as error:
                return str(error)
    return ""


def used_late(strategy: FSDP) -> list[list[bool]]:
    """Which layers have a gradient after a global batch whose micro-batches use other layers."""
    found = []
    with lockstep.init(strategy, precision="bf16") as world:
        model: Any = Gates()
        model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = world.loader(tensors(32, torch.float32), 16, micro_batch_size=4)
        for x, y in loader:
            world.backward(F.cross_entropy(model(x, int(loader.current.last)), y))
            if loader.current.last:
                found.append([layer.weight.grad is not None for layer in model.layers])
            optimizer.step()
            optimizer.zero_grad()
    return found


def unfrozen() -> bool:
    """Whether a unit is trained that was frozen as a whole when it was prepared."""
    with lockstep.init("fsdp", precision="bf16") as world:
        model: Any = build("transformer", torch.float32)
        model.blocks[0].requires_grad_(False)
        model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        before = whole(model)
        for batch in world.loader(data("transformer", 2 * BATCH, torch.float32), BATCH):
            world.backward(loss_of(model, batch, False))
            optimizer.step()
            optimizer.zero_grad()
            model.blocks[0].requires_grad_(True)
        after = whole(model)
        name = "blocks.0.up.weight"
        assert after[name].dtype == torch.float32
        return not torch.equal(before[name], after[name])


def one_sample() -> list[dict[str, Tensor]]:
    """Weights after a batch of one sample, and after the same sample twice, on both ranks.

    In the first case a rank computes a placeholder.
    """
    found = []
    for copies in (1, 2):
        with lockstep.init("fsdp", precision="bf16") as world:
            model = build("transformer", torch.float32)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = world.prepare(model, optimizer)
            x, y = data("transformer", 1, torch.float32)[:]
            samples = TensorDataset(x.repeat(copies, 1), y.repeat(copies, 1))
            for batch in world.loader(samples, copies):
                world.backward(loss_of(model, batch, False))
                optimizer.step()
            found.append(whole(model))
    return found


def on_two() -> dict[str, Any]:
    """All that needs two ranks; starting them takes longer than most of it."""
    return {
        "parity": parity(PARITY),
        "steps": {
            "fp32": one_step("fp32", FSDP()),
            "bf16": one_step("bf16", FSDP()),
            "autocast": one_step("bf16", FSDP(autocast=True)),
            "virtual ranks": one_step("bf16", FSDP(), virtual_ranks=2),
        },
        "nests": nests(),
        "mixed": mixed_dtypes(),
        "batchnorm": [normalised(), normalised(synchronised=False)],
        "broken off": broken_off(),
        "late": used_late(FSDP()),
    }


def more_on_two() -> dict[str, Any]:
    """What is thorough."""
    found = {
        "parity": parity(MORE_PARITY),
        "lost": lost_gradients(),
        "unfrozen": unfrozen(),
        "one sample": one_sample(),
    }
    if FINDS_UNUSED:
        found["late, unused"] = used_late(FSDP(find_unused_parameters=True))
    return found


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(on_two, 2)


@pytest.fixture(scope="module")
def more() -> list[dict[str, Any]]:
    return run_ranks(more_on_two, 2)


def check_bits(ranks: list[dict[str, Any]]) -> None:
    for of_rank in ranks:
        for case, (found, expected) in of_rank["parity"].items():
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), (case, name)
                assert value.dtype == torch.float32


def test_every_bit_is_that_of_fsdp2_with_the_same_policy(two):
    check_bits(two)
    weights = [expected["head.weight"] for _, expected in two[0]["parity"].values()]
    for other in weights[1:]:  # the cases are not all the same
        assert not torch.equal(weights[0], other)


@pytest.mark.thorough
def test_every_bit_is_that_of_fsdp2_with_options(more):
    check_bits(more)


@pytest.mark.thorough
def test_groups_of_hsdp_differ_by_rounding_alone():
    for one_group, two_groups in run_ranks(of_two_groups, 4):
        assert difference(one_group, two_groups) < 0.05


def test_nothing_of_the_size_of_the_model_is_kept_and_half_is_gathered(two):
    model_bytes = LAYERS * WIDTH * WIDTH * 4
    for of_rank in two:
        steps = of_rank["steps"]
        for way in ("fp32", "bf16"):
            assert steps[way].kept < model_bytes / 30, way
        for way in ("autocast", "virtual ranks"):
            assert steps[way].kept > model_bytes / 3, way
            assert steps[way].sent == steps["fp32"].sent
        assert 2 * steps["bf16"].sent == steps["fp32"].sent
        assert steps["fp32"].counted == steps["autocast"].counted == 12 * WIDTH * WIDTH
        assert steps["bf16"].counted == 8 * WIDTH * WIDTH


def test_the_block_of_choices_says_how_half_precision_is_computed(two):
    said = {way: step.said for way, step in two[0]["steps"].items()}
    assert said["fp32"] == ""
    assert "bf16 in every unit" in said["bf16"]
    assert "also norms, softmax and losses" in said["bf16"]
    assert "under autocast" in said["autocast"]
    assert "copies of the weights stay" in said["autocast"]
    assert "virtual ranks: the bits of ddp" in said["virtual ranks"]


def test_inputs_and_outputs_in_any_container(two):
    half = torch.bfloat16
    for of_rank in two:
        for seen, returned in of_rank["nests"]:
            assert seen == [half, torch.int64, half, half, half]
            assert returned == {
                "logits": torch.float32,
                "exact": torch.float64,
                "loss": torch.float32,
            }


def test_an_error_about_dtypes_says_what_to_do(two):
    for of_rank in two:
        notes, dtype_under_autocast = of_rank["mixed"]
        assert len(notes) == 1
        assert "parameters are in torch.bfloat16 in the forward pass" in notes[0]
        assert "FSDP(autocast=True)" in notes[0]
        assert dtype_under_autocast == torch.float32


def test_batchnorm_keeps_its_statistics_in_fp32(two):
    fp32 = torch.float32
    for of_rank in two:
        for found in of_rank["batchnorm"]:
            assert found[:4] == [fp32, True, fp32, fp32]
    synchronised, alone = two[0]["batchnorm"]
    assert "bf16 in every unit" in synchronised[4]
    assert "bf16 under autocast" in alone[4]
    assert "a BatchNorm1d that is not synchronised" in alone[4]


def test_gradients_of_a_global_batch_that_was_left_are_dropped(two):
    for of_rank in two:
        left, not_left = of_rank["broken off"]
        for name, value in not_left.items():
            assert torch.equal(left[name], value), name


def test_parameters_that_only_the_last_micro_batch_uses(two):
    assert all(of_rank["late"] == [[True, True, False]] * 2 for of_rank in two)


@pytest.mark.thorough
@pytest.mark.skipif(not FINDS_UNUSED, reason="torch cannot find unused parameters")
def test_parameters_that_only_the_last_micro_batch_uses_where_some_are_unused(more):
    assert all(of_rank["late, unused"] == [[True, True, False]] * 2 for of_rank in more)


@pytest.mark.thorough
def test_gradients_that_were_not_averaged_are_an_error(more):
    for of_rank in more:
        assert "a backward pass around the outputs of a sharded model" in of_rank["lost"]


@pytest.mark.thorough
def test_a_frozen_unit_is_trained_later(more):
    assert all(of_rank["unfrozen"] for of_rank in more)


@pytest.mark.thorough
def test_a_rank_without_samples(more):
    for of_rank in more:
        placeholder, twice = of_rank["one sample"]
        for name, value in twice.items():
            assert torch.equal(placeholder[name], value), name
