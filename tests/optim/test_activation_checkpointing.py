from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_gloo_group, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.errors import SettingError
from lockstep.optim.activation_checkpointing import checkpoint_activations


class Block(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Dropout(0.3), norm(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        if self.training:
            self.calls += 1
        return x + scale * self.body(x).relu() / (1 + self.calls)


class Net(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3)
        self.blocks = nn.ModuleList([Block(norm) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.mean((1, 2, 3))


def train(net: nn.Module) -> list[Tensor]:
    """Everything that two steps leave behind."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    left = []
    for _ in range(2):
        loss = net(torch.randn(4, 2, 6, 6)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        left += [loss.detach(), *(p.grad.clone() for p in net.parameters())]
        optimizer.step()
    return [*left, *net.state_dict().values(), torch.get_rng_state()]


def plain_and_checkpointed(
    choice: Any, norm: Callable[[int], nn.Module] = nn.BatchNorm2d
) -> list[nn.Module]:
    torch.manual_seed(0)
    plain = Net(norm)
    checkpointed = copy.deepcopy(plain)
    checkpoint_activations(checkpointed, choice)
    return [plain, checkpointed]


def tracking_instance_norm(channels: int) -> nn.Module:
    return nn.InstanceNorm2d(channels, affine=True, track_running_stats=True)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, tracking_instance_norm])
def test_same_bits_with_dropout_and_running_statistics(norm: Callable[[int], nn.Module]) -> None:
    plain, checkpointed = plain_and_checkpointed(Block, norm)
    assert all(map(torch.equal, train(plain), train(checkpointed)))
    assert checkpointed.blocks[0].calls == 2


@pytest.mark.parametrize(
    ("choice", "count"),
    [
        (Block, 3),
        ((Block, nn.Conv2d), 4),
        ("blocks.*", 3),
        ("blocks*", 3),
        ("blocks.1", 1),
        ("*body", 3),
        (lambda m: isinstance(m, nn.Conv2d), 4),
        (lambda _: True, 4),
    ],
)
def test_choices(choice: Any, count: int) -> None:
    plain, checkpointed = plain_and_checkpointed(choice)
    assert checkpoint_activations(checkpointed, choice) == count
    assert all(map(torch.equal, train(plain), train(checkpointed)))
    assert list(checkpointed.state_dict()) == list(plain.state_dict())


def saved_bytes(net: nn.Module) -> int:
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(torch.randn(4, 2, 16, 16))
    return kept


def test_it_keeps_less() -> None:
    plain, checkpointed = plain_and_checkpointed(Block)
    assert saved_bytes(checkpointed) < 0.5 * saved_bytes(plain)


def test_a_kept_graph_may_run_backward_twice() -> None:
    plain, checkpointed = plain_and_checkpointed(Block)
    for net in (plain, checkpointed):
        torch.manual_seed(1)
        loss = net(torch.randn(4, 2, 6, 6)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    same = map(torch.equal, plain.state_dict().values(), checkpointed.state_dict().values())
    assert all(same)
    for wanted, found in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(wanted.grad, found.grad)


def test_a_wrapped_block_may_hold_wrapped_blocks() -> None:
    plain, checkpointed = plain_and_checkpointed(nn.Sequential)
    checkpoint_activations(checkpointed, Block)
    assert all(map(torch.equal, train(plain), train(checkpointed)))


def test_it_is_the_same_module_and_copies_are_their_own() -> None:
    net = Net()
    block = net.blocks[0]
    signature = inspect.signature(block.forward)
    checkpoint_activations(net, Block)
    assert net.blocks[0] is block
    assert inspect.signature(block.forward) == signature
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.blocks[0].body[0].weight.zero_()
        other.blocks[0].body[0].bias.zero_()
    x = torch.randn(1, 3, 4, 4)
    assert torch.equal(other.eval().blocks[0](x), x)
    assert not torch.equal(net.eval().blocks[0](x), x)
    other.train().blocks[0](torch.randn(2, 3, 4, 4)).sum().backward()
    assert net.blocks[0].calls == 0
    assert net.blocks[0].body[0].weight.grad is None


def test_nothing_to_wrap() -> None:
    with pytest.raises(SettingError) as caught:
        checkpoint_activations(Net(), nn.TransformerEncoderLayer)
    assert "TransformerEncoderLayer" in str(caught.value)
    assert "Block (3, such as 'blocks.0'), Sequential (3, such as 'blocks.0.body')" in str(
        caught.value
    )
    with pytest.raises(SettingError, match="choose among: Linear, ReLU"):
        checkpoint_activations(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), "layers.*")


@pytest.mark.parametrize("choice", [None, 3, (), (Block, int), int, nn.Linear(1, 1)])
def test_what_does_not_choose(choice: Any) -> None:
    with pytest.raises(SettingError, match="does not choose submodules"):
        checkpoint_activations(Net(), choice)


@in_gloo_group
def train_with_ddp(checkpointed: bool) -> list[Any]:
    from lockstep.strategies.sync_batchnorm import convert

    torch.manual_seed(0)
    net = convert(Net()).module
    if checkpointed:
        checkpoint_activations(net, Block)
    # Small buckets, so that gradients are reduced while blocks are still being recomputed.
    model = DistributedDataParallel(net, bucket_cap_mb=0.0001)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for shares in [(3, 1), (2, 2), (4, 0)]:
        loss = model(torch.randn(shares[dist.get_rank()], 2, 6, 6)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [value.numpy() for value in net.state_dict().values()]


def test_with_synchronised_batch_norm_under_ddp() -> None:
    plain = run_ranks(train_with_ddp, 2, False)
    checkpointed = run_ranks(train_with_ddp, 2, True)
    for rank in range(2):
        assert all((a == b).all() for a, b in zip(plain[rank], checkpointed[rank], strict=True))
