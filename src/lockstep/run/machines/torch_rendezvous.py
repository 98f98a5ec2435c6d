"""Uses torch's own rendezvous for backends that Lockstep does not implement, such as etcd.

Source: torch/distributed/elastic/rendezvous/dynamic_rendezvous.py.
"""

from __future__ import annotations

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from lockstep.errors import SettingError
from lockstep.run.machines.nodes import Peers
from lockstep.run.machines.rendezvous import Rendezvous, Say


class TorchRendezvous(Rendezvous):
    """A rendezvous that passes all calls on to one of torch's handlers."""

    can_publish = False

    def __init__(self, parameters: RendezvousParameters, peers: Peers, say: Say) -> None:
        super().__init__(parameters, peers, store=None, say=say, interface=None)

        try:
            handler = get_rendezvous_handler(parameters)
        except ValueError as error:
            raise SettingError(
                f"--rdzv-backend {parameters.backend}",
                str(error),
                "give one that torch has, such as c10d or static",
            ) from None

        self._handler: RendezvousHandler | None = handler
        """None once the run has ended, so that the heartbeats of the handler end too."""

    @property
    def use_agent_store(self) -> bool:
        """True if the ranks use the store in which the launchers meet."""
        return self._handler is not None and bool(self._handler.use_agent_store)

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits until torch's rendezvous is complete."""
        if self._handler is None:
            raise RendezvousClosedError
        return self._handler.next_rendezvous()

    def num_nodes_waiting(self) -> int:
        """Returns torch's answer, or 0 once the connection to its store is lost."""
        if self._handler is None:
            return 0
        try:
            return int(self._handler.num_nodes_waiting())
        except RendezvousConnectionError:
            self._handler = None
            return 0

    def shutdown(self) -> bool:
        """Ends the run for all nodes, and the heartbeats of torch's handler."""
        handler = self._handler
        self._handler = None
        if handler is None:
            return True
        return bool(handler.shutdown())

    def close(self, why: str = "") -> None:
        """Leaves the run."""
        self._handler = None
        super().close(why)
