"""Large batches: LARS and LAMB, learning rates that follow the batch size, gradual warm-up.

Learning rates and warm-up count in global batches (`batch_size` is the samples, and one step the
duration, of one optimizer step), so neither changes with the number of devices.

The optimizers measure a step against the tensor that it changes: the trust ratio, the norm of the
tensor over that of its step, is a learning rate of each tensor's own, so that one rate suits all
layers. Norms are those of whole tensors. Of a parameter that is sharded over the ranks (a
`DTensor`, as FSDP makes them) all shards count, which takes one small all-reduce for all parameters
that are sharded alike; every rank then steps at the same time, with gradients for the same
parameters. Nothing is read back from a GPU.

Whether they are needed is another question: Nado et al., "A Large Batch Optimizer Reality Check"
(arXiv 2102.06356), reach the same results with well-tuned Nesterov momentum and with Adam.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import ParamsT

from lockstep.distributed.torch_compat import is_sharded, own_part
from lockstep.errors import SettingError, UsageError, unknown_choice_error
from lockstep.settings import check_whole_number
from lockstep.wording import group_by_key

_AT_LEAST_0 = (lambda x: x >= 0, "a number from 0 up")
_ABOVE_0 = (lambda x: x > 0, "a number above 0")
_FRACTION = (lambda x: 0 <= x < 1, "a number from 0 up and below 1")
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "lr": _AT_LEAST_0,
    "momentum": _FRACTION,
    "beta": _FRACTION,
    "weight_decay": _AT_LEAST_0,
    "trust_coefficient": _ABOVE_0,
    "eps": _AT_LEAST_0,
    "max_ratio": _ABOVE_0,
}


class _Layerwise(Optimizer, ABC):
    """What the two have in common.

    Options of a group:
        adapt: None: tensors of two or more dimensions get a trust ratio and weight decay, the
            others (biases, scales and shifts of normalisation layers) get neither. True: all get
            both. False: none gets a trust ratio, all get the weight decay.
        max_ratio: the largest trust ratio; None: no limit.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step.

        Args:
            closure: computes the loss and its gradients again; most training loops need none.

        Returns:
            What the closure returned.

        Raises:
            UsageError: a gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            for adapted in (True, False):
                chosen = [p for p in with_gradient if _adapts(group, p) is adapted]
                decay = group["weight_decay"] if adapted or group["adapt"] is False else 0.0
                for parameters in _sharded_alike(chosen):
                    self._update({**group, "weight_decay": decay}, parameters, adapted)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, with options of their own where the group has some.

        Raises:
            SettingError: an option out of range.
        """
        if isinstance(param_group, dict):  # torch's own complains of anything else
            _check({**self.defaults, **param_group}, type(self).__name__)
        super().add_param_group(param_group)

    @abstractmethod
    def _update(self, group: dict[str, Any], parameters: Sequence[Tensor], adapted: bool) -> None:
        """Changes parameters that are sharded alike; `adapted`: with a trust ratio.

        `group` has the weight decay of these parameters.
        """


class LARS(_Layerwise):
    """Layer-wise Adaptive Rate Scaling, for SGD with momentum.

    You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (arXiv 1708.03888),
    algorithm 1. For each tensor w with gradient g:

        ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)
        v     = momentum * v + ratio * (g + weight_decay * w)
        w     = w - lr * v

    The ratio is 1 where |w| or |g| is 0.

    This is the form of torch's SGD: the learning rate is not in v, so a rate that changes takes
    hold of the whole step at once, and needs no correction of the momentum. The paper's own form
    has it in v; both are the same while the rate stays, and for a rate that changes this one is
    the paper's with the momentum correction of Goyal et al. (arXiv 1706.02677, section 3).

    Args:
        params: as for all optimizers of torch.
        lr: learning rate; with the default `trust_coefficient` one in the order of 1 to 30.
        momentum: of v.
        weight_decay: for the tensors that `adapt` chooses.
        nesterov: steps along `ratio * (g + weight_decay * w) + momentum * v`, as torch's SGD.
        trust_coefficient: how far a step may go, as a fraction of the tensor's norm.
        eps: keeps the ratio finite where the gradient is very small.
        max_ratio: the largest trust ratio; 1.0 never steps further than SGD does (known as LARC).
        adapt: which tensors get a trust ratio and weight decay. None: those of two or more
            dimensions get both, the others (biases, scales and shifts of normalisation layers)
            neither. True: all both. False: all weight decay, none a ratio, which is SGD. For a
            choice by name make groups: `[{"params": ...}, {"params": ..., "adapt": True}]`.

    Raises:
        SettingError: an option out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        max_ratio: float | None = None,
        adapt: bool | None = None,
    ) -> None:
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "max_ratio": max_ratio,
            "adapt": adapt,
        }
        super().__init__(params, options)

    def _update(self, group: dict[str, Any], parameters: Sequence[Tensor], adapted: bool) -> None:
        weights, decay = [own_part(p) for p in parameters], group["weight_decay"]
        gradients = [_gradient(p) for p in parameters]
        ratios: list[Tensor] = []
        if adapted:
            for w, g in zip(*_norms(parameters, [weights, gradients]), strict=True):
                ratio = group["trust_coefficient"] * w / (g + decay * w + group["eps"])
                ratios.append(_or_1(ratio, w, g, group["max_ratio"]))
        for i, (p, weight, gradient) in enumerate(zip(parameters, weights, gradients, strict=True)):
            step = gradient.add(weight, alpha=decay) if decay else gradient
            if adapted:
                step = step.mul(ratios[i]) if step is gradient else step.mul_(ratios[i])
            if group["momentum"]:
                step = self._with_momentum(group, p, step)
            weight.sub_(step, alpha=group["lr"])

    def _with_momentum(self, group: dict[str, Any], parameter: Tensor, step: Tensor) -> Tensor:
        """Adds the step to what the steps before have left; returns where to go."""
        state, momentum = self.state[parameter], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity = own_part(state["momentum_buffer"])
        velocity.mul_(momentum).add_(step)
        return step.add(velocity, alpha=momentum) if group["nesterov"] else velocity


class LAMB(_Layerwise):
    """Layer-wise Adaptive Moments for Batch training: LARS's idea, for Adam.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
    (arXiv 1904.00962), algorithm 2, with phi(x) = x. For each tensor w, with Adam's m and v of its
    gradient, both corrected for their start from 0:

        u     = m / (sqrt(v) + eps) + weight_decay * w
        ratio = |w| / |u|
        w     = w - lr * ratio * u

    The ratio is 1 where |w| or |u| is 0.

    The gradient is taken as it is; where it should be clipped, call `world.clip_grad_norm_`.

    Args:
        params: as for all optimizers of torch.
        lr: learning rate: how far a step goes, as a fraction of the tensor's norm.
        betas: how much of m and of v stays in a step.
        eps: keeps u finite where v is very small.
        weight_decay: for the tensors that `adapt` chooses.
        max_ratio: the largest trust ratio; 1.0 never steps further than AdamW does. (The paper's
            phi bounds |w| instead.)
        adapt: as for `LARS`; False is AdamW.

    Raises:
        SettingError: an option out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        max_ratio: float | None = None,
        adapt: bool | None = None,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_ratio": max_ratio,
            "adapt": adapt,
        }
        super().__init__(params, options)

    def _update(self, group: dict[str, Any], parameters: Sequence[Tensor], adapted: bool) -> None:
        weights = [own_part(p) for p in parameters]
        steps = [self._adam(group, p) for p in parameters]
        if group["weight_decay"]:
            for weight, step in zip(weights, steps, strict=True):
                step.add_(weight, alpha=group["weight_decay"])
        if adapted:
            norms = _norms(parameters, [weights, steps])
            for step, weight_norm, step_norm in zip(steps, *norms, strict=True):
                ratio = weight_norm / step_norm
                step.mul_(_or_1(ratio, weight_norm, step_norm, group["max_ratio"]))
        for weight, step in zip(weights, steps, strict=True):
            weight.sub_(step, alpha=group["lr"])

    def _adam(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """Takes up the gradient; returns m / (sqrt(v) + eps), a new tensor."""
        state, gradient = self.state[parameter], _gradient(parameter)
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)  # on the host, as torch's Adam
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        number = state["step"].item()
        beta1, beta2 = group["betas"]
        mean, square = own_part(state["exp_avg"]), own_part(state["exp_avg_sq"])
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        against = square.div(1 - beta2**number).sqrt_().add_(group["eps"])
        return mean.div(1 - beta1**number).div_(against)


def _check(group: dict[str, Any], name: str) -> None:
    """Raises SettingError where an option of a group is out of range."""
    betas = group.get("betas", (0.0, 0.0))
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise SettingError(f"{name}(betas={betas!r})", "Adam has two of them", "give a pair")
    given = [(key, group[key]) for key in _RANGES if key in group]
    given = [option for option in given if option != ("max_ratio", None)]  # no limit
    for key, value in [*given, *(("beta", beta) for beta in betas)]:
        fits, wanted = _RANGES[key]
        if not _is_number(value) or not math.isfinite(value) or not fits(value):
            raise SettingError(f"{name}({key}={value!r})", "it is out of range", f"give {wanted}")
    if not any(group["adapt"] is value for value in (None, True, False)):
        raise SettingError(
            f"{name}(adapt={group['adapt']!r})",
            "it says which tensors get a trust ratio",
            "None: those of two or more dimensions; True: all; False: none",
        )
    if group.get("nesterov") and not group["momentum"]:
        raise SettingError(f"{name}(nesterov=True)", "momentum=0", "give a momentum above 0")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _adapts(group: dict[str, Any], parameter: Tensor) -> bool:
    """Whether a parameter's step gets a trust ratio."""
    return parameter.dim() >= 2 if group["adapt"] is None else bool(group["adapt"])


def _sharded_alike(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those whose norms are summed over the same ranks together, all others alone."""

    def lot(parameter: Tensor) -> Any:
        mesh: Any = getattr(parameter, "device_mesh", None)
        return id(parameter) if mesh is None else (mesh, _summed_over(parameter), parameter.device)

    return list(group_by_key((lot(parameter), parameter) for parameter in parameters).values())


def _summed_over(parameter: Any) -> tuple[int, ...]:
    """The dimensions of a DTensor's mesh over which its shards lie."""
    return tuple(i for i, where in enumerate(parameter.placements) if not where.is_replicate())


def _gradient(parameter: Any) -> Tensor:
    """The gradient of this rank's part of a parameter."""
    gradient = parameter.grad
    if gradient.is_sparse or gradient.is_complex():
        raise UsageError(
            f"a {'sparse' if gradient.is_sparse else 'complex'} gradient",
            "LARS and LAMB compare the norms of dense real tensors",
            "use nn.Embedding(sparse=False), or give this parameter to an optimizer of torch's",
        )
    if is_sharded(parameter) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return own_part(gradient)


def _norms(parameters: Sequence[Any], lists: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The norms of whole tensors, each a tensor without dimensions on the parameter's device.

    Args:
        parameters: sharded alike.
        lists: each has one tensor for each parameter, this rank's part of it.
    """
    local = [[_norm(tensor) for tensor in tensors] for tensors in lists]
    first = parameters[0]
    mesh = getattr(first, "device_mesh", None)
    if mesh is None:
        return local
    squares = torch.stack([torch.stack(norms).double().square() for norms in local])
    squares = squares.to(mesh.device_type)  # where the group communicates, of offloaded ones too
    for dimension in _summed_over(first):
        dist.all_reduce(squares, group=mesh.get_group(dimension))
    return [list(row) for row in squares.to(first.device).sqrt()]


def _norm(tensor: Tensor) -> Tensor:
    """In float32 at least: squares of small numbers vanish in half precision."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm


def _or_1(ratio: Tensor, one: Tensor, other: Tensor, largest: float | None) -> Tensor:
    """The ratio where both norms are above 0, else 1; at most `largest`. Asks nothing of a GPU."""
    ratio = torch.where((one > 0) & (other > 0), ratio, torch.ones_like(ratio))
    return ratio if largest is None else ratio.clamp(max=largest)


RULES: dict[str, Callable[[float], float]] = {"linear": lambda k: k, "sqrt": math.sqrt}
"""How the learning rate grows when the batch grows k times."""

_CANNOT_FOLLOW: dict[type, str] = {
    lr_scheduler.ReduceLROnPlateau: "it steps on a metric: warm up the optimizer, step it by hand",
    lr_scheduler.OneCycleLR: "it warms up by itself: use its pct_start",
    lr_scheduler.CyclicLR: "it moves between rates of its own",
    lr_scheduler.MultiplicativeLR: "it multiplies whatever rate it meets: use LambdaLR",
    lr_scheduler.SequentialLR: "it cannot start inside another: add LinearLR to its list",
    lr_scheduler.ChainedScheduler: "it cannot start inside a sequence: add LinearLR to its list",
}

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


@overload
def scale_learning_rate(
    optimizer_or_lr: float, *, batch_size: int, base_batch_size: int, rule: str = "linear"
) -> float: ...


@overload
def scale_learning_rate(
    optimizer_or_lr: OptimizerT, *, batch_size: int, base_batch_size: int, rule: str = "linear"
) -> OptimizerT: ...


def scale_learning_rate(
    optimizer_or_lr: Optimizer | float,
    *,
    batch_size: int,
    base_batch_size: int,
    rule: str = "linear",
) -> Optimizer | float:
    """Scales a learning rate that was found at `base_batch_size` to `batch_size`.

    Returns what it was given, scaled: for a number the scaled number, for an optimizer that
    optimizer, with the rate of every parameter group changed in place. Scale an optimizer before
    its scheduler is built: schedulers remember the rates that they begin with.

    Args:
        optimizer_or_lr: a learning rate, or an optimizer.
        batch_size: samples of one optimizer step, over all devices and micro-batches.
        base_batch_size: the same, where the learning rate was found.
        rule: `linear` (times batch_size / base_batch_size: Goyal et al., "Accurate, Large Minibatch
            SGD", arXiv 1706.02677) or `sqrt` (times its square root: Krizhevsky, "One weird trick
            for parallelizing convolutional neural networks", arXiv 1404.5997).

    Raises:
        SettingError: a batch size that is no whole number above 0, a learning rate that is no
            finite number from 0 up, or an unknown rule.
        UsageError: the optimizer already has a scheduler.
    """
    for name, size in (("batch_size", batch_size), ("base_batch_size", base_batch_size)):
        check_whole_number(f"{name}={size!r}", size)
    if rule not in RULES:
        raise unknown_choice_error(f"rule={rule!r}", rule, "the rules", RULES)
    factor = RULES[rule](batch_size / base_batch_size)
    if isinstance(optimizer_or_lr, Optimizer):
        if any("initial_lr" in group for group in optimizer_or_lr.param_groups):
            raise UsageError(
                "scale_learning_rate of an optimizer",
                "it already has a scheduler, which would go on from the rates before scaling",
                "call scale_learning_rate before building the scheduler",
            )
        for group in optimizer_or_lr.param_groups:
            group["lr"] *= factor  # a tensor changes in place
        return optimizer_or_lr
    number = _is_number(optimizer_or_lr)
    if not number or not 0 <= optimizer_or_lr < math.inf:
        raise SettingError(
            "scale_learning_rate",
            str(optimizer_or_lr) if number else f"a {type(optimizer_or_lr).__name__}",
            "pass an optimizer, or a finite learning rate from 0 up",
        )
    return optimizer_or_lr * factor


def warmup(
    scheduler_or_optimizer: lr_scheduler.LRScheduler | Optimizer, steps: int, start: float = 0.01
) -> lr_scheduler.LRScheduler:
    """Gradual warm-up: the rate grows linearly for `steps` steps, then the schedule begins.

    The first step uses `start` times the optimizer's learning rate, step `steps` (counted from 0)
    the whole of it. A scheduler that is given begins with its own step 0 at that point, so it
    covers what is left: give it `total - steps` steps where it wants to know its length. Step the
    result once after every optimizer step, and the scheduler that it was made from no more.

    After Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677, section 2.2), who start
    at 1/k of the rate when the batch is k times as large.

    The result is a `torch.optim.lr_scheduler.SequentialLR` (for an optimizer: a `LinearLR`), whose
    `state_dict` holds numbers and lists and no functions, as far as the given scheduler's does.

    Args:
        scheduler_or_optimizer: the schedule that follows, newly built; or an optimizer, whose
            rate then stays as it is.
        steps: optimizer steps (global batches).
        start: fraction of the learning rate in the first step, above 0 and at most 1.

    Raises:
        SettingError: `steps`, `start` or the kind of scheduler cannot be honoured.
        UsageError: the scheduler has been stepped before.
    """
    check_whole_number(f"warm-up steps={steps!r}", steps)
    if not _is_number(start) or not 0 < start <= 1:
        raise SettingError(
            f"warm-up start={start!r}",
            "it is the fraction of the learning rate in the first step",
            "choose a number above 0 and at most 1",
        )
    if isinstance(scheduler_or_optimizer, Optimizer):
        return lr_scheduler.LinearLR(scheduler_or_optimizer, start, total_iters=steps)
    scheduler = scheduler_or_optimizer
    if not isinstance(scheduler, lr_scheduler.LRScheduler):
        raise SettingError(
            "warm-up",
            f"a {type(scheduler).__name__}",
            "pass an optimizer or a scheduler of torch.optim.lr_scheduler",
        )
    was_set = f"warm-up followed by {type(scheduler).__name__}"
    for kind, reason in _CANNOT_FOLLOW.items():
        if isinstance(scheduler, kind):
            raise SettingError(was_set, "it cannot begin after a warm-up", reason)
    if scheduler.last_epoch != 0:
        raise UsageError(
            was_set,
            f"the scheduler has already made {scheduler.last_epoch} steps",
            "build it, wrap it in warmup, and only then load a saved state or step",
        )
    ramp = lr_scheduler.LinearLR(scheduler.optimizer, start, total_iters=steps)
    return lr_scheduler.SequentialLR(scheduler.optimizer, [ramp, scheduler], [steps])
