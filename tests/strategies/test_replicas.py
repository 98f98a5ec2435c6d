"""DataParallel and BalancedDataParallel on their own, over replicas on the CPU."""

from __future__ import annotations

import copy
import threading
import warnings
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, fields
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from opened_gpus import OpenedGpus
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep
from lockstep import BalancedDataParallel, torch_compat
from lockstep.checkpoint.modules import load_plain, plain_state_dict, unwrap
from lockstep.errors import DataError, SettingError, UsageError
from lockstep.strategies.data_parallel import parallel_apply, replicate
from lockstep.strategies.data_parallel.module import DataParallel

pytestmark = pytest.mark.unit

FEATURES = 5
Pair = namedtuple("Pair", ["one", "other"])


@dataclass
class Batch:
    x: Tensor
    scale: float


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """As the outputs of Hugging Face's models: a dataclass that is a dictionary of its fields."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None:
                super().__setitem__(each.name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, each.name) for each in fields(self))


class Net(nn.Module):
    """A little of everything: convolution-like BatchNorm, an unused and a frozen parameter."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.last = nn.Linear(8, 3)
        self.unused = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.counter = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.counter += 1
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x)) * self.frozen))
        return out


class Calls(nn.Module):
    """Calls a function; it has a parameter, so it has a device."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(self, *args, **kwargs)


def net(norm: bool = True) -> Net:
    torch.manual_seed(3)
    return Net(norm).double()


def data(count: int) -> Tensor:
    return torch.randn(
        count, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(count)
    )


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone()
        for name, p in unwrap(module).named_parameters()
    }


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def compare(wrapped: nn.Module, plain: nn.Module, count: int, steps: int = 2) -> None:
    """Outputs, gradients (of inputs too) and buffers after some batches."""
    for step in range(steps):
        x, again = (data(count + step).requires_grad_() for _ in range(2))
        expected, found = plain(x), wrapped(again)
        close(found, expected)
        expected.square().mean().backward()
        found.square().mean().backward()
        close(again.grad, x.grad)
    theirs = gradients(wrapped)
    for name, gradient in gradients(plain).items():
        if gradient is None:
            assert theirs[name] is None, name
        else:
            close(theirs[name], gradient)
    for (name, buffer), own in zip(plain.named_buffers(), unwrap(wrapped).buffers(), strict=True):
        torch.testing.assert_close(own, buffer, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("replicas", "shares", "count"),
    [(1, None, 7), (2, None, 8), (3, None, 8), (3, (2, 3, 3), 9), (3, (0, 1, 2), 7), (4, None, 2)],
)
def test_it_computes_what_one_device_computes(replicas, shares, count, norm):
    wrapped = DataParallel(net(norm), replicas=replicas, shares=shares)
    compare(wrapped, net(norm), count)
    assert threading.active_count() == 1


@pytest.mark.parametrize("gpu0_bsz", [0, 1, 2, 5, 8])
def test_balanced_computes_what_one_device_computes(gpu0_bsz):
    compare(BalancedDataParallel(gpu0_bsz, net(), replicas=3), net(), 8)


def test_how_a_balanced_batch_is_cut():
    def cut(gpu0_bsz: int, count: int, replicas: int = 3) -> list[int]:
        seen: list[int] = []
        module = Calls(lambda self, x: seen.append(len(x)) or x)
        BalancedDataParallel(gpu0_bsz, module, replicas=replicas).eval()(data(count))
        return seen

    assert cut(2, 8) == [2, 3, 3]
    assert cut(0, 8) == [4, 4]
    assert cut(4, 16) == [4, 6, 6]
    assert cut(4, 3) == [3]  # a last batch
    assert cut(5, 16, replicas=1) == [16]


def test_accumulation_cuts_every_micro_batch():
    """4+6+6 over two micro-batches is 2+3+3 twice; the gradient is that of the whole batch."""
    seen: list[int] = []

    class Seen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return x

    plain, x = net(norm=False), data(16)
    wrapped = BalancedDataParallel(4 // 2, nn.Sequential(net(norm=False), Seen()), replicas=3)
    plain(x).square().mean().backward()
    for part in x.chunk(2):
        (wrapped(part).square().mean() / 2).backward()
    assert seen == [2, 3, 3] * 2
    close(wrapped.module[0].first.weight.grad, plain.first.weight.grad)


def test_inputs_of_every_kind_are_cut():
    seen = []

    def forward(self, x, nested, *, batch, pair, one_row, scalar, none, text, listed):
        seen.append((len(x), len(nested["a"][0]), len(batch.x), len(pair.other), batch.scale, text))
        assert type(batch) is Batch
        assert type(pair) is Pair
        assert one_row.shape == (1, 4)
        assert scalar.shape == ()
        assert none is None
        assert listed == [1, "two"]
        return x + nested["a"][0] + batch.x * batch.scale + pair.one + pair.other + scalar

    def call(module: nn.Module) -> Tensor:
        x = data(8)
        return module(
            x,
            {"a": [x * 2, "text"], "b": (3,)},
            batch=Batch(x * 3, 0.5),
            pair=Pair(x, x),
            one_row=torch.ones(1, 4),
            scalar=torch.tensor(1.0),
            none=None,
            text="abc",
            listed=[1, "two"],
        )

    expected = call(Calls(forward))
    seen.clear()
    close(call(DataParallel(Calls(forward), replicas=3, shares="2:3:3")), expected)
    assert seen == [(n, n, n, n, 0.5, "abc") for n in (2, 3, 3)]


def test_outputs_of_every_kind_are_joined():
    def forward(self, x: Tensor) -> Any:
        loss = (x * self.weight).mean()
        return {
            "output": Output(loss=loss, logits=x, hidden=(x * 2, x * 3)),
            "pair": Pair(x, [x, None]),
            "batch": Batch(x, float(x.detach().mean())),
            "same": (7, "text", True, torch.tensor(5), torch.float32),
        }

    x = data(7)
    module = DataParallel(Calls(forward), replicas=3, shares="2:3:3")
    found, expected = module(x), forward(module.module, x)
    assert type(found["output"]) is Output
    assert list(found["output"]) == ["loss", "logits", "hidden"]
    assert found["output"]["loss"] is found["output"].loss
    close(found["output"].loss, expected["output"].loss)
    for one, other in zip(found["output"].hidden, expected["output"].hidden, strict=True):
        close(one, other)
    assert type(found["pair"]) is Pair
    close(found["pair"].other[0], x)
    assert found["pair"].other[1] is None
    assert found["batch"].scale == pytest.approx(expected["batch"].scale, abs=1e-12)
    close(found["batch"].x, x)
    assert found["same"] == (7, "text", True, torch.tensor(5), torch.float32)


def test_a_loss_inside_the_module_is_the_mean_over_the_batch():
    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).square().mean()

    wrapped, plain = DataParallel(Calls(forward), replicas=2), Calls(forward)
    expected, found = plain(data(7)), wrapped(data(7))
    close(found, expected)
    expected.backward()
    found.backward()
    close(wrapped.module.weight.grad, plain.weight.grad)
    parts = torch.stack([forward(plain, part) for part in (data(7)[:4], data(7)[4:])])
    assert abs(parts.mean() - expected) > 1e-3  # what the mean of torch's vector would be


def test_other_dimensions_than_the_first():
    lstm = nn.LSTM(FEATURES, 6).double()
    x = data(12).view(2, 6, FEATURES)
    for module in (lstm, nn.Linear(FEATURES, 2).double()):
        wrapped = DataParallel(copy.deepcopy(module), dim=1, replicas=4)
        expected, found = module(x), wrapped(x)
        if module is lstm:  # its state has the samples in dimension 1 as well
            close(found[1][0], expected[1][0])
            expected, found = expected[0], found[0]
        close(found, expected)
        expected.sum().backward()
        found.sum().backward()
        for p, own in zip(module.parameters(), wrapped.parameters(), strict=True):
            close(own.grad, p.grad)


def test_few_samples_and_none():
    seen: list[int] = []
    module = DataParallel(Calls(lambda self, x: seen.append(len(x)) or x * 2), replicas=3)
    assert module(data(2)).shape == (2, FEATURES)
    assert seen == [1, 1]
    assert module(data(1)).shape == (1, FEATURES)
    assert module(data(0)).shape == (0, FEATURES)
    assert seen == [1, 1, 1, 0]
    assert DataParallel(Calls(lambda self: 5), replicas=3)() == 5


def test_the_first_replica_leaves_what_it_did():
    module = DataParallel(net(), replicas=3)
    for _ in range(2):
        module(data(6))
    assert module.module.counter == 2
    assert int(module.module.calls) == 2
    # With nothing for the first device, what the second one leaves stays.
    module = BalancedDataParallel(0, net(), replicas=3)
    module(data(6))
    assert module.module.counter == 1
    assert int(module.module.calls) == 1
    assert int(module.module.norm.num_batches_tracked) == 1


def test_hooks_run_once_for_each_replica():
    module, seen = net(), []
    module.first.register_forward_hook(lambda m, args, out: seen.append(len(out)))
    module.last.register_full_backward_hook(lambda m, gin, gout: seen.append(-len(gout[0])))
    DataParallel(module, replicas=3, shares="2:3:3")(data(8)).sum().backward()
    assert seen[:3] == [2, 3, 3]
    assert sorted(seen[3:]) == [-3, -3, -2]


@pytest.mark.parametrize("norm", [False, True])
def test_replicas_draw_numbers_of_their_own_in_a_fixed_order(norm):
    middle = nn.BatchNorm1d(FEATURES).double() if norm else nn.Identity()
    module = DataParallel(nn.Sequential(middle, nn.Dropout(0.5)), replicas=3)
    x = torch.ones(30, FEATURES, dtype=torch.float64) + torch.arange(30).view(30, 1)
    found = []
    for _ in range(20):
        torch.manual_seed(5)
        found.append(module(x))
    assert all(torch.equal(out, found[0]) for out in found)
    dropped = [part == 0 for part in found[0].chunk(3)]
    assert not torch.equal(dropped[0], dropped[1])
    assert not torch.equal(dropped[1], dropped[2])


def test_state_dicts_and_wrappers():
    module = net()
    wrapped = DataParallel(module, replicas=2)
    assert isinstance(wrapped, nn.DataParallel)
    assert unwrap(wrapped) is module
    assert set(wrapped.state_dict()) == {f"module.{name}" for name in net().state_dict()}
    assert plain_state_dict(wrapped).keys() == net().state_dict().keys()
    other = DataParallel(net(), replicas=2)
    wrapped(data(6))
    load_plain(other, plain_state_dict(wrapped))
    other.load_state_dict(wrapped.state_dict())
    close(other.module.norm.running_mean, module.norm.running_mean)
    again = copy.deepcopy(wrapped)
    close(again.eval()(data(4)), wrapped.eval()(data(4)))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    "kind",
    [
        "2d",
        "no affine",
        pytest.param(
            "no bias",
            marks=pytest.mark.skipif(
                "bias" not in signature(nn.BatchNorm2d).parameters,
                reason="BatchNorm of this torch has no argument `bias`",
            ),
        ),
        "no statistics",
        "torch sync",
    ],
)
def test_batch_norm_of_every_kind(kind, momentum):
    made = {
        "2d": lambda: nn.BatchNorm2d(4, momentum=momentum),
        "no affine": lambda: nn.BatchNorm2d(4, affine=False, momentum=momentum),
        "no bias": lambda: nn.BatchNorm2d(4, bias=False, momentum=momentum),
        "no statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False, momentum=momentum),
        "torch sync": lambda: nn.SyncBatchNorm(4, momentum=momentum),
    }[kind]().double()
    plain = copy.deepcopy(made)
    if kind == "torch sync":  # on the CPU torch's own computes in eval mode alone
        plain.__class__ = nn.BatchNorm2d
    wrapped = DataParallel(made, replicas=3, shares="1:2:3")
    assert wrapped.batchnorms.converted == [""]
    for training in (True, False):
        wrapped.train(training)
        plain.train(training)
        for count in (11, 2):
            x = torch.randn(count, 4, 3, 2, dtype=torch.float64)
            one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
            expected, found = plain(one), wrapped(other)
            close(found, expected)
            (expected**3).sum().backward()
            (found**3).sum().backward()
            close(other.grad, one.grad)
    for a, b in zip(plain.state_dict().values(), made.state_dict().values(), strict=True):
        close(b, a)
    for p, own in zip(plain.parameters(), made.parameters(), strict=True):
        close(own.grad, p.grad)


def test_batch_norm_without_synchronisation_is_torchs_of_the_first_replica():
    wrapped = DataParallel(net(), replicas=2, sync_batchnorm=False)
    assert type(wrapped.module.norm) is nn.BatchNorm1d
    x, plain = data(8), net()
    found = wrapped(x)
    close(found, torch.cat([copy.deepcopy(plain)(part) for part in x.chunk(2)]))
    plain(x[:4])
    close(wrapped.module.norm.running_var, plain.norm.running_var)


def test_batch_norm_under_autocast_and_without_gradients():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    wrapped = DataParallel(copy.deepcopy(plain), replicas=2)
    x = data(6).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = wrapped(x)
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found, plain(x), rtol=0.05, atol=0.05)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not wrapped(x).requires_grad
            assert wrapped(x).is_inference() is (mode is torch.inference_mode)


def test_activation_checkpointing():
    module, plain = nn.Sequential(net(norm=False), nn.BatchNorm1d(3).double()), net(norm=False)
    plain = nn.Sequential(plain, nn.BatchNorm1d(3).double())
    wrapped = DataParallel(module, replicas=3)
    lockstep.checkpoint_activations(module, Net)
    compare(wrapped, plain, 7, steps=1)
    assert int(module[0].calls) == 1
    assert module[0].counter == 2  # the second run counts too


def test_activation_checkpointing_around_batch_norm_of_several_replicas():
    module = nn.Sequential(net())
    wrapped = BalancedDataParallel(2, module, replicas=3)
    lockstep.checkpoint_activations(module, Net)
    loss = wrapped(data(8)).square().mean()
    with pytest.raises(UsageError, match="activation checkpointing of a block with BatchNorm"):
        loss.backward()
    module.zero_grad()
    plain = net()
    wrapped(data(2)).square().mean().backward()  # all of it on the first replica
    plain(data(2)).square().mean().backward()
    close(module[0].first.weight.grad, plain.first.weight.grad)


class Fails(nn.Module):
    def __init__(self, least: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES).double()
        self.least = least

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if len(x) > self.least:
            raise ValueError("too many")  # the user's line
        return self.norm(x)


def test_an_error_in_a_replica_reaches_the_caller():
    """In the second or third of three replicas, while the others wait at the next layer."""
    for shares in ("1:4:1", "1:1:4", "4:1:1"):
        module = DataParallel(Fails(2), replicas=3, shares=shares)
        with pytest.raises(ValueError, match="too many") as caught:
            module(data(12))
        failed = shares.split(":").index("4")
        note = f"lockstep: in replica {failed} on cpu, which has 8 of 12 samples"
        assert caught.value.__notes__ == [note]
        assert caught.traceback[-1].statement.lines[0].strip().endswith("# the user's line")
        assert threading.active_count() == 1
        assert parallel_apply.current_replica.get() is None


def test_the_threads_of_replicas_open_their_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = OpenedGpus()
    monkeypatch.setattr(torch, "cuda", cuda)
    devices = [torch.device("cuda", index) for index in (2, 1, 3)]
    cuda.set_device(devices[0])

    def stream_of(device: torch.device) -> Any:
        with cuda.device(device):
            return cuda.current_stream().device

    calls = [partial(stream_of, device) for device in devices]
    assert parallel_apply.parallel_apply(calls, devices) == devices
    assert cuda.opened == {1, 2, 3}


def test_an_interruption_ends_all_replicas():
    def forward(self: Any, x: Tensor) -> Tensor:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return x

    module = nn.Sequential(nn.BatchNorm1d(FEATURES).double(), Calls(forward))
    with pytest.raises(KeyboardInterrupt):
        DataParallel(module, replicas=3)(data(6))
    assert threading.active_count() == 1


class TwoWays(nn.Module):
    def __init__(self, which: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(FEATURES).double() for _ in range(2))
        self.which = which

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2:
            return self.norms[self.which](x) if self.which < 2 else x
        return self.norms[0](x)


@pytest.mark.parametrize("shares", ["1:4:1", "4:1:1", "1:1:4"])
def test_replicas_that_take_different_ways_are_an_error(shares):
    DataParallel(TwoWays(0), replicas=3, shares=shares)(data(12))
    for which in (1, 2):
        with pytest.raises(UsageError, match="different ways through the model"):
            DataParallel(TwoWays(which), replicas=3, shares=shares)(data(12))


def test_shares_can_be_changed_between_batches():
    seen: list[int] = []
    module = BalancedDataParallel(1, Calls(lambda self, x: seen.append(len(x)) or x), replicas=3)
    module(data(8))
    module.set_shares("2:1:1")
    module(data(8))
    module.set_shares(None)
    module(data(9))
    assert seen == [1, 4, 3, 4, 2, 2, 3, 3, 3]


def returns(value: Any) -> Any:
    return Calls(lambda self, x: value(x))


WRONG_SETTINGS: dict[str, tuple[Any, str]] = {
    "GPUs that are not there": (lambda: DataParallel(net(), [0, 900]), "they name GPUs, each once"),
    "GPUs and replicas": (lambda: DataParallel(net(), [0], replicas=2), "give one of them"),
    "no replicas": (lambda: DataParallel(net(), replicas=0), "replicas=0"),
    "too few shares": (
        lambda: DataParallel(net(), replicas=3, shares="1:2"), "2 shares for 3 devices"
    ),
    "one number as shares": (
        lambda: DataParallel(net(), replicas=2, shares=3), "not whole numbers"
    ),
    "shares of nothing": (
        lambda: DataParallel(net(), replicas=2, shares="0:0"), "one is above 0"
    ),
    "a negative gpu0_bsz": (lambda: BalancedDataParallel(-1, net(), replicas=2), "gpu0_bsz=-1"),
    "half a gpu0_bsz": (lambda: BalancedDataParallel(2.5, net(), replicas=2), "gpu0_bsz=2.5"),
    "nothing on the only device": (
        lambda: BalancedDataParallel(0, net(), replicas=1), "gpu0_bsz=0 with one device"
    ),
    "more than the batch": (
        lambda: [module(data(8)) for module in [BalancedDataParallel(9, net(), replicas=2)] * 2],
        "have 8 samples",
    ),
}  # fmt: skip
WRONG_INPUTS: dict[str, tuple[Any, str]] = {
    "sizes that differ": (
        lambda: DataParallel(returns(lambda x: x), replicas=2)([data(4), data(6)]),
        "their sizes there are 4, 6",
    ),
    "packed sequences": (
        lambda: DataParallel(returns(lambda x: x), replicas=2)(pack_sequence([data(3)])),
        "pack them inside of the module's forward",
    ),
    "lists that differ": (
        lambda: DataParallel(returns(lambda x: list(x)), replicas=2)(data(5)),
        "a list of 3, a list of 2",
    ),
}


@pytest.mark.parametrize("case", WRONG_SETTINGS)
def test_wrong_settings(case):
    call, text = WRONG_SETTINGS[case]
    with pytest.raises(SettingError) as caught:
        call()
    assert text in str(caught.value)


@pytest.mark.parametrize("case", WRONG_INPUTS)
def test_wrong_inputs_and_outputs(case):
    call, text = WRONG_INPUTS[case]
    with pytest.raises(DataError) as caught:
        call()
    assert text in str(caught.value)


def test_a_sum_of_integers_is_not_guessed_at():
    module = DataParallel(returns(lambda x: (x > 0).sum()), replicas=2)
    with pytest.raises(UsageError, match="it differs between the replicas"):
        module(data(5))


def test_one_sample_for_batch_norm():
    module = DataParallel(nn.BatchNorm1d(FEATURES).double(), replicas=2)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        module(data(1))
    # Two replicas with one sample each have two values per channel.
    close(module(data(2)), nn.BatchNorm1d(FEATURES).double()(data(2)))


def test_modules_that_cannot_be_copied():
    class Patched(nn.Linear):
        pass

    patched = Patched(FEATURES, 2).double()
    patched.forward = lambda x: x
    compiled = nn.Linear(FEATURES, 2).double()
    compiled.compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(FEATURES, 2).double())
    for module in (patched, compiled, scripted):
        with pytest.raises(UsageError, match="bound to one object on one device"):
            DataParallel(module, replicas=2)(data(4))
        assert DataParallel(module, replicas=1)(data(4)) is not None


def test_methods_set_on_the_object_are_those_of_the_copy():
    module = net(norm=False)
    module.forward = type(module).forward.__get__(module)
    wrapped = DataParallel(module, replicas=3)
    wrapped(data(6))
    assert module.counter == 1


def test_gradients_that_come_from_other_devices(monkeypatch):
    """The bookkeeping of `Broadcast`, with a stand-in for torch's broadcast to GPUs."""

    def broadcast(tensors: Any, devices: Any) -> Any:
        return [[t.clone() for t in tensors] for _ in devices]

    monkeypatch.setattr(replicate, "broadcast_coalesced", broadcast)
    devices = [torch.device("cpu"), torch.device("cpu")]
    tensors = [
        torch.randn(3, dtype=torch.float64, requires_grad=True),
        torch.randn(2, dtype=torch.complex128, requires_grad=True),
        torch.randn(4, dtype=torch.float64, requires_grad=True),
        torch.arange(3),
        torch.randn(2, dtype=torch.float64),
    ]
    one, other = replicate.copy_to_devices(tensors, devices)
    for new, tensor in zip(one + other, tensors * 2, strict=True):
        assert torch.equal(new, tensor)
        assert new.requires_grad is tensor.requires_grad
    # The first is used on both, the second on one device, the third on none.
    loss = (one[0] * 2).sum() + (other[0] * 3).sum() + (other[1].abs() ** 2).sum()
    loss.backward()
    close(tensors[0].grad, torch.full((3,), 5.0, dtype=torch.float64))
    close(tensors[1].grad, 2 * tensors[1].detach())
    assert tensors[2].grad is None


class AddsAndCopies(TorchDispatchMode):
    """Counts the additions and joins of whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"add": 0, "cat": 0}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in self.counts:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(2**20, 2), (500, 4)])
def test_gradients_from_other_devices_are_summed_in_buckets(monkeypatch, bucket_bytes, buckets):
    monkeypatch.setattr(replicate, "BUCKET_BYTES", bucket_bytes)
    shapes = [(3, 4), (), (0, 2), (5, 1, 2), (100, 2), (7,), (100, 2), (1,)]
    given: list[list[Tensor]] = [[torch.randn(shape) for _ in range(3)] for shape in shapes]
    given += [[torch.randn(4, dtype=torch.bfloat16) for _ in range(3)] for _ in range(20)]
    given[3] = [each.to(memory_format=torch.contiguous_format).mT for each in given[3]]
    expected = [(first + second) + third for first, second, third in given]
    # Some replica has not used one, none has used another, and a third is sparse.
    given += [[torch.ones(2)], [], [torch.ones(3).to_sparse()] * 2]
    with torch.no_grad(), AddsAndCopies() as counted:  # as in a backward pass
        found = replicate.sum_gradients(given, torch.device("cpu"))
    *sums, alone, none, sparse = found
    for each, wanted in zip(sums, expected, strict=True):
        assert each.shape == wanted.shape
        assert torch.equal(each, wanted)
    assert torch.equal(alone, torch.ones(2))
    assert none is None
    assert torch.equal(sparse.to_dense(), torch.full((3,), 2.0))
    assert counted.counts["add"] == 2 * buckets + 1
    # Each is written to for itself.
    before = torch_compat.write_counts(sums)
    sums[0].mul_(2)
    assert torch_compat.write_counts(sums[1:]) == before[1:]


def test_copies_with_parameters_of_their_own_work_as_modules():
    """As on another GPU: plain tensors in the place of parameters, seen by `parameters()`."""
    module = nn.Sequential(net(norm=False), nn.LSTM(3, 4).double())
    held = {id(t): t.detach() * 1 for t in [*module.parameters(), *module.buffers()]}
    new = replicate.copy_module(module, held)
    assert len(list(new.parameters())) == len(list(module.parameters()))
    assert next(new.parameters()).dtype is torch.float64
    x = data(4).view(2, 2, FEATURES)
    close(new(x)[0], module(x)[0])
    for part in held.values():
        if part.is_floating_point():
            part.zero_()
    assert float(new(x)[0].detach().abs().max()) == 0.0  # the copies are what it computes with
    assert float(module(x)[0].detach().abs().max()) > 0.0


def test_replicas_that_catch_the_error_of_different_ways_fail_all_the_same():
    class Catches(TwoWays):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x)
            except Exception:
                return x

    with pytest.raises(UsageError, match="different ways through the model"):
        DataParallel(Catches(1), replicas=3, shares="1:4:1")(data(12))
    assert threading.active_count() == 1
