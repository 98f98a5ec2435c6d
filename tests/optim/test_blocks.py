"""Blocks are found in models of the kinds that people write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lockstep.optim.module_filter import repeated_blocks

pytestmark = pytest.mark.unit


class Residual(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size))
        self.side = nn.Sequential(nn.Linear(size, size), nn.LayerNorm(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.side(x) + self.body(x)


class OneTensor(nn.Module):
    """A block without submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.layer1 = nn.Sequential(Residual(), Residual())
        self.layer2 = nn.Sequential(Residual(), Residual(), Residual())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(self.layer1(self.stem(x)))


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = Residual(), Residual()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down2(self.down1(x)))


class Encoders(nn.Module):
    """Two stacks of a class of their own: blocks are what the stacks repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = ResNet(), ResNet()

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


def stages() -> nn.Module:
    """Stages that are built alike are no blocks, the blocks in them are."""
    return nn.Sequential(
        nn.Linear(4, 4), *(nn.Sequential(Residual(), Residual()) for _ in range(3))
    )


def layers() -> nn.Module:
    """Blocks that are plain Sequentials."""
    return nn.ModuleDict(
        {
            "layers": nn.ModuleList(
                nn.Sequential(nn.LayerNorm(4), OneTensor(), Residual()) for _ in range(3)
            ),
            "other": nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        }
    )


def shared() -> nn.Module:
    """One block that runs three times is not repeated: there is one."""
    block = Residual()
    return nn.Sequential(block, block, block)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (ResNet, "layer1.0 layer1.1 layer2.0 layer2.1 layer2.2"),
        (Attributes, "down1 down2"),
        (Encoders, "".join(f"{s}.layer1.{i} " for s in ("left", "right") for i in range(2))),
        (stages, "1.0 1.1 2.0 2.1 3.0 3.1"),
        (layers, "layers.0 layers.1 layers.2"),
        (lambda: nn.Sequential(OneTensor(), nn.ReLU(), OneTensor()), "0 2"),
        (lambda: nn.ModuleList([ResNet(), ResNet(), nn.Linear(4, 4)]), "0 1"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ""),
        (lambda: nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())), ""),
        (lambda: nn.Sequential(Residual()), ""),
        (shared, ""),
        (lambda: nn.Linear(4, 4), ""),
    ],
)
def test_what_is_found(make: Callable[[], nn.Module], names: str) -> None:
    model = make()
    found = repeated_blocks(model)
    if make is Encoders:
        assert len(found) == 10
        found = [item for item in found if "layer1" in item[0]]
    assert [name for name, _ in found] == names.split()
    assert all(model.get_submodule(name) is block for name, block in found)


def test_torchs_own_transformer() -> None:
    model = nn.Transformer(
        8, 2, num_encoder_layers=2, num_decoder_layers=3, dim_feedforward=8, batch_first=True
    )
    names = [name for name, _ in repeated_blocks(model)]
    assert names == [f"encoder.layers.{i}" for i in range(2)] + [
        f"decoder.layers.{i}" for i in range(3)
    ]


def test_under_another_module_the_names_are_longer() -> None:
    model = nn.DataParallel(ResNet())
    assert [name for name, _ in repeated_blocks(model)] == [
        f"module.{name}" for name, _ in repeated_blocks(model.module)
    ]


def names_with_compiled(make: Callable[[], nn.Module], *parts: str) -> list[str]:
    """The names of the blocks of a model of which some parts are compiled."""
    model = make()
    for name in parts:
        model.set_submodule(name, torch.compile(model.get_submodule(name), backend="eager"))
    # The block itself, inside of what `torch.compile` gave.
    return [name.replace("._orig_mod", "") for name, _ in repeated_blocks(model)]


@pytest.mark.parametrize("make", [ResNet, Attributes, stages, layers])
def test_a_block_is_found_inside_of_what_torch_compile_gave(make: Callable[[], nn.Module]) -> None:
    expected = names_with_compiled(make)
    first = expected[0]
    stage = first.rpartition(".")[0]
    assert names_with_compiled(make, first) == expected
    assert names_with_compiled(make, *expected) == expected
    if stage and type(make().get_submodule(stage)) is not nn.ModuleList:  # which has no forward
        assert names_with_compiled(make, stage) == expected
    if make is not layers:  # which has none either
        whole = torch.compile(make(), backend="eager")
        assert [name for name, _ in repeated_blocks(whole)] == [f"_orig_mod.{n}" for n in expected]
