"""What is counted and measured of a device's memory, against sizes worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import CLASSES, FEATURES, difference, mean_loss, mlp, tensors, weights
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import UsageError
from lockstep.extensions.memory_table import DeviceMemory, Memory
from lockstep.extensions.memory_tensors import LiveTensors, SavedTensors, state_bytes
from lockstep.strategies import DP, Pipeline

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
DOUBLE, BATCH, HIDDEN = 8, 16, 16
WEIGHTS = FEATURES * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES


def kept_by(samples: int) -> tuple[int, int]:
    """Bytes that `mlp` and `mean_loss` keep: inputs and tanh; log-probabilities, labels, weight."""
    model = samples * (FEATURES + HIDDEN) * DOUBLE
    loss = samples * CLASSES * DOUBLE + samples * 8 + DOUBLE
    return model, loss


def ask(strategy: Any = None, shares: str | None = None, **options: Any) -> list[Memory]:
    """Counted only, then with training steps."""
    with lockstep.init(strategy, shares=shares) as world:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(tensors(), BATCH, **options)
        counted = world.memory(model, optimizer)
        return [counted, world.memory(model, optimizer, loader, mean_loss)]


def test_one_device_by_hand():
    counted, tried = (memory.devices for memory in ask())
    assert len(counted) == len(tried) == 1
    assert counted[0] == DeviceMemory(
        rank=0,
        device="cpu",
        parameters=WEIGHTS * DOUBLE,
        gradients=WEIGHTS * DOUBLE,
        state=WEIGHTS * DOUBLE,
    )
    model, loss = kept_by(BATCH)
    one = tried[0]
    assert (one.samples, one.activations, one.loss) == (BATCH, model, loss)
    assert one.counted == 3 * WEIGHTS * DOUBLE + model + loss
    # Where the gradient goes back through tanh: its result and both gradients, and what is there.
    head = (HIDDEN * CLASSES + CLASSES) * DOUBLE
    there = 2 * WEIGHTS * DOUBLE + head + BATCH * (FEATURES + 3 * HIDDEN) * DOUBLE + BATCH * 8
    assert 0 <= one.peak - there <= 8 * DOUBLE, "a few single numbers"
    assert one.step_s > 0


@pytest.mark.parametrize(
    ("kind", "options", "copies"),
    [
        ("SGD", {"lr": 0.1}, 0),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, 1),
        ("Adam", {}, 2),
        ("AdamW", {}, 2),
        ("AdamW", {"amsgrad": True, "foreach": True}, 3),
        ("RMSprop", {"centered": True, "momentum": 0.1}, 3),
        ("Adagrad", {}, 1),
        ("Adadelta", {}, 2),
        ("Adamax", {}, 2),
        ("NAdam", {}, 2),
        ("RAdam", {}, 2),
    ],
)
def test_state_of_an_optimizer_is_known_before_its_first_step(kind, options, copies):
    model = mlp()
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    before = state_bytes(optimizer)
    mean_loss(model, tensors()[:BATCH]).backward()
    optimizer.step()
    assert before == state_bytes(optimizer) or (copies == 0 and not optimizer.state)
    assert before == {CPU: copies * WEIGHTS * DOUBLE}


def test_asking_leaves_an_optimizer_as_it_was():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    state_bytes(optimizer)
    assert not optimizer.state
    assert not called
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == list(map(id, model.parameters()))


def test_state_that_cannot_be_known_is_not_guessed():
    model = mlp()
    assert state_bytes(torch.optim.LBFGS(model.parameters())) is None
    assert state_bytes(torch.optim.Adafactor(model.parameters())) is None, "it looks at the data"
    with lockstep.init() as world:
        model, optimizer = world.prepare(model, torch.optim.LBFGS(model.parameters()))
        memory = world.memory(model, optimizer)
    assert memory.devices[0].state is None
    assert memory.devices[0].counted == 2 * WEIGHTS * DOUBLE
    assert "?" in str(memory)


def test_saved_tensors_counts_storages_once():
    saved = SavedTensors()
    x = torch.randn(10, 10, requires_grad=True)
    with saved.watch():
        y = x.exp()  # keeps its result
        z = (y[:5] * y[5:]).sum()  # keeps views of it
    assert saved.count_and_add_to(set()) == {CPU: 400}
    z.backward()
    torch.testing.assert_close(x.grad[:5], (y[:5] * y[5:]).detach())


def test_live_tensors_sees_what_is_made_and_what_is_freed():
    held = torch.zeros(1000, dtype=torch.uint8)
    live = LiveTensors()
    live.count([held.untyped_storage()])
    assert live.peak == 1000
    with live:
        one = torch.zeros(2000, dtype=torch.uint8)
        view = one[10:20]
        del one
        assert view.sum(dtype=torch.uint8) == 0
        assert live.peak < 1000 + 2000 + 100
        del view
        other = held + 1
        assert live.peak < 1000 + 2000 + 100, "the first was freed before"
        more = torch.zeros(4000, dtype=torch.uint8)
        assert live.peak == 1000 + 1000 + 4000
        more.untyped_storage().resize_(0)  # as FSDP gives back what it has gathered
        again = torch.zeros(4000, dtype=torch.uint8)
        assert live.peak == 1000 + 1000 + 4000
    del other, more, again
    assert live.total == 1000


def train(ask_before: int | None, strategy: Any, micro_batch_size: int | None) -> dict[str, Any]:
    """Two epochs; the question is asked before the epoch of that number."""
    with lockstep.init(strategy, seed=3, micro_batch_size=micro_batch_size) as world:
        model = nn.Sequential(*mlp(batch_norm=True), nn.Dropout(0.3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        model, optimizer, scheduler = world.prepare(model, optimizer, scheduler)
        loader = world.loader(tensors(54), BATCH, shuffle=True)
        for epoch in world.epochs(2):
            if epoch == ask_before:
                before = held(model), world.state_dict(), loader.state_dict()
                world.memory(model, optimizer, loader, mean_loss)
                assert difference(before[0], held(model)) == 0
                assert before[1:] == (world.state_dict(), loader.state_dict())
            for batch in loader:
                world.backward(mean_loss(model, batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return {**held(model), "steps": torch.tensor(float(world._run.step.number))}


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """What is on this rank: of a pipeline's other stages there are only shapes."""
    return {name: value for name, value in weights(model).items() if not value.is_meta}


def train_all(strategy: Any, micro_batch_size: int | None) -> list[dict[str, Any]]:
    return [train(when, strategy, micro_batch_size) for when in (None, 0, 1)]


@pytest.mark.filterwarnings("ignore:micro_batch_size=6 and a model with BatchNorm")
@pytest.mark.parametrize("strategy", ["single", DP(replicas=2)], ids=["single", "dp"])
def test_the_training_goes_on_as_if_nothing_had_been_asked(strategy):
    plain, *asked = train_all(strategy, 6)
    for other in asked:
        assert difference(plain, other) == 0


def ranks(size: int) -> dict[str, Any]:
    found: dict[str, Any] = {name: ask(name) for name in ("ddp", "fsdp")}
    found["uneven"] = ask("ddp", ":".join("3" + "1" * (size - 1)))
    found["weights"] = train_all("ddp", 3)
    pipeline = Pipeline(schedule="gpipe", num_micro_batches=4)
    found["pipeline"] = ask(pipeline)
    found["weights of stages"] = train_all(Pipeline(num_micro_batches=2), None)
    return found


@pytest.fixture(scope="module")
def two() -> list[Any]:
    return run_ranks(ranks, 2, 2)


def test_every_rank_knows_the_figures_of_all(two):
    assert two[0]["ddp"][0] == two[1]["ddp"][0]
    assert [device.rank for device in two[1]["ddp"][1].devices] == [0, 1]


def test_ddp_holds_the_whole_model_and_a_part_of_the_batch(two):
    alone = ask()[1].devices[0]
    for device in two[0]["ddp"][1].devices:
        assert device.parameters == device.gradients == device.state == WEIGHTS * DOUBLE
        assert (device.activations, device.loss) == kept_by(BATCH // 2)
        assert device.copies == 0
        most = alone.peak + WEIGHTS * DOUBLE
        assert device.peak < most, "gradients are views of the buckets, and no mapping is counted"


def test_uneven_shares_show(two):
    first, second = two[0]["uneven"][1].devices
    assert (first.samples, second.samples) == (12, 4)
    assert first.activations == 3 * second.activations == kept_by(12)[0]


def test_fsdp_holds_a_shard_and_gathers_copies(two):
    devices = two[0]["fsdp"][1].devices
    assert sum(device.parameters for device in devices) == WEIGHTS * DOUBLE
    for device in devices:
        assert device.parameters == device.gradients == device.state < WEIGHTS * DOUBLE
        assert device.copies == WEIGHTS * DOUBLE, "the model is one unit here"
        assert device.gathered == 2 * WEIGHTS * DOUBLE, "gradients, and what they are sent in"
        assert (device.activations, device.loss) == kept_by(BATCH // 2)


def test_a_stage_holds_a_part_of_the_model_and_the_table_says_what_is_counted(two):
    counted, tried = two[0]["pipeline"]
    assert sum(device.parameters for device in tried.devices) == WEIGHTS * DOUBLE
    for device in tried.devices:
        assert device.parameters == device.gradients == device.state > 0
        assert device.samples == BATCH // 4
    assert sum(device.activations for device in tried.devices) >= kept_by(BATCH // 4)[0]
    assert "activations of one micro-batch" in str(tried).splitlines()[-1]
    assert "micro-batch" not in str(counted)


@pytest.mark.parametrize("name", ["weights", "weights of stages"])
def test_training_on_ranks_goes_on_as_if_nothing_had_been_asked(two, name):
    for rank in range(2):
        plain, *asked = two[rank][name]
        for other in asked:
            assert difference(plain, other) == 0


def test_replicas_are_shown_as_devices():
    even = ask(DP(replicas=2))[1].devices
    assert [device.device for device in even] == ["replica 0", "replica 1"]
    half = kept_by(BATCH // 2)[0]
    assert [device.activations for device in even] == [half, half]
    assert even[0].loss == kept_by(BATCH)[1], "outputs of the whole batch are on the first"
    assert (even[0].parameters, even[1].parameters) == (WEIGHTS * DOUBLE, 0)
    assert (even[0].copies, even[1].copies) == (0, WEIGHTS * DOUBLE)
    assert (even[0].state, even[1].state) == (WEIGHTS * DOUBLE, 0)
    assert even[0].counted > even[1].counted
    assert even[1].peak is None
    assert even[0].peak > 3 * WEIGHTS * DOUBLE, "parameters, gradients and state are there"

    balanced = ask(DP(replicas=3), shares="1:2:1")[1].devices
    assert [device.samples for device in balanced] == [4, 8, 4]
    assert [device.activations for device in balanced] == [kept_by(n)[0] for n in (4, 8, 4)]

    spared = ask(DP(replicas=2), shares="0:1")[1].devices
    assert [device.activations for device in spared] == [0, kept_by(BATCH)[0]]


def test_the_loss_may_call_the_model_more_than_once():
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch[0]), model(-batch[0]))

    with lockstep.init(DP(replicas=2)) as world:
        model = mlp()
        model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = world.loader(tensors(), BATCH)
        memory = world.memory(model, optimizer, loader, loss)
    assert [d.activations for d in memory.devices] == [2 * kept_by(BATCH // 2)[0]] * 2


def test_layers_that_replicas_compute_together_count_for_each():
    with lockstep.init(DP(replicas=2)) as world:
        model = mlp(batch_norm=True)
        model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = world.loader(tensors(), BATCH)
        first, second = world.memory(model, optimizer, loader, mean_loss).devices
    assert first.activations == second.activations > kept_by(BATCH // 2)[0]


def test_the_table():
    counted, tried = ask()
    lines = str(counted).splitlines()
    assert lines[0] == "memory of each device in KiB, strategy single"
    assert [line.split()[0] for line in lines[3:]] == [
        "parameters",
        "gradients",
        "optimizer",
        "all",
    ]
    assert f"{WEIGHTS * DOUBLE / 1024:.1f}" in lines[3]
    assert "measured" not in str(counted)
    shown = str(tried)
    assert "samples at a time           16" in shown
    assert "measured peak" in shown
    assert " ms" in shown
    assert "tensors alive at one time" in shown


def test_many_devices_are_shown_in_blocks():
    devices = tuple(
        DeviceMemory(rank=n, device=f"cuda:{n % 8}", parameters=2**30, peak=2**34)
        for n in range(12)
    )
    lines = str(Memory(strategy="ddp", devices=devices)).splitlines()
    assert lines[0].startswith("memory of each device in GiB")
    assert max(map(len, lines)) <= 20 + 8 * 12
    assert sum(line.count("rank") for line in lines) == 12
    assert "max_memory_allocated" in lines[-1]


def test_what_cannot_be_measured_is_refused():
    with lockstep.init() as world:
        model = mlp()
        bare = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, bare)
        loader = world.loader(tensors(), BATCH)
        for parts in (
            (optimizer, loader),
            (optimizer, None, mean_loss),
            (bare, loader, mean_loss),
            (optimizer, [1, 2], mean_loss),
        ):
            with pytest.raises(UsageError, match=r"world\.memory with"):
                world.memory(model, *parts)
        for _ in loader:
            with pytest.raises(UsageError, match="a loop over it is running"):
                world.memory(model, optimizer, loader, mean_loss)
            break
        with pytest.raises(UsageError, match="it is empty"):
            empty = world.loader(tensors(3), BATCH, drop_last=True)
            world.memory(model, optimizer, empty, mean_loss)
    with pytest.raises(UsageError, match=r"after world\.close"):
        world.memory(model)


def test_all_is_put_back_after_an_error_too():
    with lockstep.init() as world:
        model = mlp()
        model, optimizer = world.prepare(model, torch.optim.Adam(model.parameters()))
        loader = world.loader(tensors(), BATCH, shuffle=True)
        before, position, calls = weights(model), loader.state_dict(), []

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("in the third step")
            return mean_loss(model, batch)

        with pytest.raises(RuntimeError, match="in the third step"):
            world.memory(model, optimizer, loader, loss)
        assert difference(before, weights(model)) == 0
        assert loader.state_dict() == position
        assert not optimizer.inner.state
        assert world._run.step.number == 0
        assert not world._run.step.in_training_loop
        assert not model[0]._forward_pre_hooks


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_peak_is_that_of_the_allocator():
    with lockstep.init(device="cuda:0") as world:
        model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64))
        model, optimizer = world.prepare(model, torch.optim.AdamW(model.parameters()))
        data = torch.utils.data.TensorDataset(torch.randn(256, 64), torch.randint(64, (256,)))
        loader = world.loader(data, 64)
        [device] = world.memory(model, optimizer, loader, mean_loss).devices
    assert device.device == "cuda:0"
    assert device.state == 2 * device.parameters
    assert device.counted - device.activations <= device.peak < 3 * device.counted


def test_a_compiled_model_runs_compiled_after_the_measurement():
    """Torch runs eagerly for ever what it once could not compile."""
    num_compiled_calls = 0

    def backend(graph: Any, _inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            nonlocal num_compiled_calls
            num_compiled_calls += 1
            return graph.forward(*arguments)

        return run

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()

    with lockstep.init(device="cpu") as world:
        model = torch.compile(nn.Linear(3, 3), backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.ones(8, 3)), 4)
        model, optimizer, loader = world.prepare(model, optimizer, loader)
        world.memory(model, optimizer, loader, loss)
        num_compiled_calls = 0
        for batch in loader:
            world.backward(loss(model, batch))
            optimizer.step()
    assert num_compiled_calls == 2


def test_a_buffer_that_a_forward_pass_sets_anew_is_put_back():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return self.layers(x)

    with lockstep.init() as world:
        model = Counts()
        before = model.calls
        model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        world.memory(model, optimizer, world.loader(tensors(), BATCH), mean_loss)
        assert model.calls is before
        assert float(before) == 0
