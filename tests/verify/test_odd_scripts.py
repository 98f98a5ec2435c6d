"""Odd models and optimizers, all of them right: the recorder neither fails nor sees a difference.

Each model trains with an optimizer that is odd in another way, to the end of its script.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import warm

pytestmark = [pytest.mark.unit, pytest.mark.thorough]

BEGIN = """
import dataclasses
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(4)
x = torch.randn(64, 6)
y = torch.randint(3, (64,))
loss_of = F.cross_entropy
"""

END = """
model = DistributedDataParallel(Net())
optimizer = make(list(model.parameters()))
for epoch in range(2):
    for inputs, labels in zip(x.split(16), y.split(16)):
        optimizer.zero_grad()
        loss_of(model(inputs.chunk(size)[rank]), labels.chunk(size)[rank]).backward()
        optimizer.step()
"""

BASE = """
class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x)
"""

MODELS = {
    "a scalar, and a parameter without elements": """
class Net(Base):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return self.layer(x) * self.scale + self.empty.sum()
""",
    "complex numbers": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64) * 0.3)

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).abs()
""",
    "buffers of integers, of NaN and None": """
class Net(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("nan", torch.full((2,), float("nan")))
        self.register_buffer("none", None)

    def forward(self, x):
        self.count += 1
        return self.layer(x)
""",
    "an output that pytree does not know": """
@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    more: list

class Net(Base):
    def forward(self, x):
        return Output(self.layer(x), [x, None, "text"])

def loss_of(output, labels):
    return F.cross_entropy(output.logits, labels)
""",
    "a nested output with None": """
class Net(Base):
    def forward(self, x):
        return {"a": {"logits": self.layer(x)}, "loss": None, 3: (1, 2.0)}

def loss_of(output, labels):
    return F.cross_entropy(output["a"]["logits"], labels)
""",
    "weight normalisation": """
class Net(Base):
    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(self.layer)
""",
    "tied weights": """
class Net(Base):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.layer(self.second(self.first(x).tanh()))
""",
    "a forward that calls the module again": """
class Net(Base):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.depth = 0

    def forward(self, x):
        if self.depth == 2:
            return self.layer(x)
        self.depth += 1
        try:
            return self(self.inner(x).tanh())
        finally:
            self.depth -= 1
""",
    "a function with a backward of its own": """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient

class Net(Base):
    def forward(self, x):
        return Square.apply(self.layer(x))
""",
    "a recurrent layer": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(2, 3, batch_first=True)

    def forward(self, x):
        return self.recurrent(x.view(len(x), 3, 2))[0][:, -1]
""",
    "parameters in containers": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.by_name = nn.ParameterDict({"weight": nn.Parameter(torch.randn(6, 3))})
        self.by_number = nn.ParameterList([nn.Parameter(torch.zeros(3))])

    def forward(self, x):
        return x @ self.by_name["weight"] + self.by_number[0]
""",
    "functional_call": """
class Net(Base):
    def forward(self, x):
        return torch.func.functional_call(self.layer, dict(self.layer.named_parameters()), (x,))
""",
    "methods that raise": """
class Net(Base):
    def __len__(self):
        return 0

    def __eq__(self, other):
        raise TypeError("not comparable")

    __hash__ = nn.Module.__hash__
""",
}

OPTIMIZERS = {
    "sgd": """
def make(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
""",
    "groups with other values": """
def make(parameters):
    groups = [{"params": []}, {"params": parameters, "lr": 0.05, "note": "text", "function": len}]
    return torch.optim.SGD(groups, lr=0.1)
""",
    "not one of torch's": """
class make:
    def __init__(self, parameters):
        self.param_groups = [{"params": parameters, "lr": 0.1}]
        self.state = {}

    def zero_grad(self):
        for p in self.param_groups[0]["params"]:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p -= 0.1 * p.grad
""",
    "a state of all kinds": """
class make(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        self.state["whole"] = {"n": 1}
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"text": "x", "list": [p.grad.clone(), None], "function": len}
            p.sub_(p.grad, alpha=0.1)
""",
    "one around another": """
class make(torch.optim.Optimizer):
    def __init__(self, parameters):
        self.inner = torch.optim.SGD(parameters, lr=0.1)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step()
        return 3
""",
    "gradients that the step replaces": """
class make(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad = 0.5 * p.grad
        return super().step()
""",
    "data that is assigned": """
class make(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data = p.data - 0.1 * p.grad
""",
    "a rate that a hook sets": """
def decay(optimizer, *_):
    optimizer.param_groups[0]["lr"] *= 0.9

def make(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(decay)
    return optimizer
""",
    "a rate that is a tensor": """
def make(parameters):
    return torch.optim.Adam(parameters, lr=torch.tensor(0.01), foreach=False)
""",
}


def pairs() -> list[tuple[str, str]]:
    """Each model, with the optimizers in turn."""
    optimizers = list(OPTIMIZERS)
    return [(model, optimizers[n % len(optimizers)]) for n, model in enumerate(MODELS)]


@pytest.mark.parametrize(("model", "optimizer"), pairs())
def test_what_is_odd_and_right_is_equal(model: str, optimizer: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("\n".join([BEGIN, BASE, MODELS[model], OPTIMIZERS[optimizer], END]))
    verdict = warm.verify(script, steps=50)
    assert verdict.word == "EQUAL", verdict.lines()
