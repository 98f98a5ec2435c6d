from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lockstep.errors import SettingError
from lockstep.optim.precision import Precision

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
