from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.distributed.collectives import Collectives
from lockstep.errors import UsageError
from lockstep.machine.topology import Topology
from lockstep.optim.precision import Precision
from lockstep.session.delivery import TrainingPass
from lockstep.session.extension import Place
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step
from lockstep.training.optimizer import PreparedOptimizer
from lockstep.training.optimizer_kinds import choose_foreach
from lockstep.training.scheduler import PreparedScheduler

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


def prepared(
    lr: float = 1.0, precision: str = "fp32"
) -> tuple[nn.Parameter, PreparedOptimizer, Step]:
    parameter, step = nn.Parameter(torch.zeros(2)), Step()
    optimizer = torch.optim.SGD([parameter], lr=lr)
    made = PreparedOptimizer(optimizer, step, Precision(precision, CPU))
    for extension in made.extensions:
        step.extensions.add(extension, Place.PREPARED_OBJECT)
    return parameter, made, step


def micro(first: bool, last: bool) -> MicroBatch:
    return MicroBatch(
        global_samples=4, local_rows=2, first=first, last=last, scale=0.5, plain=False
    )


@pytest.mark.parametrize("zero_grad_at", ["start", "end"])
def test_one_step_and_one_clearing_for_a_global_batch(zero_grad_at):
    parameter, optimizer, step = prepared()
    scheduler = PreparedScheduler(
        torch.optim.lr_scheduler.StepLR(optimizer.inner, 1, 0.1),
        optimizer,
        step,
        Collectives(Topology(), CPU),
    )
    steps, running = [], TrainingPass()
    for first, last in [(True, False), (False, False), (False, True)] * 2:
        step.begin(running, micro(first, last))
        if zero_grad_at == "start":
            optimizer.zero_grad()
        (parameter.sum() * 1.0).backward()
        running.num_backwards += 1
        optimizer.step()
        scheduler.step()
        if zero_grad_at == "end":
            optimizer.zero_grad()
        steps.append((parameter.detach()[0].item(), scheduler.get_last_lr()[0]))
    assert [s[0] for s in steps] == pytest.approx([0, 0, -3, -3, -3, -3.3])
    assert [s[1] for s in steps] == pytest.approx([1, 1, 0.1, 0.1, 0.1, 0.01])
    assert step.number == 2
    assert step.samples == 8


@pytest.mark.parametrize("after_backward", [False, True])
def test_a_step_that_is_left_out_leaves_nothing_behind(after_backward):
    parameter, optimizer, step = prepared()
    running = TrainingPass()
    for number, (first, last) in enumerate([(True, False), (False, True)] * 2):
        step.begin(running, micro(first, last))
        left_out = number == 1  # as where the loss is infinite
        if after_backward or not left_out:
            (parameter.sum() * 1.0).backward()
            running.num_backwards += 1
        if not left_out:
            optimizer.step()
        optimizer.zero_grad()
    assert parameter.detach()[0].item() == -2


def test_outside_of_a_loader_it_is_the_users_optimizer():
    parameter, optimizer, step = prepared()
    parameter.sum().backward()
    optimizer.step()
    assert parameter.detach().tolist() == [-1, -1]
    assert step.number == 1
    optimizer.zero_grad()
    assert parameter.grad is None
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.inner.param_groups
    assert optimizer.state_dict() == optimizer.inner.state_dict()
    assert optimizer.defaults["lr"] == 1.0


def test_a_scheduler_can_be_made_from_the_prepared_optimizer():
    _, optimizer, _ = prepared()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.inner.param_groups[0]["lr"] == 0.5


def test_backward_of_the_loss_itself_is_noticed_where_it_is_wrong():
    parameter, optimizer, step = prepared()
    running = TrainingPass()
    step.begin(running, MicroBatch(global_samples=8, local_rows=3, scale=0.75, plain=False))
    parameter.sum().backward()
    with pytest.raises(UsageError, match=r"without world.backward .*\n.*3 of 8 samples"):
        optimizer.step()
    assert parameter.detach().tolist() == [0, 0]
    step.begin(running, MicroBatch(global_samples=8, local_rows=4, plain=True))
    optimizer.step()
    assert parameter.detach().tolist() == [-1, -1]


def test_backward_of_the_loss_itself_is_noticed_under_fp16():
    parameter, optimizer, _ = prepared(precision="fp16")
    parameter.sum().backward()
    with pytest.raises(UsageError, match="whose loss is scaled"):
        optimizer.step()


def test_a_closure_is_evaluated_on_a_whole_batch_only():
    parameter, optimizer, step = prepared()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (parameter - 1).square().sum()
        loss.backward()
        return loss.detach()

    assert optimizer.step(closure) == 2.0
    step.begin(TrainingPass(), micro(True, False))
    with pytest.raises(UsageError, match="closure"):
        optimizer.step(closure)


def test_parameter_groups_cannot_be_added():
    _, optimizer, _ = prepared()
    with pytest.raises(UsageError, match="add_param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.Adam, {"lr": 1e-2}),
    (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.01}),
    (torch.optim.AdamW, {"lr": 1e-2}),
    (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    (torch.optim.Adamax, {"lr": 1e-2, "weight_decay": 0.01}),
    (torch.optim.Adadelta, {"weight_decay": 0.01}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_the_faster_implementation_gives_the_same_bits(kind, options, dtype):
    def run(faster: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(17, 33), (33,), (8, 3, 3, 3), (1,), (), (5,), (64, 64), (2, 1)]
        parameters = [
            nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in shapes
        ]
        optimizer = kind(parameters, **options)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 25)
        if faster:
            assert choose_foreach(optimizer, CPU)
            assert all(group["foreach"] for group in optimizer.param_groups)
        for _ in range(25):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=dtype)
            optimizer.step()
            scheduler.step()
        return [p.detach() for p in parameters]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def many(count: int = 8, size: int = 1) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for _ in range(count)]


def test_lists_pay_for_many_small_tensors_alone():
    def chosen(*groups: list[nn.Parameter]) -> bool:
        optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.1)
        return choose_foreach(optimizer, CPU) is not None

    assert chosen(many(8))
    assert chosen(many(4), many(4))
    assert not chosen(many(7))
    assert chosen(many(8, 2**14))
    assert not chosen(many(8, 2**14 + 1))
    assert chosen(many(30), many(2, 2**17))


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}, {"maximize": True}])
def test_what_the_user_chose_stays(options):
    optimizer = torch.optim.AdamW(many(), **options)
    assert choose_foreach(optimizer, CPU) is None
    assert optimizer.param_groups[0]["foreach"] is options.get("foreach")


def test_a_learning_rate_given_as_a_tensor_is_left_alone():
    optimizer = torch.optim.AdamW(many(), lr=torch.tensor(0.1))
    assert choose_foreach(optimizer, CPU) is None


def test_others_are_left_alone():
    class Mine(torch.optim.SGD):
        pass

    for kind in (Mine, torch.optim.NAdam):
        assert choose_foreach(kind(many(), lr=1.0), CPU) is None
    sgd = torch.optim.SGD(many())
    assert choose_foreach(sgd, CPU) is not None
    sgd = torch.optim.SGD(many())
    assert choose_foreach(sgd, torch.device("cuda")) is None
