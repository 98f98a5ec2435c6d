"""Saves and loads the states of virtual ranks that train copies of the model (DiLoCo's replicas).

Each *virtual rank* has its own weights, buffers and optimizer states. If several processes compute
the same virtual rank, the first of them saves its state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lockstep.checkpoint.sharding import copy_to_memory
from lockstep.errors import CheckpointError
from lockstep.strategies.base import PreparedModule, VirtualRankState
from lockstep.training.optimizer import PreparedOptimizer


class VirtualRankStates:
    """The states of a run's virtual ranks, as a part of its checkpoints.

    Args:
        count: the number of virtual ranks in the run.
        stores_shared: True on the rank that saves the state that all virtual ranks share.
        wrapped: all prepared modules; the mapping may still grow.
        optimizers: all prepared optimizers; the list may still grow.
    """

    partial = True
    """True, because each rank has only a part of the state."""

    def __init__(
        self,
        count: int,
        stores_shared: bool,
        wrapped: Mapping[nn.Module, PreparedModule],
        optimizers: Sequence[PreparedOptimizer],
    ) -> None:
        self.count = count
        self._stores_shared = stores_shared
        self._wrapped = wrapped
        self.optimizers = optimizers

    @property
    def own_virtual_ranks(self) -> list[int]:
        """The numbers of the virtual ranks that this process computes."""
        modules = self._modules()
        return list(modules[0].own) if modules else []

    def state_dict(self, shared: bool | None = None) -> dict[str, Any]:
        """Returns the states of this process's virtual ranks, and the state that all of them share.

        The shared state is that of DiLoCo's outer optimizer, which is the same on all ranks. For
        a run of 4 virtual ranks, of which this process computes the numbers 2 and 3, the result is

            {
                "replicas": 4,
                "shared": [one state for each module],
                "state": {
                    2: {"modules": [one state each], "optimizers": [one state each]},
                    3: ...
                },
            }

        Args:
            shared: True to include the shared state, False to leave it out. None to include it only
                on the rank that saves it.
        """
        modules = self._modules()
        includes_shared = self._stores_shared if shared is None else shared
        # Called on every rank, even if the result is not included: it waits for an exchange that is
        # under way, in which all ranks take part.
        shared_states = [module.shared_state() for module in modules]

        state_by_virtual_rank = {}
        for number in self.own_virtual_ranks:
            module_states = [module.virtual_rank_state(number) for module in modules]
            optimizer_states = []
            for optimizer in self.optimizers:
                optimizer_states.append(optimizer.versions.state_of(number))
            state_by_virtual_rank[number] = {
                "modules": module_states,
                "optimizers": optimizer_states,
            }

        return {
            "replicas": self.count,
            "shared": shared_states if includes_shared else None,
            "state": state_by_virtual_rank,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError if a saved state does not fit this run.

        It must have as many virtual ranks as the run (which DiLoCo calls replicas). The state that
        all virtual ranks share must fit the modules that they train.
        """
        if state["replicas"] != self.count:
            raise CheckpointError(
                f"resuming with DiLoCo(replicas={self.count})",
                f"the checkpoint has {state['replicas']} replicas, each with weights and optimizer "
                "states of its own",
                "continue with as many, on any number of devices; or begin anew from the shared "
                "weights: lockstep.load_weights(model, folder)",
            )

        for diloco_module, shared_state in zip(self._modules(), state["shared"], strict=True):
            diloco_module.check(shared_state)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Loads this rank's part of a state of the form that `state_dict` returns.

        The form is `{"shared": [...], "state": {number: {"modules": [...], "optimizers": [...]}}}`,
        with one entry for each module or optimizer in each list.

        Args:
            state: the state; None to load nothing, so that all virtual ranks begin with the weights
                that they have.
        """
        if state is None:
            return

        # The saved tensors may lie in the checkpoint's files. Only those of this process are read.
        state_by_virtual_rank = state["state"]
        own_states = {}
        for number in self.own_virtual_ranks:
            own_states[number] = copy_to_memory(state_by_virtual_rank[number])

        for index, module in enumerate(self._modules()):
            states_of_module = {}  # by virtual rank
            for number, own_state in own_states.items():
                states_of_module[number] = own_state["modules"][index]
            shared_state = copy_to_memory(state["shared"][index])  # common to all virtual ranks
            module.load(shared_state, states_of_module)

        for index, optimizer in enumerate(self.optimizers):
            for number, own_state in own_states.items():
                optimizer.versions.load(number, own_state["optimizers"][index])

    def _modules(self) -> list[VirtualRankState]:
        """Returns the object that holds virtual ranks' states, for each prepared module."""
        states = []
        for wrapped in self._wrapped.values():
            if wrapped.virtual_rank_state is not None:
                states.append(wrapped.virtual_rank_state)
        return states
