"""The optimizers LARS and LAMB, which scale the step of each tensor by a *trust ratio*.

The trust ratio of a tensor is the norm of its weights divided by the norm of its step. It acts as a
separate learning rate for each tensor, so that one global rate suits all layers, even with large
batches. Norms are always those of whole tensors. If parameters are sharded (DTensors, as made by
FSDP), each rank updates its own shards (`to_local`), and one small all-reduce adds up the squares
of the shards' norms, for all parameters with the same sharding. So all ranks must step at the same
time, with gradients of the same parameters. Nothing is copied from a GPU to the host.

Whether these optimizers are needed is another question: Nado et al., "A Large Batch Optimizer
Reality Check" (arXiv 2102.06356), reach the same results with well-tuned Nesterov momentum and with
Adam.
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
from lockstep.errors import SettingError, UsageError
from lockstep.keyword_arguments import check_keywords_of_constructor
from lockstep.torch_compat import is_sharded, to_local


class _Range(NamedTuple):
    """The range of numbers that is allowed for an option."""

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

    Both have these options of a parameter group:

    - `adapt`: which tensors get a trust ratio and weight decay. None: tensors of two or more
      dimensions get both, and others (biases, scales and shifts of normalisation layers) get
      neither. True: all get both. False: none gets a trust ratio, and all get weight decay.
    - `max_ratio`: the largest trust ratio; None for no limit.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one optimizer step.

        Args:
            closure: a function that computes the loss and its gradients again; rarely needed.

        Returns:
            The return value of the closure.

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

            decay_without_ratio = _weight_decay_without_ratio(group)
            for parameters in _group_by_sharding(without_ratio):
                self._update(group, parameters, use_ratio=False, weight_decay=decay_without_ratio)

        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, which may have its own options.

        Raises:
            SettingError: an option is out of range.
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
        """Makes the step of some parameters of a group; changes them and their state in place.

        Args:
            group: the parameter group, for its options.
            parameters: parameters with gradients, which all have the same sharding.
            use_ratio: True to scale the step of each parameter by its trust ratio.
            weight_decay: the weight decay of these parameters, which may differ from that of the
                group.
        """


@check_keywords_of_constructor("lockstep.optim.LARS", {"learning_rate": "lr"})
class LARS(_LayerwiseOptimizer):
    """Layer-wise Adaptive Rate Scaling, for SGD with momentum.

    You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (arXiv 1708.03888),
    algorithm 1. For each tensor w with gradient g:

        ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)
        v     = momentum * v + ratio * (g + weight_decay * w)
        w     = w - lr * v

    The ratio is 1 where |w| or |g| is 0.

    As in torch's SGD, the learning rate is not part of v, so a change of the rate affects the whole
    step at once, and the momentum needs no correction. In the paper the rate is part of v. Both
    forms are equal as long as the rate is constant; with a changing rate, this one is the paper's
    with the momentum correction of Goyal et al. (arXiv 1706.02677, section 3).

    Args:
        params: the parameters, as for all optimizers of torch.
        lr: the learning rate. With the default `trust_coefficient` it is in the order of 1 to 30.
        momentum: the momentum factor of v.
        weight_decay: the weight decay of the tensors that `adapt` chooses.
        nesterov: True to step along `ratio * (g + weight_decay * w) + momentum * v`, as in torch's
            SGD.
        trust_coefficient: how far a step may go, as a fraction of the tensor's norm.
        eps: keeps the ratio finite if the gradient is very small.
        max_ratio: the largest trust ratio. With 1.0 a step never goes further than with SGD (this
            is known as LARC).
        adapt: which tensors get a trust ratio and weight decay. None: tensors of two or more
            dimensions get both, and others (biases, scales and shifts of normalisation layers) get
            neither. True: all get both. False: all get weight decay and none a ratio, which is SGD.
            To choose tensors by name, make groups: `[{"params": ...}, {"params": ..., "adapt":
            True}]`.

    Raises:
        SettingError: an option is out of range.
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
        """Makes LARS's step of some parameters; changes them and their momentum in place.

        In the comments, w is a parameter, g its gradient and v its momentum buffer. Of a sharded
        parameter, everything except the norms is computed for the shard of this rank.
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
                step = step.mul(ratios[index])  # a new tensor, because the gradient must not change
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
            The direction of the step: v, or with Nesterov step + momentum * v.
        """
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity = to_local(state["momentum_buffer"])
        velocity.mul_(group["momentum"]).add_(step)
        if group["nesterov"]:
            return step.add(velocity, alpha=group["momentum"])
        return velocity


@check_keywords_of_constructor("lockstep.optim.LAMB", {"learning_rate": "lr"})
class LAMB(_LayerwiseOptimizer):
    """Layer-wise Adaptive Moments for Batch training, which applies the idea of LARS to Adam.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (arXiv
    1904.00962), algorithm 2, with phi(x) = x. For each tensor w, with Adam's bias-corrected m and v
    of its gradient:

        u     = m / (sqrt(v) + eps) + weight_decay * w
        ratio = |w| / |u|
        w     = w - lr * ratio * u

    The ratio is 1 where |w| or |u| is 0.

    The gradient is not clipped; call `world.clip_grad_norm_` for that.

    Args:
        params: the parameters, as for all optimizers of torch.
        lr: the learning rate: how far a step goes, as a fraction of the tensor's norm.
        betas: the decay rates of m and v.
        eps: keeps u finite if v is very small.
        weight_decay: the weight decay of the tensors that `adapt` chooses.
        max_ratio: the largest trust ratio. With 1.0 a step never goes further than with AdamW. (The
            paper's phi bounds |w| instead.)
        adapt: as for `LARS`; False is AdamW.

    Raises:
        SettingError: an option is out of range.
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
        """Makes LAMB's step of some parameters; changes them and Adam's m and v in place.

        In the comments, w is a parameter, m and v are Adam's means of its gradient and of the
        squared gradient, and u is its step. Of a sharded parameter, everything except the norms is
        computed for the shard of this rank.
        """
        weights = [to_local(parameter) for parameter in parameters]

        # u = m / (sqrt(v) + eps), and then u = u + weight_decay * w
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
        """Updates Adam's m and v of a parameter in the optimizer's state with its gradient.

        Returns:
            m / (sqrt(v) + eps), both bias-corrected, as a new tensor, which may be changed. Of a
            sharded parameter it is computed for this rank's shard.
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

        # Bias correction: m and v began at 0, so after t steps their weights add up to 1 - beta**t
        # instead of 1.
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

    # LAMB has the two betas of Adam.
    if "betas" in group:
        betas = group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise SettingError(f"{name}(betas={betas!r})", "Adam has two of them", "give a pair")
        for beta in betas:
            _check_number(name, "beta", beta, _FRACTION)

    adapt_is_allowed = group["adapt"] is None or isinstance(group["adapt"], bool)
    if not adapt_is_allowed:
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


def _weight_decay_without_ratio(group: dict[str, Any]) -> float:
    """Returns the weight decay of the tensors that get no trust ratio, such as biases.

    Usually this is 0. But in a group with `adapt=False` no tensor gets a ratio, and all of them get
    the weight decay of the group.
    """
    no_tensor_gets_ratio = group["adapt"] is False
    weight_decay: float = group["weight_decay"]
    return weight_decay if no_tensor_gets_ratio else 0.0


def _group_by_sharding(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Groups parameters so that the norms of a group can be added up in one all-reduce.

    Parameters that are sharded over the same ranks are in one group. A parameter that is not
    sharded is a group by itself.
    """
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        mesh: Any = getattr(parameter, "device_mesh", None)
        is_sharded = mesh is not None
        if is_sharded:
            key: Any = (mesh, _sharded_dimensions(parameter), parameter.device)
        else:
            key = id(parameter)
        groups.setdefault(key, []).append(parameter)

    return list(groups.values())


def _sharded_dimensions(parameter: Any) -> tuple[int, ...]:
    """Returns the dimensions of a DTensor's mesh over which it is sharded."""
    dimensions: list[int] = []
    for dimension, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            dimensions.append(dimension)
    return tuple(dimensions)


def _local_gradient(parameter: Any) -> Tensor:
    """Returns the gradient of a parameter, or of this rank's shard of it.

    Raises:
        UsageError: the gradient is sparse or complex.
    """
    gradient = parameter.grad
    if gradient.is_sparse or gradient.is_complex():
        raise UsageError(
            "a sparse gradient" if gradient.is_sparse else "a complex gradient",
            "LARS and LAMB compare the norms of dense real tensors",
            "use nn.Embedding(sparse=False), or give this parameter to an optimizer of torch's",
        )

    # The gradient of a DTensor may have different placements than the parameter: with `Partial()`,
    # for example, it has yet to be summed over the ranks. Bring it to those of the parameter.
    if is_sharded(parameter) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)

    return to_local(gradient)


def _norms_of_whole(
    parameters: Sequence[Any], weights: Sequence[Tensor], steps: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Returns the norms of whole weights and whole steps, of which this rank may only have shards.

    For sharded parameters this takes one all-reduce for each dimension of the mesh over which they
    are sharded.

    Args:
        parameters: the parameters, which all have the same sharding.
        weights: `to_local()` of each parameter: the parameter itself, or this rank's shard of it.
        steps: for each parameter the change of its weights in this optimizer step, or of this
            rank's shard of them.

    Returns:
        The norms of the weights and the norms of the steps, in the order of the parameters. Each is
        a tensor of shape `()` on the device of the parameter.
    """
    # First case: the user, or a run with virtual ranks, wants results whose bits do not depend on
    # the sharding. These are computed from `parameters`: only they know how they are sharded.
    if torch.are_deterministic_algorithms_enabled():
        return _norms_in_fixed_order(parameters, steps)

    # Second case: the parameters are not sharded.
    weight_norms = [_norm(weight) for weight in weights]
    step_norms = [_norm(step) for step in steps]
    any_parameter = parameters[0]  # all have the same sharding
    mesh = getattr(any_parameter, "device_mesh", None)
    if mesh is None:
        return weight_norms, step_norms

    # Third case: shards. The square of the norm of a whole tensor is the sum of the squares of its
    # shards' norms: |w|**2 = |w_0|**2 + |w_1|**2 + ... The shape is (2, number of parameters): the
    # weights, then the steps.
    norms = torch.stack([torch.stack(weight_norms), torch.stack(step_norms)])
    squares = norms.double().square()

    # Parameters may be offloaded to the CPU, but the ranks communicate on the device of the mesh.
    squares = squares.to(mesh.device_type)
    for dimension in _sharded_dimensions(any_parameter):
        dist.all_reduce(squares, group=mesh.get_group(dimension))

    norms_of_whole = squares.to(any_parameter.device).sqrt()
    return list(norms_of_whole[0]), list(norms_of_whole[1])


def _norms_in_fixed_order(
    parameters: Sequence[Any], steps: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Returns the norms of whole parameters and whole steps; the bits do not depend on sharding.

    Args:
        parameters: the parameters: DTensors if they are sharded, otherwise plain tensors.
        steps: for each parameter its step, or this rank's shard of it, as plain tensors.
    """
    # `norms_of_tensors` adds the squares of all elements in a fixed order. If it is given DTensors,
    # it adds those of all ranks. So the steps of sharded parameters are made DTensors too.
    steps_like_parameters = []
    for step, parameter in zip(steps, parameters, strict=True):
        steps_like_parameters.append(_shard_like(step, parameter))
    return norms_of_tensors(parameters), norms_of_tensors(steps_like_parameters)


def _shard_like(step: Tensor, parameter: Any) -> Tensor:
    """Wraps this rank's shard of a step as a DTensor, if the parameter is one.

    Args:
        step: the step of the parameter, or of this rank's shard of it.
        parameter: the parameter.
    """
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
    """Returns the norm of a tensor, shape `()`, in at least float32.

    In half precision, the squares of small numbers would become 0.
    """
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm


def _valid_ratio(
    ratio: Tensor, numerator: Tensor, denominator: Tensor, max_ratio: float | None
) -> Tensor:
    """Limits a trust ratio to `max_ratio`, and replaces it by 1 if one of its norms is 0.

    This is done by operations on the GPU, since an `if` would have to wait for the values. All
    tensors have the shape `()`.

    Args:
        ratio: the trust ratio; NaN or infinite if the denominator is 0.
        numerator: the norm of the weights.
        denominator: the norm of the gradient or of the step.
        max_ratio: the largest trust ratio; None for no limit.
    """
    is_valid = (numerator > 0) & (denominator > 0)
    ratio = torch.where(is_valid, ratio, torch.ones_like(ratio))
    return ratio if max_ratio is None else ratio.clamp(max=max_ratio)
