"""DataParallel with unusual models, inputs and outputs, over replicas on the CPU."""

from __future__ import annotations

import contextvars
import copy
import functools
import gc
import pickle
import re
import threading
import types
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from problems import difference, mean_loss, mlp, tensors, weights
from torch import Tensor, nn
from torch.nn.parallel import comm

import lockstep
from lockstep import BalancedDataParallel
from lockstep.errors import DataError, LockstepWarning, SettingError, UsageError
from lockstep.extensions.profiling import ProfilingRun
from lockstep.optim.precision import Precision
from lockstep.strategies import DP
from lockstep.strategies.data_parallel import replicate
from lockstep.strategies.data_parallel.module import DataParallel

pytestmark = pytest.mark.unit

FEATURES = 6


class Calls(nn.Module):
    """Calls a function of itself and its inputs."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)
        self.register_buffer("moving", torch.zeros(FEATURES, dtype=torch.float64))
        self.register_buffer("queue", None)
        self.fn = fn

    def forward(self, *args: Any) -> Any:
        return self.fn(self, *args)


def made(fn: Any) -> Calls:
    torch.manual_seed(3)
    return Calls(fn)


def data(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return torch.randn(*shape, FEATURES, dtype=torch.float64, generator=generator)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in module.parameters()]


# Outputs


@pytest.mark.parametrize("shares", ["2:3:3", "1:1:6"])
def test_a_loss_of_one_element_is_a_mean_too(shares):
    """`loss.unsqueeze(0)` is how scripts still torch's warning about scalars."""

    def loss(self: Calls, x: Tensor) -> Tensor:
        return self.layer(x).square().mean().unsqueeze(0)

    plain, wrapped = made(loss), DataParallel(made(loss), replicas=3, shares=shares)
    expected, found = plain(data(8)), wrapped(data(8))
    close(found, expected)
    expected.mean().backward()
    found.mean().backward()
    for one, other in zip(gradients(plain), gradients(wrapped), strict=True):
        close(other, one)
    # One sample a replica: a row a sample.
    assert DataParallel(made(loss), replicas=3)(data(3)).shape == (3,)


def test_a_parameter_that_is_returned_is_itself():
    def forward(self: Calls, x: Tensor) -> tuple[Tensor, ...]:
        return self.layer(x), self.layer.bias, self.layer.weight, self.moving

    plain, wrapped = made(forward), DataParallel(made(forward), replicas=3)
    for module in (plain, wrapped):
        out, bias, weight, moving = module(data(6))  # as many samples as the bias has numbers
        assert bias.shape == moving.shape == (FEATURES,)
        (out.square().mean() + bias.exp().sum() + weight.square().sum()).backward()
    for one, other in zip(gradients(plain), gradients(wrapped), strict=True):
        close(other, one)


UNLIKE: dict[str, tuple[Any, str, str]] = {
    "squeeze, first": (lambda s, x: s.layer(x)[:, 0].squeeze(), "1:3:3", "(), (3,), (3,)"),
    "squeeze, last": (lambda s, x: s.layer(x)[:, 0].squeeze(), "3:3:1", "(3,), (3,), ()"),
    "squeeze of rows": (lambda s, x: s.layer(x).squeeze(), "3:3:1", "(3, 6), (3, 6), (6,)"),
    "padded to the longest": (
        lambda s, x: x[:, : 1 + len(x)], "1:2:4", "(1, 2), (2, 3), (4, 5)"
    ),
    "state of an LSTM": (lambda s, x: x.t(), "1:3:3", "(6, 1), (6, 3), (6, 3)"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNLIKE)
def test_outputs_of_unlike_shapes(case):
    fn, shares, shapes = UNLIKE[case]
    with pytest.raises(UsageError, match=re.escape(f"beside it: {shapes}")):
        DataParallel(made(fn), replicas=3, shares=shares)(data(7))


def test_a_number_that_is_the_same_everywhere_is_not_averaged():
    wrapped = DataParallel(made(lambda s, x: (s.layer(x), 0.1, x.mean().item())), replicas=3)
    _, constant, mean = wrapped(data(7))
    assert constant == 0.1
    assert mean == pytest.approx(float(data(7).mean()), abs=1e-12)


def test_empty_outputs_are_joined_as_by_torch():
    module = made(lambda s, x: x if len(x) > 1 else torch.empty(0, dtype=x.dtype))
    assert DataParallel(module, replicas=3, shares="1:3:3")(data(7)).shape == (6, FEATURES)


# Inputs


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_inputs_are_cut_and_others_refused():
    module = made(lambda s, x: torch.sparse.mm(x, s.layer.weight))
    close(DataParallel(module, replicas=3)(data(7).to_sparse()), module(data(7).to_sparse()))
    for batch in (
        data(4).to_sparse_csr(),
        torch.nested.nested_tensor([data(3), data(2)], layout=torch.jagged),
    ):
        with pytest.raises(DataError, match="not a tensor that can be cut"):
            DataParallel(module, replicas=2)(batch)


def test_a_module_without_tensors_computes_where_its_inputs_are():
    wrapped = DataParallel(nn.Tanh(), replicas=2)
    assert wrapped(torch.empty(4, 3, device="meta")).is_meta


def said(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if issubclass(w.category, LockstepWarning)]


def test_lists_with_an_entry_a_sample():
    import numpy as np

    for entries, words in (
        (["a"] * 8, "a list of 8 values"),
        ((1, 2, 3, 4, 5, 6, 7, 8), "a tuple of 8 values"),
        ({"lengths": np.arange(8)}, "an array of shape (8,)"),
    ):
        wrapped = DataParallel(made(lambda s, x, more: s.layer(x)), replicas=3)
        [text] = said(lambda w=wrapped, e=entries: [w(data(8), e) for _ in range(3)])
        assert f"found: {words}, beside tensors of 8 samples" in text
        assert "lockstep explain LS310" in text
    for count, entries in ((1, ["a"] * 8), (3, ["a"] * 7), (3, [data(8)] * 8), (3, "12345678")):
        wrapped = DataParallel(made(lambda s, x, more: s.layer(x)), replicas=count)
        assert said(lambda w=wrapped, e=entries: w(data(8), e)) == []


# What a forward pass leaves


def moves(self: Calls, x: Tensor) -> Tensor:
    self.moving.lerp_(x.mean(0), 0.1)
    return self.layer(x)


def keeps_a_term(self: Calls, x: Tensor) -> Tensor:
    out = self.layer(x)
    self.penalty = out.square().mean()
    return out


def adds_to_a_list(self: Calls, x: Tensor) -> Tensor:
    out = self.layer(x)
    self.penalties.append(out.square().mean())
    return out


def fills_a_dictionary(self: Calls, x: Tensor) -> Tensor:
    out = self.layer(x)
    self.terms["penalty"] = out.square().mean()
    return out


def makes_containers(self: Calls, x: Tensor) -> Tensor:
    out = self.layer(x)
    self.made = {"penalty": out.square().mean().unsqueeze(0), "of": "this pass"}
    return out


def harmless(self: Calls, x: Tensor) -> Tensor:
    """The same in all replicas, or no part of a loss."""
    self.moving += 1
    self.temperature = self.layer.bias.exp().sum()
    self.features = self.layer(x)
    self.seen = getattr(self, "seen", 0) + len(x)
    self.kept = {"temperature": self.temperature, "seen": self.seen}
    return self.features * self.temperature


def test_what_replicas_keep_of_their_own_samples_is_said():
    for forward, name in (
        (moves, "moving"),
        (keeps_a_term, "penalty"),
        (adds_to_a_list, "ies"),
        (fills_a_dictionary, "terms"),
        (makes_containers, "made"),
    ):
        module = made(forward)
        module.penalties, module.terms = [], {"penalty": 0.0}
        wrapped = DataParallel(module, replicas=3)
        [text] = said(lambda w=wrapped: [w(data(8)) for _ in range(3)])
        assert re.search(rf"a module on 3 replicas that keeps [\w.]*{name}\n", text)
        assert "lockstep explain LS310" in text
    norm = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True))
    [text] = said(lambda: DataParallel(norm.double(), replicas=2)(data(8)).sum())
    assert "keeps 1.running_mean, 1.running_var" in text
    for module in (made(harmless), nn.BatchNorm1d(FEATURES).double(), made(harmless)):
        assert said(lambda m=module: DataParallel(m, replicas=3)(data(8))) == []
    assert said(lambda: DataParallel(made(moves), replicas=1)(data(8))) == []


@pytest.mark.parametrize(
    ("inside", "weight", "warnings"),
    [(True, True, 1), (True, False, 0), (False, True, 0)],
)
def test_a_weighted_mean_of_each_device_is_said(inside, weight, warnings):
    def loss_of(self: Calls, x: Tensor) -> Tensor:
        loss = self.layer(x).square().mean(1)
        return loss.mean() if inside else loss

    def train() -> None:
        with lockstep.init(DP(replicas=2), device="cpu") as world:
            model = made(loss_of)
            model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            weigh = (lambda batch: batch[1].sum() + 1.0) if weight else None
            for x, _ in world.loader(tensors(), 16, weight=weigh):
                world.backward(model(x).mean())
                optimizer.step()

    found = said(train)
    assert len(found) == warnings
    assert all("each device's mean is weighted by its number of samples" in text for text in found)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor")
def test_buffers_that_cannot_be_compared_are_left_alone():
    module = made(lambda s, x: s.layer(x))
    for name, buffer in {
        "graph": torch.eye(3).to_sparse(),
        "rows": torch.eye(3).to_sparse_csr(),
        "packed": torch.ones(3).to(torch.float8_e4m3fn),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "mask": torch.ones(3, dtype=torch.bool),
    }.items():
        module.register_buffer(name, buffer)
    plain = module.layer(data(8))
    close(DataParallel(module, replicas=3)(data(8)), plain)
    close(BalancedDataParallel(0, module, replicas=3)(data(8)), plain)


def test_buffers_of_another_shape_come_back_from_the_second_replica():
    def forward(self: Calls, x: Tensor) -> Tensor:
        self.queue = x.detach() if self.queue is None else torch.cat([self.queue, x.detach()])
        return self.layer(x)

    module = made(forward)
    wrapped = BalancedDataParallel(0, module, replicas=2)
    wrapped(data(3))
    wrapped(data(2))
    close(module.queue, torch.cat([data(3), data(2)]))


def test_what_the_second_replica_keeps_is_the_modules_where_the_first_has_no_samples():
    plain, module = made(keeps_a_term), made(keeps_a_term)
    module.penalty = plain.penalty = torch.zeros(())
    wrapped = BalancedDataParallel(0, module, replicas=2)
    for each in (plain, wrapped):
        out = each(data(8))
        (out.mean() + getattr(each, "module", each).penalty).backward()
    for one, other in zip(gradients(plain), gradients(wrapped), strict=True):
        close(other, one)


def test_copies_are_gone_without_a_garbage_collection(monkeypatch):
    """Each holds copies of all parameters, where it is on another GPU."""
    alive: list[weakref.ref[nn.Module]] = []
    shallow = replicate.shallow_copy

    def watched(part: nn.Module) -> nn.Module:
        new = shallow(part)
        alive.append(weakref.ref(new))
        return new

    monkeypatch.setattr(replicate, "shallow_copy", watched)
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(FEATURES, FEATURES)) for _ in range(2)])
    lockstep.checkpoint_activations(blocks.double(), nn.Linear)
    fails = nn.Sequential(nn.BatchNorm1d(FEATURES).double(), made(lambda s, x: x + None))
    gc.collect()
    gc.disable()
    try:
        wrapped = DataParallel(blocks, replicas=3)
        for _ in range(2):
            wrapped(data(8)).sum().backward()
        assert alive
        assert not [ref for ref in alive if ref() is not None]
        alive.clear()
        with Raises(TypeError):
            DataParallel(fails, replicas=3)(data(8))
        assert alive
        assert not [ref for ref in alive if ref() is not None]
    finally:
        gc.enable()


class Raises:
    """`pytest.raises` without the traceback, which would hold what the frames hold."""

    def __init__(self, kind: type[Exception]) -> None:
        self.kind = kind

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        assert kind is self.kind
        return True


# Modules


def test_a_data_parallel_inside_of_another_is_refused():
    inner = DataParallel(nn.BatchNorm1d(FEATURES), replicas=2)
    with pytest.raises(UsageError, match=r"0 is a DataParallel already"):
        BalancedDataParallel(1, nn.Sequential(inner), replicas=2)
    match = "0 is a DataParallel already"
    with lockstep.init(DP(replicas=2)) as world, pytest.raises(UsageError, match=match):
        world.prepare(nn.Sequential(inner))
    assert DataParallel(nn.Sequential(inner), replicas=1).num_replicas == 1


def test_a_partial_set_as_forward_is_refused():
    """As some libraries set it: it holds the module, out of reach of a copy."""
    module = made(lambda s, x: s.layer(x))
    old = module.forward
    module.forward = functools.update_wrapper(functools.partial(lambda m, x: old(x), module), old)
    with pytest.raises(UsageError, match="a forward set on the object"):
        DataParallel(module, replicas=2)(data(4))


class Own(nn.BatchNorm2d):
    def __init__(self) -> None:
        super().__init__(4)


def test_batch_norm_is_still_found_by_its_class():
    """Scripts freeze it so after they have wrapped the model."""

    kinds = (nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.BatchNorm3d(4), Own())
    module = nn.ModuleList(kinds)
    expected = [next(k for k in type(m).__mro__ if k.__module__.startswith("torch")) for m in kinds]
    wrapped = DataParallel(module, replicas=2)
    assert wrapped.batchnorms.converted == ["0", "1", "2", "3"]
    for found in (wrapped, copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        for layer, kind in zip(found.module, expected, strict=True):
            assert isinstance(layer, kind)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Slotted(nn.Module):
    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_attributes_in_slots_are_copied():
    close(DataParallel(Slotted(), replicas=2)(data(4)), data(4) * 2)


def test_a_traced_module_is_copied_to_another_device():
    traced = torch.fx.symbolic_trace(Scales())
    new = replicate.copy_module(traced, {id(traced.scale): traced.scale.detach() + 1})
    close(new(data(2)), data(2) * 2)
    close(traced(data(2)), data(2))


@pytest.mark.parametrize("norm", [False, True])
def test_compiling_the_wrapper_changes_nothing(norm):
    plain = mlp(norm)
    wrapped = torch.compile(DataParallel(copy.deepcopy(plain), replicas=2), backend="eager")
    for count in (8, 9, 3):
        close(wrapped(data(count)), plain(data(count)))


# Threads


def test_replicas_in_threads_see_the_context_of_the_caller():
    setting = contextvars.ContextVar("setting", default=1.0)
    scaled = made(lambda s, x: x * setting.get())
    wrapped = DataParallel(nn.Sequential(nn.BatchNorm1d(FEATURES).double(), scaled), replicas=3)
    token = setting.set(3.0)
    try:
        close(wrapped(data(9)), nn.BatchNorm1d(FEATURES).double()(data(9)) * 3)
    finally:
        setting.reset(token)
    assert threading.active_count() == 1


def test_replicas_in_threads_compute_under_autocast_each():
    seen = []

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        seen.append(((x @ x.T).dtype, threading.get_ident()))
        if len(x) == 1:
            raise ValueError("one sample")
        return x

    layers = nn.Sequential(nn.BatchNorm1d(FEATURES), made(forward))
    Precision("bf16", torch.device("cpu")).attach(layers)
    wrapped = DataParallel(layers, replicas=2)
    assert wrapped(data(8).float()).dtype == torch.float32
    assert {dtype for dtype, _ in seen} == {torch.bfloat16}
    assert len({thread for _, thread in seen}) == 2
    with pytest.raises(ValueError, match="one sample"):
        wrapped(data(2).float())
    assert not torch.is_autocast_enabled("cpu")


def test_a_function_set_as_forward_is_found_under_autocast_too():
    module = nn.Identity()
    module.forward = lambda x: x
    Precision("bf16", torch.device("cpu")).attach(module)
    with pytest.raises(UsageError, match="a forward set on the object"):
        DataParallel(module, replicas=2)(data(4))


def test_a_method_set_as_forward_is_bound_to_each_replica_under_autocast():
    module = Scales()
    module.forward = types.MethodType(lambda own, x: x * own.scale, module)
    Precision("bf16", torch.device("cpu")).attach(module)
    new = replicate.copy_module(module, {id(module.scale): module.scale.detach() + 1})
    close(new(data(2)), data(2) * 2)
    close(module(data(2)), data(2))


def test_a_second_derivative_through_copies_on_other_devices(monkeypatch):
    """With a stand-in for torch's broadcast to GPUs, which autograd cannot look into."""
    cpu = torch.device("cpu")

    def broadcast(given: Any, devices: Any) -> Any:
        return [[t.detach().clone() for t in given] for _ in devices]

    assert comm.broadcast_coalesced
    monkeypatch.setattr(replicate, "broadcast_coalesced", broadcast)
    found = []
    for several in (False, True):
        w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
        unused = torch.ones(2, requires_grad=True)
        flat = replicate.Broadcast.apply([cpu, cpu], w, unused) if several else (w, unused) * 2
        loss = (flat[0] ** 3).sum() + (flat[2] ** 4).sum()
        first, none = torch.autograd.grad(loss, (w, unused), create_graph=True, allow_unused=True)
        assert none is None
        first.square().sum().backward()
        found.append((first.detach(), w.grad))
    close(found[1][0], found[0][0])
    close(found[1][1], found[0][1])


# Settings

WRONG: dict[str, tuple[Any, str]] = {
    "output_device": (lambda: DataParallel(nn.Tanh(), output_device=900), "output_device=900"),
    "dim": (lambda: DataParallel(nn.Tanh(), dim="x"), "dim='x'"),
    "auto": (lambda: DataParallel(nn.Tanh(), replicas=2, shares="auto"), "measured in a run"),
    "one GPU": (lambda: DataParallel(nn.Tanh(), 0), "device_ids=0"),
    "a string of GPUs": (lambda: DataParallel(nn.Tanh(), "01"), "device_ids='01'"),
    "one GPU and replicas": (
        lambda: DataParallel(nn.Tanh(), 0, replicas=2),
        "device_ids=0, replicas=2",
    ),
    "no list": (lambda: DataParallel(nn.Tanh(), 1.5), "device_ids=1.5"),
    "a fraction of a GPU": (lambda: DataParallel(nn.Tanh(), [1.5]), r"device_ids=\[1.5\]"),
    "an unknown device": (lambda: DataParallel(nn.Tanh(), ["x"]), r"device_ids=\['x'\]"),
    "an unknown output device": (
        lambda: DataParallel(nn.Tanh(), output_device="x"),
        "output_device='x'",
    ),
    "arguments in the wrong order": (lambda: BalancedDataParallel(nn.Tanh(), 2), "gpu0_bsz=Tanh"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings(case):
    call, text = WRONG[case]
    with pytest.raises(SettingError, match=text):
        call()


def test_numbers_of_numpy_and_outputs_on_the_cpu():
    import numpy as np

    wrapped = BalancedDataParallel(np.int64(2), nn.Tanh(), replicas=3, output_device=-1)
    assert wrapped.sizes(8) == [2, 3, 3]
    assert wrapped(data(8)).device.type == "cpu"


def with_micro_batch(micro_batch_size: Any, strategy: Any) -> dict[str, Tensor]:
    with lockstep.init(strategy, seed=4, device="cpu", micro_batch_size=micro_batch_size) as world:
        model = mlp(batch_norm=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(tensors(), batch_size=16, shuffle=True)
        model, optimizer, loader = world.prepare(model, optimizer, loader)
        for batch in loader:
            world.backward(mean_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)


@pytest.mark.filterwarnings("ignore:micro_batch_size='auto' and a model with BatchNorm")
def test_the_largest_micro_batch_is_found_with_batch_norm():
    """Sizes are tried at which a replica has one sample; the statistics are those of all."""
    found = with_micro_batch("auto", DP(replicas=3))
    assert difference(with_micro_batch("auto", "single"), found) < 1e-9


def trained(
    strategy: Any, *, gpu0_bsz: int | None = None, steps: int = 5, folder: Any = None, **init: Any
) -> tuple[dict[str, Tensor], Any]:
    """The weights after some steps, and the model as it was prepared."""
    with lockstep.init(strategy, seed=4, device="cpu", **init) as world:
        model: nn.Module = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if gpu0_bsz is not None:
            model = BalancedDataParallel(gpu0_bsz, model, replicas=3)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(tensors(), batch_size=16, shuffle=True)
        if folder is not None:
            checkpoint = world.checkpoint(folder, model=model, optimizer=optimizer, loader=loader)
            checkpoint.resume()
        for _epoch in world.epochs(2):
            for batch in loader:
                world.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                if world._run.step.number == steps:
                    if folder is not None:
                        checkpoint.save()
                        checkpoint.wait()
                    return weights(model), model
    raise AssertionError("too few batches")


def test_a_first_batch_that_is_short_is_no_error(tmp_path):
    """The last of an epoch after a resume has 2 samples; so has what "auto" begins with."""
    expected = trained("single")[0]
    trained("single", gpu0_bsz=4, folder=tmp_path, steps=3)
    found, balanced = trained("single", gpu0_bsz=4, folder=tmp_path)
    assert difference(expected, found) < 1e-12
    assert balanced.sizes(16) == [4, 6, 6]
    found, balanced = trained("single", gpu0_bsz=5, micro_batch_size="auto")
    assert difference(expected, found) < 1e-12
    assert balanced.sizes(16) == [5, 6, 5]


def test_equal_devices_that_have_the_same_to_do_before_the_first_sample(monkeypatch):
    """What is copied for each but the first, say: fewer samples are dearer ones."""
    overhead = [3.0, 6.0, 6.0]
    monkeypatch.setattr(
        ProfilingRun,
        "seconds_per_sample",
        lambda run, samples, device: 1.0 + overhead[device] / samples,
    )
    assert trained(DP(replicas=3), shares="auto")[1].shares == (1, 1, 1)


def test_samples_in_another_dimension_are_tried_at_other_sizes():
    def run(strategy: Any, **init: Any) -> dict[str, Tensor]:
        with lockstep.init(strategy, device="cpu", **init) as world:
            torch.manual_seed(2)
            model = nn.LSTM(FEATURES, 5).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = world.prepare(model, optimizer)
            samples = torch.utils.data.TensorDataset(data(30, 3))
            for (x,) in world.loader(samples, 16):
                world.backward(model(x.transpose(0, 1))[0].square().mean())
                optimizer.step()
                optimizer.zero_grad()
            return weights(model)

    found = run(DP(replicas=3, dim=1), shares="auto", micro_batch_size="auto")
    assert difference(run("single"), found) < 1e-12


def test_one_device_has_its_share_before_it_is_measured():
    with lockstep.init("dp", device="cpu", shares="auto", micro_batch_size=4) as world:
        assert world.loader(tensors(), 16).micro_batches == 4


def test_shares_of_one_loader_are_refused():
    match = r"(?s)world\.loader\(shares='1:3'\).*give the shares to lockstep\.init"
    with lockstep.init(DP(replicas=2), device="cpu") as world:
        with pytest.raises(SettingError, match=match):
            world.loader(tensors(), 16, shares="1:3")
        assert world.loader(tensors(), 16, shares="auto").shares == (1,)


def test_out_of_memory_is_met_with_fewer_samples_of_one_device():
    def forward(self: Calls, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. (a test)")

    def train() -> None:
        with lockstep.init(DP(replicas=4), device="cpu") as world:
            model = world.prepare(made(forward))
            for x, _ in world.loader(tensors(), 16):
                model(x)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        train()
    advice = caught.value.__notes__[1]
    assert "16 samples at a time on this rank of 4 devices" in advice
    assert "micro_batch_size=2:" in advice


@dataclass(frozen=True, slots=True)
class Logits:
    values: Tensor
    name: str = "x"


def test_dataclasses_in_mixed_and_in_double_precision():
    """Torch's pytree takes them for leaves unless it is told of them."""

    def forward(self: Calls, batch: Logits) -> dict[str, Any]:
        return {"out": Logits(self.layer(batch.values), batch.name)}

    for precision, dtype in (("bf16", torch.float32), ("fp64", torch.float64)):
        with lockstep.init(DP(replicas=2), device="cpu", precision=precision) as world:
            model = world.prepare(made(forward).float())
            out = model(Logits(data(4).float()))["out"]
        assert type(out) is Logits
        assert (out.values.dtype, out.name) == (dtype, "x")
