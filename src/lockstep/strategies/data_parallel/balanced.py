"""`BalancedDataParallel`: a `DataParallel` module whose first device computes fewer samples.

The first device also holds the outputs and the loss, so with equal parts it is the first one to run
out of memory. `gpu0_bsz` sets its number of samples; the other devices share the rest equally.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lockstep.batch.plan import part_sizes
from lockstep.errors import SettingError
from lockstep.strategies.data_parallel.module import DataParallel


class BalancedDataParallel(DataParallel):
    """DataParallel in which the first device, which also holds outputs and loss, computes less.

    A drop-in replacement for the class of that name in Link-Li's Balanced-DataParallel (on GitHub).
    See `DataParallel` for everything that is not described here.

    Args:
        gpu0_bsz: the number of samples that the first device computes in each forward pass; the
            other devices share the rest equally. With 0, it only holds the parameters and the
            outputs. With gradient accumulation the number applies to each micro-batch. A last batch
            that has no more samples than this is computed on the first device.
        module: see `DataParallel`.
        device_ids: see `DataParallel`.
        output_device: see `DataParallel`.
        dim: see `DataParallel`.
        replicas: see `DataParallel`.
        sync_batchnorm: see `DataParallel`.

    Raises:
        SettingError: `gpu0_bsz` is not a whole number of at least 0, or it is 0 with one device. In
            forward: the first two training batches have the same number of samples, which is less
            than `gpu0_bsz`.
    """

    def __init__(
        self,
        gpu0_bsz: int,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        *,
        replicas: int | None = None,
        sync_batchnorm: bool = True,
    ) -> None:
        # Integers of NumPy are accepted as well, which also have `__index__`.
        is_whole_number = hasattr(gpu0_bsz, "__index__") and not isinstance(gpu0_bsz, bool)
        if not is_whole_number or gpu0_bsz < 0:
            shown = repr(gpu0_bsz)
            if isinstance(gpu0_bsz, nn.Module):  # the arguments are in the wrong order
                shown = type(gpu0_bsz).__name__
            raise SettingError(
                f"gpu0_bsz={shown}",
                "the first device computes a whole number of samples, at least 0",
                "give the samples of one forward pass on the first device",
            )

        super().__init__(
            module, device_ids, output_device, dim, replicas=replicas, sync_batchnorm=sync_batchnorm
        )
        if gpu0_bsz == 0 and self.num_replicas == 1:
            raise SettingError(
                "gpu0_bsz=0 with one device",
                "no device is left to compute anything",
                "give more device_ids, or a gpu0_bsz above 0",
            )

        self.gpu0_bsz: int | None = int(gpu0_bsz)
        self._looks_for_short_batches = True
        """True until the first training batch of at least `gpu0_bsz` samples."""
        self._previous_short_size: int | None = None
        """The size of the latest short training batch; None if there was none."""

    def set_shares(self, shares: str | Sequence[int] | None) -> None:
        """Divides batches by shares instead of `gpu0_bsz`, from the next forward pass on."""
        super().set_shares(shares)
        self.gpu0_bsz = None

    def sizes(self, count: int) -> list[int]:
        """Returns how many samples each replica computes.

        For example, with `gpu0_bsz=2` and 3 replicas, a batch of 8 gives `[2, 3, 3]`, and a short
        batch of 1 gives `[1, 0, 0]`.

        Args:
            count: the number of samples in the batch.

        Raises:
            SettingError: all of the first training batches have fewer samples than `gpu0_bsz`.
        """
        if self.gpu0_bsz is None or self.num_replicas == 1:  # divided by shares, or not at all
            return super().sizes(count)

        is_training_batch = self.training and torch.is_grad_enabled()
        if is_training_batch:
            self._check_first_training_batches(count, self.gpu0_bsz)

        size_of_first = min(self.gpu0_bsz, count)
        equal_shares = (1,) * (self.num_replicas - 1)
        sizes_of_others = part_sizes(count - size_of_first, equal_shares)
        return [size_of_first, *sizes_of_others]

    def _check_first_training_batches(self, batch_size: int, gpu0_bsz: int) -> None:
        """Checks that training batches usually have at least `gpu0_bsz` samples.

        The first GPU computes all of a *short* batch, which has fewer, and the others nothing. If
        two short batches in a row have the same size, this must be the usual size, and an error is
        raised. Short batches of different sizes raise none:

        - one may be the last batch of an epoch, in a run that was resumed there;
        - `micro_batch_size="auto"` tries different sizes.

        For example, with `gpu0_bsz=8`:

            batch sizes 5, 64: no error      batch sizes 6, 6: an error at the second one

        After the first batch that is not short, nothing is checked any more.

        Args:
            batch_size: the number of samples in the present training batch.
            gpu0_bsz: the number of samples that the first GPU computes.

        Raises:
            SettingError: two short batches in a row have the same size.
        """
        if not self._looks_for_short_batches:
            return

        if batch_size >= gpu0_bsz:
            self._looks_for_short_batches = False
            return

        if batch_size == self._previous_short_size:
            raise SettingError(
                f"gpu0_bsz={gpu0_bsz}",
                f"the batches that are trained on have {batch_size} samples",
                "give fewer than a batch has; with accumulation, than a micro-batch has",
            )

        self._previous_short_size = batch_size
