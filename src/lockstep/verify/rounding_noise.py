"""Finds parameters that an optimizer moves although their gradient is only rounding (LS408).

An example is the bias in front of a BatchNorm layer: its exact gradient is 0, because the layer
subtracts whatever the bias adds. The computed gradient is rounding noise. Adam divides gradients by
their size, so it turns this noise into steps as large as any other.

Rounding noise shrinks in a higher precision, while a gradient that is truly small stays the same.
So gradients in the script's own precision are compared with those in float64, element by element.
They come from two runs on one process, which differ in more than the precision (only the first one
has dropout and virtual ranks). But this cannot reduce a gradient to `MAX_FLOAT64_GRADIENT`, unless
it is zero in exact arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lockstep.verify.cause import Cause, script_names
from lockstep.verify.finding import Finding
from lockstep.verify.tolerance import Array, largest_of_all
from lockstep.verify.training_record import Update

# In the script's own precision, noise is below this fraction of the largest gradient: about 1000
# times the unit roundoff of the precision, since sums have many terms.
MAX_SHARE_OF_LARGEST = {
    "torch.float32": 1e-4,
    "torch.bfloat16": 1e-1,
    "torch.float16": 1e-1,
}
# In float64, noise is below this fraction of the largest gradient,
MAX_FLOAT64_GRADIENT = 1e-11
# and below this fraction of the same gradient in the script's precision. The unit roundoff of
# float64 is 2e-9 of that of float32.
MAX_FLOAT64_SHARE = 1e-4
# An optimizer turns noise into steps if it moves some value by this fraction of the largest change.
# With SGD, the fraction is as small as the gradient. With Adam, it is up to 1, and less if the
# noise is below its `eps`. Weight decay stays below: with AdamW's default, a value of 1 changes by
# 0.01.
MIN_SHARE_OF_STEP = 0.02
# A tensor is reported if this fraction of its values is noise. In `nn.MultiheadAttention`, a third
# of the bias of the projections belongs to the keys, whose gradient is 0.
MIN_SHARE_OF_TENSOR = 0.25
MAX_PARAMETERS_IN_TEXT = 3


@dataclass(frozen=True)
class NoisyParameter:
    """A parameter that is moved by nothing but rounding errors."""

    name: str
    num_values: int
    # The number of values whose gradient is noise.
    num_noisy: int
    # The largest gradient of these values, in the script's own precision and in float64.
    gradient: float
    gradient_in_float64: float
    # Their largest change in the step, as a fraction of the largest change of any parameter.
    share_of_step: float

    @property
    def text(self) -> str:
        """The evidence for the finding, in one sentence.

        For example "fc.bias: gradients up to 1.2e-09 in the script's precision and 3.0e-19 in
        float64; the step moves it 97% as far as the parameter that moves most".
        """
        # "fc.bias" for "Net/fc.bias", or "fc.bias (3 of 8 values)".
        name_and_count = script_names([self.name])[0]
        if self.num_noisy < self.num_values:
            name_and_count += f" ({self.num_noisy} of {self.num_values} values)"

        return (
            f"{name_and_count}: gradients up to {self.gradient:.1e} in the script's precision and "
            f"{self.gradient_in_float64:.1e} in float64; the step moves it "
            f"{self.share_of_step:.0%} as far as the parameter that moves most"
        )


def may_have_noise(run: Sequence[Update]) -> bool:
    """True if a run has gradients that may be noise, so that it must be compared with float64.

    Args:
        run: updates of a run on one process, in the script's own precision.
    """
    for update in run:
        if _find_suspects(update):
            return True
    return False


def find_rounding_noise(run: Sequence[Update], run_in_float64: Sequence[Update]) -> list[Finding]:
    """Returns the finding LS408 in a list, if an optimizer uses noise as a gradient.

    Args:
        run: updates of a run on one process, in the script's own precision.
        run_in_float64: updates of the same steps in float64.
    """
    # By name: each noisy parameter, from the first step in which it was noisy.
    noisy_parameters: dict[str, NoisyParameter] = {}
    # A run may have more steps than the other one if its time limit allowed more.
    for update, update_in_float64 in zip(run, run_in_float64, strict=False):
        for parameter in _noisy_parameters(update, update_in_float64):
            if parameter.name not in noisy_parameters:
                noisy_parameters[parameter.name] = parameter

    if not noisy_parameters:
        return []

    evidence = [parameter.text for parameter in noisy_parameters.values()]
    first_evidence = tuple(evidence[:MAX_PARAMETERS_IN_TEXT])
    return [Finding(Cause("LS408", first_evidence, names=tuple(noisy_parameters)))]


def _noisy_parameters(update: Update, update_in_float64: Update) -> list[NoisyParameter]:
    """Returns the parameters that an update moves by nothing but rounding errors."""
    gradients = update.merged("gradients")
    gradients_in_float64 = update_in_float64.merged("gradients")

    # A float64 gradient of at most this size is only rounding: its exact value is taken to be 0.
    max_rounding_in_float64 = MAX_FLOAT64_GRADIENT * largest_of_all(gradients_in_float64)

    parameters = []
    for name, suspect in _find_suspects(update).items():
        gradient = gradients[name]  # in the script's own precision
        gradient_in_float64 = gradients_in_float64.get(name)
        if gradient_in_float64 is None or gradient_in_float64.shape != gradient.shape:
            continue

        # A gradient is noise if it is small here, and almost zero in float64.
        mask_of_zeros = _mask_of_zeros(gradient, gradient_in_float64, max_rounding_in_float64)
        noise_mask = suspect.mask_of_small_gradients & mask_of_zeros
        if not _is_enough_to_report(noise_mask, suspect.relative_change):
            continue

        parameter = NoisyParameter(
            name,
            num_values=noise_mask.size,
            num_noisy=int(noise_mask.sum()),
            gradient=float(np.abs(gradient[noise_mask]).max()),
            gradient_in_float64=float(np.abs(gradient_in_float64[noise_mask]).max()),
            share_of_step=float(suspect.relative_change[noise_mask].max()),
        )
        parameters.append(parameter)

    return parameters


def _mask_of_zeros(
    gradient: Array, gradient_in_float64: Array, max_rounding_in_float64: float
) -> Array:
    """Returns a mask of the values of a gradient that are almost zero in float64.

    Args:
        gradient: a gradient in the script's own precision.
        gradient_in_float64: the same gradient in float64.
        max_rounding_in_float64: largest value that counts as zero in float64.
    """
    magnitude_in_float64 = np.abs(gradient_in_float64)
    shrinks = magnitude_in_float64 < MAX_FLOAT64_SHARE * np.abs(gradient)
    is_tiny: Array = magnitude_in_float64 <= max_rounding_in_float64
    return shrinks & is_tiny


class _Suspect(NamedTuple):
    """A parameter with small gradients that the step has moved far. Both arrays have its shape."""

    # A mask of the values whose gradient is so small that it may be noise.
    mask_of_small_gradients: Array
    # How far the step has moved each value: 1 for the value that has moved farthest of all values
    # of all parameters.
    relative_change: Array


def _find_suspects(update: Update) -> Mapping[str, _Suspect]:
    """Returns the parameters with small gradients that the step has moved far nevertheless.

    Returns:
        The parameters by name. Parameters of which only a few values are suspicious are left out.
    """
    # How large noise can be in this precision, as a fraction of the largest gradient. There is no
    # entry for float64, since its gradients cannot be compared with a higher precision.
    only_rank = update[0]
    max_share_of_largest_gradient = MAX_SHARE_OF_LARGEST.get(only_rank.dtype)
    if max_share_of_largest_gradient is None:
        return {}

    # How far each value of each parameter has moved.
    gradients = update.merged("gradients")
    before = update.merged("parameters_before")
    after = update.merged("parameters")
    changes = {}
    for name in gradients:
        if name in before and name in after:
            changes[name] = np.abs(after[name] - before[name])

    largest_change = largest_of_all(changes)
    if largest_change == 0.0:  # as in the first step of a warm-up
        return {}

    max_noise = max_share_of_largest_gradient * largest_of_all(gradients)
    suspects = {}
    for name, change in changes.items():
        magnitude = np.abs(gradients[name])
        mask_of_small_gradients = (magnitude > 0) & (magnitude <= max_noise)
        relative_change = change / largest_change
        if _is_enough_to_report(mask_of_small_gradients, relative_change):
            suspects[name] = _Suspect(mask_of_small_gradients, relative_change)

    return suspects


def _is_enough_to_report(noise_mask: Array, relative_change: Array) -> bool:
    """True if a large part of a tensor may have noise as gradients, and some of it moves far.

    Args:
        noise_mask: mask of the values whose gradients may be noise.
        relative_change: how far each value has moved, as a fraction of the largest change.
    """
    is_large_part = noise_mask.sum() >= MIN_SHARE_OF_TENSOR * noise_mask.size
    if not noise_mask.any() or not is_large_part:
        return False
    return float(relative_change[noise_mask].max()) >= MIN_SHARE_OF_STEP
