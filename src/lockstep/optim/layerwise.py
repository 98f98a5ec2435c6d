"""The optimizers LARS and LAMB, which scale the step of each tensor by a *trust ratio*.

The trust ratio of a tensor is the norm of its weights divided by the norm of its step. It acts as a
learning rate for this tensor alone, so that one global rate suits all layers, also with large
batches. Norms are those of whole tensors. If parameters are sharded (DTensors, as FSDP makes them),
each rank updates its own shards (`to_local`), and one small all-reduce adds the squares of the
shards' norms, for all parameters with the same sharding. So all ranks have to step at the same
time, with gradients for the same parameters. Nothing is copied from a GPU to the host.

Whether they are needed is another question: Nado et al., "A Large Batch Optimizer Reality Check"
(arXiv 2102.06356), reach the same results with well-tuned Nesterov momentum and with Adam.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lockstep.distributed.ordered_norm import norms_of_tensors
from lockstep.distributed.torch_compat import is_sharded, to_local
from lockstep.errors import SettingError, UsageError


class _Range(NamedTuple):
    """The numbers that an option may have."""

    contains: Callable[[float], bool]
    description: str


_AT_LEAST_0 = _Range(lambda x: x >= 0, "a number from 0 up")
_ABOVE_0 = _Range(lambda x: x > 0, "a number above 0")
_FRACTION = _Range(lambda x: 0 <= x < 1, "a number from 0 up and below 1")
_RANGES: dict[str, _Range] = {
    "lr": _AT_LEAST_0,
    "momentum": _FRACTION,
    "weight_decay": _AT_LEAST_0,
    "trust_coefficient": _ABOVE_0,
    "eps": _AT_LEAST_0,
    "max_ratio": _ABOVE_0,
}


class _LayerwiseOptimizer(Optimizer, ABC):
    """The base class of LARS and LAMB.

    Options of a parameter group that both have:
        adapt: None: tensors of two or more dimensions get a trust ratio and weight decay, the
            others (biases, scales and shifts of normalisation layers) get neither. True: all get
            both. False: none gets a trust ratio, all get weight decay.
        max_ratio: the largest trust ratio. None for no limit.
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
            with_ratio: list[Tensor] = []
            without_ratio: list[Tensor] = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if _gets_trust_ratio(group, parameter):
                    with_ratio.append(parameter)
                else:
                    without_ratio.append(parameter)

            decay = group["weight_decay"]
            for parameters in _group_by_sharding(with_ratio):
                self._update(group, parameters, use_ratio=True, weight_decay=decay)

            # The others are biases and the like, which get no weight decay either. Only with
            # adapt=False are all parameters without a ratio, and all of them get weight decay.
            no_tensor_gets_ratio = group["adapt"] is False
            decay_without_ratio = decay if no_tensor_gets_ratio else 0.0
            for parameters in _group_by_sharding(without_ratio):
                self._update(group, parameters, use_ratio=False, weight_decay=decay_without_ratio)

        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, which may have options of its own.

        Raises:
            SettingError: an option out of range.
        """
        if isinstance(param_group, dict):  # torch raises its own error for anything else
            _check_options({**self.defaults, **param_group}, type(self).__name__)
        super().add_param_group(param_group)

    @abstractmethod
    def _update(
        self,
        group: dict[str, Any],
        parameters: Sequence[Tensor],
        *,
        use_ratio: bool,
        weight_decay: float,
    ) -> None:
        """Makes the step of some parameters of a group: changes them and their state in place.

        Args:
            group: the parameter group, for its options.
            parameters: parameters with gradients. Either all have the same sharding, or it is one.
            use_ratio: scale the step of each parameter by its trust ratio.
            weight_decay: the weight decay of these parameters, in place of the group's.
        """


class LARS(_LayerwiseOptimizer):
    """Layer-wise Adaptive Rate Scaling, for SGD with momentum.

    You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (arXiv 1708.03888),
    algorithm 1. For each tensor w with gradient g:

        ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)
        v     = momentum * v + ratio * (g + weight_decay * w)
        w     = w - lr * v

    The ratio is 1 where |w| or |g| is 0.

    This is the form of torch's SGD: the learning rate is not in v, so a change of the rate affects
    the whole step at once, and needs no correction of the momentum. The paper's own form
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

    def _update(
        self,
        group: dict[str, Any],
        parameters: Sequence[Tensor],
        *,
        use_ratio: bool,
        weight_decay: float,
    ) -> None:
        """Makes LARS's step of some parameters: changes them and their momentum in place.

        The symbols in the comments are those of the class. Of a sharded parameter everything is
        computed for the shard of this rank, except the norms.
        """
        # w and g of each parameter
        weights = [to_local(parameter) for parameter in parameters]
        gradients = [_local_gradient(parameter) for parameter in parameters]

        # ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps), a number as a tensor
        ratios: list[Tensor] = []
        if use_ratio:
            weight_norms, gradient_norms = _norms_of_whole(parameters, weights, gradients)
            for weight_norm, gradient_norm in zip(weight_norms, gradient_norms, strict=True):
                denominator = gradient_norm + weight_decay * weight_norm + group["eps"]
                ratio = group["trust_coefficient"] * weight_norm / denominator
                ratios.append(_valid_ratio(ratio, weight_norm, gradient_norm, group["max_ratio"]))

        for index, parameter in enumerate(parameters):
            weight = weights[index]

            # step = ratio * (g + weight_decay * w)
            step = gradients[index]
            if weight_decay:
                step = step.add(weight, alpha=weight_decay)

            step_is_gradient_itself = not weight_decay
            if use_ratio and step_is_gradient_itself:
                step = step.mul(ratios[index])  # makes a new tensor: the gradient must not change
            elif use_ratio:
                step.mul_(ratios[index])

            # v = momentum * v + step
            if group["momentum"]:
                step = self._add_momentum(group, parameter, step)

            # w = w - lr * v
            weight.sub_(step, alpha=group["lr"])

    def _add_momentum(self, group: dict[str, Any], parameter: Tensor, step: Tensor) -> Tensor:
        """Updates the velocity v of a parameter in the optimizer's state: v = momentum * v + step.

        Args:
            group: the parameter group, for its options.
            parameter: the parameter, whole or sharded.
            step: the step of the parameter, or of this rank's shard of it.

        Returns:
            The direction in which the parameter goes: v, or with Nesterov step + momentum * v.
        """
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity = to_local(state["momentum_buffer"])
        velocity.mul_(group["momentum"]).add_(step)
        if group["nesterov"]:
            return step.add(velocity, alpha=group["momentum"])
        return velocity


class LAMB(_LayerwiseOptimizer):
    """Layer-wise Adaptive Moments for Batch training: LARS's idea, for Adam.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
    (arXiv 1904.00962), algorithm 2, with phi(x) = x. For each tensor w, with Adam's m and v of its
    gradient, both corrected for their start from 0:

        u     = m / (sqrt(v) + eps) + weight_decay * w
        ratio = |w| / |u|
        w     = w - lr * ratio * u

    The ratio is 1 where |w| or |u| is 0.

    The gradient is not clipped; call `world.clip_grad_norm_` for that.

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

    def _update(
        self,
        group: dict[str, Any],
        parameters: Sequence[Tensor],
        *,
        use_ratio: bool,
        weight_decay: float,
    ) -> None:
        """Makes LAMB's step of some parameters: changes them and Adam's m and v in place.

        The symbols in the comments are those of the class. Of a sharded parameter everything is
        computed for the shard of this rank, except the norms.
        """
        # w, and u = m / (sqrt(v) + eps) + weight_decay * w, of each parameter
        weights = [to_local(parameter) for parameter in parameters]
        steps = [self._adam_step(group, parameter) for parameter in parameters]
        if weight_decay:
            for weight, step in zip(weights, steps, strict=True):
                step.add_(weight, alpha=weight_decay)

        # u = ratio * u, with ratio = |w| / |u|
        if use_ratio:
            weight_norms, step_norms = _norms_of_whole(parameters, weights, steps)
            for index, step in enumerate(steps):
                weight_norm = weight_norms[index]
                step_norm = step_norms[index]
                ratio = weight_norm / step_norm
                step.mul_(_valid_ratio(ratio, weight_norm, step_norm, group["max_ratio"]))

        # w = w - lr * u
        for weight, step in zip(weights, steps, strict=True):
            weight.sub_(step, alpha=group["lr"])

    def _adam_step(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """Updates Adam's m and v of a parameter in the optimizer's state by its gradient.

        Returns:
            m / (sqrt(v) + eps), both corrected for their start from 0: a new tensor, which may be
            changed. Of a sharded parameter it is computed for this rank's shard.
        """
        gradient = _local_gradient(parameter)
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)  # on the host, as torch's Adam
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)

        state["step"] += 1
        num_steps = state["step"].item()
        beta1, beta2 = group["betas"]

        # m = beta1 * m + (1 - beta1) * g
        mean = to_local(state["exp_avg"])
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)

        # v = beta2 * v + (1 - beta2) * g * g
        mean_of_squares = to_local(state["exp_avg_sq"])
        mean_of_squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

        # Both began at 0. After t steps their weights add up to 1 - beta**t, not 1, so they are
        # divided by that.
        denominator = mean_of_squares.div(1 - beta2**num_steps).sqrt_().add_(group["eps"])
        return mean.div(1 - beta1**num_steps).div_(denominator)


def _check_options(group: dict[str, Any], name: str) -> None:
    """Raises SettingError if an option of a parameter group is out of range.

    Args:
        group: a parameter group, with all options.
        name: the name of the optimizer's class.
    """
    for key, allowed in _RANGES.items():
        if key not in group:  # LARS and LAMB have not all the same options
            continue
        if key == "max_ratio" and group[key] is None:  # no limit
            continue
        _check_number(name, key, group[key], allowed)

    if "betas" in group:
        betas = group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise SettingError(f"{name}(betas={betas!r})", "Adam has two of them", "give a pair")
        for beta in betas:
            _check_number(name, "beta", beta, _FRACTION)

    # Compared by `is`, because 0 == False and 1 == True.
    if not any(group["adapt"] is value for value in (None, True, False)):
        raise SettingError(
            f"{name}(adapt={group['adapt']!r})",
            "it says which tensors get a trust ratio",
            "None: those of two or more dimensions; True: all; False: none",
        )

    if group.get("nesterov") and not group["momentum"]:
        raise SettingError(f"{name}(nesterov=True)", "momentum=0", "give a momentum above 0")


def _check_number(name: str, option: str, value: Any, allowed: _Range) -> None:
    """Raises SettingError if the value of an option is no finite number in the allowed range."""
    if not is_real_number(value) or not math.isfinite(value) or not allowed.contains(value):
        raise SettingError(
            f"{name}({option}={value!r})", "it is out of range", f"give {allowed.description}"
        )


def is_real_number(value: Any) -> bool:
    """Returns True for an int or a float. A bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _gets_trust_ratio(group: dict[str, Any], parameter: Tensor) -> bool:
    """Returns True if the option `adapt` gives a parameter a trust ratio."""
    if group["adapt"] is None:
        return parameter.dim() >= 2
    return bool(group["adapt"])


def _group_by_sharding(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Groups parameters so that the norms of a group can be added up in one all-reduce.

    Parameters that are sharded over the same ranks are in one group. A parameter that is not
    sharded is a group by itself.
    """
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        mesh: Any = getattr(parameter, "device_mesh", None)  # None: it is not sharded
        key: Any = id(parameter)
        if mesh is not None:
            key = (mesh, _sharded_dimensions(parameter), parameter.device)
        if key not in groups:
            groups[key] = []
        groups[key].append(parameter)

    return list(groups.values())


def _sharded_dimensions(parameter: Any) -> tuple[int, ...]:
    """Returns the numbers of those dimensions of a DTensor's mesh over which it is sharded."""
    dimensions: list[int] = []
    for dimension, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            dimensions.append(dimension)
    return tuple(dimensions)


def _local_gradient(parameter: Any) -> Tensor:
    """Returns the gradient of a parameter, or of the shard that this rank has of the parameter.

    Raises:
        UsageError: it is sparse or complex.
    """
    gradient = parameter.grad
    if gradient.is_sparse or gradient.is_complex():
        raise UsageError(
            f"a {'sparse' if gradient.is_sparse else 'complex'} gradient",
            "LARS and LAMB compare the norms of dense real tensors",
            "use nn.Embedding(sparse=False), or give this parameter to an optimizer of torch's",
        )

    # A gradient may be sharded in another way, for example not yet summed over the ranks.
    if is_sharded(parameter) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)

    return to_local(gradient)


def _norms_of_whole(
    parameters: Sequence[Any], weights: Sequence[Tensor], steps: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Returns the norms of whole weights and of whole steps, of which this rank may have shards.

    If the parameters are sharded, this is one all-reduce for each dimension of the mesh over which
    they are.

    Args:
        parameters: the parameters, which have the same sharding.
        weights: each parameter, or this rank's shard of it.
        steps: the step of each parameter, or of this rank's shard of it.

    Returns:
        The norms of the weights, and those of the steps, in the order of the parameters. Each is a
        tensor of shape `()` on the device of the parameter.
    """
    first = parameters[0]
    if torch.are_deterministic_algorithms_enabled():
        # The user (or a run with virtual ranks, which sets this mode) wants the same bits however
        # the parameters are sharded. `norms_of_tensors` adds in an order that is always the same.
        whole_steps = []
        for step, parameter in zip(steps, parameters, strict=True):
            whole_steps.append(_like_parameter(step, parameter))
        return norms_of_tensors(parameters), norms_of_tensors(whole_steps)

    weight_norms = [_norm(weight) for weight in weights]
    step_norms = [_norm(step) for step in steps]
    mesh = getattr(first, "device_mesh", None)
    if mesh is None:
        return weight_norms, step_norms

    # The square of the norm of a whole tensor is the sum of the squares of its shards' norms:
    # |w|**2 = |w_0|**2 + |w_1|**2 + ... Shape (2, number of parameters): weights, then steps.
    norms = torch.stack([torch.stack(weight_norms), torch.stack(step_norms)])
    squares = norms.double().square()

    # Parameters may be offloaded to the CPU, but the ranks communicate on the device of the mesh.
    squares = squares.to(mesh.device_type)
    for dimension in _sharded_dimensions(first):
        dist.all_reduce(squares, group=mesh.get_group(dimension))

    norms_of_whole = squares.to(first.device).sqrt()
    return list(norms_of_whole[0]), list(norms_of_whole[1])


def _like_parameter(step: Tensor, parameter: Any) -> Tensor:
    """Returns a step, of which this rank may have a shard, as a DTensor if its parameter is one."""
    if not is_sharded(parameter):
        return step

    sharded: Tensor = DTensor.from_local(
        step,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return sharded


def _norm(tensor: Tensor) -> Tensor:
    """Returns the norm of a tensor, shape `()`, in float32 or wider.

    In half precision the squares of small numbers would vanish.
    """
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm


def _valid_ratio(
    ratio: Tensor, numerator: Tensor, denominator: Tensor, max_ratio: float | None
) -> Tensor:
    """Returns the trust ratio, but at most `max_ratio`, and 1 if one of its norms is 0.

    It is decided on the GPU: an `if` would have to wait for the numbers. All tensors have the shape
    `()`.

    Args:
        ratio: the trust ratio; NaN or infinite if the denominator is 0.
        numerator: the norm of the weights.
        denominator: the norm of the gradient or the step.
        max_ratio: None for no limit.
    """
    is_valid = (numerator > 0) & (denominator > 0)
    ratio = torch.where(is_valid, ratio, torch.ones_like(ratio))
    return ratio if max_ratio is None else ratio.clamp(max=max_ratio)
