"""The sum over all ranks of one vector, sent quantized, again and again.

A *peer* is who sends: a machine if its ranks sum up in shared memory first, else a rank. As in
other all-reduces each peer sums up one chunk of the vector, over the peers in their order, and all
take its sum. What is sent, once to that peer and once by it, is quantized.

Except for bf16 there is error feedback (Karimireddy et al., arXiv 1901.09847): the rounding
errors, the *residual*, are added to what is sent the next time. They, and so the numbers of a
training, depend on the number of peers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.communication import routing
from lockstep.communication.quantize import BLOCK, Method, decode, encode, wide_dtype
from lockstep.communication.shared_memory import SharedMemory

State = Mapping[str, Tensor]


class Peers(NamedTuple):
    """Who sends to whom."""

    size: int
    """Number of peers."""
    number: int
    """The number of this rank's peer."""
    shared: SharedMemory | None = None
    """The memory in which the ranks of a peer sum up before it sends."""
    local_size: int = 1
    """Ranks of each peer."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """One rank of each peer; None: all ranks. It is not kept here, so it ends with the run."""
        return None if self.shared is None else self.shared.across


def find_peers(device: torch.device) -> Peers:
    """Returns who sends tensors of a device to whom."""
    shared = routing.shared_memory() if device.type == "cpu" else None
    if shared is None or shared.across is None:  # no shared memory, or all ranks on one machine
        return Peers(size=dist.get_world_size(), number=dist.get_rank())
    # The group `across` has one rank of each machine.
    num_machines = dist.get_world_size(shared.across)
    return Peers(
        size=num_machines,
        number=dist.get_rank(shared.across),
        shared=shared,
        local_size=dist.get_world_size() // num_machines,
    )


def describe_peers(device: torch.device) -> str:
    """Says between whom tensors of a device are compressed, such as `between 2 machines`."""
    peers = find_peers(device)
    kind = "ranks" if peers.shared is None else "machines"
    return f"between {peers.size} {kind}"


def have_same_shapes(state: State, other: State) -> bool:
    """Returns True if two states have tensors of the same names and shapes."""
    shapes = {name: tensor.shape for name, tensor in state.items()}
    return shapes == {name: tensor.shape for name, tensor in other.items()}


class QuantizedSum:
    """The sum over all ranks of one vector. All ranks get the same bits.

    Args:
        length: of the vector.
        like: a tensor whose device the sum has, and whose dtype if it has at least 32 bits.
        method: how the vector is quantized.
    """

    def __init__(self, length: int, like: Tensor, method: Method) -> None:
        self._method = method
        self._peers = find_peers(like.device)
        # Every chunk of a peer, and every rank's shard of it, consists of whole blocks.
        multiple = BLOCK * self._peers.size * self._peers.local_size
        # The length is rounded up to that; an empty vector gets one multiple, too.
        num_multiples = max(1, (length + multiple - 1) // multiple)
        dtype = wide_dtype(like.dtype)
        self._padded = torch.zeros(num_multiples * multiple, dtype=dtype, device=like.device)
        self.values = self._padded[:length]
        """What this rank gives, before `start`; the sum over all ranks, after `end`."""
        self.state: dict[str, Tensor] = {}
        """What a checkpoint must hold of this rank alone."""
        if method != "bf16":
            peers = self._peers
            self.state["peers"] = torch.tensor((peers.size, peers.local_size, peers.number))
            self.state["residual"] = torch.zeros(
                len(self._padded) // peers.local_size, dtype=dtype, device=like.device
            )
        self._finish: Callable[[], None] = do_nothing
        self._wait_for_exchange: Callable[[], None]
        self._received: Tensor
        """What the peers send, (peers, bytes): first their parts of this peer's chunk, then the sum
        of each peer's chunk."""
        self._chunks: Tensor
        """This rank's shard of its peer's vector, (peers, values): the chunk of each peer."""

    def start(self) -> None:
        """Begins to send `values`.

        `advance` and `end` follow; those of other sums may come between them. All ranks call all of
        them in the same order.
        """
        # The padding after the vector is set to 0 again. The last sum has written to it: NaN, if
        # there was a NaN in its block, of which the vector's last values are a part.
        self._padded[len(self.values) :] = 0.0
        shared = self._peers.shared
        if shared is None:
            self._finish = self._start_exchange(self._padded)
        else:
            # The ranks of this machine sum up in their memory, each a part of the vector. `between`
            # is called with the part of this rank, and sums it up over the machines.
            self._finish = shared.start_all_reduce(self._padded, between=self._start_exchange)

    def advance(self) -> None:
        """Waits for what the other peers have sent of this peer's chunk, and sends them its sum."""
        peers = self._peers
        self._wait_for_exchange()
        # `_received` has a row for each peer: its part of this peer's chunk, encoded. The parts are
        # added in the order of the peers; this peer's own part is not quantized.
        total = torch.zeros_like(self._chunks[:1])  # (1, values)
        decoded = torch.empty_like(self._chunks[:1])
        for peer, encoded in enumerate(torch.split(self._received, 1)):
            if peer == peers.number:
                total += self._chunks[peer]
            else:
                total += decode(encoded, self._method, decoded)
        # `encode` also writes what it rounds off to the residual of this peer's chunk.
        own_chunk = slice(peers.number, peers.number + 1)
        encoded_total = encode(total, self._method, self._residual_of_chunks(own_chunk))
        # Every peer is sent the same: the sum of this peer's chunk. From now on `_received` has the
        # sum of each peer's chunk.
        sent = encoded_total.expand(peers.size, -1)
        self._received = encoded_total.new_empty(peers.size, encoded_total.numel())
        self._wait_for_exchange = routing.start_all_to_all(self._received, sent, peers.group)

    def end(self) -> None:
        """Waits for the sums of all chunks, and makes `values` the sum over all ranks."""
        self._finish()
        self._finish = do_nothing

    def load(self, own: State, states_of_ranks: Sequence[State]) -> bool:
        """Loads what this rank's `state` was in the run that is resumed.

        Args:
            own: what `state` was on this rank.
            states_of_ranks: what it was on every rank; used by `LowRankSum.load` alone.

        Returns:
            False if there were other peers; then the state is not loaded.
        """
        if not self.state:  # with bf16 there is nothing to load
            return True
        if not have_same_shapes(own, self.state):
            return False
        if not torch.equal(own["peers"], self.state["peers"]):
            return False
        self.state["residual"].copy_(own["residual"])
        return True

    def _start_exchange(self, shard: Tensor) -> Callable[[], None]:
        """Begins to send this rank's shard of its peer's vector, a chunk to each peer.

        Args:
            shard: the whole vector; or the part of it that this rank has summed up over the ranks
                of its machine.

        Returns:
            A function that waits for the sums, and writes them to the shard.
        """
        peers = self._peers
        self._chunks = shard.view(peers.size, -1)  # (peers, values): a view
        if "residual" in self.state:  # not with bf16
            shard += self.state["residual"]
        # `encode` writes what it rounds off to the residual. This peer's own chunk is not sent
        # here; its residual is written again by `advance`, when the sum of the chunk is sent.
        all_chunks = slice(None)
        encoded = encode(self._chunks, self._method, self._residual_of_chunks(all_chunks))
        self._received = torch.empty_like(encoded)
        self._wait_for_exchange = routing.start_all_to_all(self._received, encoded, peers.group)
        return self._take_sums

    def _take_sums(self) -> None:
        """Waits for the sums of all chunks, and writes them to this rank's shard."""
        self._wait_for_exchange()
        decode(self._received, self._method, self._chunks)

    def _residual_of_chunks(self, chunks: slice) -> Tensor | None:
        """Returns a view of the residual of some peers' chunks, `(chunks, values)`.

        Without error feedback (with bf16) it returns None.
        """
        residual = self.state.get("residual")
        if residual is None:
            return None
        return residual.view(self._peers.size, -1)[chunks]


def do_nothing() -> None:
    """Stands for waiting where there is nothing to wait for."""
