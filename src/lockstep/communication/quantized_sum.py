"""Sums a vector over all ranks in every step, and sends it quantized.

A *peer* takes part in the exchange: a machine, if its ranks add up their vectors in shared memory
first, and otherwise a rank. The vector is cut into one *chunk* for each peer. As in any all-reduce,
each peer receives its chunk from all others, adds them up in the order of the peers, and sends the
sum back to all. Everything that is sent is quantized.

All methods except bf16 use error feedback (Karimireddy et al., arXiv 1901.09847): the rounding
errors of a step, the *residual*, are added to what is sent in the next step. They depend on the
number of peers, and so do the results of a training.
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
    """The peers that exchange data, and this rank's place among them."""

    size: int
    """Number of peers."""
    number: int
    """The number of the peer that this rank belongs to."""
    shared: SharedMemory | None = None
    """If a peer is a machine, the memory in which its ranks add up their vectors first."""
    local_size: int = 1
    """Number of ranks in each peer."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group that has one rank of each peer; None for all ranks.

        It is looked up each time, so that this object does not keep the group alive.
        """
        return None if self.shared is None else self.shared.group_across_machines


def find_peers(device: torch.device) -> Peers:
    """Returns the peers that exchange tensors of a device."""
    # Without shared memory, or with a single machine, every rank is a peer.
    shared = routing.shared_memory() if device.type == "cpu" else None
    if shared is None or shared.group_across_machines is None:
        return Peers(size=dist.get_world_size(), number=dist.get_rank())

    # Otherwise every machine is a peer. The group across machines has one rank of each machine, so
    # its size is the number of machines, and this rank's number in it is that of this machine.
    num_machines = dist.get_world_size(shared.group_across_machines)
    return Peers(
        size=num_machines,
        number=dist.get_rank(shared.group_across_machines),
        shared=shared,
        local_size=dist.get_world_size() // num_machines,
    )


def describe_peers(device: torch.device) -> str:
    """Describes which peers compress tensors of a device, e.g. `between 2 machines`."""
    peers = find_peers(device)
    kind = "ranks" if peers.shared is None else "machines"
    return f"between {peers.size} {kind}"


def have_same_shapes(state: State, other: State) -> bool:
    """Returns True if two states have tensors with the same names and shapes."""
    shapes = {name: tensor.shape for name, tensor in state.items()}
    return shapes == {name: tensor.shape for name, tensor in other.items()}


class QuantizedSum:
    """Sums a vector over all ranks, with the same bits on every rank.

    Call `start`, `advance` and `end` in every step.

    Args:
        length: number of elements in the vector.
        like: tensor whose device and dtype the sum has. A dtype of fewer than 32 bits is replaced
            by float32.
        method: how the vector is quantized.
    """

    def __init__(self, length: int, like: Tensor, method: Method) -> None:
        self._method = method
        self._peers = find_peers(like.device)

        # The length is rounded up so that every peer's chunk, and every rank's shard of it, has
        # whole blocks. Even an empty vector gets one such multiple.
        multiple = BLOCK * self._peers.size * self._peers.local_size
        num_multiples = max(1, (length + multiple - 1) // multiple)
        dtype = wide_dtype(like.dtype)
        self._padded = torch.zeros(num_multiples * multiple, dtype=dtype, device=like.device)
        self.values = self._padded[:length]
        """Before `start`, the vector of this rank; after `end`, the sum over all ranks."""
        self.state: dict[str, Tensor] = {}
        """The state of this rank, which belongs in a checkpoint."""

        if method != "bf16":
            peers = self._peers
            self.state["peers"] = torch.tensor((peers.size, peers.local_size, peers.number))
            self.state["residual"] = torch.zeros(
                len(self._padded) // peers.local_size, dtype=dtype, device=like.device
            )

        self._finish: Callable[[], None] = do_nothing
        self._wait_for_exchange: Callable[[], None]
        self._received: Tensor
        """The received bytes, `(peers, bytes)`: after `start` every peer's values of this peer's
        chunk, after `advance` the sum of each peer's chunk."""
        self._chunks: Tensor
        """This rank's shard of its peer's vector, `(peers, values)`: one chunk for each peer."""

    def start(self) -> None:
        """Begins to send `values`.

        Call `advance` and `end` next. Calls for other sums may come in between, as long as all
        ranks make all calls in the same order.
        """
        # `values` is the beginning of `_padded`; the rest is padding, which must be 0. If the last
        # values of the vector became NaN in the last sum, the padding became NaN too, because both
        # belong to the same quantization block and have the same scale.
        self._padded[len(self.values) :] = 0.0
        shared = self._peers.shared
        if shared is None:
            self._finish = self._start_exchange(self._padded)
        else:
            # The ranks of this machine add up their vectors in shared memory, each a part of it.
            # Then `_start_exchange` is called with this rank's part, and sums it over the machines.
            self._finish = shared.start_all_reduce(
                self._padded, start_between_machines=self._start_exchange
            )

    def advance(self) -> None:
        """Makes the second of three steps: adds up this peer's chunk, and sends the sum to all.

        `start` has sent the chunks, and `end` will wait for the sums.
        """
        peers = self._peers
        self._wait_for_exchange()  # for the one that `start` has begun

        # `_received` has a row for each peer: the encoded values that it sent. They are added in
        # the order of the peers; this peer's own values are not quantized.
        shape_of_chunk = (1, self._chunks.shape[1])
        total = self._chunks.new_zeros(shape_of_chunk)
        buffer = self._chunks.new_empty(shape_of_chunk)
        for peer, encoded in enumerate(torch.split(self._received, 1)):
            if peer == peers.number:
                total += self._chunks[peer]
            else:
                total += decode(encoded, self._method, out=buffer)

        # `encode` also writes its rounding errors to the residual of this peer's chunk.
        own_chunk = slice(peers.number, peers.number + 1)
        encoded_total = encode(total, self._method, self._residual_of_chunks(own_chunk))

        # Send the sum of this peer's chunk to every peer. The new `_received` is filled with the
        # sums of all chunks.
        sent = encoded_total.expand(peers.size, -1)
        self._received = encoded_total.new_empty(peers.size, encoded_total.numel())
        self._wait_for_exchange = routing.start_all_to_all(self._received, sent, peers.group)

    def end(self) -> None:
        """Waits for the sums of all chunks, and makes `values` the sum over all ranks."""
        self._finish()
        self._finish = do_nothing

    def load(self, own: State, states_of_ranks: Sequence[State]) -> bool:
        """Loads the state of the run that is resumed.

        Args:
            own: the `state` that this rank had at the end of that run.
            states_of_ranks: not used; `LowRankSum.load` needs the states of all ranks.

        Returns:
            False if that run had other peers, or the state belongs to another vector; nothing is
            loaded then.
        """
        keeps_rounding_errors = len(self.state) > 0  # not with the method bf16
        if not keeps_rounding_errors:
            return True  # there is nothing to load

        # A vector of another length, or another number of peers, has a residual of another shape.
        if not have_same_shapes(own, self.state):
            return False

        # With the same shapes, this rank may still have had another place among the peers.
        if not torch.equal(own["peers"], self.state["peers"]):
            return False

        # The rounding errors of the last step, which are added to the next one.
        self.state["residual"].copy_(own["residual"])
        return True

    def _start_exchange(self, shard: Tensor) -> Callable[[], None]:
        """Begins to send this rank's values, one chunk to each peer.

        This is the first of two exchanges. The second one, in which each peer sends the sum of its
        chunk to all others, is begun by `advance`.

        Args:
            shard: the values that this rank sends: if the peer is a rank, its whole vector; if it
                is a machine, the part of the vector that this rank has summed over the ranks of the
                machine.

        Returns:
            A function, to be called after `advance`, that waits for the sums of all chunks and
            writes them to `shard`.
        """
        # Add the rounding errors of the last step (not with bf16, which keeps none).
        peers = self._peers
        if "residual" in self.state:
            shard += self.state["residual"]
        self._chunks = shard.view(peers.size, -1)  # (peers, values): a chunk for each peer

        # `encode` writes the rounding errors of all chunks to the residual. `advance` will replace
        # those of this peer's own chunk, by the errors of rounding the sum of that chunk.
        all_chunks = slice(None)
        residual = self._residual_of_chunks(all_chunks)
        encoded = encode(self._chunks, self._method, residual)
        self._received = torch.empty_like(encoded)
        self._wait_for_exchange = routing.start_all_to_all(self._received, encoded, peers.group)
        return self._take_sums

    def _take_sums(self) -> None:
        """Waits for the sums of all chunks, and writes them to this rank's shard."""
        self._wait_for_exchange()
        decode(self._received, self._method, out=self._chunks)

    def _residual_of_chunks(self, chunks: slice) -> Tensor | None:
        """Returns a view of the residual of the given chunks, of shape `(chunks, values)`.

        Returns None with bf16, which has no error feedback.
        """
        residual = self.state.get("residual")
        if residual is None:
            return None
        return residual.view(self._peers.size, -1)[chunks]


def do_nothing() -> None:
    """Does nothing: the function to call where there is nothing to wait for."""
