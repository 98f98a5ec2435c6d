"""Several versions of an optimizer's state, one of which is in the optimizer at a time.

Virtual ranks that train copies of the model (DiLoCo's replicas) each have a state of their own, but
those of a process share one optimizer. All of them begin with the *common* state. It is also the
only one if virtual ranks do not train copies, and without virtual ranks.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

from torch.optim import Optimizer

from lockstep.checkpoint.optimizer_state import load_into_torch_optimizer

COMMON = None
"""The key of the state with which all virtual ranks begin."""


class OptimizerVersions:
    """The states of one optimizer, by virtual rank.

    Args:
        optimizer: the optimizer, which holds the common state at first.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._in_optimizer: int | None = COMMON
        """The virtual rank whose state the optimizer holds; `COMMON` before the first step."""
        self._stored: dict[int | None, Any] = {}
        """The states that the optimizer does not hold at present, by virtual rank or `COMMON`."""

    def put_in_optimizer(self, virtual_rank: int) -> None:
        """Gives the optimizer the state of a virtual rank.

        The first time, this is a copy of the state with which all virtual ranks begin.
        """
        if virtual_rank == self._in_optimizer:
            return

        # Put the present state of the optimizer away. It belongs to another virtual rank or, the
        # first time, to all of them.
        self._stored[self._in_optimizer] = self._optimizer.state

        is_first_time = virtual_rank not in self._stored
        if is_first_time:
            # The common state is missing only if `load` has dropped it. `load` then sets the state
            # of the virtual rank itself, so it begins empty.
            common_state = self._stored.get(COMMON, {})
            state: dict[Any, Any] = defaultdict(dict)
            for parameter, entry in common_state.items():
                state[parameter] = copy.deepcopy(entry)
            self._stored[virtual_rank] = state

        self._optimizer.state = self._stored.pop(virtual_rank)
        self._in_optimizer = virtual_rank

    def put_first_in_optimizer(self) -> None:
        """Gives the optimizer the state of the first virtual rank on this process.

        Before the first step, and without virtual ranks, it holds the only state that there is.
        """
        if self._in_optimizer is COMMON:
            return
        first_virtual_rank = min([self._in_optimizer, *self._stored_virtual_ranks()])
        self.put_in_optimizer(first_virtual_rank)

    def drop_common_if_unused(self, num_virtual_ranks: int) -> None:
        """Drops the common state once all virtual ranks of this process have their own state.

        Args:
            num_virtual_ranks: number of virtual ranks that this process computes.
        """
        # One state is in the optimizer, the others are stored.
        if 1 + len(self._stored_virtual_ranks()) == num_virtual_ranks:
            self._stored.pop(COMMON, None)

    def _stored_virtual_ranks(self) -> list[int]:
        """Returns the virtual ranks whose states the optimizer does not hold at present."""
        return [number for number in self._stored if number is not COMMON]

    def forget_virtual_ranks(self) -> None:
        """Drops the states of virtual ranks: all begin with the state that is loaded next."""
        self._in_optimizer = COMMON
        self._stored.clear()

    def state_of(self, virtual_rank: int) -> Any:
        """Returns the state of a virtual rank, as in `state_dict`; None if it has none."""
        if self._in_optimizer is COMMON:
            return None
        self.put_in_optimizer(virtual_rank)
        return self._optimizer.state_dict()["state"]

    def load(self, virtual_rank: int, state: Any) -> None:
        """Loads what `state_of` returned for a virtual rank.

        It is called for each virtual rank of this process, one after the other.

        Args:
            virtual_rank: the number of the virtual rank.
            state: its state. None if it had none of its own: it begins with the common state.
        """
        if state is None:
            return
        self.put_in_optimizer(virtual_rank)

        # The common state is only for virtual ranks without a state of their own. Each gets its
        # own now, so the common one is not needed any more.
        self._stored.pop(COMMON, None)
        whole_state = {**self._optimizer.state_dict(), "state": state}
        # Without dtypes, parameters are assumed to have had their present ones.
        load_into_torch_optimizer(self._optimizer, whole_state, saved_dtypes={})
