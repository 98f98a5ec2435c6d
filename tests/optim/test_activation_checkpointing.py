from __future__ import annotations

import copy
import inspect
import itertools
import random
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
import torch.distributed as dist
from problems import CLASSES, FEATURES, difference, mean_loss, tensors, weights
from ranks import in_gloo_group, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep
from lockstep.errors import SettingError, UsageError
from lockstep.optim import activation_checkpointing
from lockstep.optim.activation_checkpointing import checkpoint_activations
from lockstep.optim.saved_activations import Activations, measure
from lockstep.units import parse_bytes

pytestmark = pytest.mark.ranks


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
        gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        left += [loss.detach(), *gradients]
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


def test_compiled_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("tqdm"):  # torch draws bars with it, where it is there
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # and it would keep a thread

    def train(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        parts = nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Dropout(0.3)
        net = nn.Sequential(*(nn.Sequential(*copy.deepcopy(parts)) for _ in range(2)))
        if checkpointed:
            assert checkpoint_activations(net) == 2
        compiled = torch.compile(net, backend="aot_eager")
        for _ in range(2):
            compiled(torch.randn(8, 6)).square().sum().backward()
        return [*net.state_dict().values(), *(p.grad for p in net.parameters())]

    assert all(map(torch.equal, train(False), train(True)))


def test_buffers_that_would_move_twice_are_not_compiled() -> None:
    net = torch.compile(plain_and_checkpointed(Block)[1], backend="eager")
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        net(torch.randn(4, 2, 6, 6))


class Skipped(nn.Module):
    """Drawn: whether it does anything, and how much."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + np.random.rand() * self.layer(x).relu() if random.random() < 0.7 else x


def test_same_bits_with_draws_of_numpy_and_random() -> None:
    left = []
    for net in plain_and_checkpointed(Block, Skipped):
        random.seed(5)
        np.random.seed(5)
        left.append([*train(net), torch.tensor([random.random(), np.random.rand()])])
    assert all(map(torch.equal, *left))


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


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        ({}, "0 1 2"),
        ({"every": 1}, "0 1 2"),
        ({"every": 2}, "0 2"),
        ({"every": 9}, "0"),
        ({"submodules": "blocks.[12]", "every": 2}, "1"),
    ],
)
def test_some_of_the_repeated_blocks(policy: dict[str, Any], names: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    net = copy.deepcopy(plain)
    assert checkpoint_activations(net, **policy) == len(names.split())
    assert recomputing(net) == [int(name) for name in names.split()]
    assert all(map(torch.equal, train(plain), train(net)))


def recomputing(net: nn.Module) -> list[int]:
    return [i for i, block in enumerate(net.blocks) if "forward" in vars(block)]


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


@pytest.mark.parametrize("choice", [3, (), (Block, int), int, nn.Linear(1, 1)])
def test_what_does_not_choose(choice: Any) -> None:
    with pytest.raises(SettingError, match="does not choose submodules"):
        checkpoint_activations(Net(), choice)


EXAMPLE = ((torch.randn(4, 2, 16, 16),), {})


class Alive(TorchDispatchMode):
    """The bytes of all tensors alive that operations have made: the naive way to measure."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: WeakSet[torch.UntypedStorage] = WeakSet()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.storages.add(tensor.untyped_storage())
        self.most = max(self.most, self.bytes())
        return made

    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages)


def alive_after_forward(net: nn.Module) -> int:
    """What a forward pass leaves, without parameters, buffers and the example."""
    with Alive() as alive:
        out = net(*EXAMPLE[0], **EXAMPLE[1])
    own = [*net.parameters(), *net.buffers(), *EXAMPLE[0], out]
    for tensor in own:
        alive.storages.discard(tensor.untyped_storage())
    return alive.bytes()


class Uneven(Net):
    """Blocks that keep different amounts; the middle one the most."""

    def __init__(self) -> None:
        super().__init__()
        for width, block in zip((3, 24, 9), self.blocks, strict=True):
            block.body = nn.Sequential(
                nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.Conv2d(width, 3, 1)
            )


@pytest.mark.parametrize("make", [Net, Uneven])
@pytest.mark.parametrize("count", range(4))
def test_what_is_counted_is_what_is_alive(make: Callable[[], Net], count: int) -> None:
    for chosen in itertools.combinations(range(3), count):
        net = make()
        measured = measure(net, list(net.blocks), *EXAMPLE)
        assert list(measured.activations_of_block) == [0, 1, 2]
        held = dict(measured.outside_blocks)
        for i in range(3):
            held |= measured.inputs_of_block[i] if i in chosen else measured.activations_of_block[i]
        held.pop(next(iter(measured.outside_blocks)))  # the example, which the first layer keeps
        for i in chosen:
            checkpoint_activations(net, f"blocks.{i}")
        counted, alive = sum(held.values()), alive_after_forward(net)
        # What dropout and the norm keep that is small, and the random states, are in one alone.
        assert counted == pytest.approx(alive, rel=0.02, abs=20_000 * bool(chosen))
        assert counted <= measured.peak(set(chosen))


def naive_peak(kept: Activations, recomputed: set[int]) -> int:
    """The sizes of all sets that are held at one time."""
    moments = [kept.outside_blocks | {}]
    for i in range(3):
        moments[-1] |= kept.inputs_of_block[i] if i in recomputed else kept.activations_of_block[i]
    for i in recomputed:
        now = kept.outside_blocks | kept.inputs_of_block[i] | kept.activations_of_block[i]
        for j in range(i):
            now |= kept.inputs_of_block[j] if j in recomputed else kept.activations_of_block[j]
        moments.append(now)
    return max(sum(moment.values()) for moment in moments)


def budgets(make: Callable[[], Net]) -> tuple[Activations, dict[int, int]]:
    """What is kept, and the least peak that any choice of so many blocks has."""
    net = make()
    measured = measure(net, list(net.blocks), *EXAMPLE)
    best = {
        count: min(naive_peak(measured, set(c)) for c in itertools.combinations(range(3), count))
        for count in range(4)
    }
    return measured, best


@pytest.mark.parametrize("make", [Net, Uneven])
def test_a_budget_takes_the_fewest_blocks_that_fit(make: Callable[[], Net]) -> None:
    _, best = budgets(make)
    for count in range(4):
        net = make()
        needed = min(c for c in best if best[c] <= best[count])
        assert checkpoint_activations(net, budget=best[count], example=EXAMPLE) == needed
        assert len(recomputing(net)) == needed
    assert best[0] > best[1] > best[2]
    least = min(best.values())
    with pytest.raises(SettingError, match=f"the least that any choice keeps is {least:,}"):
        checkpoint_activations(net := make(), budget=least - 1, example=EXAMPLE)
    assert recomputing(net) == []


def test_the_block_that_keeps_most_comes_first() -> None:
    measured, best = budgets(Uneven)
    net = Uneven()
    checkpoint_activations(net, budget=best[1], example=EXAMPLE)
    assert recomputing(net) == [1]
    assert measured.by_saving()[0] == 1


def test_of_equal_blocks_the_first_come_first() -> None:
    """They are recomputed when what the later ones keep is gone already."""
    measured, best = budgets(Net)
    net = Net()
    checkpoint_activations(net, budget=best[1], example=EXAMPLE)
    assert recomputing(net) == [0]
    assert measured.peak({0}) < measured.peak({2})


def test_a_budget_counts_what_recomputes_already() -> None:
    _, best = budgets(Net)
    net = Net()
    checkpoint_activations(net, "blocks.0")
    assert checkpoint_activations(net, budget=best[2], example=EXAMPLE) == 2
    assert recomputing(net) == [0, 1]


def test_measuring_leaves_no_trace() -> None:
    torch.manual_seed(0)
    plain = Net()
    net = copy.deepcopy(plain)
    state = torch.get_rng_state()
    checkpoint_activations(net, budget="1GiB", example=EXAMPLE)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert all(map(torch.equal, train(plain), train(net)))


def test_measuring_keeps_nothing() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(20)))
    x = torch.randn(4096, 64)
    with Alive() as alive:
        kept = measure(net, list(net), (x,), {})
    assert kept.peak(set()) > 19 * x.nbytes
    assert alive.most < 5 * x.nbytes


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("2GiB", 2**31), ("500 MB", 5 * 10**8), ("1.5kib", 1536), (7, 7), ("7", 7), ("1T", 10**12)],
)
def test_amounts_of_memory(text: int | str, wanted: int) -> None:
    assert parse_bytes(text) == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": True}, "every=True"),
        ({"every": 1.5}, r"every=1\.5"),
        ({"budget": "1GiB"}, "give both"),
        ({"example": EXAMPLE}, "give both"),
        ({"budget": "1GiB", "every": 2, "example": EXAMPLE}, "give one of the two"),
        ({"budget": "1GiB", "example": (torch.ones(1), {})}, "no pair of a tuple and a dict"),
        ({"budget": "1GiB", "example": torch.ones(2)}, "no pair of a tuple and a dict"),
        ({"budget": "a lot", "example": EXAMPLE}, "budget='a lot'"),
        ({"budget": 1.5, "example": EXAMPLE}, r"budget=1\.5"),
        ({"budget": -1, "example": EXAMPLE}, "budget=-1"),
        ({"budget": "auto", "example": EXAMPLE}, "the model is on cpu"),
    ],
)
def test_policies_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    net = Net()
    with pytest.raises(SettingError, match=message):
        checkpoint_activations(net, **arguments)
    assert recomputing(net) == []


def test_a_model_in_which_nothing_repeats() -> None:
    with pytest.raises(SettingError, match="no block repeats in it"):
        checkpoint_activations(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))


class Penalised(Net):
    """Computes a gradient in its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = super().forward(x)
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0].square().mean()


def test_a_forward_pass_with_a_backward_pass_in_it() -> None:
    with pytest.raises(UsageError, match="choose submodules= or every= by hand"):
        checkpoint_activations(Penalised(), budget="1GiB", example=EXAMPLE)


def test_a_model_without_parameters_does_not_tell_how_much_memory_there_is() -> None:
    net = nn.Sequential(nn.Tanh(), nn.Tanh())
    with pytest.raises(SettingError, match="the model has no parameters"):
        checkpoint_activations(net, nn.Tanh, budget="auto", example=((torch.ones(2, 3),), {}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_free_memory_of_a_gpu() -> None:
    net = Net().cuda()
    example = ((EXAMPLE[0][0].cuda(),), {})
    assert checkpoint_activations(net, budget="auto", example=example) == 0
    assert torch.cuda.mem_get_info()[1] > activation_checkpointing._free_bytes(net) > 0


@in_gloo_group
def train_with_ddp(checkpointed: bool) -> list[Any]:
    from lockstep.strategies.sync_batchnorm import convert

    torch.manual_seed(0)
    net = Net()
    convert(net)
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


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.stem = nn.Linear(FEATURES, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def train_prepared(strategy: str | None, when: str) -> dict[str, Tensor]:
    """Two epochs with LARS, uneven parts; the weights of the whole model."""
    with lockstep.init(strategy, seed=5) as world:
        model = Layers().double()
        if when == "before":
            assert checkpoint_activations(model) == 3
        optimizer = lockstep.optim.LARS(model.parameters(), lr=5.0, weight_decay=0.01)
        model, optimizer = world.prepare(model, optimizer)
        if when == "after":
            assert checkpoint_activations(model, every=2) == 2
        loader = world.loader(
            tensors(), 9, shuffle=True, micro_batch_size=6 if world.size == 1 else 3
        )
        assert loader.micro_batches == 2
        for _ in world.epochs(2):
            for batch in loader:
                world.backward(mean_loss(model, batch))
                world.clip_grad_norm_(model, 0.5)
                optimizer.step()
                optimizer.zero_grad()
        state = getattr(model, "module", model).state_dict()
        whole = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in state.items()}
        return {name: value.detach().clone() for name, value in whole.items()}


def train_all_ways() -> dict[str, dict[str, Tensor]]:
    return {
        f"{strategy} {when}": train_prepared(strategy, when)
        for strategy in ("ddp", "fsdp")
        for when in ("never", "before", "after")
    }


def test_with_every_strategy_before_and_after_prepare() -> None:
    [expected] = run_ranks(train_prepared, 1, None, "never")
    assert difference(expected, weights(Layers().double())) > 1e-2
    for found in run_ranks(train_all_ways, 2):
        assert len(found) == 6
        for case, state in found.items():
            assert difference(expected, state) < 1e-9, case
