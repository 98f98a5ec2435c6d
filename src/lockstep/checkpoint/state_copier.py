"""Copies the state of a step to a memory area.

On the CPU, everything is copied at once: a thread would take the same time from the same cores.
From a GPU, a thread copies while the next step computes (`background_copy`). Tensors that the
forward pass may change, such as buffers, are first copied on the GPU, and the optimizer's step
waits until the rest is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.checkpoint.background_copy import BackgroundCopy
from lockstep.checkpoint.kept_layout import KeptLayout
from lockstep.torch_compat import copy_to_each

BACKGROUND_DEVICES = ("cuda",)
"""The types of devices from which a thread copies while the next step computes."""


class _Copies:
    """Pairs of tensors: what is copied, and to where."""

    def __init__(self) -> None:
        self.destinations: list[Tensor] = []
        self.sources: list[Tensor] = []

    def add(self, destination: Tensor, source: Tensor) -> None:
        """Adds a pair."""
        self.destinations.append(destination)
        self.sources.append(source)


class StateCopier:
    """Copies tensors to an area: those on the CPU at once, and those on a GPU in a thread.

    Args:
        device: the device of the training.
    """

    def __init__(self, device: torch.device) -> None:
        self._background: BackgroundCopy | None = None
        """Copies in a thread; None if everything is on the CPU."""
        if device.type in BACKGROUND_DEVICES:
            self._background = BackgroundCopy()
        self.clones_every_source = False
        """True once a tensor that only the optimizer should change was changed by something else.
        From then on the thread never copies from the training's own tensors."""

    def copy(
        self,
        destinations: Sequence[Tensor],
        layout: KeptLayout,
        ids_changed_only_by_optimizer: Callable[[], set[int]],
        seal_area: Callable[[], None],
    ) -> None:
        """Copies the tensors of a layout, or starts to copy them.

        A tensor that only the optimizer's step changes can be copied by the thread, because that
        step waits for the thread. Any other tensor may change in the next forward pass, so the
        thread copies from a clone of it.

        Args:
            destinations: the tensors to copy to, one for each source of the layout.
            layout: which tensors are copied.
            ids_changed_only_by_optimizer: returns the ids of the tensors that change only in the
                step of a prepared optimizer.
            seal_area: seals the area. It is called when everything is copied.
        """
        if self._background is None:
            copy_to_each(list(destinations), layout.sources)
            seal_area()
            return

        ids_without_clone = set() if self.clones_every_source else ids_changed_only_by_optimizer()
        copied_now = _Copies()
        copied_in_thread = _Copies()

        # Each source is a tensor of the training state (a leaf), or some rows of one.
        leaves = layout.leaves()
        for destination, source, leaf in zip(destinations, layout.sources, leaves, strict=True):
            if source.device.type not in BACKGROUND_DEVICES:
                copied_now.add(destination, source)
            elif id(leaf) in ids_without_clone:
                copied_in_thread.add(destination, source)
            else:
                copied_in_thread.add(destination, source.clone())

        copy_to_each(copied_now.destinations, copied_now.sources)
        self._background.start(copied_in_thread.destinations, copied_in_thread.sources, seal_area)

    def wait(self) -> bool:
        """Waits until the last copy has ended.

        Parameters, for example, are copied without a clone: nothing should change them until the
        optimizer steps, and it waits here first. If the script has changed one of them
        nevertheless, the copy is not sealed, and all later copies are made from clones.

        Returns:
            False if the copy was not sealed because a tensor was changed, otherwise True.

        Raises:
            Exception: the error that was raised in the thread.
        """
        if self._background is None:
            return True

        was_sealed = self._background.wait()
        if not was_sealed:
            self.clones_every_source = True
        return was_sealed
