"""Strategies fsdp and hsdp where a model or a loop is unusual: the numbers of one device, or an
error that says why not.
"""

from __future__ import annotations

import copy
import io
import itertools
import os
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import FEATURES, difference, tensors
from ranks import run_ranks
from test_fsdp import FINDS_UNUSED, whole
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributions import Categorical
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import lockstep
from lockstep.errors import LockstepError, LockstepWarning
from lockstep.strategies import FSDP
from lockstep.strategies.fsdp_shown_gradients import ShownGradients

pytestmark = pytest.mark.ranks

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(self.norm(x)))


class Net(nn.Module):
    """Two units and the rest."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList([block(), block()])
        self.head = nn.Linear(FEATURES, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(
    strategy: Any,
    model: nn.Module,
    loss: Loss = entropy,
    *,
    between: Callable[[nn.Module, int], Any] = lambda model, step: None,
    optimizer: Callable[..., Any] = torch.optim.SGD,
    samples: int = 50,
    micro_batch_size: int | None = None,
    steps: int = 4,
) -> dict[str, Tensor]:
    """Weights after some steps; `between` is called after the backward passes of each."""
    with lockstep.init(strategy, seed=5) as world:
        opt = optimizer(model.parameters(), lr=0.1)
        model, opt = world.prepare(model, opt)
        each = None if micro_batch_size is None else micro_batch_size // world.size
        loader = world.loader(tensors(samples), 16, shuffle=True, micro_batch_size=each)
        while world._run.step.number < steps:
            for batch in loader:
                world.backward(loss(model, batch))
                between(model, world._run.step.number)
                opt.step()
                opt.zero_grad()
                if world._run.step.number == steps:
                    break
        return whole(model)


def net(make: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(3)
    return make().double()


class Aside(Block):
    """A term of the loss beside the output, made after it."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.terms = {"norm": [(x.sin() * self.norm.weight).square().mean()]}
        return out


class Policy(nn.Module):
    """One unit, and its output is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 4)

    def forward(self, x: Tensor) -> Any:
        return Categorical(logits=self.layer(x))


class Silent(Policy):
    def forward(self, x: Tensor) -> None:
        self.kept = SimpleNamespace(logits=self.layer(x)) if self.hidden else (self.layer(x),)

    hidden = False


def silent_in_handler(model: nn.Module, batch: Batch) -> Tensor:
    """The error that the script handles is not one of the forward pass, which returns None."""
    error = ValueError("of the script")
    try:
        raise error
    except ValueError:
        outputs = [model(batch[0])]
        with torch.no_grad():
            outputs.append(model(batch[0].new_zeros(1, FEATURES)))
        outputs.append(model(batch[0]))
    assert outputs == [None, None, None]
    assert not hasattr(error, "__notes__")
    return F.cross_entropy(model.kept[0], batch[1])


def of_aside(model: nn.Module, batch: Batch) -> Tensor:
    return entropy(model, batch) + sum(block.terms["norm"][0] for block in model.blocks)


def penalty(model: nn.Module, batch: Batch, again: bool = False) -> Tensor:
    """With the gradient of a gradient (WGAN-GP)."""
    x, y = batch[0].clone().requires_grad_(), batch[1]
    out = model(x)
    [gradient] = torch.autograd.grad(out.sum(), x, create_graph=True)
    smooth = gradient.square().sum() / max(len(x), 1)
    with torch.no_grad():
        model(x)
    return F.cross_entropy(model(batch[0]) if again else out, y) + smooth


class Stop(Exception):
    """Leaves a forward pass in its middle."""


def left(model: nn.Module, step: int, grad: bool = False) -> None:
    """A forward pass that is left by an exception, between backward pass and step."""

    def stop(*_: Any) -> None:
        raise Stop

    hook = model.blocks[1].layer.register_forward_hook(stop)
    try:
        with torch.set_grad_enabled(grad):
            model(torch.ones(2, FEATURES, dtype=torch.float64))
    except Stop:
        pass
    hook.remove()


def frozen_at_first() -> nn.Module:
    model = Net()
    model.blocks.requires_grad_(False)
    model.head.weight.requires_grad_(False)
    return model


def unfreeze(model: nn.Module, step: int) -> None:
    if step == 4:
        model.requires_grad_(True)


def frozen_within_a_batch(strategy: Any) -> dict[str, Tensor]:
    """In the second micro-batch of a global batch; and trained again in that of a later one."""
    passes: list[int] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        passes.append(len(passes))
        if passes[-1] in (1, 5):
            model.blocks.requires_grad_(passes[-1] == 5)
        return entropy(model, batch)

    return train(strategy, net(), loss, micro_batch_size=8, samples=64)


class Normed(nn.Module):
    """Parametrizations inside of units and outside; parameters smaller than the ranks are many."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"module": Block(), "_orig_mod": Block()})
        for block in self.blocks.values():
            parametrizations.weight_norm(block.layer)
        self.last = parametrizations.spectral_norm(nn.Linear(FEATURES, 4))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(1, FEATURES)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for scale, block in zip(self.scales, self.blocks.values(), strict=True):
            x = block(x * scale)
        return self.last(x)


def to_where_it_is(model: nn.Module, batch: Batch) -> Tensor:
    return entropy(model.to(batch[0].device).double(), batch)


def average(strategy: Any) -> dict[str, Tensor]:
    """A moving average of the weights, prepared like the model."""
    with lockstep.init(strategy, seed=5) as world:
        model = net()
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, ema = world.prepare(model, optimizer, ema)
        for batch in world.loader(tensors(32), 16):
            world.backward(entropy(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(model)
        return whole(ema)


def searched(strategy: Any) -> dict[str, Tensor]:
    """LBFGS keeps the list of parameters that it was built with."""
    with lockstep.init(strategy, seed=5) as world:
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
        model, optimizer = world.prepare(model, optimizer)
        for batch in world.loader(tensors(48), 48):

            def closure(batch: Batch = batch) -> Tensor:
                optimizer.zero_grad()
                loss = entropy(model, batch)
                world.backward(loss)
                return world.mean(loss.detach())

            optimizer.step(closure)
        return whole(model)


def unit_first(model: nn.Module, batch: Batch) -> Tensor:
    """A block by itself, before the model has ever run."""
    return model.blocks[0](batch[0]).square().mean() + entropy(model, batch)


def back_to_the_best(strategy: Any) -> dict[str, Tensor]:
    """A copy of the state is kept, and loaded again, on all ranks."""
    with lockstep.init(strategy, seed=5) as world:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        for number, batch in enumerate(world.loader(tensors(64), 16)):
            world.backward(entropy(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            if number == 2:
                model.load_state_dict(best[0])
                optimizer.load_state_dict(best[1])
        return whole(model)


def cleared_after_forward(
    strategy: Any, *, set_to_none: bool, by_part: bool = False
) -> dict[str, Tensor]:
    """`model.zero_grad()` is called while the model has whole parameters, on several ranks in each
    of several micro-batches. (To write zeros between micro-batches is refused.)"""
    with lockstep.init(strategy, seed=5) as world:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        size = 3 if world.size > 1 and set_to_none else None
        for batch in world.loader(tensors(48), 16, micro_batch_size=size):
            loss = entropy(model, batch)
            for part in model.children() if by_part else [model]:
                part.zero_grad(set_to_none)
            world.backward(loss)
            optimizer.step()
        return whole(model)


def cleared_by_hand(
    strategy: Any, clear: Callable[[nn.Module], None], **settings: Any
) -> dict[str, Tensor]:
    """Gradients are cleared while the model has whole parameters, without `zero_grad`."""
    micro_batch_size = settings.pop("micro_batch_size", None)
    with lockstep.init(strategy, seed=5, **settings) as world:
        model = net().float() if settings else net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        for x, labels in world.loader(tensors(48), 16, micro_batch_size=micro_batch_size):
            loss = entropy(model, (x.float() if settings else x, labels))
            clear(model)
            world.backward(loss)
            optimizer.step()
        return whole(model)


def set_to_none(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def set_to_zero(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def cleared_in_half() -> dict[str, dict[str, Tensor]]:
    """A gradient in fp32 cannot be shown at a parameter in bf16."""
    return {
        name: cleared_by_hand("fsdp", clear, precision="bf16")
        for name, clear in {
            "zero_grad": lambda model: model.zero_grad(),
            "none": set_to_none,
            "zeros": set_to_zero,
        }.items()
    }


def skipped_after_forward(strategy: Any, *, by_hand: bool) -> dict[str, Tensor]:
    """The loop skips the last micro-batch of a global batch, once it has seen the loss. Gradients
    of the first one are not added to those of the next global batch."""
    with lockstep.init(strategy, seed=5) as world:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(tensors(64), 16, micro_batch_size=8 // world.size)
        for number, batch in enumerate(loader):
            if by_hand and loader.current.first:
                set_to_none(model)
            loss = entropy(model, batch)
            if number == 3:
                assert loader.current.last
                continue
            world.backward(loss)
            optimizer.step()
            if not by_hand:
                optimizer.zero_grad()
        return whole(model)


def fetched_before_backward(strategy: Any) -> dict[str, Tensor]:
    """The loop gets the next batch between a forward and a backward pass, so the loader has ended
    before the backward pass of its last micro-batch."""
    with lockstep.init(strategy, seed=5) as world:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(tensors(32), 16, micro_batch_size=8 // world.size)
        for _ in range(2):
            batches = iter(loader)
            fetched = [next(batches), next(batches)]  # two, so that forward passes are noted
            while fetched:
                loss = entropy(model, fetched.pop(0))
                if not fetched:
                    fetched = list(itertools.islice(batches, 1))
                world.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return whole(model)


def recomputed(strategy: Any) -> dict[str, Tensor]:
    """Backward passes run the whole forward pass again, and the second one finds gradients."""
    with lockstep.init(strategy, seed=5) as world:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        for x, labels in world.loader(tensors(48), 16):
            for _ in range(2):
                with set_checkpoint_early_stop(False):
                    out = checkpoint(model, x, use_reentrant=False)
                world.backward(F.cross_entropy(out, labels))
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)


def clipped_in_half(*, another_forward: bool) -> dict[str, Tensor]:
    """The norms that are clipped. Another forward pass, with gradients, does not change them."""
    found: dict[str, Tensor] = {}
    with lockstep.init("fsdp", seed=5, precision="bf16") as world:
        model = net().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        for number, (x, labels) in enumerate(world.loader(tensors(48), 16)):
            x = x.float()
            world.backward(entropy(model, (x, labels)))
            two_parts = nn.ModuleList([model.blocks[0], model.head])
            for name, part in {"head": model.head, "two": two_parts, "model": model}.items():
                if another_forward:
                    model(x)
                norm = world.clip_grad_norm_(part, 0.1)
                assert norm is not None
                found[f"{name} {number}"] = norm
            optimizer.step()
            optimizer.zero_grad()
        return {**found, **whole(model)}


def norms(strategy: Any) -> dict[str, Tensor]:
    """Of gradients of two types, of which a rank may have nothing of one; and the smallest."""
    model = net().float()
    model.first = nn.Identity()
    model.head = nn.Linear(FEATURES, 2, bias=False).double()
    model.head.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    with lockstep.init(strategy, seed=5) as world:
        model = world.prepare(model)
        x = torch.linspace(-1, 2, FEATURES).view(1, FEATURES)
        found = {}
        world.backward(1e3 * model(x).square().sum())
        for kind in (2.0, 3.0, float("inf")):
            found[f"{kind}"] = world.clip_grad_norm_(model, 1e9, kind)
        found["smallest"] = world.clip_grad_norm_(model.head, 1e9, float("-inf"))
        for kind in (2.0, float("inf"), float("-inf")):
            for p in model.parameters():
                own = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                own.fill_(torch.nan if world.is_main else 1.0)
            assert world.clip_grad_norm_(model, 1e9, kind).isnan()
        return found


EXACT: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    "terms in attributes": lambda s: train(s, net(lambda: Net(Aside)), of_aside),
    "terms in attributes, micro-batches": lambda s: train(
        s, net(lambda: Net(Aside)), of_aside, micro_batch_size=6
    ),
    "an object": lambda s: train(s, net(Policy), lambda m, b: -m(b[0]).log_prob(b[1]).mean()),
    "an attribute alone": lambda s: train(
        s, net(Silent), lambda m, b: F.cross_entropy((m(b[0]), m.kept)[1][0], b[1])
    ),
    "an attribute alone, while an error is handled": lambda s: train(
        s, net(Silent), silent_in_handler
    ),
    "gradient of a gradient": lambda s: train(s, net(), penalty, micro_batch_size=8),
    "and another forward": lambda s: train(s, net(), lambda m, b: penalty(m, b, again=True)),
    "unfrozen": lambda s: train(s, net(frozen_at_first), between=unfreeze, samples=200, steps=11),
    "frozen within a batch": frozen_within_a_batch,
    "parametrizations": lambda s: train(s, net(Normed)),
    "moved to where it is": lambda s: train(s, net(), to_where_it_is),
    "moving average": average,
    "LBFGS": searched,
    "a unit before the model": lambda s: train(s, net(), unit_first, samples=48),
    "back to the best": back_to_the_best,
    "cleared after forward": partial(cleared_after_forward, set_to_none=True),
    "zeroed after forward": partial(cleared_after_forward, set_to_none=False),
    "cleared by part": partial(cleared_after_forward, set_to_none=True, by_part=True),
    "cleared by hand": partial(cleared_by_hand, clear=set_to_none),
    "zeroed by hand": partial(cleared_by_hand, clear=set_to_zero),
    "skipped after forward": partial(skipped_after_forward, by_hand=False),
    "skipped after forward, cleared by hand": partial(skipped_after_forward, by_hand=True),
    "fetched before backward": fetched_before_backward,
    "recomputed": recomputed,
}
LEFT: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    "evaluation that is left": lambda s: train(s, net(), between=left),
    "forward that is left": lambda s: train(s, net(), between=lambda m, n: left(m, n, grad=True)),
}
if RESETS := hasattr(FSDPModule, "reset_iter_state"):  # else there is an error
    EXACT |= LEFT


def exact(strategy: Any) -> dict[str, Any]:
    return {name: case(strategy) for name, case in EXACT.items()}


def on_two() -> dict[str, Any]:
    return {
        "fsdp": exact("fsdp"),
        "kept whole": {
            name: EXACT[name](FSDP(reshard_after_forward=False))
            for name in (
                "and another forward",
                "frozen within a batch",
                "cleared by hand",
                "skipped after forward",
                "skipped after forward, cleared by hand",
            )
        },
        "in half": cleared_in_half(),
        "clipped": clipped_in_half(another_forward=False),
        "clipped after another forward": clipped_in_half(another_forward=True),
        "refused": refused(),
        "others": other_parts(),
        "loaded on one": loaded_on_one(),
        "in turn": in_turn(),
    }


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    [found] = run_ranks(exact_on_one, 1)
    return found


def exact_on_one() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LockstepWarning)  # of what is unfrozen
        return {**exact("single"), "norms": norms("single")}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(on_two, 2)


@pytest.mark.parametrize("case", EXACT)
def test_unusual_models_and_loops_give_the_numbers_of_one_device(one, two, case):
    for of_rank in two:
        assert difference(one[case], of_rank["fsdp"][case]) < 1e-9


def test_units_that_are_kept_whole_may_be_differentiated_twice_and_frozen(one, two):
    for of_rank in two:
        for name, found in of_rank["kept whole"].items():
            assert difference(one[name], found) < 1e-9, name


def test_gradients_that_are_cleared_by_hand_in_half_precision(two):
    for of_rank in two:
        found = of_rank["in half"]
        assert difference(found["zero_grad"], found["none"]) == 0.0
        assert difference(found["zero_grad"], found["zeros"]) == 0.0


def test_another_forward_pass_before_clipping_leaves_the_norm_as_it_is(two):
    for found in two:
        assert difference(found["clipped"], found["clipped after another forward"]) == 0.0


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch has no dtype of gradients")
def test_a_gradient_is_shown_in_the_dtype_that_the_whole_parameter_takes():
    shards = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    whole_parameters = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in shards]
    for shard, parameter in zip(shards, whole_parameters, strict=True):
        shard.grad = torch.ones_like(shard)
        parameter.grad_dtype = torch.float32  # as torch 2.15 sets it for units in half precision

    shown = ShownGradients(shards, whole_parameters)
    shown.show(accumulates_in_whole=False)
    assert whole_parameters[0].grad is shards[0].grad
    assert whole_parameters[1].grad.isnan().all()

    shown.hide()
    assert [parameter.grad for parameter in whole_parameters] == [None, None]
    assert [shard.grad.tolist() for shard in shards] == [[1.0, 1.0], [1.0, 1.0]]


def test_the_norm_of_gradients_that_some_ranks_have_nothing_of(one):
    for found in run_ranks(norms, 3, "fsdp"):
        assert difference(one["norms"], found) < 1e-6


def unmoved(model: nn.Module, batch: Batch) -> Tensor:
    for p in model.parameters():
        p.data = p.data.clamp(-0.1, 0.1)
    return entropy(model, batch)


def watched(model: nn.Module, batch: Batch) -> Tensor:
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return entropy(model, batch)


def of_shards(model: nn.Module, batch: Batch) -> Tensor:
    return entropy(model, batch) + model.blocks[0].layer.weight.full_tensor().square().sum()


def of_other_weights(model: nn.Module, batch: Batch) -> Tensor:
    weights = {name: shard - 0.1 for name, shard in model.named_parameters()}
    return F.cross_entropy(torch.func.functional_call(model, weights, (batch[0],)), batch[1])


def of_other_head(model: nn.Module, batch: Batch) -> Tensor:
    bias = torch.zeros(4, dtype=torch.float64)
    logits = torch.func.functional_call(model, {"head.bias": bias}, (batch[0],))
    return F.cross_entropy(logits, batch[1])


def empty() -> nn.Module:
    model = Net()
    model.none = nn.Parameter(torch.empty(0, 3))
    return model


def hooked() -> nn.Module:
    model = Net()
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return model


def sparse() -> nn.Module:
    model = Net()
    model.words = nn.Embedding(3, FEATURES, sparse=True)
    return model


def of_hidden(model: nn.Module, batch: Batch) -> Tensor:
    model.hidden = True
    model(batch[0])
    return F.cross_entropy(model.kept.logits, batch[1])


def refused() -> dict[str, str]:
    """What each of them says."""
    old: list[Any] = []

    def kept() -> nn.Module:
        model = net()
        old[:] = model.parameters()
        return model

    def clip(model: nn.Module, step: int) -> None:
        torch.nn.utils.clip_grad_norm_(old, 1.0)

    cases: dict[str, Callable[[], Any]] = {
        **({} if RESETS else {name: partial(case, "fsdp") for name, case in LEFT.items()}),
        "old in a norm": lambda: train("fsdp", kept(), between=clip),
        "old in a penalty": lambda: train(
            "fsdp", kept(), lambda m, b: entropy(m, b) + sum(p.square().sum() for p in old)
        ),
        "data": lambda: train("fsdp", net(), unmoved),
        "hook": lambda: train("fsdp", net(), watched),
        "hook before": lambda: train("fsdp", net(hooked)),
        "shards": lambda: train("fsdp", net(), of_shards),
        "empty": lambda: train("fsdp", net(empty)),
        "unseen": lambda: train("fsdp", net(Silent), of_hidden),
        "converted": lambda: train("fsdp", net(), lambda m, b: entropy(m.float(), b)),
        "penalty": lambda: train(
            "fsdp", net(), lambda m, b: entropy(m, b) + m.blocks[0].norm.weight.square().sum()
        ),
        "sparse": lambda: train("fsdp", net(sparse)),
        "copied": lambda: train("fsdp", net(), between=lambda m, n: copy.deepcopy(m)),
        "saved": lambda: train("fsdp", net(), between=lambda m, n: torch.save(m, io.BytesIO())),
        "block": lambda: train("fsdp", net(), between=lambda m, n: pickle.dumps(m.blocks[0])),
        "cleared within": lambda: cleared_by_hand("fsdp", set_to_none, micro_batch_size=3),
        "functional": lambda: train("fsdp", net(), of_other_weights),
        "functional, head": lambda: train("fsdp", net(), of_other_head, samples=96),
        "whole state": lambda: train(
            "fsdp", net(), between=lambda m, n: m.load_state_dict(net().state_dict())
        ),
    }
    found = {}
    for name, case in cases.items():
        try:
            case()
        except LockstepError as error:
            found[name] = error.message
    assert "replaced" in repr(old[0])
    return found


def test_what_would_go_wrong_in_silence_is_refused(two):
    for found in (of_rank["refused"] for of_rank in two):
        for name in () if RESETS else LEFT:
            assert "cannot take up such a model" in found[name]
        assert "taken from a model before world.prepare" in found["old in a norm"]
        assert "taken from a model before world.prepare" in found["old in a penalty"]
        assert "no effect on first.weight" in found["data"]
        assert "those of head.weight are not called" in found["hook"]
        assert "those of head.weight are not called" in found["hook before"]
        assert "blocks.0.layer.weight was a shard" in found["shards"]
        assert "'none'" in found["empty"]
        assert "layer.weight, layer.bias stayed on this rank" in found["unseen"]
        assert "shards stay in torch.float64" in found["converted"]
        assert "outside of its forward pass" in found["penalty"]
        assert "'words', an embedding with sparse gradients" in found["sparse"]
        assert "a copy of a sharded model" in found["copied"]
        for name in ("saved", "block"):
            assert "torch.save, pickle or copy.copy of a sharded model" in found[name]
            assert "lockstep.save_weights(model, path)" in found[name]
        assert "those of the micro-batches before are lost" in found["cleared within"]
        other_tensor = "is not the tensor that world.prepare has sharded"
        assert f"first.weight {other_tensor}" in found["functional"]
        assert f"head.bias {other_tensor}" in found["functional, head"]
        assert "use strategy='ddp'" in found["functional"]
        assert "first.weight, first.bias" in found["whole state"]
        assert "lockstep.load_weights(model, path)" in found["whole state"]


def loaded_on_one() -> str:
    """What the next step says."""
    old: dict[str, Any] = {}

    def load(model: nn.Module, step: int) -> None:
        if step == 1:
            old.update(copy.deepcopy(model.state_dict()))
        if step == 2 and os.environ["RANK"] == "0":
            model.load_state_dict(old)

    try:
        train("fsdp", net(), between=load)
    except LockstepError as error:
        return error.message
    return ""


def test_a_state_that_one_rank_alone_has_loaded(two):
    for of_rank in two:
        assert "some ranks called it and others did not" in of_rank["loaded on one"]


def in_turn() -> list[str]:
    """What is said of a forward pass, and of a collective, inside of `main_process_first`."""
    said = []
    with lockstep.init("fsdp", seed=5) as world:
        model = world.prepare(net())
        x = torch.ones(2, FEATURES, dtype=torch.float64)
        for work in (lambda: model(x), world.barrier):
            try:
                with torch.no_grad(), world.main_process_first():
                    work()
            except LockstepError as error:
                said.append(error.message)
        with torch.no_grad():
            model(x)
    return said


def test_what_all_ranks_do_together_is_refused_while_they_take_turns(two):
    assert "a forward pass of a sharded model inside of" in two[0]["in turn"][0]
    assert "barrier inside of" in two[0]["in turn"][1]
    for said in two[1]["in turn"]:
        assert "rank 0 raised in its block" in said


class Experts(nn.Module):
    """Runs those whose numbers it is given."""

    def __init__(self, expert: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList([expert(), expert()])
        self.head = nn.Linear(FEATURES, 4)

    def forward(self, x: Tensor, numbers: list[int]) -> Tensor:
        for number in numbers:
            x = self.experts[number](x)
        return self.head(x)


def other_parts() -> dict[str, Any]:
    """In the last step the ranks run units, or use parameters, that others do not: what is said."""

    def steps(
        strategy: Any, expert: Callable[[], nn.Module], number: int, last: list[list[int]]
    ) -> list[str]:
        said = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", LockstepWarning)
            with lockstep.init(strategy, seed=5) as world:
                torch.manual_seed(3)
                model = Experts(expert)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                model, optimizer = world.prepare(model, optimizer)
                x = torch.ones(2, FEATURES)
                try:
                    for step in range(number):
                        numbers = last[world.rank if step == number - 1 else 0]
                        world.backward(model(x, numbers).square().mean())
                        optimizer.step()
                        optimizer.zero_grad()
                    if number == 5:
                        model(x, last[0])
                except LockstepError as error:
                    said.append(error.message)
        return said + [f"warning {warning.message}" for warning in caught]

    linear = partial(nn.Linear, FEATURES, FEATURES)
    return {
        "units": steps("fsdp", Block, 5, [[0], [1]]),
        "units, last": steps("fsdp", Block, 1, [[0], [1]]),
        "order": steps("fsdp", Block, 5, [[0, 1], [1, 0]]),
        "parameters": steps("fsdp", linear, 5, [[0], [1]]),
        "unused": FINDS_UNUSED and steps(FSDP(find_unused_parameters=True), linear, 5, [[0], [1]]),
    }


def test_ranks_that_use_other_parts_of_the_model(two):
    for rank, found in enumerate(of_rank["others"] for of_rank in two):
        assert "experts.0, experts.1 ran more often on some" in found["units"][0]
        assert "another order" in found["order"][0]
        assert "experts.0.weight, experts.0.bias, experts.1.weight" in found["parameters"][0]
        assert found["unused"] == (FINDS_UNUSED and [])
        assert len(found["units, last"]) == (1 if rank == 0 else 0)  # warnings are rank 0's
    assert "warning forward passes" in two[0]["others"]["units, last"][0]


def machines() -> str:
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"] = str(rank % 2), str(rank // 2)
    os.environ["LOCAL_WORLD_SIZE"] = "2" if rank < 2 else "1"
    try:
        lockstep.init("hsdp")
    except LockstepError as error:
        return f"{type(error).__name__} {error.found}"
    return ""


class Scaled(Net):
    """A model with a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class Clearing(Scaled):
    """A model that clears more than gradients."""

    num_cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.num_cleared += 1
        super().zero_grad(set_to_none)


def clear_odd_gradients() -> tuple[float, int, int]:
    with lockstep.init("fsdp", seed=5) as world:
        model: Any = world.prepare(net(Scaled))
        model.scale.grad = torch.ones(2, dtype=torch.float64)[0]  # a view of another tensor
        model.zero_grad(set_to_none=False)
        clearing: Any = world.prepare(net(Clearing))
        clearing.zero_grad()
        copied = copy.deepcopy(model.first)  # a part that is no unit
        for parameter in copied.parameters():
            parameter.grad = torch.zeros_like(parameter)
        copied.zero_grad()
        num_left = sum(parameter.grad is not None for parameter in copied.parameters())
        return model.scale.grad.item(), clearing.num_cleared, num_left


def test_gradients_that_are_views_a_zero_grad_of_the_script_and_that_of_a_copy():
    assert run_ranks(clear_odd_gradients, 2) == [(0.0, 1, 0)] * 2


def test_machines_of_different_size_are_refused_on_every_rank():
    """Of three ranks, two on one machine."""

    found = run_ranks(machines, 3)
    assert found == ["RanksDifferError ranks 0 to 2 have 2, 2, 1 ranks a group"] * 3
