"""Finds parameters whose gradient is only rounding, although an optimizer steps by it (LS408).

The exact gradient of a bias in front of BatchNorm is 0, and so is that of the bias of the keys of
attention: the layer behind takes away whatever they add. What is computed is what rounding has left
of a sum of terms that cancel each other. Adam divides a gradient by its size, so it makes of this
noise a step as long as of any other gradient.

Rounding is known by what happens in another precision: it shrinks with the precision, while a
gradient that is truly small stays as it is. So gradients in the script's own precision are compared
with those in float64, element by element. They come from two runs on one process, which differ in
more than the precision (only the first one has dropout and virtual ranks). That cannot make a
gradient vanish to `MAX_FLOAT64_GRADIENT`, unless it is zero in exact arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.verify.cause import Cause, script_names
from lockstep.verify.finding import Finding
from lockstep.verify.tolerance import Array, largest, scale_of
from lockstep.verify.training_record import Update

# Gradients are noise only if they are below this share of the largest one, in the script's own
# precision: about 1000 times its unit roundoff, since sums have many terms.
MAX_GRADIENT = {
    "torch.float32": 1e-4,
    "torch.bfloat16": 1e-1,
    "torch.float16": 1e-1,
}
# In float64 noise is below this share of the largest gradient,
MAX_FLOAT64_GRADIENT = 1e-11
# and below this share of the gradient in the script's precision. The unit roundoff of float64 is
# 2e-9 of that of float32.
MAX_FLOAT64_SHARE = 1e-4
# An optimizer turns noise into steps if it changes some value by this share of the largest change.
# For SGD the share is that of the gradient. For Adam it is up to 1, and less where the noise is
# below its `eps`. Weight decay stays below: by the default of AdamW a value of 1 changes by 0.01.
MIN_SHARE_OF_STEP = 0.02
# A tensor is reported if this share of its values is noise: a third of the bias of the projections
# in `nn.MultiheadAttention` is that of the keys.
MIN_SHARE_OF_TENSOR = 0.25
MAX_PARAMETERS_IN_TEXT = 3


@dataclass(frozen=True)
class NoisyParameter:
    """A parameter that moves by rounding alone."""

    name: str
    num_values: int
    # How many of its values these are.
    num_noisy: int
    # The largest of their gradients, in the script's own precision and in float64.
    gradient: float
    gradient_in_float64: float
    # The largest change that the step has made to them, as a share of that of any parameter.
    share_of_step: float

    @property
    def text(self) -> str:
        """The evidence, in one sentence."""
        (name,) = script_names([self.name])
        what = name
        if self.num_noisy < self.num_values:
            what = f"{name} ({self.num_noisy} of {self.num_values} values)"

        return (
            f"{what}: gradients up to {self.gradient:.1e} in the script's precision and "
            f"{self.gradient_in_float64:.1e} in float64; the step moves it "
            f"{self.share_of_step:.0%} as far as the parameter that moves most"
        )


def may_have_noise(run: Sequence[Update]) -> bool:
    """Returns whether a run has gradients that may be noise, so that float64 must be asked.

    Args:
        run: of one process, in the script's own precision.
    """
    for update in run:
        if _suspects(update):
            return True
    return False


def find_rounding_noise(run: Sequence[Update], run_in_float64: Sequence[Update]) -> list[Finding]:
    """Returns LS408 in a list if an optimizer steps by rounding alone; else an empty list.

    Args:
        run: of one process, in the script's own precision.
        run_in_float64: the same steps in float64.
    """
    parameters: dict[str, NoisyParameter] = {}
    for update, update_in_float64 in zip(run, run_in_float64, strict=False):
        for parameter in _noisy_parameters(update, update_in_float64):
            parameters.setdefault(parameter.name, parameter)

    if not parameters:
        return []

    evidence = [parameter.text for parameter in parameters.values()]
    first_evidence = tuple(evidence[:MAX_PARAMETERS_IN_TEXT])
    return [Finding(Cause("LS408", first_evidence, names=tuple(parameters)))]


def _noisy_parameters(update: Update, update_in_float64: Update) -> list[NoisyParameter]:
    """Returns the parameters of an update that move by rounding alone."""
    gradients_in_float64 = update_in_float64.merged("gradients")
    max_in_float64 = MAX_FLOAT64_GRADIENT * scale_of(gradients_in_float64)
    gradients = update.merged("gradients")
    parameters = []

    for name, (is_suspect, share_of_step) in _suspects(update).items():
        gradient_in_float64 = gradients_in_float64.get(name)
        if gradient_in_float64 is None or gradient_in_float64.shape != is_suspect.shape:
            continue

        size = np.abs(gradients[name])
        size_in_float64 = np.abs(gradient_in_float64)
        shrinks = size_in_float64 < MAX_FLOAT64_SHARE * size
        is_noise = is_suspect & shrinks & (size_in_float64 <= max_in_float64)
        if not _matters(is_noise, share_of_step):
            continue

        parameter = NoisyParameter(
            name,
            is_noise.size,
            num_noisy=int(is_noise.sum()),
            gradient=float(size[is_noise].max()),
            gradient_in_float64=float(size_in_float64[is_noise].max()),
            share_of_step=float(share_of_step[is_noise].max()),
        )
        parameters.append(parameter)

    return parameters


def _suspects(update: Update) -> Mapping[str, tuple[Array, Array]]:
    """Returns which values have a small gradient, of the parameters that move far all the same.

    Returns:
        For each parameter in which enough values have one: a mask of them, and how far each value
        has moved, as a share of the largest change of any parameter.
    """
    max_share = MAX_GRADIENT.get(update[0].dtype)
    if max_share is None:  # in float64 nothing is compared with a higher precision
        return {}

    gradients = update.merged("gradients")
    before = update.merged("parameters_before")
    after = update.merged("parameters")
    changes = {}

    for name in gradients:
        if name in before and name in after:
            changes[name] = np.abs(after[name] - before[name])

    largest_change = max((largest(change) for change in changes.values()), default=0.0)
    if largest_change == 0.0:  # such as in the first step of a warm-up
        return {}

    max_gradient = max_share * scale_of(gradients)
    suspects = {}
    for name, change in changes.items():
        size = np.abs(gradients[name])
        share_of_step = change / largest_change
        is_suspect = (size > 0) & (size <= max_gradient)
        if _matters(is_suspect, share_of_step):
            suspects[name] = (is_suspect, share_of_step)

    return suspects


def _matters(mask: Array, share_of_step: Array) -> bool:
    """Returns whether enough values of a tensor are in a mask, and one of them moves far enough.

    Args:
        mask: True for each value that may be noise.
        share_of_step: how far each value has moved, as a share of the largest change.
    """
    if not mask.any() or mask.sum() < MIN_SHARE_OF_TENSOR * mask.size:
        return False
    return float(share_of_step[mask].max()) >= MIN_SHARE_OF_STEP
