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
from lockstep.communication.shared_memory import SharedMemory, do_nothing

State = Mapping[str, Tensor]


class Peers(NamedTuple):
    """The peers that exchange data, and this rank's place among them."""

    size: int
    """Number of peers."""
    own_index: int
    """The index of the peer that this rank belongs to."""
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
        return Peers(size=dist.get_world_size(), own_index=dist.get_rank())

    # Otherwise every machine is a peer. The group across machines has one rank of each machine, so
    # its size is the number of machines, and this rank's number in it is that of this machine.
    num_machines = dist.get_world_size(shared.group_across_machines)
    return Peers(
        size=num_machines,
        own_index=dist.get_rank(shared.group_across_machines),
        shared=shared,
        local_size=dist.get_world_size() // num_machines,
    )


def describe_peers(device: torch.device) -> str:
    """Describes which peers compress tensors of a device, e.g. `between 2 machines`."""
    peers = find_peers(device)
    if peers.shared is None:
        return f"between {peers.size} ranks"
    return f"between {peers.size} machines"


def have_same_shapes(state: State, other: State) -> bool:
    """Returns True if two states have tensors with the same names and shapes."""
    shapes = {name: tensor.shape for name, tensor in state.items()}
    return shapes == {name: tensor.shape for name, tensor in other.items()}


class QuantizedSum:
    """Sums a vector over all ranks, with the same bits on every rank.

    Call `start`, `advance` and `end` in every step:

    1. `start` sends to each peer its chunk of this peer's vector.
    2. `advance` adds up the chunks that this peer has received, and sends the sum to all peers.
    3. `end` waits for the sums of all chunks, and writes them to `values`.

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
        """A view of the first part of `_padded`; the rest is padding. Before `start`, it holds the
        vector of this rank; after `end`, the sum over all ranks."""
        self.state: dict[str, Tensor] = {}
        """The state of this rank, which belongs in a checkpoint."""

        if method != "bf16":
            peers = self._peers
            self.state["peers"] = torch.tensor((peers.size, peers.local_size, peers.own_index))
            self.state["residual"] = torch.zeros(
                len(self._padded) // peers.local_size, dtype=dtype, device=like.device
            )

        self._wait_for_sums: Callable[[], None] = do_nothing
        """What `end` calls: waits until the sums of all chunks are in `values`."""
        self._wait_for_chunks: Callable[[], None]
        self._received_chunks: Tensor
        """Received after `start`, `(peers, bytes)`: the values of this peer's chunk that each peer
        has, encoded."""
        self._wait_for_encoded_sums: Callable[[], None]
        self._received_sums: Tensor
        """Received after `advance`, `(peers, bytes)`: the sum of each peer's chunk, encoded."""
        self._chunks: Tensor
        """This rank's shard of its peer's vector, `(peers, values)`: one chunk for each peer."""

    def start(self) -> None:
        """Begins to send `values`.

        Call `advance` and `end` next. Calls for other sums may come in between, as long as all
        ranks make all calls in the same order.
        """
        # Clear the padding behind `values`: the previous sum was also written there. The last block
        # reaches into the padding, where a NaN, for example, would spoil its quantization scale.
        self._padded[len(self.values) :] = 0.0
        shared = self._peers.shared
        if shared is None:
            self._wait_for_sums = self._start_exchange(self._padded)
        else:
            # The ranks of this machine add up their vectors in shared memory, each a part of it. As
            # soon as a rank has summed its part, `start_all_reduce` calls `_start_exchange` with
            # it, which sums the part over the machines.
            self._wait_for_sums = shared.start_all_reduce(
                self._padded, start_between_machines=self._start_exchange
            )

    def advance(self) -> None:
        """Makes the second of three steps: adds up this peer's chunk, and sends the sum to all.

        `start` has sent the chunks, and `end` will wait for the sums.
        """
        peers = self._peers
        self._wait_for_chunks()

        # Add in the order of the peers; this peer's own values are not quantized.
        shape_of_chunk = (1, self._chunks.shape[1])
        total = self._chunks.new_zeros(shape_of_chunk)
        buffer = self._chunks.new_empty(shape_of_chunk)
        for peer, encoded_chunk in enumerate(torch.split(self._received_chunks, 1)):
            if peer == peers.own_index:
                total += self._chunks[peer]
            else:
                total += decode(encoded_chunk, self._method, out=buffer)

        encoded_total = encode(total, self._method, errors_out=self._residual_of_own_chunk)

        # Send the sum of this peer's chunk to every peer, and receive the sums of all chunks.
        sent = encoded_total.expand(peers.size, -1)
        self._received_sums = encoded_total.new_empty(peers.size, encoded_total.numel())
        self._wait_for_encoded_sums = routing.start_all_to_all(
            self._received_sums, sent, peers.group
        )

    def end(self) -> None:
        """Waits for the sums of all chunks, and makes `values` the sum over all ranks."""
        self._wait_for_sums()
        self._wait_for_sums = do_nothing

    def load(self, own: State, states_of_ranks: Sequence[State]) -> bool:
        """Loads the state of the run that is resumed.

        Args:
            own: the `state` that this rank had at the end of that run.
            states_of_ranks: not used; `LowRankSum.load` needs the states of all ranks.

        Returns:
            False if the state does not fit this run, because that run had other peers or another
            vector; nothing is loaded then.
        """
        if self._method == "bf16":  # it keeps no rounding errors, so any state fits
            return True

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
        """Begins to send this rank's values, one chunk to each peer (step 1 of the class).

        The residual of each chunk, which is the rounding error of the previous step, is added to
        the chunk, and is replaced by the new rounding error.

        Args:
            shard: the values that this rank sends: if the peer is a rank, its whole vector; if it
                is a machine, the part of the vector that this rank has summed over the ranks of the
                machine.

        Returns:
            A function, to be called after `advance`, that waits for the sums of all chunks and
            writes them to `shard`.
        """
        peers = self._peers
        self._chunks = shard.view(peers.size, -1)

        # Add the rounding errors of the last step. This changes `shard`, which has the same memory.
        residuals = self._residuals
        if residuals is not None:
            self._chunks += residuals

        # One operation encodes all chunks, and writes their rounding errors to the residuals. The
        # peer's own chunk is not sent; `advance` replaces its residual.
        encoded = encode(self._chunks, self._method, errors_out=residuals)
        self._received_chunks = torch.empty_like(encoded)
        self._wait_for_chunks = routing.start_all_to_all(
            self._received_chunks, encoded, peers.group
        )
        return self._decode_sums

    def _decode_sums(self) -> None:
        """Waits for the sums of all chunks, and writes them to this rank's shard."""
        self._wait_for_encoded_sums()
        decode(self._received_sums, self._method, out=self._chunks)

    @property
    def _residuals(self) -> Tensor | None:
        """The residual of each chunk, `(peers, values)`: a view of the state. None with bf16."""
        residual = self.state.get("residual")
        return None if residual is None else residual.view(self._peers.size, -1)

    @property
    def _residual_of_own_chunk(self) -> Tensor | None:
        """The residual of this peer's chunk, `(1, values)`: a view of the state. None with bf16."""
        residuals = self._residuals
        if residuals is None:
            return None
        own_index = self._peers.own_index
        return residuals[own_index : own_index + 1]
