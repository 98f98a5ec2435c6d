"""The gradients as a backward pass has left them: has anybody written to them since?

In the middle of a global batch, and under a loss scaler, they are not yet what the step will use.
Clipping or unscaling them there gives other numbers than on a whole batch, and nothing shows it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lockstep.errors import UsageError


class GradientVersionGuard:
    """What the last backward pass has left."""

    def __init__(self) -> None:
        self._marks: list[tuple[nn.Parameter, int, int]] = []
        """Of each gradient: its parameter, its id, and how often it was written to."""

    def remember(self, parameters: Iterable[nn.Parameter]) -> None:
        """A backward pass has ended."""
        self._marks = [(p, id(g), g._version) for p in parameters if (g := p.grad) is not None]

    def check_between(self) -> None:
        """Before the pass of a further micro-batch: raises UsageError where they differ."""
        if any(map(_changed, self._marks)):
            raise UsageError(
                "gradients that are written to between the micro-batches of a global batch",
                "they are those of a part of it; clipped there, by torch's clip_grad_norm_ say, "
                "they add up to something else",
                "use world.clip_grad_norm_(model, max_norm); change gradients by hand only where "
                "loader.current.last",
                code="LS406",
            )

    def check_scaled(self, parameters: Iterable[nn.Parameter]) -> None:
        """Before a step on gradients that are still scaled: raises UsageError where they differ."""
        stepped = set(map(id, parameters))
        if any(_changed(mark) for mark in self._marks if id(mark[0]) in stepped):
            raise UsageError(
                "gradients that are written to before optimizer.step() under precision='fp16'",
                "they are still multiplied by the scale of the loss, so that clip_grad_norm_ of "
                "torch clips nearly all of them away",
                "use world.clip_grad_norm_(model, max_norm); after it (max_norm=math.inf clips "
                "nothing) they have their true size and may be changed",
                code="LS406",
            )


def _changed(mark: tuple[nn.Parameter, int, int]) -> bool:
    """Whether the parameter has another gradient now; one that was cleared has not."""
    parameter, gradient_id, version = mark
    gradient = parameter.grad
    return gradient is not None and (id(gradient) != gradient_id or gradient._version != version)
