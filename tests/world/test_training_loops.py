"""Training loops as people write them: what must be exact is, and what cannot be is refused."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems import Augmented, difference, mean_loss, mlp, tensors, weights
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, Sampler, random_split

import lockstep
from lockstep.distributed.join import Join
from lockstep.errors import LockstepWarning, RanksDifferError, SettingError, UsageError

pytestmark = pytest.mark.ranks


@pytest.fixture
def world() -> Iterator[lockstep.World]:
    with lockstep.init(seed=1) as made:
        yield made


def ready(world: lockstep.World, model: nn.Module | None = None) -> Any:
    model = model or mlp()
    return world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def two_models(world: lockstep.World, micro_batch_size: int | None, *, separate: bool) -> Any:
    """Two models with an optimizer each, cleared at the start and in turns."""
    pairs = [ready(world), ready(world)]
    for batch in world.loader(tensors(), 10, micro_batch_size=micro_batch_size):
        for _, optimizer in pairs:
            optimizer.zero_grad()
        if separate:
            for model, optimizer in pairs:
                optimizer.zero_grad()
                world.backward(mean_loss(model, batch))
                optimizer.step()
        else:
            world.backward(sum(mean_loss(model, batch) for model, _ in pairs))
            for _, optimizer in pairs:
                optimizer.step()
    return [weights(model) for model, _ in pairs]


def test_two_models_of_one_loss_accumulate_like_one(world):
    whole = two_models(world, None, separate=False)
    parts = two_models(world, 5, separate=False)
    assert all(difference(a, b) < 1e-12 for a, b in zip(whole, parts, strict=True))
    assert difference(whole[0], whole[1]) == 0


def test_two_losses_of_two_optimizers_work_on_whole_batches_and_are_refused_on_parts(world):
    assert difference(*two_models(world, None, separate=True)) == 0
    with pytest.raises(UsageError, match="several backward passes a micro-batch"):
        two_models(world, 5, separate=True)


def two_passes_a_batch(world: lockstep.World, micro_batch_size: int | None) -> None:
    """Sharpness-aware minimisation: the gradients are those of weights that were moved uphill."""
    model, optimizer = ready(world)
    for batch in world.loader(tensors(), 10, micro_batch_size=micro_batch_size):
        world.backward(mean_loss(model, batch))
        uphill = [(parameter, 0.1 * parameter.grad) for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, by in uphill:
                parameter.add_(by)
        optimizer.zero_grad()
        world.backward(mean_loss(model, batch))
        with torch.no_grad():
            for parameter, by in uphill:
                parameter.sub_(by)
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_cleared_between_two_passes_of_a_micro_batch_are_not_counted(world):
    with pytest.raises(UsageError, match=r"zero_grad\(\) between two backward passes"):
        two_passes_a_batch(world, 5)


def test_two_passes_of_a_batch_that_is_whole_may_be_cleared_in_between(world):
    two_passes_a_batch(world, None)


def test_clearing_through_the_model_is_noticed(world):
    model, optimizer = ready(world)
    with pytest.raises(UsageError, match="gradients cleared between the micro-batches"):
        for batch in world.loader(tensors(), 10, micro_batch_size=5):
            model.zero_grad()
            world.backward(mean_loss(model, batch))
            optimizer.step()


def step_in_the_last_micro_batch_only(world: lockstep.World, *, clears_first: bool) -> None:
    """Trains with a condition around `step`, but with none around `zero_grad`."""
    model, optimizer = ready(world)
    for batch in world.loader(tensors(), 10, micro_batch_size=5):
        if clears_first:
            optimizer.zero_grad()
        world.backward(mean_loss(model, batch))
        if world.is_last_micro_batch:
            optimizer.step()
        if not clears_first:
            optimizer.zero_grad()


@pytest.mark.parametrize("clears_first", [True, False])
def test_a_step_whose_first_gradients_zero_grad_has_cleared_is_warned_of(world, clears_first):
    with pytest.warns(LockstepWarning, match="the optimizer has stepped with those of the later"):
        step_in_the_last_micro_batch_only(world, clears_first=clears_first)


def test_a_global_batch_that_is_cleared_and_left_out_is_not_warned_of(world):
    model, optimizer = ready(world)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LockstepWarning)
        number = 0
        for batch in world.loader(tensors(), 10, micro_batch_size=5):
            world.backward(mean_loss(model, batch))
            if number != 1:
                optimizer.step()
            optimizer.zero_grad()
            if world.is_last_micro_batch:
                number += 1
    assert number > 2


def test_an_optimizer_that_is_not_prepared_and_steps_in_each_micro_batch_is_noticed(world):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = world.prepare(model)
    loader = world.loader(tensors(), 10, micro_batch_size=5)
    with pytest.raises(UsageError, match="whose optimizer is not prepared"):
        for batch in loader:
            world.backward(mean_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    optimizer.zero_grad()
    for batch in loader:  # by hand, but right
        world.backward(mean_loss(model, batch))
        if loader.current.last:
            optimizer.step()
            optimizer.zero_grad()


def test_an_optimizer_that_is_not_prepared_is_noticed_under_fp16():
    with lockstep.init(precision="fp16") as world:
        model = world.prepare(mlp())
        with pytest.raises(UsageError, match="multiplied by the scale of the loss"):
            world.backward(mean_loss(model, next(iter(world.loader(tensors(), 10)))))


def test_gradients_of_a_global_batch_that_was_broken_off_are_dropped(world):
    model, optimizer = ready(world)
    loader = world.loader(tensors(), 10, micro_batch_size=5)
    for batch in loader:
        world.backward(mean_loss(model, batch))
        optimizer.step()
        break
    del batch
    assert all(p.grad is None for p in model.parameters())


def test_two_loaders_in_one_step(world):
    model, optimizer = ready(world)
    one, other = world.loader(tensors(), 10), world.loader(tensors(), 5)
    for a, b in zip(one, other, strict=False):
        world.backward(mean_loss(model, a) + mean_loss(model, b))
        optimizer.step()
        optimizer.zero_grad()
    assert world._run.step.number == 5
    parts = world.loader(tensors(), 10, micro_batch_size=5)
    with pytest.raises(UsageError, match="two prepared loaders at a time"):
        for a, b in zip(one, parts, strict=False):
            mean_loss(model, a)
            mean_loss(model, b)


def test_an_iterator_that_is_kept_does_not_hold_the_step(world):
    model, optimizer = ready(world)
    loader = world.loader(tensors(), 10, micro_batch_size=5)
    kept = iter(loader)
    next(kept)
    kept.close()
    before = weights(model)
    world.backward(mean_loss(model, tensors()[:4]))
    optimizer.step()
    assert difference(before, weights(model)) > 0


def test_evaluation_inside_of_training_leaves_the_position_alone(world):
    model, optimizer = ready(world)
    train, test = world.loader(tensors(), 10), world.loader(tensors(), 10)
    for step, batch in enumerate(train):
        world.backward(mean_loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        next(iter(test))  # with gradients enabled
        with torch.no_grad():
            list(test)
        assert train.state_dict()["step"] == step + 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_inside_a_pass_over_the_same_loader(world, workers):
    loader = world.loader(Augmented(40), 4, shuffle=True, num_workers=workers)
    twin = world.loader(Augmented(40), 4, shuffle=True)
    expected = [x.tolist() for x, _ in twin]
    found = []
    for step, (x, _) in enumerate(loader):
        found.append(x.tolist())
        if step == 3:
            with torch.no_grad():
                list(loader)
    assert found == expected


def test_a_finished_training_that_is_started_again_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for num_epochs in (1, 1, 2):
        with lockstep.init(seed=3) as world:
            model, optimizer = ready(world)
            loader = world.loader(tensors(8), 4)
            checkpoint = world.checkpoint(tmp_path, model=model, loader=loader)
            checkpoint.resume()
            for _ in world.epochs(num_epochs):
                for batch in loader:
                    world.backward(mean_loss(model, batch))
                    optimizer.step()
                checkpoint.save()
        said.append(capsys.readouterr().out)

    nothing_left = "nothing is left of world.epochs(1): the run was resumed at epoch 1, step 2;"
    nothing_trained = "trained     nothing after step 2, which was resumed"
    assert nothing_left in said[1]
    assert nothing_trained in said[1]
    for other in (said[0], said[2]):
        assert "nothing" not in other


@pytest.mark.parametrize("when", ["top", "inside", "last batch", "end"])
def test_a_checkpoint_at_any_place_of_the_loop_loses_and_repeats_nothing(tmp_path: Path, when):
    def train(stop: bool) -> tuple[list[int], dict[str, Any]]:
        steps = []
        with lockstep.init(seed=3) as world:
            model, optimizer = ready(world)
            loader = world.loader(tensors(20), 4, shuffle=True)
            checkpoint = world.checkpoint(
                tmp_path / when, model=model, optimizer=optimizer, loader=loader
            )
            checkpoint.resume()
            for epoch in world.epochs(4):
                if stop and (when, epoch) == ("top", 2):
                    checkpoint.save()
                    return steps, {}
                for step, batch in enumerate(loader, loader.start):
                    world.backward(mean_loss(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
                    steps.append(10 * epoch + step)
                    inside = {"inside": 2, "last batch": 4}.get(when)
                    if stop and epoch == 2 and step == inside:
                        checkpoint.save()
                        return steps, {}
                if stop and (when, epoch) == ("end", 1):
                    checkpoint.save()
                    return steps, {}
            return steps, weights(model)

    first, _ = train(stop=True)
    rest, resumed = train(stop=False)
    assert first + rest == [10 * epoch + step for epoch in range(4) for step in range(5)]
    for path in (tmp_path / when).iterdir():
        path.rename(tmp_path / f"{path.name}-moved")
    whole, expected = train(stop=False)
    assert len(whole) == 20
    assert difference(expected, resumed) == 0


@pytest.mark.parametrize("kept", ["generator", "out of sight", "without a seed"])
def test_a_sampler_of_ones_own_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, kept):
    class Drawing(Sampler[int]):
        def __init__(self) -> None:
            rng = np.random.default_rng(None if kept == "without a seed" else 5)
            self.draw = None if kept == "generator" else lambda: rng.permutation(20)
            self.rng = rng if kept == "generator" else None

        def __len__(self) -> int:
            return 20

        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter((self.draw() if self.rng is None else self.rng.permutation(20)).tolist())

    def handed(folder: str, stop: bool) -> list[list[float]]:
        found = []
        with lockstep.init(seed=3) as world:
            model, optimizer = ready(world)
            loader = world.prepare(DataLoader(tensors(20), batch_size=4, sampler=Drawing()))
            state = {"model": model, "optimizer": optimizer, "loader": loader}
            checkpoint = world.checkpoint(tmp_path / folder, **state)
            checkpoint.resume()
            for epoch in world.epochs(3):
                for step, batch in enumerate(loader, loader.start):
                    world.backward(mean_loss(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
                    found.append(batch[0].sum(dim=1).tolist())
                    if stop and (epoch, step) == (1, 2):
                        checkpoint.save()
                        return found
        return found

    pieces = handed("stopped", stop=True)
    warned = pytest.warns(LockstepWarning, match="it gives epoch 1 another order")
    with warned if kept == "without a seed" else contextlib.nullcontext():
        pieces += handed("stopped", stop=False)
    assert sorted(sum(pieces[5:10], [])) == sorted(sum(pieces[:5], []))
    if kept != "without a seed":
        assert pieces == handed("whole", stop=False)


def test_breaking_out_of_the_epochs_counts_the_epoch_if_it_was_done(world):
    model, optimizer = ready(world)
    loader = world.loader(tensors(20), 10)
    for epoch in world.epochs(5):
        for batch in loader:
            world.backward(mean_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 1:
            break
    assert world.epoch == 2
    for _ in world.epochs(5):
        break
    assert world.epoch == 2


def test_a_prepared_scheduler_that_a_checkpoint_leaves_out_is_told(world, tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = world.prepare(model, optimizer, scheduler)
    world.checkpoint(tmp_path, model=model)
    world.checkpoint(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
    with pytest.warns(LockstepWarning, match="the StepLR that was prepared with it is not"):
        world.checkpoint(tmp_path, model=model, optimizer=optimizer)


def test_a_loop_over_a_range_saves_the_epoch_of_its_loader(world, tmp_path):
    model, optimizer = ready(world)
    loader, validation = (world.loader(tensors(20), 10) for _ in range(2))
    checkpoint = world.checkpoint(
        tmp_path,
        model=model,
        optimizer=optimizer,
        loader=loader,
        validation=validation,
        asynchronous=False,
    )
    for _ in range(3):
        with torch.no_grad():
            assert len(list(validation)) == len(list(loader)) == 2
        for batch in loader:
            world.backward(mean_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    manifest = json.loads((checkpoint.save() / "manifest.json").read_text())
    assert (manifest["epoch"], manifest["step"]) == (3, 6)


def test_a_scheduler_that_was_not_prepared_is_noticed_with_micro_batches(world):
    model, optimizer = ready(world)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with pytest.raises(UsageError, match=r"give the scheduler to world\.prepare"):
        for batch in world.loader(tensors(), 10, micro_batch_size=5):
            world.backward(mean_loss(model, batch))
            optimizer.step()
            scheduler.step()


def test_a_closure_of_the_loss_itself_is_noticed():
    with lockstep.init() as world:
        model, optimizer = ready(world)
        for batch in world.loader(tensors(5), 5, weight=lambda batch: 2.0):
            world._run.step.training_pass.micro_batch = lockstep_uneven()
            before = weights(model)

            def closure(batch: Any = batch) -> torch.Tensor:
                loss = mean_loss(model, batch)
                loss.backward()
                return loss.detach()

            with pytest.raises(UsageError, match=r"loss\.backward\(\)"):
                optimizer.step(closure)
            assert difference(before, weights(model)) == 0


def lockstep_uneven() -> Any:
    from lockstep.session.micro_batch import MicroBatch

    return MicroBatch(global_samples=5, local_rows=3, scale=1.2, plain=False)


def test_a_part_that_counts_nothing_may_not_poison_the_gradients(world):
    def train(clamp: bool) -> dict[str, torch.Tensor]:
        model, optimizer = ready(world)
        data = torch.utils.data.TensorDataset(*tensors(10).tensors, torch.arange(10).lt(5).double())
        for x, y, counts in world.loader(data, 10, micro_batch_size=5, weight=lambda b: b[2].sum()):
            each = nn.functional.cross_entropy(model(x), y, reduction="none")
            total = counts.sum().clamp(min=1) if clamp else counts.sum()
            world.backward((each * counts).sum() / total)
            optimizer.step()
        return weights(model)

    assert all(value.isfinite().all() for value in train(clamp=True).values())
    with pytest.raises(UsageError, match="whose weight is 0"):
        train(clamp=False)


def test_fp16_with_two_optimizers_and_clipping_steps_like_fp32():
    def train(precision: str) -> list[dict[str, torch.Tensor]]:
        with lockstep.init(precision=precision) as world:
            pairs = [ready(world, mlp(dtype=torch.float32)) for _ in range(2)]
            for batch in world.loader(tensors(dtype=torch.float32), 10):
                for model, _ in pairs:
                    world.backward(mean_loss(model, batch))
                for model, optimizer in pairs:
                    world.clip_grad_norm_(model, 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
            return [weights(model) for model, _ in pairs]

    low, full = train("fp16"), train("fp32")
    assert all(difference(a, b) < 0.01 for a, b in zip(low, full, strict=True))
    assert difference(low[0], low[1]) == 0


def test_a_scheduler_of_epochs_ticks_also_when_the_last_step_was_left_out():
    with lockstep.init(precision="fp16") as world:
        model = mlp(dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, scheduler = world.prepare(model, optimizer, scheduler)
        data = tensors(dtype=torch.float32)
        for _epoch in world.epochs(3):
            for step, batch in enumerate(world.loader(data, 10)):
                loss = mean_loss(model, batch)
                world.backward(loss * (float("inf") if step == 4 else 1.0))
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
        assert scheduler.get_last_lr() == [0.125]


def test_ddp_on_one_process_is_the_module_itself():
    with lockstep.init("ddp") as world:
        model = mlp()
        assert world.prepare(model) is model
        assert world.strategy == "ddp"


def test_a_failing_block_leaves_the_run_and_says_no_last_words(capsys):
    with pytest.raises(ZeroDivisionError), lockstep.init() as world:
        model, optimizer = ready(world)
        for batch in world.loader(tensors(), 10):
            world.backward(mean_loss(model, batch))
            optimizer.step()
        raise ZeroDivisionError
    assert "trained" not in capsys.readouterr().out
    lockstep.init().close()


# --- two processes


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm, self.head = norm, nn.Linear(6, 4).double()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
        return self.head(self.norm(x.unsqueeze(-1).expand(-1, -1, 3)).mean(-1))


def on_two(tmp: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with lockstep.init(seed=1) as world:
        found["two optimizers"] = two_optimizers(world)
        found["accumulation"] = reductions(world)
        found["buffers"] = moving_buffers(world)
        found["frozen"] = frozen(world)
        found["refused"] = refused(world)
        found["alone"] = rank_0_alone(world)
        found["uneven"] = uneven_evaluation(world)
    with lockstep.init(sync_batchnorm=False) as world:
        model, optimizer = ready(world, mlp(batch_norm=True))
        for batch in world.loader(tensors(30), 10):
            world.backward(mean_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        found["batchnorm per rank"] = weights(model)
    with lockstep.init(lockstep.strategies.DDP(static_graph=True)) as world:
        model, optimizer = ready(world)
        try:
            for batch in world.loader(tensors(), 10, micro_batch_size=3):
                world.backward(mean_loss(model, batch))
                optimizer.step()
        except SettingError as error:
            found["static graph"] = str(error)
    return found


def two_optimizers(world: lockstep.World) -> dict[str, torch.Tensor]:
    """One for each layer of one model, cleared in turns."""
    model = mlp()
    layers = [model[0], model[2]]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
    model, *optimizers = world.prepare(model, *optimizers)
    for batch in world.loader(tensors(21), 7):
        world.backward(mean_loss(model, batch))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def reductions(world: lockstep.World) -> tuple[int, int]:
    """How often gradients were reduced, and how many global batches there were."""
    model, optimizer = ready(world)
    calls = []

    def count(state, bucket):  # type: ignore[no-untyped-def] # torch checks annotations
        calls.append(bucket)
        return allreduce_hook(state, bucket)

    model.register_comm_hook(None, count)
    before = world._run.step.number
    for batch in world.loader(tensors(48), 12, micro_batch_size=2):
        world.backward(mean_loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return len(calls), world._run.step.number - before


def moving_buffers(world: lockstep.World) -> list[Any]:
    model, optimizer = ready(world, Normed(nn.InstanceNorm1d(6, track_running_stats=True).double()))
    for batch in world.loader(tensors(30), 6):
        world.backward(mean_loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    (steps,) = world._preparer.wrapped[model].extensions
    return [steps.moving_buffers.moving, *weights(model).values()]


def frozen(world: lockstep.World) -> list[torch.Tensor]:
    torch.manual_seed(world.rank)
    target = nn.Linear(3, 3).requires_grad_(False)
    return list(weights(world.prepare(target)).values())


def refused(world: lockstep.World) -> list[str]:
    messages = []
    for act in (
        lambda: world.prepare(DataLoader(tensors(8 + world.rank), batch_size=4)),
        lambda: world.prepare(DataLoader(split(world.rank), batch_size=4)),
    ):
        with pytest.raises(RanksDifferError) as caught:
            act()
        messages.append(str(caught.value))
    return messages


def split(rank: int) -> Any:
    return random_split(tensors(20), [10, 10], generator=torch.Generator().manual_seed(rank))[0]


def rank_0_alone(world: lockstep.World) -> Any:
    """Rank 0 evaluates with a loader of its own; the model has BatchNorm."""
    model, optimizer = ready(world, mlp(batch_norm=True))
    for batch in world.loader(tensors(20), 10):
        world.backward(mean_loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    count = 0
    if world.is_main:
        with torch.no_grad():
            count = sum(len(model(x)) for x, _ in DataLoader(tensors(13), batch_size=4))
        count += len(model(tensors(5)[:][0]))  # with gradients enabled too
    model.train()
    return world.sum(count)


def uneven_evaluation(world: lockstep.World) -> list[Any]:
    """11 samples in batches of 10: rank 1 has none of the last."""
    model, _ = ready(world, mlp(batch_norm=True))
    loader = world.loader(tensors(11), 10)
    found = []
    with torch.no_grad():
        with pytest.raises(UsageError, match="in training mode in an evaluation loop"):
            for x, _ in loader:
                model(x)
        with pytest.raises(UsageError, match=r"world\.sum in the body"):
            for x, _ in loader:
                world.sum(len(x))
        model.eval()
        found.append([len(model(x)) for x, _ in loader])
    return [*found, world.sum(sum(found[0]))]


def test_on_two_processes(tmp_path: Path):
    first, second = run_ranks(on_two, 2, str(tmp_path))
    with lockstep.init(seed=1) as world:
        expected = two_optimizers(world)
    assert difference(first["two optimizers"], expected) < 1e-12
    assert first["accumulation"] == second["accumulation"] == (4, 4)
    moving, *values = first["buffers"]
    assert moving == ["steps", "norm.running_mean", "norm.running_var"]
    for name in ("buffers", "frozen"):
        for a, b in zip(first[name][1:], second[name][1:], strict=True):
            assert torch.equal(a, b), name
    assert len(values) == 7
    one, other = first["batchnorm per rank"], second["batchnorm per rank"]
    assert all(torch.equal(one[name], other[name]) for name in one)
    for found in (first, second):
        assert "8 samples" in found["refused"][0]
        assert "9 samples" in found["refused"][0]
        assert found["refused"][1].count("checksum") == 2
        assert found["alone"] == 18
        assert "static_graph=True" in found["static graph"]
    assert first["uneven"] == [[5, 1], 11]
    assert second["uneven"] == [[5], 11]


def first_line_printed() -> str:
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        agree = Join.agree
        patch.setattr(Join, "agree", lambda self: agree(self) and ["alpha", "alpha", "beta"])
        with lockstep.init() as world:
            ready(world)
    return printed.getvalue().partition("\n")[0]


def test_hosts_are_counted_where_they_hold_unequal_numbers_of_ranks():
    first, *others = run_ranks(first_line_printed, 3)
    assert first == f"lockstep {lockstep.__version__} · 3 processes on 2 hosts"
    assert others == ["", ""]
