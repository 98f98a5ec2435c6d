"""DiLoCo computes the same on any number of processes: what its equations say, written out here."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import warnings
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import difference, mean_loss, mlp, tensors, weights
from ranks import RankFailed, run_ranks
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import IterableDataset

import lockstep
from lockstep.batch.plan import plan_epoch
from lockstep.communication.quantize import BLOCK
from lockstep.communication.traffic import traffic
from lockstep.errors import (
    CheckpointError,
    LockstepError,
    LockstepWarning,
    SettingError,
    UsageError,
)
from lockstep.strategies import DiLoCo
from lockstep.strategies.diloco.exchange import Exchange
from lockstep.strategies.diloco.outer_optimizer import OuterOptimizer
from lockstep.strategies.diloco.tensor_versions import TensorVersions
from lockstep.testing import assert_same

IGNORED_WARNING = r"ignore:DiLoCo\({option}=:lockstep.errors.LockstepWarning"
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings(IGNORED_WARNING.format(option="every")),
    pytest.mark.filterwarnings(IGNORED_WARNING.format(option="outer_lr")),
]

BATCH, STEPS = 13, 10
"""No number of replicas divides it; 50 samples are four batches, the last of them of 11."""


def model(batch_norm: bool) -> nn.Module:
    made = mlp(batch_norm)
    made.register_buffer("mask", torch.tensor([0.1, -torch.inf], dtype=torch.float64))
    return made


def train(
    options: DiLoCo, batch_norm: bool = False, steps: int = STEPS, **more: Any
) -> tuple[dict[str, Tensor], list[float]]:
    """The shared weights after some steps, and the losses."""
    with lockstep.init(options, seed=5, device="cpu") as world:
        net = model(batch_norm)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        net, optimizer, schedule = world.prepare(net, optimizer, schedule)
        loader = world.loader(tensors(), BATCH, shuffle=True, **more)
        losses = []
        while world.step < steps:
            for x, y in loader:
                loss = F.cross_entropy(net(x), y)
                world.backward(loss)
                world.clip_grad_norm_(net, 0.5)
                mean = world.loss()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                if mean is not None:
                    losses.append(mean)
                if world.step == steps:
                    break
        return weights(net), losses


def written_out(
    options: DiLoCo, batch_norm: bool = False, steps: int = STEPS
) -> tuple[dict[str, Tensor], list[float]]:
    """The same by copies of the model, torch's optimizers and nothing else."""
    shared = model(batch_norm)
    replicas: list[Any] = []
    for _ in range(options.replicas):
        net = copy.deepcopy(shared)
        inner = torch.optim.AdamW(net.parameters(), lr=0.01)
        replicas.append((net, inner, torch.optim.lr_scheduler.StepLR(inner, 4, 0.5)))
    outer = torch.optim.SGD(
        shared.parameters(),
        lr=options.outer_lr,
        momentum=options.outer_momentum,
        nesterov=options.outer_momentum > 0,
    )
    nets = [net for net, *_ in replicas]
    sent: dict[int, dict[str, Tensor]] = {}
    losses = []
    for number in range(1, steps + 1):
        losses.append(backward(nets, number))
        if number <= options.start:
            average_gradients(nets)
        for net, inner, schedule in replicas:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            inner.step()
            schedule.step()
        if number <= options.start:
            shared.load_state_dict(nets[0].state_dict())
            share_buffers(shared, nets)
        for names in fragments_due(options, number):
            sent[number + options.delay] = {
                name: p.detach() - sum(net.get_parameter(name).detach() for net in nets) / len(nets)
                for name, p in shared.named_parameters()
                if name in names
            }
        arrived = sent.pop(number, {})
        for name, parameter in shared.named_parameters():
            parameter.grad = arrived.get(name)
        outer.step()
        for name, net in product(arrived, nets):
            new, own = shared.get_parameter(name).detach(), net.get_parameter(name).detach()
            own.copy_(0.5 * (own + new) if options.delay else new)
        if "2.weight" in arrived or "3.weight" in arrived:
            share_buffers(shared, nets)
    return weights(shared), losses


def backward(nets: list[nn.Module], number: int) -> float:
    """Gradients of each replica's part of a global batch, and the mean of their losses."""
    epoch, position = divmod(number - 1, 4)
    batch = plan_epoch(50, BATCH, seed=5, epoch=epoch)[position]
    cuts = [-(-len(batch) * r // len(nets)) for r in range(len(nets) + 1)]
    losses = []
    for net, begin, end in zip(nets, cuts, cuts[1:], strict=False):
        x, y = tensors()[batch[begin:end]]
        losses.append(F.cross_entropy(net(x), y))
        net.zero_grad()
        losses[-1].backward()
    return sum(loss.item() for loss in losses) / len(nets)


def average_gradients(nets: list[nn.Module]) -> None:
    for same in zip(*(net.parameters() for net in nets), strict=True):
        mean = sum(p.grad for p in same) / len(same)
        for parameter in same:
            parameter.grad = mean.clone()


def fragments_due(options: DiLoCo, number: int) -> list[tuple[str, ...]]:
    """The names in the fragments that are sent after so many steps; the last has the buffers."""
    apart, every = number - options.start, options.every
    if apart <= 0:
        return []
    if options.fragments == 1:
        return [sum(FRAGMENTS, ("3.weight", "3.bias", "1.weight", "1.bias"))] * (apart % every == 0)
    return [
        names
        for half, names in zip((1, 2), FRAGMENTS, strict=True)
        if apart % every == half * every // 2 % every
    ]


FRAGMENTS = [("0.weight",), ("0.bias", "2.weight", "2.bias")]
"""Of nearly equal size, in the order of the model without BatchNorm."""


def share_buffers(shared: nn.Module, nets: list[nn.Module]) -> None:
    for name, buffer in shared.named_buffers():
        own = [net.get_buffer(name) for net in nets]
        if name.endswith(("mean", "var")):
            buffer.copy_(sum(own) / len(own))
        elif name != "mask":
            buffer.copy_(own[0])
        for each in own:
            each.copy_(buffer)


CASES = [
    (DiLoCo(replicas=3, every=5), False, (3,)),
    (DiLoCo(replicas=4, every=5), True, (1, 3, 4)),
    (DiLoCo(replicas=1, every=3), True, (2,)),
    (DiLoCo(replicas=2, every=3, outer_lr=1, outer_momentum=0), False, (1,)),
    (DiLoCo(replicas=2, every=4, fragments=2), False, (1, 2)),
    (DiLoCo(replicas=2, every=4, fragments=2, delay=1), False, (1, 2)),
    (DiLoCo(replicas=2, every=3, delay=2, start=2), False, (2,)),
    (DiLoCo(replicas=2, every=3, start=3), True, (1, 2, 4)),
    (DiLoCo(replicas=3, every=3, start=3), True, (2,)),
]


@pytest.mark.parametrize(("options", "batch_norm", "sizes"), CASES, ids=str)
def test_any_number_of_processes_computes_the_equations(
    options: DiLoCo, batch_norm: bool, sizes: tuple[int, ...]
) -> None:
    expected, losses = written_out(options, batch_norm)
    for size in sizes:
        for found, seen in run_ranks(train, size, options, batch_norm):
            found["mask"] = expected["mask"]  # its infinity has no difference to itself
            assert difference(expected, found) < 1e-9
            assert seen == pytest.approx(losses, rel=1e-9)


def block_of_choices() -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), lockstep.init(DiLoCo(replicas=3), device="cpu") as world:
        net = mlp()
        data = torch.utils.data.DataLoader(tensors(), 12, drop_last=True)
        _, _, loader = world.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), data)
        next(iter(loader))
    return " ".join(out.getvalue().split())


def test_says_where_replicas_are_that_do_not_divide_evenly() -> None:
    first, _ = run_ranks(block_of_choices, 2)
    assert "train apart; 1 or 2 replicas on each process, in turn" in first
    assert "samples in a global batch, 8 + 4 on ranks 0 to 1" in first


def train_in_two(options: DiLoCo, folder: str, steps: int) -> tuple[dict[str, Tensor], str]:
    """Goes on where a checkpoint is, to so many steps, and saves."""
    with lockstep.init(options, seed=5, device="cpu") as world:
        net = model(batch_norm=True)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        net, optimizer = world.prepare(net, optimizer)
        loader = world.loader(tensors(), BATCH, shuffle=True)
        checkpoint = world.checkpoint(folder, model=net, optimizer=optimizer, loader=loader)
        checkpoint.resume()
        while world.step < steps:
            for batch in loader:
                world.backward(mean_loss(net, batch))
                optimizer.step()
                optimizer.zero_grad()
                if world.step == steps:
                    checkpoint.save()
                    break
        checkpoint.wait()
        return weights(net), checkpoint.last_resume_note


def on_two_machines(options: DiLoCo) -> tuple[dict[str, Tensor], int, int]:
    """As the environment says: two ranks on each; and the bytes that this one moved."""
    node, local = divmod(int(os.environ["RANK"]), 2)
    here = {"GROUP_RANK": node, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in here.items()})
    return train(options)[0], traffic.sent, traffic.shared


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(DiLoCo(replicas=4, every=4, fragments=2, delay=2), marks=pytest.mark.thorough),
        pytest.param(DiLoCo(replicas=2, every=4, fragments=2, delay=2), marks=pytest.mark.thorough),
        pytest.param(DiLoCo(replicas=2, every=4, compress="bf16"), marks=pytest.mark.thorough),
        DiLoCo(replicas=2, every=4, compress="int8"),
    ],
    ids=str,
)
def test_replicas_on_machines_with_several_ranks(options: DiLoCo) -> None:
    """Where a machine computes one replica, its ranks average gradients without the network."""
    alone, _ = train(options)
    for found, sent, shared in run_ranks(on_two_machines, 4, options):
        found["mask"] = alone["mask"]
        assert difference(alone, found) < 1e-9
        if options.replicas == 2:
            assert sent < shared / 5


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([tensors()[i] for i in range(50)])


def train_otherwise(kind: str) -> tuple[dict[str, Tensor], list[float], float]:
    """Weights, losses and what an evaluation in the middle of training gives."""
    with lockstep.init(DiLoCo(replicas=4, every=3), device="cpu") as world:
        net, losses, evaluated = mlp(), [], 0.0
        first, *others = net.parameters()
        optimizers = [torch.optim.AdamW([first], lr=0.01), torch.optim.SGD(others, lr=0.1)]
        net, *optimizers = world.prepare(net, *optimizers)
        loader = world.loader(
            Stream() if kind == "stream" else tensors(),
            BATCH,
            weight=(lambda batch: float(batch[1].sum() + 1)) if kind == "weight" else None,
            micro_batch_size=2 if kind == "micro-batches" else None,
        )
        for x, y in chain(loader, loader):
            weight = (y + 1 / len(y)) if kind == "weight" else torch.ones(len(y))
            each = F.cross_entropy(net(x), y, reduction="none")
            world.backward((each * weight).sum() / weight.sum())
            if (mean := world.loss()) is not None:
                losses.append(mean)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if world.is_last_micro_batch and world.step == 4:
                with torch.no_grad():
                    parts = [mean_loss(net, b) * len(b[1]) for b in world.loader(tensors(), 7)]
                evaluated = float(world.sum(sum(parts)))
        return weights(net), losses, evaluated


@pytest.mark.parametrize("kind", ["weight", "micro-batches", "stream"])
def test_so_do_two_optimizers_and_every_kind_of_loader(kind: str) -> None:
    alone, losses, evaluated = train_otherwise(kind)
    for found, seen, other in run_ranks(train_otherwise, 3, kind):
        assert difference(alone, found) < 1e-9
        assert [*seen, other] == pytest.approx([*losses, evaluated], rel=1e-9)


@pytest.mark.parametrize(
    ("method", "bound"),
    [
        pytest.param("bf16", 1e-2, marks=pytest.mark.thorough),
        pytest.param("int8", 1e-2, marks=pytest.mark.thorough),
        ("int4", 0.2),
    ],
)
def test_compressed_differences_are_those_of_replicas_too(method: Any, bound: float) -> None:
    options = DiLoCo(replicas=3, every=2, fragments=2, delay=1, compress=method)
    exact, _ = train(replace(options, compress=None))
    alone, _ = train(options)
    exact["mask"] = alone["mask"]
    assert 1e-6 < difference(exact, alone) < bound
    for size in (2, 3):
        for found, _ in run_ranks(train, size, options):
            found["mask"] = alone["mask"]
            assert difference(alone, found) < 1e-9


RESUMED = DiLoCo(replicas=4, every=4, fragments=2, delay=1)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(RESUMED, marks=pytest.mark.thorough),
        replace(RESUMED, compress="int4"),
        pytest.param(replace(RESUMED, every=3, start=4), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_resumes_in_the_middle_of_a_round_on_other_processes(
    options: DiLoCo, tmp_path: Path
) -> None:
    whole, _ = train_in_two(options, str(tmp_path / "whole"), STEPS)
    run_ranks(train_in_two, 2, options, str(tmp_path / "parts"), 3)  # as the first fragment waits
    run_ranks(train_in_two, 4, options, str(tmp_path / "parts"), 6)
    found, note = train_in_two(options, str(tmp_path / "parts"), STEPS)
    assert "step 6" in note
    whole["mask"] = found["mask"]
    assert difference(whole, found) < 1e-9


@pytest.mark.parametrize("compress", [None, "bf16", "int8"])
def test_what_was_lost_before_a_checkpoint_is_sent_once(compress: Any) -> None:
    """The run was resumed with a method that may leave no errors of its own."""
    parameters = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(3))]
    weights_of = TensorVersions(lambda: parameters)
    with lockstep.init("single", device="cpu") as world:
        outer = OuterOptimizer(
            weights_of,
            virtual_ranks=[0, 1],
            fragments=[[0, 1]],
            exchange=Exchange(world._run, 2),
            learning_rate=1.0,
            momentum=0.0,
            compress=compress,
            delays=False,
        )
        lost = F.pad(torch.tensor([1.0] * 4 + [2.0] * 3), (0, BLOCK - 7))
        outer.load_quantization_errors(0, {0: lost}, world.device)
        outer.load_quantization_errors(1, {0: 3 * lost}, world.device)
        for step in range(3):
            outer.send(0, step)
            outer.apply(0)
    for parameter, total in zip(parameters, (-2.0, -4.0), strict=True):
        assert torch.allclose(parameter, torch.tensor(total), rtol=0.02)


def test_a_checkpoint_of_other_replicas_is_refused(tmp_path: Path) -> None:
    train_in_two(DiLoCo(replicas=2, every=4), str(tmp_path), 3)
    with pytest.raises(CheckpointError, match="the checkpoint has 2 replicas"):
        train_in_two(DiLoCo(replicas=3, every=4), str(tmp_path), 6)


def test_a_checkpoint_of_other_fragments_is_refused(tmp_path: Path) -> None:
    train_in_two(DiLoCo(every=4, fragments=2, compress="int8"), str(tmp_path), 3)
    with pytest.raises(CheckpointError, match="saved with 2 fragments"):
        train_in_two(DiLoCo(every=4, compress="int8"), str(tmp_path), 6)


@pytest.mark.parametrize(
    ("before", "after"), [("single", DiLoCo(every=4)), (DiLoCo(every=4), "single")]
)
def test_goes_on_from_and_to_another_strategy(before: Any, after: Any, tmp_path: Path) -> None:
    """The replicas begin with the weights of the one model; it goes on with the shared ones."""
    saved, _ = train_in_two(before, str(tmp_path), 4)
    found, note = train_in_two(after, str(tmp_path), 4)
    assert "step 4" in note
    assert ("left out" in note) is (after == "single")
    found["mask"] = saved["mask"]
    assert difference(saved, found) == 0


def test_says_which_steps_are_in_no_exchange() -> None:
    with pytest.warns(LockstepWarning, match="the last 1 step of the replicas are not in"):
        train(DiLoCo(every=3), steps=4)
    later = DiLoCo(every=3, delay=1)
    with pytest.warns(LockstepWarning, match=r"(?s)the last 3 steps.*end after 7 steps"):
        train(later, steps=6)  # what was sent in the last step is not applied any more
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(later, steps=7)


def test_says_where_running_statistics_do_not_fit_the_shared_weights() -> None:
    for options in (DiLoCo(every=2), DiLoCo(every=2, outer_momentum=0.0)):
        with pytest.warns(LockstepWarning, match=r"BatchNorm.*\n.*mean over the replicas"):
            train(options, batch_norm=True, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(DiLoCo(every=2), steps=2)
        train(DiLoCo(every=2, outer_lr=1.0, outer_momentum=0.0), batch_norm=True, steps=2)


def computed_anew() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What `update_bn` makes of the model that was trained, and of a plain one with its weights."""
    with lockstep.init(DiLoCo(every=2), seed=5, device="cpu") as world:
        net = mlp(True)
        net, optimizer = world.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        for batch in world.loader(tensors(26), BATCH, shuffle=True):
            world.backward(mean_loss(net, batch))
            optimizer.step()
            optimizer.zero_grad()
        plain = mlp(True)
        plain.load_state_dict(net.state_dict())
        for each in (net, plain):
            update_bn(tensors().tensors[0].split(10), each)
        return weights(net), weights(plain)


@pytest.mark.parametrize("size", [1, 2])
def test_running_statistics_can_be_computed_anew(size: int) -> None:
    for found, plain in run_ranks(computed_anew, size):
        assert difference(found, plain) < 1e-12


def test_what_is_seen_of_the_replicas() -> None:
    """In a step the replica's weights; in an evaluation and a state dict the shared ones."""
    with lockstep.init(DiLoCo(every=2), device="cpu") as world:
        net = model(batch_norm=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net, optimizer = world.prepare(net, optimizer)
        shared, x = weights(net), tensors()[:4][0]
        with torch.no_grad():
            evaluated = copy.deepcopy(net).eval()(x)
        for number, batch in enumerate(world.loader(tensors(), 25)):
            if number == 3:  # the second replica's second step
                assert not torch.equal(net[0].weight, shared["0.weight"])
                with torch.no_grad():
                    assert torch.equal(net.eval()(x), evaluated)
                assert difference(weights(net) | {"mask": x}, shared | {"mask": x}) == 0
            net.train()
            world.backward(mean_loss(net, batch))
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(net[0].weight, shared["0.weight"]) is (number == 1)
        assert difference(weights(net) | {"mask": x}, shared | {"mask": x}) > 0


def test_new_weights_are_those_of_all_replicas() -> None:
    with lockstep.init(DiLoCo(every=100), device="cpu") as world:
        net = model(batch_norm=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net, optimizer = world.prepare(net, optimizer)
        loader, begun = world.loader(tensors(), 25), []
        for _ in range(2):
            net.load_state_dict(model(batch_norm=True).state_dict())
            for batch in loader:
                world.backward(mean_loss(net, batch))
                begun.append(float(optimizer.inner.param_groups[0]["params"][0].grad.sum()))
                optimizer.step()
                optimizer.zero_grad()
        assert begun[:2] == begun[4:6]
        with torch.no_grad():
            net[0].weight.clamp_(-0.1, 0.1)
        with pytest.raises(UsageError, match="weights changed by hand"):
            next(iter(loader))


def refused(case: str) -> None:
    options = DiLoCo(replicas=4 if case == "samples" else 2)
    precision = "fp16" if case == "fp16" else None
    shares = "1:2" if case == "shares" else None
    with lockstep.init(options, device="cpu", precision=precision, shares=shares) as world:
        net = model(batch_norm=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if case == "optimizer":
            net = world.prepare(net)
        else:
            net, optimizer = world.prepare(net, optimizer)
        loader = world.loader(tensors(10), 8)
        if case == "memory":
            world.memory(net, optimizer, loader, mean_loss)
        for number, batch in enumerate(loader):
            skips = (case, number) in (("skipped first", 0), ("skipped last", 1))
            if skips or (case == "skipped at the end" and number == 3):
                continue
            world.backward(mean_loss(net, batch))
            optimizer.step()
            if case == "twice":
                optimizer.step()
            if case == "left" and number == 0:
                break
        if case == "left":
            next(iter(loader))


REFUSED = {
    "size": (3, r"DiLoCo\(replicas=2\) on 3 processes"),
    "shares": (2, "each of them trains on an equal part"),
    "fp16": (1, "its loss scaler would skip steps of one replica"),
    "samples": (1, "a global batch of 2 samples for 4 replicas"),
    "optimizer": (1, "without a prepared loader and optimizer"),
    "twice": (1, "several steps of SGD in a global batch"),
    "memory": (1, "steps of the replicas, which are not put back"),
    "left": (1, "left between the replicas of a global batch"),
    "skipped first": (1, "skips optimizer.step.. for some replicas(.|\n)*1 of 2 replicas"),
    "skipped last": (1, "skips optimizer.step.. for some replicas(.|\n)*1 of 2 replicas"),
    "skipped at the end": (1, "skips optimizer.step.. for some replicas(.|\n)*1 of 2 replicas"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_depend_on_the_processes_is_refused(case: str) -> None:
    size, message = REFUSED[case]
    if size == 1:
        with pytest.raises(LockstepError, match=message):
            refused(case)
    else:
        with pytest.raises(RankFailed, match=message):
            run_ranks(refused, size, case)


def means_in_a_loop(in_every_micro_batch: bool) -> list[float]:
    """The means over the ranks of how many micro-batches each has trained, called in the loop."""
    means = []
    with lockstep.init(DiLoCo(replicas=3), device="cpu") as world:
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net, optimizer = world.prepare(net, optimizer)
        loader = world.loader(tensors(24), 12)
        for _ in loader:
            break  # before a replica has trained, so that all ranks are together again
        means.append(world.mean(0.0))
        for number, batch in enumerate(loader, 1):
            world.backward(mean_loss(net, batch))
            optimizer.step()
            if in_every_micro_batch or world.is_last_micro_batch:
                means.append(world.mean(float(number)))
    return means


def test_ranks_with_several_and_with_one_replica_communicate_once_in_a_global_batch() -> None:
    for means in run_ranks(means_in_a_loop, 2, False):
        assert means == [0.0, (2 + 1) / 2, (4 + 2) / 2]
    with pytest.raises(RankFailed) as failed:
        run_ranks(means_in_a_loop, 2, True)
    error = failed.value.errors[0]
    assert "world.mean in a micro-batch that only some ranks have" in error
    assert "3 replicas on 2 processes" in error


@pytest.mark.parametrize(
    "wrong",
    [
        *({"replicas": 0}, {"fragments": 51}, {"delay": 50}),
        *({"outer_lr": 0}, {"outer_momentum": 1}, {"compress": "int16"}),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(wrong))):
        DiLoCo(**wrong)


def train_to_verify(strategy: Any, wrong: float = 0.0) -> None:
    with lockstep.init(strategy) as world:
        net = mlp(batch_norm=True)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        net, optimizer = world.prepare(net, optimizer)
        for batch in world.loader(tensors(), BATCH, shuffle=True):
            world.backward(mean_loss(net, batch) * (1 + wrong * world.rank))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.thorough
def test_verify_compares_with_replicas_on_one_process() -> None:
    assert_same(train_to_verify, (DiLoCo(replicas=2, every=2, start=1),))
    with pytest.raises(AssertionError, match=r"first in gradients(.*\n)*.*\(replica 1\)"):
        assert_same(train_to_verify, (None, 0.1), strategy="diloco")
