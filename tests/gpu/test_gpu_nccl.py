"""NCCL with one rank, which is as many as it takes on one GPU.

Lockstep opens no process group on one process. So these tests open one, as Lockstep opens that of
several, and call the parts that use it.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_devices import DEVICES, GPU, run_on
from problems import difference, mean_loss, mlp, tensors, weights
from torch import Tensor, nn

import lockstep
from lockstep import torch_compat
from lockstep.communication.routing import carrier_device
from lockstep.distributed import reductions, tensor_bytes
from lockstep.distributed.backend import (
    CUDA_BACKENDS,
    choose_backend,
    close_group,
    open_group,
)
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.process_group import Run
from lockstep.machine.topology import Topology
from lockstep.optim.precision import Precision
from lockstep.run.watch.probe import FLIGHT_RECORDER_VARIABLES
from lockstep.run.watch.probe_answer import with_answer
from lockstep.run.watch.snapshot import CollectiveCall, RankState
from lockstep.session.delivery import TrainingPass
from lockstep.session.extension import Place
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step
from lockstep.settings import Settings
from lockstep.strategies import DDP, FSDP, fused_batchnorm, sync_batchnorm
from lockstep.strategies.base import PreparedModule, Strategy
from lockstep.strategies.ddp import ExactDDP, _StepsUnderDDP
from lockstep.strategies.moving_buffers import MovingBuffers

pytestmark = pytest.mark.ranks

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)


def in_group(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `fn(device, ...)` in the group that Lockstep opens for such a device: on a GPU, NCCL."""

    @functools.wraps(fn)
    def run(kind: str, *args: Any) -> Any:
        device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(device)
        backend, _ = choose_backend(None, device)
        assert backend == (CUDA_BACKENDS if kind == "cuda" else "gloo")
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
        open_group(Topology(), backend, device, store, timeout=None)
        try:
            return fn(device, *args)
        finally:
            close_group()

    return run


def values(dtype: torch.dtype, device: torch.device) -> Tensor:
    numbers = torch.tensor([[0.0, 1.0], [2.0, 4.0]])  # fp8 has these, too
    if dtype is torch.float8_e8m0fnu:
        numbers = torch.tensor([[0.5, 1.0], [2.0, 4.0]])  # powers of 2 alone
    return numbers.to(dtype).to(device)


@in_group
def every_dtype(device: torch.device) -> list[str]:
    """The dtypes that did not come back as they were sent."""
    wrong = []
    assert carrier_device(device) == device
    assert carrier_device(torch.device("cpu")) == torch.device("cpu")
    for dtype in DTYPES:
        mine = values(dtype, device)
        moved = tensor_bytes.to_bytes(mine)
        parts = [torch.empty_like(moved)]
        dist.all_gather(parts, moved)
        dist.broadcast(moved, 0)
        found = [tensor_bytes.from_bytes(data, dtype, mine.shape) for data in (*parts, moved)]
        for name, operation in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
            # The sum of booleans is a count, and complex numbers have no order.
            fits = dtype is not torch.bool if name == "sum" else not dtype.is_complex
            found += [reductions.all_reduced_copy(mine, operation)] if fits else []
        plain = tensor_bytes.to_bytes(mine).cpu()
        alike = all(
            f.dtype == dtype
            and f.device == device
            and torch.equal(tensor_bytes.to_bytes(f).cpu(), plain)
            for f in found
        )
        wrong += [] if alike else [str(dtype)]
    # Beside the GPU's, what is on the CPU goes over Gloo.
    digest = torch.arange(16, dtype=torch.uint8)
    dist.all_reduce(digest, dist.ReduceOp.MAX)
    assert digest.tolist() == list(range(16))
    return wrong


@pytest.mark.parametrize("device", DEVICES)
def test_every_dtype_travels(device: str) -> None:
    assert run_on(every_dtype, 1, device) == [[]]


@in_group
def batchnorm(device: torch.device) -> list[float]:
    """How far moments, output and gradients over the group are from torch's own on the CPU."""
    torch.manual_seed(0)
    x = torch.randn(6, 5, 3, 4, dtype=torch.float64) + 3
    weight, bias = torch.rand(5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    dy = torch.randn_like(x)
    whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
    expected = torch.nn.functional.batch_norm(whole[0], None, None, *whole[1:], training=True)
    expected.backward(dy)
    own = [t.to(device).requires_grad_() for t in (x, weight, bias)]
    sum_over_ranks = functools.partial(sync_batchnorm.sum_over_ranks, group=None, tree_sums=None)
    # Not by the layer itself, which is torch's own BatchNorm on one rank.
    if device.type == "cuda":
        row = fused_batchnorm.make_row(own[0].detach(), 1e-5, has_samples=True)
        rows = sync_batchnorm._gather_rows(row, None)
        mean, invstd = fused_batchnorm.combine_rows(rows, None, None, 0.0, 1e-5)
        y = fused_batchnorm.FusedNormalize.apply(
            *own, mean, invstd, rows[:, -1], sum_over_ranks, False
        )
    else:
        moments = sync_batchnorm._global_moments(own[0], None)
        y = sync_batchnorm._Normalize.apply(*own, moments, 1e-5, sum_over_ranks)
    y.backward(dy.to(device))
    pairs = [(y, expected), *((a.grad, b.grad) for a, b in zip(own, whole, strict=True))]
    return [float((a.cpu() - b).abs().max() / b.abs().max()) for a, b in pairs]


@pytest.mark.parametrize("device", DEVICES)
def test_batchnorm_over_the_group(device: str) -> None:
    [errors] = run_on(batchnorm, 1, device)
    assert max(errors) < 1e-11


def recorded() -> list[CollectiveCall]:
    groups, records = torch_compat.process_groups(), torch_compat.flight_record(stacks=False)
    text = f'{{"request": 1, "stacks": {{}}, "groups": {json.dumps(groups)}, "records": {records}}}'
    state = with_answer(RankState(rank=0, host="", pid=0, alive=True), text, 0)
    assert state.answered, text
    assert [group.ranks for group in state.groups or ()] == [(0,)]
    return [call for call in state.calls or () if call.op == "all_reduce"]


@in_group
def behind_other_work(device: torch.device) -> list[list[tuple[Any, ...]]]:
    """What the recorder says of a collective while the GPU works before it, and after it."""
    x = torch.ones(8192, 8192, device=device) if device.type == "cuda" else torch.ones(8, 8)
    y = x @ x
    dist.all_reduce(x[0, :3])  # the first one may wait until it is connected
    if device.type == "cuda":
        torch.cuda.synchronize()
    for _ in range(100):  # a second or two
        torch.mm(x, x, out=y)
    dist.all_reduce(x[0])
    during = recorded()
    if device.type == "cuda":
        torch.cuda.synchronize()
    parts = (during[-1:], recorded())
    return [[(c.backend, c.seq, c.dtypes, c.p2p, c.state) for c in calls] for calls in parts]


def with_recorder(device: str) -> Any:
    os.environ.update(FLIGHT_RECORDER_VARIABLES)
    return behind_other_work(device)


@pytest.mark.parametrize("device", DEVICES)
def test_the_recorder_says_what_is_not_completed(device: str) -> None:
    [[[during], [first, second]]] = run_on(with_recorder, 1, device)
    backend, seq, dtypes, p2p, state = during
    assert (backend, p2p) == ("nccl" if device == "cuda" else "gloo", False)
    assert [dtype.lower() for dtype in dtypes] == ["float"]
    assert state in ("scheduled", "started")
    assert second[:4] == during[:4]
    assert seq == first[1] + 1
    if device == "cuda":
        assert (first[4], second[4]) == ("completed", "completed")


class OneShard(FSDP):
    """FSDP over a mesh of one rank, which in a run of one it leaves out."""

    def _mesh_shape(self, run: Run) -> tuple[int, ...]:
        return (1,)


def run_of(device: torch.device, size: int) -> Run:
    """A run that takes itself for one of `size` ranks."""
    topology = Topology(rank=0, size=size, local_rank=0, local_size=size)
    return Run(
        topology=topology,
        device=device,
        backend=choose_backend(None, device)[0],
        collectives=Collectives(topology, device),
        step=Step(),
        settings=Settings(),
        joined=None,
    )


def whole(model: nn.Module) -> dict[str, Tensor]:
    found = weights(model)
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()
        for name, value in found.items()
    }


def steps(wrapped: PreparedModule, device: torch.device, strategy: Strategy, run: Run) -> float:
    """Some training steps of two micro-batches, as a prepared optimizer takes them."""
    model = wrapped.module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    precision = Precision("fp32", device)
    x, y = (tensor.to(device) for tensor in tensors(48).tensors)
    norm, running = 0.0, TrainingPass()
    for _ in range(4):
        for piece in range(2):
            micro = MicroBatch(
                first=piece == 0, last=piece == 1, global_samples=24, local_rows=24, scale=0.5
            )
            run.step.begin(running, micro)
            part = slice(24 * piece, 24 * piece + 24)
            loss = mean_loss(model, (x[part], y[part])) * micro.scale
            run.extensions.backward_begins(loss, micro)
            strategy.backward([model], loss, precision)
            run.extensions.backward_ended(micro)
        parameters = list(model.parameters())
        norm = float(strategy.total_norm(parameters, 2.0))
        torch.nn.utils.clip_grads_with_norm_(parameters, 0.5, torch.tensor(norm))
        run.extensions.before_step(optimizer, [model])
        optimizer.step()
        run.step.mark_stepped()
        run.extensions.after_step(optimizer, [model])
        optimizer.zero_grad()
    run.step.end_pass(running)
    return norm


@in_group
def train(device: torch.device, kind: str) -> tuple[dict[str, Tensor], float]:
    """The weights after some steps, and the norm of the last gradient."""
    model = mlp()
    options: Strategy = DDP() if kind in ("plain", "ddp") else OneShard(
        blocks=nn.Linear, cpu_offload=kind == "offloaded", accumulate_shards=kind == "shards"
    )  # fmt: skip
    run = run_of(device, 1 if kind in ("plain", "ddp") else 2)
    wrapped = options.wrap(model, run)
    if kind == "ddp":  # which leaves a module alone where there is one rank
        ids = [device.index] if device.type == "cuda" else None
        made = ExactDDP(
            wrapped.module, run, DDP(), None, device_ids=ids, gradient_as_bucket_view=True
        )
        buffers = MovingBuffers(wrapped.module, run.step)
        wrapped = PreparedModule(module=made, extensions=[_StepsUnderDDP(made, buffers)])
    for extension in wrapped.extensions:
        run.extensions.add(extension, Place.STRATEGY)
    norm = steps(wrapped, device, options, run)
    home = {p.device.type for p in wrapped.module.parameters()}
    assert home == {"cpu" if kind == "offloaded" else device.type}
    found = whole(wrapped.module)
    run.extensions.release()
    return found, norm


@pytest.mark.parametrize(
    ("device", "kind"),
    [(d, k) for d in ("cpu",) for k in ("ddp", "fsdp", "shards")]
    + [
        pytest.param("cuda", kind, marks=GPU.marks)
        for kind in ("ddp", "fsdp", "shards", "offloaded")
    ],
)
def test_strategies_over_a_group_of_one_train_as_plain_torch_does(device: str, kind: str) -> None:
    [(expected, expected_norm)] = run_on(train, 1, "cpu", "plain")
    [(found, norm)] = run_on(train, 1, device, kind)
    assert difference(expected, found) < 1e-10
    assert norm == pytest.approx(expected_norm, rel=1e-9)


def one_process() -> dict[str, Any]:
    with lockstep.init(backend="nccl", device="cuda") as world:
        x = torch.arange(3.0, device=world.device)
        found = {"sum": world.sum(x), "gather": world.gather(x), "broadcast": world.broadcast(x)}
        world.barrier()
        return {
            "group": dist.is_initialized(),
            "backend": world._run.backend,
            "same": all(value is x for value in found.values()),
            "device": str(world.device),
        }


@pytest.mark.gpu
def test_on_one_process_nccl_is_not_opened() -> None:
    [found] = run_on(one_process, 1)
    assert found == {"group": False, "backend": "", "same": True, "device": "cuda:0"}


def two_on_one_gpu() -> str:
    assert os.environ["LOCAL_WORLD_SIZE"] == "2"
    with pytest.raises(lockstep.errors.SettingError) as caught:
        lockstep.init(backend="nccl", device="cuda")
    return str(caught.value)


@pytest.mark.gpu
def test_two_ranks_on_one_gpu_are_told_to_use_gloo() -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip(f"{torch.cuda.device_count()} GPUs are visible, enough for two ranks")
    for text in run_on(two_on_one_gpu, 2):
        assert "NCCL needs one for each" in text
        assert "backend='gloo' to share GPUs" in text
