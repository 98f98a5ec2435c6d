"""Mistakes that used to end with exit code 0 are told, and honest programs like them are not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from messages import MESSAGES
from problems import mlp, tensors
from ranks import run_ranks
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

import lockstep
from lockstep.errors import LockstepWarning
from lockstep.extensions.checks.sums_of_script import (
    divides_sum_by_length,
    divides_sum_by_number,
    lines_mention_number_of_ranks,
)

pytestmark = pytest.mark.ranks

Use = Callable[[lockstep.World], Any]


def set_and_do(message: str) -> tuple[str, str]:
    """What a message says was set, and what it says is to do; what was found has numbers."""
    return message.split("\n")[0], message.partition("\n  do:    ")[2]


KNOWN_MESSAGES = {set_and_do(message) for message in MESSAGES.values()}
TEST_SAMPLES = 33
TRAIN_SAMPLES = 96


def told(use: Use, strategy: str | None = None) -> list[str]:
    """The code of each warning on this rank, and the user's line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with lockstep.init(strategy, seed=0) as world:
            use(world)
    found = []
    for warning in caught:
        assert issubclass(warning.category, LockstepWarning), warning.message
        code = str(warning.message)[-6:-1]
        if not code.startswith("LS"):
            continue  # a strategy says something of its own
        assert warning.filename == __file__
        assert set_and_do(str(warning.message)) in KNOWN_MESSAGES, warning.message
        with open(__file__, encoding="utf-8") as file:
            found.append(f"{code} {file.readlines()[warning.lineno - 1].strip()}")
    return found


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


def train(
    world: lockstep.World,
    model: nn.Module,
    *optimizers: Any,
    loader: Any = None,
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
) -> None:
    """One pass over the data; there are twelve global batches."""
    for x, y in loader or world.loader(tensors(TRAIN_SAMPLES), 8):
        loss = loss_of(model, x, y) if loss_of else F.cross_entropy(model(x), y)
        world.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def plain_training(model: nn.Module, after_backward: Callable[[], Any] = lambda: None) -> None:
    """One pass over all samples, as a script for one process has it."""
    optimizer = sgd(model)
    for x, y in DataLoader(tensors(24), 8):
        F.cross_entropy(model(x), y).backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(world: lockstep.World) -> nn.Module:
    model = mlp()
    model, optimizer = world.prepare(model, sgd(model))
    train(world, model, optimizer)
    return model


@torch.no_grad()
def hits(model: nn.Module, loader: Any) -> Tensor:
    total = torch.zeros((), dtype=torch.int64)
    for x, y in loader:
        total += (model(x).argmax(1) == y).sum()
    return total


def plain_test(**options: Any) -> DataLoader[Any]:
    return DataLoader(tensors(TEST_SAMPLES), 8, **options)


# What is wrong


def model_not_prepared(world: lockstep.World) -> None:
    model = mlp()
    train(world, model, sgd(model))


def model_not_prepared_in_a_short_training(world: lockstep.World) -> None:
    model = mlp()
    train(world, model, sgd(model), loader=world.loader(tensors(24), 8))


def nothing_prepared(world: lockstep.World) -> None:
    """Each rank trains alone; a sum at the end changes nothing about that."""
    model = mlp()
    plain_training(model)
    world.sum(hits(model, plain_test()) / world.size)


def discriminator_not_prepared(world: lockstep.World) -> None:
    generator, critic = nn.Linear(2, 6).double(), mlp()
    critic_optimizer = sgd(critic)
    generator, optimizer = world.prepare(generator, sgd(generator))
    for x, _ in world.loader(tensors(TRAIN_SAMPLES), 8):
        made = generator(torch.ones(len(x), 2).double())
        real, fake = critic(x).mean(), critic(made.detach()).mean()
        world.backward(fake - real)
        critic_optimizer.step()
        world.backward(-critic(made).mean())
        optimizer.step()
        optimizer.zero_grad()
        critic_optimizer.zero_grad()


def optimizer_not_prepared(world: lockstep.World) -> None:
    model = world.prepare(mlp())
    train(world, model, sgd(model))


def optimizer_that_was_given(world: lockstep.World) -> None:
    model = mlp()
    optimizer = sgd(model)
    model, _ = world.prepare(model, optimizer)
    train(world, model, optimizer)


def optimizer_of_more_than_the_model(world: lockstep.World) -> None:
    model, head = world.prepare(mlp()), nn.Linear(4, 4).double()
    both = sgd(model, head)
    train(world, model, both, loss_of=lambda model, x, y: F.cross_entropy(head(model(x)), y))


def loss_that_sums(world: lockstep.World) -> None:
    """A sum over the samples, beside a penalty that is no sum over them."""
    model, loader = mlp(), world.loader(tensors(24), 8)
    model, optimizer = world.prepare(model, sgd(model))
    for x, y in loader:
        penalty = sum(p.square().sum() for p in model.parameters())
        loss = F.cross_entropy(model(x), y, reduction="sum") + 1e-4 * penalty
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def sum_divided_by_the_global_batch(world: lockstep.World) -> None:
    model = mlp()
    model, optimizer = world.prepare(model, sgd(model))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="sum") / 8

    train(world, model, optimizer, loss_of=loss_of)


def mean_divided_by_the_micro_batches(world: lockstep.World) -> None:
    model = mlp()
    model, optimizer = world.prepare(model, sgd(model))
    loader = world.loader(tensors(48), 24, num_micro_batches=3)
    train(world, model, optimizer, loader=loader, loss_of=divided_by_3)


def divided_by_3(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) / 3


def evaluation_loader_not_prepared(world: lockstep.World) -> None:
    model = trained(world)
    world.sum(hits(model, plain_test()))


def evaluation_loader_not_prepared_of_several_sums(world: lockstep.World) -> None:
    model = trained(world)
    for _ in range(2):
        found = hits(model, plain_test(shuffle=True))
        world.sum({"hits": int(found), "loss": 0.25})
        model.train()
        train(world, mlp())


def evaluation_loader_not_prepared_and_counts_by_class(world: lockstep.World) -> None:
    model, counts = trained(world), torch.zeros(4)
    with torch.no_grad():
        for x, _ in plain_test():
            counts += model(x).argmax(1).bincount(minlength=4)
    world.sum(counts * 2)


def evaluation_loader_not_prepared_and_a_loss(world: lockstep.World) -> None:
    model = trained(world)
    world.sum(losses(model, plain_test()) / TEST_SAMPLES)


def evaluation_loader_not_prepared_and_two_sums(world: lockstep.World) -> None:
    model = trained(world)
    found, count = world.sum((hits(model, plain_test()), TEST_SAMPLES))
    world.print(f"{100 * int(found) / 33:.1f} % of {count}")  # TEST_SAMPLES


def rank_0_over_a_prepared_loader(world: lockstep.World) -> None:
    model, test = trained(world), world.prepare(plain_test())
    if world.is_main:
        hits(model, test)
    world.barrier()
    world.barrier()


def rank_1_over_a_prepared_loader_at_the_end(world: lockstep.World) -> None:
    model, test = trained(world), world.prepare(plain_test())
    if world.rank == 1:
        hits(model, test)


def rank_0_over_a_prepared_loader_with_gradients(world: lockstep.World) -> None:
    test = world.prepare(plain_test())
    if world.is_main:
        for _ in test:
            pass
    assert world.sum(1) == world.size


def training_over_the_unprepared_loader(world: lockstep.World) -> None:
    model, loader = mlp(), DataLoader(tensors(24), 8, shuffle=True)
    model, optimizer, _ = world.prepare(model, sgd(model), loader)
    train(world, model, optimizer, loader=loader)


@torch.no_grad()
def losses(model: nn.Module, loader: Any) -> float:
    return sum(F.cross_entropy(model(x), y).item() for x, y in loader)


def means_of_batches_summed(world: lockstep.World) -> None:
    model, test = trained(world), world.prepare(plain_test())
    for _ in range(2):
        mean = world.sum(losses(model, test)) / len(test)
        assert mean > 0
        train(world, mlp())


def means_of_batches_summed_at_the_end(world: lockstep.World) -> None:
    model, test = trained(world), world.prepare(plain_test())
    total = losses(model, test)
    mean = total / len(test)
    world.print(f"loss {world.sum(torch.tensor(mean)):.3f}")


_BACKWARD = "world.backward(loss)"
_HITS = "for x, y in loader:"
MISTAKES: dict[Use, str] = {
    model_not_prepared: f"LS311 {_BACKWARD}",
    model_not_prepared_in_a_short_training: f"LS311 {_BACKWARD}",
    nothing_prepared: "LS311 optimizer.step()",
    loss_that_sums: f"LS202 {_BACKWARD}",
    sum_divided_by_the_global_batch: f"LS202 {_BACKWARD}",
    mean_divided_by_the_micro_batches: f"LS204 {_BACKWARD}",
    discriminator_not_prepared: "LS311 world.backward(fake - real)",
    optimizer_not_prepared: "LS407 optimizer.step()",
    optimizer_that_was_given: "LS407 optimizer.step()",
    optimizer_of_more_than_the_model: "LS407 optimizer.step()",
    evaluation_loader_not_prepared: "LS501 world.sum(hits(model, plain_test()))",
    evaluation_loader_not_prepared_of_several_sums: (
        'LS501 world.sum({"hits": int(found), "loss": 0.25})'
    ),
    evaluation_loader_not_prepared_and_counts_by_class: "LS501 world.sum(counts * 2)",
    evaluation_loader_not_prepared_and_a_loss: (
        "LS501 world.sum(losses(model, plain_test()) / TEST_SAMPLES)"
    ),
    evaluation_loader_not_prepared_and_two_sums: (
        "LS501 found, count = world.sum((hits(model, plain_test()), TEST_SAMPLES))"
    ),
    rank_0_over_a_prepared_loader: f"LS501 {_HITS}",
    rank_1_over_a_prepared_loader_at_the_end: f"LS501 {_HITS}",
    rank_0_over_a_prepared_loader_with_gradients: "LS501 for _ in test:",
    training_over_the_unprepared_loader: f"LS110 {_BACKWARD}",
    means_of_batches_summed: "LS501 mean = world.sum(losses(model, test)) / len(test)",
    means_of_batches_summed_at_the_end: (
        'LS501 world.print(f"loss {world.sum(torch.tensor(mean)):.3f}")'
    ),
}


# What is right, or meant


def teacher_that_is_not_prepared(world: lockstep.World) -> None:
    model, teacher = mlp(), mlp()
    model, optimizer = world.prepare(model, sgd(model))

    def distilled(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        return F.mse_loss(model(x), wanted)

    train(world, model, optimizer, loss_of=distilled)


def frozen_backbone_and_a_head(world: lockstep.World) -> None:
    backbone, head = mlp().requires_grad_(False), nn.Linear(4, 4).double()
    backbone = world.prepare(backbone)
    head, optimizer = world.prepare(head, sgd(head))
    train(world, head, optimizer, loss_of=lambda m, x, y: F.cross_entropy(m(backbone(x)), y))


def learned_prompt_of_a_frozen_model(world: lockstep.World) -> None:
    model = world.prepare(mlp().requires_grad_(False))
    prompt, scale = nn.Parameter(torch.zeros(6).double()), nn.Parameter(torch.ones(6).double())
    optimizer = torch.optim.SGD([prompt, scale], lr=0.1)

    def prompted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x * scale + prompt), y)

    train(world, model, optimizer, loss_of=prompted)


def adversarial_examples(world: lockstep.World) -> None:
    model = mlp()
    model, optimizer = world.prepare(model, sgd(model))
    for x, y in world.loader(tensors(TRAIN_SAMPLES), 8):
        delta, scale = nn.Parameter(torch.zeros_like(x)), nn.Parameter(torch.ones_like(x))
        attacked = nn.functional.normalize(x * scale + delta).square().sum()
        world.backward(attacked)
        world.backward(F.cross_entropy(model((x + delta.grad).requires_grad_()), y))
        optimizer.step()
        optimizer.zero_grad()


def two_optimizers_in_several_calls(world: lockstep.World) -> None:
    generator, critic = nn.Linear(2, 6).double(), mlp()
    critic, critic_optimizer = world.prepare(critic, sgd(critic))
    generator, optimizer = world.prepare(generator, sgd(generator))
    for x, _ in world.loader(tensors(TRAIN_SAMPLES), 8):
        made = generator(torch.ones(len(x), 2).double())
        world.backward(critic(torch.cat([made.detach(), x])).mean())
        critic_optimizer.step()
        critic_optimizer.zero_grad()
        world.backward(-critic(made).mean())
        optimizer.step()
        optimizer.zero_grad()
        critic_optimizer.zero_grad()


def parameters_of_one_rank(world: lockstep.World) -> None:
    model, local = mlp(), nn.Linear(4, 4).double()
    model, optimizer = world.prepare(model, sgd(model))

    def calibrated(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(local(model(x)), y)

    train(world, model, optimizer, sgd(local), loss_of=calibrated)


def own_rollouts(world: lockstep.World) -> None:
    model = mlp()
    model, optimizer = world.prepare(model, sgd(model))
    for _ in range(3):
        x, y = tensors(16 + world.rank).tensors
        rollout = TensorDataset((x + world.rank)[:16], y[:16])
        train(world, model, optimizer, loader=DataLoader(rollout, 8, shuffle=True))
        world.sum(float(len(rollout)))
        world.sum({"wins": 5, "length": 12})


def gradients_averaged_by_hand(world: lockstep.World) -> None:
    model = mlp()
    optimizer = sgd(model)
    for x, y in world.loader(tensors(TRAIN_SAMPLES), 8):
        world.backward(F.cross_entropy(model(x), y))
        for parameter in model.parameters():
            parameter.grad = world.mean(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def ddp_by_hand(world: lockstep.World) -> None:
    if world.size == 1:
        return
    model: Any = DistributedDataParallel(mlp())
    try:
        train(world, model, sgd(model))
    finally:  # it would keep the process group's threads alive
        model.reducer = model.logger = model.process_group = None


class Sharpness(torch.optim.Optimizer):
    """Steps another optimizer, as SAM does."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(parameters, lr=0.1)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base.step()


def optimizer_in_an_optimizer(world: lockstep.World) -> None:
    model = mlp()
    model, optimizer = world.prepare(model, Sharpness(model.parameters()))
    train(world, model, optimizer)
    for x, y in world.loader(tensors(16), 8):
        world.backward(F.cross_entropy(model(x), y))
        optimizer.base.step()  # as the second step of SAM does


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.variable = x
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class LowRank(nn.Module):
    """A frozen layer with an adapter, and a function of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 4).double().requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False).double()
        self.up = nn.Linear(2, 4, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(self.base(x) + self.up(self.down(x)))


def adapters_and_functions(world: lockstep.World) -> None:
    model = LowRank()
    model, optimizer = world.prepare(model, torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1
    ))  # fmt: skip
    train(world, model, optimizer)


def compiled(world: lockstep.World) -> None:
    model = mlp()
    model, optimizer = world.prepare(model, sgd(model))
    train(world, torch.compile(model, backend="eager"), optimizer)


def recomputed(world: lockstep.World) -> None:
    model = mlp()
    model, optimizer = world.prepare(model, sgd(model))
    lockstep.checkpoint_activations(model, nn.Linear)
    train(world, model, optimizer)


def learners_that_are_copied(world: lockstep.World) -> None:
    """Each task trains a copy of its own, which only this rank has."""
    model = mlp()
    for x, y in world.loader(tensors(TRAIN_SAMPLES), 8):
        learner = copy.deepcopy(model)
        world.backward(F.cross_entropy(learner(x), y))
        sgd(learner).step()
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
        for value in own.values():
            value.requires_grad_()
        world.backward(F.cross_entropy(functional_call(model, own, (x,)), y))


def rank_0_over_a_plain_loader(world: lockstep.World) -> None:
    model = trained(world)
    if world.is_main:
        hits(model, plain_test())
    world.barrier()
    world.broadcast(1)


def every_rank_evaluates_all(world: lockstep.World) -> None:
    model = trained(world)
    world.mean(int(hits(model, plain_test())) / TEST_SAMPLES)
    world.sum(hits(model, plain_test()))
    world.sum(TEST_SAMPLES)  # a quotient of two sums
    world.sum(torch.tensor([float(hits(model, plain_test())), float(TEST_SAMPLES)]))
    found, count = world.sum((hits(model, plain_test()), TEST_SAMPLES))
    assert int(found) / count <= 33 / 33
    world.sum(losses(model, plain_test())) / world.size
    total = world.sum(hits(model, plain_test()))
    assert int(total) // world.size <= TEST_SAMPLES
    hits(model, plain_test())
    assert world.sum(int(False)) == 0  # whether any rank wants to stop
    assert world.sum(True) == world.size


def shards_by_hand(world: lockstep.World) -> None:
    model, data = trained(world), tensors(world.size * 8)
    own = Subset(data, range(world.rank, len(data), world.size))
    hits(model, DataLoader(own, 4))
    assert world.sum(4) == 4 * world.size  # each has found four, by chance


def every_other_batch_by_hand(world: lockstep.World) -> None:
    trained(world)
    count = 0
    for number, (x, _) in enumerate(plain_test()):
        if number % world.size == world.rank:
            count += len(x)
    sums = world.sum({"hits": 5, "samples": count})
    assert sums["hits"] / 33 < 1  # TEST_SAMPLES: each sample was counted once


def in_turn_over_a_prepared_loader(world: lockstep.World) -> None:
    model, test = trained(world), world.prepare(plain_test())
    with world.main_process_first():
        hits(model.module if world.size > 1 else model, test)
    world.sum(hits(model, test))


def first_batch_on_rank_0(world: lockstep.World) -> None:
    model, test = trained(world), world.prepare(plain_test())
    if world.is_main:
        with torch.no_grad():
            model(next(iter(test))[0])
    world.sum(hits(model, test))
    world.barrier()


def means_over_samples_and_ranks(world: lockstep.World) -> None:
    model, test = trained(world), world.prepare(plain_test())
    by_samples = world.sum(losses(model, test)) / TEST_SAMPLES
    world.print(f"{by_samples:.3f} in {len(test)} batches")
    mean_of_ranks = world.sum(losses(model, test) / len(test)) / world.size
    mean_of_means = world.sum(losses(model, test)) / world.sum(len(test))
    assert mean_of_ranks + mean_of_means + world.mean(losses(model, test) / len(test)) > 0


def plain_pass_before_a_prepared_one(world: lockstep.World) -> None:
    model, test = trained(world), world.prepare(plain_test())
    hits(model, DataLoader(tensors(8), 4))  # to calibrate, on every rank
    world.sum(hits(model, test))


def averaged_by_hand_and_nothing_prepared(world: lockstep.World) -> None:
    model = mlp()

    def average() -> None:
        for parameter in model.parameters():
            parameter.grad = world.mean(parameter.grad)

    plain_training(model, average)


def ddp_by_hand_and_nothing_prepared(world: lockstep.World) -> None:
    model: Any = DistributedDataParallel(mlp()) if world.size > 1 else mlp()
    plain_training(model)
    model.reducer = model.logger = model.process_group = None


def sums_that_are_divided(world: lockstep.World) -> None:
    """Sums that the script divides, means with a factor, and a sum over something else."""
    prototypes, zeros = torch.ones(5, 6).double(), torch.zeros(5, 4).double()

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scores, num_samples = model(x), max(1, len(x))
        return (
            F.cross_entropy(scores, y, reduction="sum") / num_samples
            + F.cross_entropy(scores, y, reduction="none").sum() * (1 / num_samples)
            + F.mse_loss(model(prototypes), zeros, reduction="sum")
        )

    def loss_of_tokens(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scores = model(torch.cat([x, x]))  # two tokens a sample: 8 on each of 2 ranks
        labels = torch.cat([y, y])
        return F.cross_entropy(scores, labels, reduction="sum") / max(1, len(labels))

    model = mlp()
    model, optimizer = world.prepare(model, sgd(model))
    for function in (loss_of, loss_of_tokens, divided_by_3):
        train(world, model, optimizer, loader=world.loader(tensors(24), 8), loss_of=function)


def rank_0_trains_alone(world: lockstep.World) -> None:
    if world.is_main:
        plain_training(mlp())


HONEST: list[Use] = [
    sums_that_are_divided,
    averaged_by_hand_and_nothing_prepared,
    ddp_by_hand_and_nothing_prepared,
    rank_0_trains_alone,
    teacher_that_is_not_prepared,
    frozen_backbone_and_a_head,
    learned_prompt_of_a_frozen_model,
    adversarial_examples,
    two_optimizers_in_several_calls,
    parameters_of_one_rank,
    own_rollouts,
    gradients_averaged_by_hand,
    ddp_by_hand,
    optimizer_in_an_optimizer,
    adapters_and_functions,
    recomputed,
    learners_that_are_copied,
    rank_0_over_a_plain_loader,
    every_rank_evaluates_all,
    shards_by_hand,
    every_other_batch_by_hand,
    in_turn_over_a_prepared_loader,
    first_batch_on_rank_0,
    means_over_samples_and_ranks,
    plain_pass_before_a_prepared_one,
]
ALWAYS_TRIED: list[Use] = [
    loss_that_sums,
    sum_divided_by_the_global_batch,
    mean_divided_by_the_micro_batches,
    sums_that_are_divided,
    nothing_prepared,
    averaged_by_hand_and_nothing_prepared,
    ddp_by_hand_and_nothing_prepared,
    rank_0_trains_alone,
    model_not_prepared_in_a_short_training,
    optimizer_not_prepared,
    evaluation_loader_not_prepared,
    evaluation_loader_not_prepared_and_two_sums,
    rank_1_over_a_prepared_loader_at_the_end,
    training_over_the_unprepared_loader,
    means_of_batches_summed,
    means_over_samples_and_ranks,
    parameters_of_one_rank,
    own_rollouts,
    ddp_by_hand,
    optimizer_in_an_optimizer,
    every_rank_evaluates_all,
    shards_by_hand,
    first_batch_on_rank_0,
]
"""On two ranks in each run of the tests; the others take their time."""
UNDER_OTHER_STRATEGIES: list[Use] = [
    trained,
    two_optimizers_in_several_calls,
    adapters_and_functions,
    recomputed,
    compiled,
    every_rank_evaluates_all,
]


def told_of_all(uses: list[Use], strategy: str | None = None) -> dict[str, list[str]]:
    return {use.__name__: told(use, strategy) for use in uses}


def check(uses: list[Use], size: int) -> None:
    found = run_ranks(told_of_all, size, uses)
    for use in uses:
        expected = [MISTAKES[use]] if use in MISTAKES else []
        assert [line for rank in found for line in rank[use.__name__]] == expected, use.__name__


def test_mistakes_are_told_and_honest_programs_are_not():
    check(ALWAYS_TRIED, 2)


def test_a_sum_divided_by_the_length_of_a_loader_is_found_in_the_source():
    one_line = [
        "loss = world.sum(total) / len(test)",
        "print('loss', float(world.sum(total)) / len(test))",
        "print(f'{world.sum(total).item() / len(test):.3f}')",
        "loss = world.sum(total / len(test))",
        "loss, hits = world.sum((total / len(test), hits))",
    ]
    for line in one_line:
        assert divides_sum_by_length(f"import x\n{line}\n", 2, 2), line
    two_lines = [
        "total = world.sum(total)\nloss = total / len(test)",
        "total, n = world.sum((total, n))\nprint(total / len(test))",
        "total = world.sum(total)\ntotal /= len(test)",
        "mean = total / len(test)\nloss = world.sum(mean)",
    ]
    for lines in two_lines:
        inside = "def evaluate():\n    " + lines.replace("\n", "\n    ")
        first, second = (3, 2) if lines.startswith("mean") else (2, 3)
        assert divides_sum_by_length(inside, first, second), lines
    right = [
        "loss = world.sum(total) / len(test) / world.size",
        "loss = world.sum(total / len(test)) / world.size",
        "loss = world.sum(total) / world.sum(len(test))",
        "print(world.sum(total) / n, len(test))",
        "loss = world.mean(total / len(test))",
        "for x in world.sum(total): len(test)",
        "not python",
    ]
    for line in right:
        assert not divides_sum_by_length(line, 1, 1), line
    assert not divides_sum_by_length("a = world.sum(b)\nc = d / len(test)", 1, 2)
    assert not divides_sum_by_length("a = world.sum(b)\n", 1, 7)


@pytest.mark.parametrize(
    "division",
    ["/ world.size", "/ world_size", "/ nproc", "/ dist.get_world_size()", "/ args.num_ranks"],
)
def test_a_script_that_divides_by_the_number_of_ranks_is_recognised(division):
    source = f"total = world.sum(hits)\n\nprint(total {division})\n"
    assert lines_mention_number_of_ranks(source, 1, 3)
    assert not lines_mention_number_of_ranks(source, 1, 2)
    assert not divides_sum_by_length(f"print(world.sum(hits) / len(test) {division})", 1, 1)


@pytest.mark.parametrize(
    "source",
    [
        "rate = world.sum((hits, n))[0] / 33",
        "hits, n = world.sum((hits, n))\nprint(100 * hits.item() / 33.0)",
        "sums = world.sum(\n    [hits, n]\n)\n\n\n\n\n\nrate = sums[0] / 33",
    ],
)
def test_a_sum_divided_by_a_number_that_is_spelt_out_is_found_in_the_source(source):
    assert divides_sum_by_number(source, 1, num_lines=6, number=33)


@pytest.mark.parametrize(
    "source",
    [
        "hits, n = world.sum((hits, n))\nprint(hits / n)",
        "hits, n = world.sum((hits, n))\nprint(hits / 34)",
        "hits, n = world.sum((hits, n))\nprint(loss / 33)",
        "hits, n = world.sum((hits, n))" + 7 * "\n" + "print(hits / 33)",  # too far away
        "world.sum(",
    ],
)
def test_another_division_is_none_of_the_sum_by_that_number(source):
    assert not divides_sum_by_number(source, 1, num_lines=6, number=33)


def test_the_size_of_a_tensor_is_not_the_number_of_ranks():
    source = "total = world.sum(hits)\nprint(total / x.size(0), x.shape)  # not world.size\n"
    assert not lines_mention_number_of_ranks(source, 1, 2)
    assert divides_sum_by_length("print(world.sum(hits) / len(test), x.size(0))", 1, 1)


def test_a_source_that_cannot_be_parsed_may_mention_the_number_of_ranks():
    assert lines_mention_number_of_ranks("print total / nproc", 1, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 3])
def test_all_mistakes_are_told_and_no_honest_program_is(size):
    check([*MISTAKES, *HONEST], size)


@pytest.mark.thorough
def test_on_one_process_nothing_is_told():
    told_of = told_of_all([*MISTAKES, *HONEST])
    assert told_of.pop(mean_divided_by_the_micro_batches.__name__)  # micro-batches are there too
    assert not any(told_of.values())


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp", "diloco"])
def test_other_strategies_give_no_alarm(strategy):
    for rank in run_ranks(told_of_all, 2, UNDER_OTHER_STRATEGIES, strategy):
        assert not any(rank.values()), rank
