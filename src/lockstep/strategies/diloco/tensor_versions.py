"""Several versions of a module's tensors, one of which is in the module at a time.

A process may train several virtual ranks with one module. Each virtual rank has a *version* of the
weights and of the buffers: its own values, identified by its number. The version `SHARED` has the
values that all virtual ranks have in common. Versions are exchanged by swapping the memory of the
tensors, without copying.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

Version = int | None
"""The number of a virtual rank, or `SHARED`."""

SHARED = None


class TensorVersions:
    """Versions of some tensors of a module.

    Args:
        get_tensors: returns the tensors that are in the module now (a module may replace its
            buffers).
    """

    def __init__(self, get_tensors: Callable[[], Sequence[Tensor]]) -> None:
        self._get_tensors = get_tensors
        self.in_module: Version = SHARED
        """The version whose values are in the module now."""
        self._stored: dict[Version, list[Tensor]] = {}
        """The values of all other existing versions."""

    def values(self, version: Version) -> list[Tensor]:
        """Returns the values of a version. Writing to them changes the version.

        A version that does not exist yet begins as a copy of the shared values.
        """
        if version == self.in_module:
            return self._values_in_module()
        if version not in self._stored:
            self._stored[version] = [value.clone() for value in self.values(SHARED)]
        return self._stored[version]

    def _values_in_module(self) -> list[Tensor]:
        """Returns the values that are in the module now."""
        return [tensor.data for tensor in self._get_tensors()]

    def put_in_module(self, version: Version) -> None:
        """Puts the values of a version into the module, and stores the values that were there."""
        if version == self.in_module:
            return

        # The stored values, or a copy of the shared ones if the version does not exist yet.
        new_values = self.values(version)

        # Store the memory that the module has now. It is not copied.
        self._stored[self.in_module] = self._values_in_module()

        # Give the module the memory of the new values.
        for tensor, value in zip(self._get_tensors(), new_values, strict=True):
            tensor.data = value

        self._stored.pop(version, None)  # its values are in the module now
        self.in_module = version

    def exists(self, virtual_rank: int) -> bool:
        """Returns True if a virtual rank has values of its own."""
        return virtual_rank == self.in_module or virtual_rank in self._stored

    def keep_only_shared(self) -> None:
        """Drops the versions of all virtual ranks, which begin again with the shared values."""
        self.put_in_module(SHARED)
        self._stored.clear()
