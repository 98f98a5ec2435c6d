"""Says at which global batches the ranks are compared, which costs a collective each time."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

CHECK_EVERY = 200
"""The number of global batches from one comparison of the ranks to the next, by default."""
_EARLY_CHECKS = frozenset({1, 2, 3, 10})


def check_due(number: int, every: int = CHECK_EVERY) -> bool:
    """Returns True if the ranks must be compared at a global batch.

    They are compared at some of the first global batches, and then at regular intervals.

    Args:
        number: number of the global batch, from 1.
        every: length of the interval.
    """
    return number in _EARLY_CHECKS or number % every == 0


class DueComparisons:
    """Tells which models are to be compared after a global batch.

    A model is due after the global batches that `check_due` names. But if its optimizer rests in
    such a batch, as that of a GAN's generator may, the model is compared after the optimizer's next
    step: until then, its buffers may be those that the samples of this rank have left.
    """

    def __init__(self) -> None:
        self._modules_with_optimizer: set[nn.Module] = set()
        self._due_modules: set[nn.Module] = set()
        """The modules that were due, and are not compared yet."""
        self._latest_number = 0
        """The number of the global batch of the latest call of `take_due_modules`."""

    def optimizer_prepared(self, modules: Collection[nn.Module]) -> None:
        """Remembers the modules that an optimizer trains."""
        self._modules_with_optimizer.update(modules)

    def take_due_modules(
        self,
        number: int,
        interval_of_module: Mapping[nn.Module, int],
        stepped: Collection[nn.Module],
    ) -> list[nn.Module]:
        """Returns the modules to compare now. They are not due any more.

        It is called after the step of each optimizer, so several times for a global batch that
        several optimizers step for. A due module is compared when its own optimizer has stepped; a
        module without an optimizer is compared at once.

        Args:
            number: number of the global batch, from 1.
            interval_of_module: for each prepared module, after how many global batches it is
                compared again.
            stepped: the modules whose optimizer has just stepped.
        """
        is_new_global_batch = number != self._latest_number
        self._latest_number = number

        to_compare = []
        for module, interval in interval_of_module.items():
            if is_new_global_batch and check_due(number, interval):
                self._due_modules.add(module)

            has_optimizer = module in self._modules_with_optimizer
            awaits_optimizer_step = has_optimizer and module not in stepped
            if module in self._due_modules and not awaits_optimizer_step:
                self._due_modules.remove(module)
                to_compare.append(module)
        return to_compare
