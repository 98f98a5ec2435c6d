from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from dataclasses import dataclass
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lockstep.errors import SettingError
from lockstep.optim.precision import Precision

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_forward_pass_runs_lower_and_comes_back_in_fp32(name):
    seen = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):  # type: ignore[no-untyped-def]
            y = self.layer(x)
            seen.append(y.dtype)
            return {"y": y, "n": 3, "ids": torch.ones(2, dtype=torch.int64)}

    precision = Precision(name, CPU)
    net = Net()
    precision.attach(net)
    out = net(torch.ones(2, 4))
    assert seen == [precision.dtype]
    assert out["y"].dtype == torch.float32
    assert out["ids"].dtype == torch.int64
    precision.backward(out["y"].mean())
    assert net.layer.weight.grad is not None
    assert net.layer.weight.grad.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


@dataclass
class Movable:
    x: Tensor
    ids: Tensor

    def to(self, device: torch.device) -> Movable:
        return Movable(self.x.to(device), self.ids.to(device))


def test_what_moves_itself_is_converted_inside():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, batch, packed):  # type: ignore[no-untyped-def]
            y = self.layer(packed.data)
            return {
                "packed": packed._replace(data=y),
                "out": Movable(self.layer(batch.x), batch.ids),
            }

    ids = torch.ones(2, dtype=torch.int64)
    for name, dtype in (("bf16", torch.float32), ("fp64", torch.float64)):
        net = Net()
        Precision(name, CPU).attach(net)
        packed = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
        made = net(Movable(torch.ones(1, 2), ids), packed)
        assert type(made["packed"]) is PackedSequence
        assert type(made["out"]) is Movable
        assert made["packed"].data.dtype == made["out"].x.dtype == dtype
        assert made["packed"].batch_sizes.dtype == made["out"].ids.dtype == torch.int64


def test_autocast_is_left_when_the_forward_pass_raises():
    class Broken(nn.Module):
        def forward(self, x):  # type: ignore[no-untyped-def]
            raise RuntimeError("broken")

    net = Broken()
    Precision("bf16", CPU).attach(net)
    with pytest.raises(RuntimeError, match="broken"):
        net(torch.ones(1))
    assert not torch.is_autocast_enabled("cpu")


class Records(nn.Module):
    """One layer; it remembers the dtype that it computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.computed_in: list[torch.dtype] = []

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = self.layer(x)
        self.computed_in.append(y.dtype)
        return y * scale


def lowered(module: nn.Module) -> tuple[nn.Module, Precision]:
    """The module in bf16."""
    precision = Precision("bf16", CPU)
    precision.attach(module)
    return module, precision


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "averaged"])
def test_copies_compute_in_the_precision_with_parameters_of_their_own(way):
    model, _ = lowered(Records())
    if way == "deepcopy":
        made = copy.deepcopy(model)
    elif way == "pickle":
        made = pickle.loads(pickle.dumps(model))
    else:
        made = torch.optim.swa_utils.AveragedModel(model).module
    assert torch.equal(made(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert made.computed_in == [torch.bfloat16]
    with torch.no_grad():
        made.layer.weight.zero_()
        made.layer.bias.zero_()
    assert not made(torch.ones(2, 4)).any()
    assert model(torch.ones(2, 4)).any()
    assert [*made.state_dict()] == [*Records().state_dict()]


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_a_copy_of_a_compiled_model_keeps_the_precision(precision):
    compiled = torch.compile(Records(), backend="eager")
    Precision(precision, CPU).attach(compiled)
    made = copy.deepcopy(compiled)
    assert torch.equal(made(torch.ones(2, 4)), compiled(torch.ones(2, 4)))


def computes_twice(model: Any, x: Tensor) -> Tensor:
    model.computed_in.append((x @ x.T).dtype)
    return model.layer(x) * 2


@pytest.mark.parametrize("set_first", [True, False])
def test_a_forward_that_is_set_on_the_model_is_autocast(set_first):
    model = Records()
    if set_first:
        model.forward = MethodType(computes_twice, model)
    _, precision = lowered(model)
    if not set_first:
        model.forward = MethodType(computes_twice, model)
        precision.follow_forwards()
    assert model(torch.ones(2, 4)).dtype == torch.float32
    made = copy.deepcopy(model)
    assert torch.equal(made(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert set(model.computed_in) == set(made.computed_in) == {torch.bfloat16}


def test_a_forward_that_the_class_gets_later_is_autocast(monkeypatch):
    model, _ = lowered(Records())
    monkeypatch.setattr(Records, "forward", computes_twice)
    model(torch.ones(2, 4))
    assert model.computed_in == [torch.bfloat16]


def test_hooks_of_the_model_see_what_it_is_given_and_returns():
    seen = []
    model = Records()
    model.register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
    lowered(model)
    model.register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
    model.register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    assert torch.equal(model(torch.ones(1, 4))[0], model.layer.bias.bfloat16().float())
    assert seen == [(torch.float32, torch.float32)] * 2


def test_the_forward_keeps_its_signature():
    model, _ = lowered(Records())
    assert [*inspect.signature(model.forward).parameters] == ["x", "scale"]
    assert model.forward.__code__ is Records.forward.__code__


def test_a_hook_that_raises_before_the_forward_pass_leaves_no_autocast():
    def refuse(module: nn.Module, args: Any) -> None:
        raise RuntimeError("refused")

    model, _ = lowered(Records())
    model.register_forward_pre_hook(refuse, prepend=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing else may go wrong then
        with pytest.raises(RuntimeError, match="refused"):
            model(torch.ones(1, 4))
    assert not torch.is_autocast_enabled("cpu")


def test_a_scripted_model_is_autocast():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 3)))
    model, _ = lowered(scripted)
    output = model(torch.randn(2, 4))
    assert output.dtype == torch.float32
    assert torch.equal(output, output.bfloat16().float())


def test_the_inputs_of_a_model_in_float64_can_be_pickled_with_it():
    precision = Precision("fp64", CPU)
    model = nn.Linear(2, 1)
    precision.attach(model)
    made = pickle.loads(pickle.dumps(model))
    assert torch.equal(made(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_fp16_leaves_out_a_step_with_infinite_gradients():
    precision = Precision("fp16", CPU)
    assert precision.scaler is not None
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    before = precision.scaler.get_scale()
    precision.backward((parameter * float("inf")).sum())
    assert precision.step(optimizer, None) == (None, True)
    assert parameter.item() == 1.0
    optimizer.zero_grad()
    precision.backward(parameter.sum())
    assert precision.scaler.get_scale() < before
    precision.unscale([optimizer])
    precision.unscale([optimizer])  # a second look at the gradients is allowed
    assert parameter.grad is not None
    assert parameter.grad.item() == 1.0
    assert precision.step(optimizer, None)[1] is False
    assert parameter.item() == 0.0


def test_gradients_that_were_looked_at_and_not_stepped_on_are_scaled_anew():
    precision = Precision("fp16", CPU)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        precision.backward(parameter.sum())
        precision.unscale([optimizer])
        assert parameter.grad is not None
        assert parameter.grad.item() == 1.0


def test_fp32_changes_nothing():
    net = nn.Linear(1, 1)
    plain = dict(vars(net)), dict(net._forward_hooks), dict(net._forward_pre_hooks)
    Precision("fp32", CPU).attach(net)
    assert (vars(net), net._forward_hooks, net._forward_pre_hooks) == plain


def test_unknown_precision():
    with pytest.raises(SettingError, match="precision='fp8'"):
        Precision("fp8", CPU)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("bf16-mixed", "bf16"),
        (torch.bfloat16, "bf16"),
        ("16-mixed", "fp16"),
        ("float16", "fp16"),
        ("32-true", "fp32"),
        ("double", "fp64"),
    ],
)
def test_the_names_of_other_tools_are_understood_in_the_error(name, meant):
    with pytest.raises(SettingError, match=f"did you mean '{meant}'"):
        Precision(name, CPU)
