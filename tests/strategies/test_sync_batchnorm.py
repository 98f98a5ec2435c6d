"""The oracle everywhere: torch's own BatchNorm over the whole batch in one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import made_up_kernels
import pytest
import torch
import torch.distributed as dist
from ranks import in_gloo_group, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

from lockstep.communication.routing import carrier_device
from lockstep.errors import DataError, UsageError
from lockstep.strategies import sync_batchnorm
from lockstep.strategies.sync_batchnorm import SyncBatchNorm, convert

pytestmark = pytest.mark.ranks

CHANNELS = 3
INNER = [(), (4,), (3, 5), (2, 3, 2)]
TORCH = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def close(found: Tensor | None, wanted: Tensor | None, tolerance: float, what: str) -> None:
    assert (found is None) == (wanted is None), what
    if found is None or not wanted.numel():
        return
    assert found.dtype == wanted.dtype, what
    error = (found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300)
    assert error <= tolerance, f"{what}: {error:.1e}"


def shares_of(size: int) -> list[tuple[int, ...]]:
    return {2: [(5, 2), (0, 4), (1, 2)], 3: [(5, 2, 1), (4, 0, 3), (0, 0, 4)]}[size]


def own_part(whole: Tensor, shares: tuple[int, ...]) -> Tensor:
    return whole.split(shares)[dist.get_rank()]


def randomised(bn: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in [*bn.parameters(), *(b for b in bn.buffers() if b.is_floating_point())]:
            tensor.uniform_(0.5, 2)
    return bn


def check_exact(
    shares: tuple[int, ...],
    inner: tuple[int, ...],
    tolerance: float = 1e-12,
    dtype: torch.dtype = torch.float64,
    mean: float = 3.0,
    memory_format: torch.memory_format = torch.contiguous_format,
    **options: Any,
) -> None:
    """Three training steps' worth of outputs, statistics and gradients, against one process."""
    size, total = dist.get_world_size(), sum(shares)
    whole_bn = TORCH[2 + len(inner)](CHANNELS, dtype=dtype, **options)
    bn = SyncBatchNorm(CHANNELS, dtype=dtype, **options)
    randomised(whole_bn)
    bn.load_state_dict(whole_bn.state_dict())
    for step in range(3):
        x = (torch.randn(total, CHANNELS, *inner, dtype=dtype) + mean).contiguous(
            memory_format=memory_format
        )
        factor = torch.randn_like(x)
        whole_x = x.clone().requires_grad_()
        whole_y = whole_bn(whole_x)
        ((whole_y.pow(3) * factor).sum() / total).backward()
        own_x = own_part(x, shares).clone().requires_grad_()
        y = bn(own_x)
        (size / total * (y.pow(3) * own_part(factor, shares)).sum()).backward()
        where = f"shares {shares}, inner {inner}, {options}, step {step}: "
        close(y, own_part(whole_y, shares), tolerance, where + "output")
        assert y.is_contiguous(memory_format=memory_format)
        # DDP divides by the size what reaches a parameter: the input gets `size` times as much.
        close(
            own_x.grad / size, own_part(whole_x.grad, shares), tolerance, where + "input gradient"
        )
        assert own_x.grad.is_contiguous(memory_format=memory_format)
        for (name, whole), own in zip(whole_bn.named_parameters(), bn.parameters(), strict=True):
            dist.all_reduce(own.grad)
            close(own.grad / size, whole.grad, tolerance, where + name)
        bn.zero_grad()
        whole_bn.zero_grad()
        for (name, whole), own in zip(whole_bn.named_buffers(), bn.buffers(), strict=True):
            close(own, whole, tolerance, where + name)


@in_gloo_group
def exactness() -> None:
    torch.manual_seed(0)
    for shares in shares_of(dist.get_world_size()):
        for inner in INNER:
            check_exact(shares, inner)
    shares = shares_of(dist.get_world_size())[0]
    for options in (
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"eps": 0.1, "momentum": 0.5},
        {"bias": False},
    ):
        bias = options.pop("bias", True)
        check_exact(shares, (3, 5), **options) if bias else check_without_bias(shares)
    check_exact(shares, (3, 5), memory_format=torch.channels_last)
    check_exact(shares, (2, 3, 2), memory_format=torch.channels_last_3d)
    check_exact(shares, (3, 5), dtype=torch.float32, tolerance=2e-6)
    check_mean_far_from_zero(shares)


@in_gloo_group
def exactness_of_fused_kernels() -> list[str]:
    """What CUDA tensors take; the kernels are made up."""
    called = made_up_kernels.install()
    torch.manual_seed(0)
    all_shares = shares_of(dist.get_world_size())
    for shares in all_shares:
        check_exact(shares, (3, 5))
    shares = all_shares[0]
    for inner in INNER:
        check_exact(shares, inner)
    for options in (
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"eps": 0.1, "momentum": 0.5},
    ):
        check_exact(shares, (3, 5), **options)
    check_without_bias(shares)
    check_exact(shares, (3, 5), memory_format=torch.channels_last)
    check_exact(shares, (2, 3, 2), memory_format=torch.channels_last_3d)
    check_exact(shares, (3, 5), dtype=torch.float32, tolerance=2e-6)
    in_pieces = SyncBatchNorm(CHANNELS)
    in_pieces.weight = nn.Parameter(torch.ones(CHANNELS, 2)[:, 0])
    in_pieces(torch.randn(2, CHANNELS, requires_grad=True)).sum().backward()
    check_mean_far_from_zero(shares, 1e-3)  # the mean is rounded to float32
    check_halves()
    check_placeholder()
    del called[:]
    layer = SyncBatchNorm(CHANNELS)
    layer(torch.randn(2, CHANNELS, 4, requires_grad=True)).sum().backward()
    return called


def check_placeholder() -> None:
    """A rank without samples computes one that counts for nothing."""
    torch.manual_seed(0)
    shares = (5, 0) if dist.get_world_size() == 2 else (0, 5, 0)
    bn = SyncBatchNorm(CHANNELS, dtype=torch.float64)
    whole = torch.randn(5, CHANNELS, 4, dtype=torch.float64)
    factor = torch.randn_like(whole)
    sync_batchnorm.thread_state.computes_placeholder = shares[dist.get_rank()] == 0
    x = own_part(whole, shares)
    if sync_batchnorm.thread_state.computes_placeholder:
        x = torch.randn(1, CHANNELS, 4, dtype=torch.float64)
        factor = torch.ones_like(x)
    x = x.clone().requires_grad_()
    y = bn(x)
    (y * factor).sum().backward()
    wanted_bn = nn.BatchNorm1d(CHANNELS, dtype=torch.float64)
    wanted = wanted_bn(whole)
    close(bn.running_mean, wanted_bn.running_mean, 1e-12, "placeholder: running mean")
    close(bn.running_var, wanted_bn.running_var, 1e-12, "placeholder: running variance")
    if sync_batchnorm.thread_state.computes_placeholder:
        assert not x.grad.any()
        assert not bn.weight.grad.any()
        assert not bn.bias.grad.any()
    else:
        close(y, wanted, 1e-12, "beside a placeholder")
    sync_batchnorm.thread_state.computes_placeholder = False


def check_without_bias(shares: tuple[int, ...]) -> None:
    bn = SyncBatchNorm(CHANNELS, dtype=torch.float64, bias=False)
    assert list(dict(bn.named_parameters())) == ["weight"]
    whole = torch.randn(sum(shares), CHANNELS, dtype=torch.float64)
    y = bn(own_part(whole, shares).requires_grad_())
    y.square().sum().backward()
    wanted = nn.functional.batch_norm(whole, None, None, training=True)
    close(y, own_part(wanted, shares), 1e-12, "without bias")


def check_mean_far_from_zero(shares: tuple[int, ...], tolerance: float = 1e-5) -> None:
    whole = torch.randn(sum(shares), CHANNELS, 50) + 30_000
    wanted = nn.functional.batch_norm(whole.double(), None, None, training=True).float()
    y = SyncBatchNorm(CHANNELS)(own_part(whole, shares))
    close(y, own_part(wanted, shares), tolerance, "mean far from zero")


@pytest.mark.parametrize("size", [2, 3])
def test_equals_one_process_over_the_whole_batch(size: int) -> None:
    run_ranks(exactness, size)


def test_the_mean_over_all_batches_has_the_bits_that_a_number_as_weight_gives() -> None:
    layer = nn.BatchNorm1d(1000, momentum=None)
    expected = layer.running_mean.clone()
    for number in range(1, 100):
        mean = torch.randn(1000, dtype=torch.float64)
        sync_batchnorm.update_running_stats(layer, mean, mean.square(), torch.tensor(9.0).double())
        expected.lerp_(mean.float(), 1.0 / number)
        assert torch.equal(layer.running_mean, expected)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_so_do_the_kernels_of_gpus_with_one_all_gather_a_layer(size: int) -> None:
    forward = ["stats", "all-gather", "gather_stats_with_counts", "elemt"]
    for called in run_ranks(exactness_of_fused_kernels, size):
        assert called == [*forward, "backward_reduce", "backward_elemt"]


@in_gloo_group
def half_precision() -> None:
    torch.manual_seed(0)
    check_halves()


def check_halves() -> None:
    shares = (5, 2) if dist.get_world_size() == 2 else (5, 2, 1)
    with_empty = (5, 0) if dist.get_world_size() == 2 else (0, 5, 0)
    for dtype in (torch.bfloat16, torch.float16):
        for memory_format in (torch.contiguous_format, torch.channels_last):
            check_half(shares, dtype, memory_format, torch.float32)
        check_half(with_empty, dtype, torch.contiguous_format, torch.float32)
        check_half(shares, dtype, torch.contiguous_format, dtype)
    conv = nn.Conv2d(2, CHANNELS, 3)
    with torch.autocast("cpu", torch.bfloat16):
        y = SyncBatchNorm(CHANNELS)(conv(torch.randn(shares[dist.get_rank()], 2, 5, 5)))
        wanted = nn.BatchNorm2d(CHANNELS)(conv(torch.randn(2, 2, 5, 5)))
    assert y.dtype == wanted.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert conv.weight.grad.isfinite().all()


def check_half(
    shares: tuple[int, ...],
    dtype: torch.dtype,
    memory_format: torch.memory_format,
    parameters: torch.dtype,
) -> None:
    x = torch.randn(sum(shares), CHANNELS, 4, 4).to(dtype).contiguous(memory_format=memory_format)
    factor = torch.randn_like(x)
    whole = x.double().requires_grad_()
    wanted = nn.functional.batch_norm(whole, None, None, training=True)
    (wanted * factor).sum().backward()
    own = own_part(x, shares).clone().requires_grad_()
    bn = SyncBatchNorm(CHANNELS, dtype=parameters)
    y = bn(own)
    (y * own_part(factor, shares)).sum().backward()
    assert y.dtype == own.grad.dtype == dtype
    assert bn.weight.grad.dtype == bn.running_mean.dtype == parameters
    assert y.is_contiguous(memory_format=memory_format)
    assert own.grad.is_contiguous(memory_format=memory_format)
    close(y.double(), own_part(wanted, shares), 1e-2, f"{dtype} output")
    close(own.grad.double(), own_part(whole.grad, shares), 2e-2, f"{dtype} input gradient")


def test_half_precision() -> None:
    run_ranks(half_precision, 2)


@in_gloo_group
def edges(fused: bool) -> list[str]:
    if fused:
        made_up_kernels.install()
    rank, size = dist.get_rank(), dist.get_world_size()
    bn = SyncBatchNorm(CHANNELS)
    errors = [refusal(DataError, lambda: bn(torch.ones(int(rank == 1), CHANNELS)))]
    assert bn.num_batches_tracked == 0
    errors.append(refusal(DataError, lambda: bn(torch.ones(2, CHANNELS + 1))))
    errors.append(refusal(DataError, lambda: bn(torch.ones(CHANNELS))))
    # No samples anywhere: as torch, statistics stay and the output is empty.
    assert bn(torch.ones(0, CHANNELS, 2, requires_grad=True)).shape == (0, CHANNELS, 2)
    assert not bn.running_mean.any()
    assert bn.running_var.eq(1).all()
    # Frozen input: no input gradient is wanted, weight and bias still learn.
    bn(torch.randn(rank + 1, CHANNELS, 2)).sum().backward()
    assert bn.bias.grad.eq(2 * (rank + 1)).all()
    # The output may be changed in place, and the gradient may come expanded or strided.
    x = torch.randn(rank + 2, CHANNELS, 4, requires_grad=True)
    nn.ReLU(inplace=True)(bn(x)).sum().backward()
    bn(x.transpose(0, 2).contiguous().transpose(0, 2)[..., ::2]).sum().backward()
    assert x.grad.isfinite().all()
    # Nothing but training communicates: rank 0 alone may evaluate.
    if rank == 0:
        bn.eval()
        bn(torch.randn(4, CHANNELS))
        SyncBatchNorm(CHANNELS, track_running_stats=False).eval()(torch.randn(4, CHANNELS))
    # A group of two ranks.
    group = dist.new_group([0, 1])
    bn = SyncBatchNorm(CHANNELS, process_group=group)
    if rank < 2:
        y = bn(torch.full((2, CHANNELS), float(rank)))
        assert torch.allclose(y, torch.full((2, CHANNELS), 2.0 * rank - 1), atol=1e-4)
    else:
        errors.append(refusal(UsageError, lambda: bn(torch.ones(2, CHANNELS))))
    # CUDA tensors over Gloo go through the CPU's memory; NCCL takes them as they are.
    cuda = torch.device("cuda", 0)
    assert carrier_device(cuda) == torch.device("cpu")
    dist.get_backend_config = lambda group: "cpu:gloo,cuda:nccl"
    assert carrier_device(cuda) == cuda
    assert size == 3
    return errors


def refusal(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("fused", [False, True])
def test_edges(fused: bool) -> None:
    one_value, channels, dims, *outside = run_ranks(edges, 3, fused)[2]
    assert "Expected more than 1 value per channel when training" in one_value
    assert "3 ranks" in one_value
    assert "(2, 4)" in channels
    assert "(3,)" in dims
    assert "not a member" in outside[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 5, 3)
        )
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x).mean((2, 3))))


@in_gloo_group
def train_with_ddp(shares: tuple[int, ...], fused: bool) -> dict[str, Tensor]:
    if fused:
        made_up_kernels.install()
    net = new_net()
    convert(net)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for x, y in batches(sum(shares)):
        output = model(own_part(x, shares))
        loss = nn.functional.cross_entropy(output, own_part(y, shares), reduction="sum")
        optimizer.zero_grad()
        (loss * len(shares) / sum(shares)).backward()
        optimizer.step()
    return {name: tensor.detach().numpy() for name, tensor in net.state_dict().items()}


def new_net() -> Net:
    torch.manual_seed(1)
    return Net().double()


def batches(size: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [
        (torch.randn(size, 2, 8, 8, dtype=torch.float64), torch.randint(3, (size,)))
        for _ in range(5)
    ]


@pytest.mark.parametrize(
    ("shares", "fused"),
    [
        ((4, 1), False),
        ((5, 2, 0), False),
        pytest.param((5, 2, 0), True, marks=pytest.mark.thorough),
    ],
)
def test_training_under_ddp_equals_one_process(shares: tuple[int, ...], fused: bool) -> None:
    net = new_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for x, y in batches(sum(shares)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    found = run_ranks(train_with_ddp, len(shares), shares, fused)
    for name, wanted in net.state_dict().items():
        close(torch.as_tensor(found[0][name]), wanted, 1e-11, name)
        for other in found[1:]:
            assert (other[name] == found[0][name]).all(), f"{name} differs between ranks"


@in_gloo_group
def one_rank() -> None:
    check_bit_equal()


def check_bit_equal() -> None:
    for inner in INNER:
        for options in ({}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}):
            theirs = randomised(TORCH[2 + len(inner)](CHANNELS, **options))
            ours = SyncBatchNorm(CHANNELS, **options)
            ours.load_state_dict(theirs.state_dict())
            for training in (True, True, False):
                x = torch.randn(4, CHANNELS, *inner, requires_grad=True)
                results = []
                for bn in (ours.train(training), theirs.train(training)):
                    y = bn(x)
                    results.append([y, *torch.autograd.grad(y.pow(3).sum(), [x, *bn.parameters()])])
                assert all(map(torch.equal, *results))
            assert all(map(torch.equal, ours.buffers(), theirs.buffers()))


def test_without_others_it_is_torch_bit_for_bit() -> None:
    check_bit_equal()
    run_ranks(one_rank, 1)


def test_state_dict_is_torchs() -> None:
    for theirs in (nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False, track_running_stats=False)):
        ours = SyncBatchNorm(
            4, affine=theirs.affine, track_running_stats=theirs.track_running_stats
        )
        assert list(ours.state_dict()) == list(theirs.state_dict())
        ours.load_state_dict(randomised(theirs).state_dict())
        randomised(ours)
        theirs.load_state_dict(ours.state_dict())
        assert all(map(torch.equal, theirs.state_dict().values(), ours.state_dict().values()))


class Doubled(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Quick(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, momentum=0.5)


def test_conversion_keeps_everything_and_goes_back() -> None:
    shared = nn.BatchNorm2d(4, eps=0.25, momentum=None)
    net = nn.Sequential(
        nn.BatchNorm1d(4),
        nn.Sequential(shared, nn.ReLU()),
        shared,
        nn.SyncBatchNorm(4),
        nn.BatchNorm3d(4, affine=False, track_running_stats=False),
        Quick(4),
        nn.GroupNorm(2, 4),
    )
    net[0].eval()
    net[0].weight.requires_grad_(False)
    calls: list[nn.Module] = []
    shared.register_forward_hook(lambda module, *_: calls.append(module))
    layers = list(net.modules())
    tensors = [*net.parameters(), *net.buffers()]
    result = convert(net)
    assert result.converted == ["0", "1.0", "3", "4", "5"]
    assert result.left_alone == []
    assert list(net.modules()) == layers
    assert all(a is b for a, b in zip(tensors, [*net.parameters(), *net.buffers()], strict=True))
    assert net[1][0] is net[2] is shared
    assert type(shared) is SyncBatchNorm
    assert (shared.eps, shared.momentum, net[5].momentum) == (0.25, None, 0.5)
    assert (net[0].training, net[2].training) == (False, True)
    assert not net[0].weight.requires_grad
    shared(torch.randn(2, 4, 3, 3))
    assert calls == [shared]
    assert convert(net).converted == []
    copies = [copy.deepcopy(net[:5]), pickle.loads(pickle.dumps(net[0]))]
    assert type(copies[1]) is SyncBatchNorm
    assert type(copies[0][2]) is SyncBatchNorm
    assert all(a is b for a, b in zip(tensors, [*net.parameters(), *net.buffers()], strict=True))


def test_conversion_of_the_root_itself() -> None:
    layer = nn.BatchNorm2d(4)
    result = convert(layer)
    assert result.converted == [""]
    assert type(layer) is SyncBatchNorm


def test_layers_with_behaviour_of_their_own_are_left_and_named() -> None:
    patched = nn.BatchNorm1d(4)
    patched.forward = lambda x: x
    net = nn.Sequential(Doubled(4), patched, nn.BatchNorm1d(4))
    net.append(parametrizations.weight_norm(nn.BatchNorm2d(4), dim=None))
    result = convert(net)
    assert result.converted == ["2"]
    assert result.left_alone == ["0", "1", "3"]
    assert type(net[0]) is Doubled


def test_a_lazy_layer_is_refused_until_it_has_seen_an_input() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.LazyBatchNorm1d())
    with pytest.raises(UsageError, match=r"conversion to SyncBatchNorm of 1, a LazyBatchNorm1d"):
        convert(net)
    assert type(net[0]) is nn.BatchNorm1d
    net(torch.randn(3, 4))
    assert convert(net).converted == ["0", "1"]
