"""Means over the ranks of vectors that are sent compressed.

`bf16` rounds. `int8` and `int4` are whole numbers, with a scale for every 128 of them (blocks as of
Dettmers et al., arXiv 2110.02861). `powersgd` sends two narrow matrices in the place of a wide one
(Vogels et al., arXiv 1905.13727). All but bf16 have error feedback (Karimireddy et al., arXiv
1901.09847): what was lost is added to what is sent the next time.

Who sends is a *peer*: a machine, where the ranks of each sum up in shared memory first, else a
rank. What is lost, and so the numbers of a training, depends on how many peers there are.

Torch has hooks of this kind (`torch.distributed.algorithms.ddp_comm_hooks`). With Gloo those for
bf16 are refused, that for PowerSGD hung with many buckets (its callbacks wait in Gloo's own
threads), and the quantizing ones raise; nor is their state part of a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.communication import routing
from lockstep.communication.link import Compressed
from lockstep.communication.shared_memory import SharedMemory

Method = Literal["bf16", "int8", "int4"]
"""How numbers are quantized."""
Compression = Literal["bf16", "int8", "powersgd"]
"""How gradients are sent."""

BLOCK = 128
"""Values that have one scale."""
_TRIED = 2**23
"""Values, at most, that are encoded to see how long it takes."""
_IN_CACHE = 2**18
"""Values that a processor encodes at a time, and finds in its cache from one operation to the next:
of 11 million, 23 ms instead of 115."""
_LARGEST = {"int8": 127, "int4": 7}
_UNITS, _LEAST_BYTES, _MOST_BYTES = 4, 2**17, 2**23
"""Gradients are sent in about so many units, of such sizes: the first are on their way while others
are computed, and while one waits for acknowledgements. An exchange of 200 KiB at 100 Mb/s alone was
measured to take nearly twice as long as its bytes explain (benchmarks/results/compression.md)."""
_MIN_GAIN = 2
"""Matrices that PowerSGD would not make smaller by this factor are sent as they are."""


def encode(values: Tensor, method: Method, lost: Tensor | None = None) -> Tensor:
    """Rows of numbers as rows of bytes.

    Args:
        values: `(rows, n)`, contiguous; n is a multiple of `BLOCK`, and not 0.
        method: how.
        lost: like `values`; becomes what they have and the bytes do not, finite everywhere. Not
            for bf16.

    Returns:
        Of dtype uint8: `(rows, 2 n)` for bf16, `(rows, n + 4 n / BLOCK)` for int8, half of the
        first term for int4. A block with a value that is not finite has none when it is decoded.
    """
    if method == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    rows, length = values.shape
    codes = values.new_empty(rows, length, dtype=torch.int8)
    scales = values.new_empty(rows, length // BLOCK, dtype=torch.float32)
    whole = [values.view(-1, BLOCK), codes.view(-1, BLOCK), scales.view(-1, 1)]
    whole += [] if lost is None else [lost.view(-1, BLOCK)]
    at_once = len(whole[0]) if values.is_cuda else _IN_CACHE // BLOCK
    work = torch.empty_like(whole[0][:at_once], dtype=_wide(values.dtype))
    for own, code, scale, *left in zip(
        *(torch.split(each, at_once) for each in whole), strict=True
    ):
        wide = own.to(work.dtype)
        near = torch.abs(wide, out=work[: len(own)])
        # `aminmax` over a short axis takes twenty times as long.
        scale.copy_(near.amax(dim=1, keepdim=True)).div_(_LARGEST[method])
        scale.clamp_(min=torch.finfo(torch.float32).tiny)
        code.copy_(torch.div(wide, scale, out=near).round_())
        for each in left:  # what is not finite is seen in the sum, and must not come back for ever
            torch.sub(wide, near.mul_(scale), out=each).nan_to_num_(0.0, 0.0, 0.0)
    if method == "int4":
        first, second = codes.tensor_split(2, dim=1)
        codes = (first & 15) | (second << 4)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], dim=1)


def decode(encoded: Tensor, method: Method, out: Tensor) -> Tensor:
    """Fills `out`, `(rows, n)`, with what `encode` has made bytes of, as far as they tell."""
    if method == "bf16":
        return out.copy_(encoded.view(torch.bfloat16))
    of_block = BLOCK if method == "int8" else BLOCK // 2
    numbers = encoded.shape[1] // (of_block + 4) * of_block
    codes = encoded[:, :numbers].view(torch.int8)
    if method == "int4":
        codes = torch.cat([(codes << 4) >> 4, codes >> 4], dim=1)
    scales = encoded[:, numbers:].contiguous().view(torch.float32).to(_wide(out.dtype))
    blocks = codes.view(len(encoded), -1, BLOCK)
    torch.mul(blocks, scales.unsqueeze(2), out=out.view(blocks.shape))
    return out


def costs(count: int, peers: int) -> dict[str, Compressed]:
    """What a `QuantizedSum` of so many values for a rank takes, by method."""
    found: dict[str, Compressed] = {}
    values = torch.ones(1, max(BLOCK, min(count, _TRIED) // BLOCK * BLOCK))
    own, lost = torch.empty_like(values), torch.empty_like(values)
    methods: tuple[tuple[Method, Tensor | None], ...] = ("bf16", None), ("int8", lost)
    for method, left in methods * 3:  # the first time memory is new
        begin = time.perf_counter()
        own.copy_(values)
        copied = time.perf_counter()
        sent = encode(own, method, left)
        encoded = time.perf_counter()
        decode(sent, method, own)
        end = time.perf_counter()
        # Gradients are put together, added up, and taken apart; the sum is encoded as well.
        seconds = 3 * (copied - begin) + (encoded - copied) * (1 + 1 / peers) + 2 * (end - encoded)
        tried = Compressed(sent.nbytes / values.nbytes, seconds * count / values.numel())
        found[method] = min(tried, found.get(method, tried))
    return found


State = Mapping[str, Tensor]


class _Peers(NamedTuple):
    """Who sends to whom."""

    size: int
    number: int
    """That of this rank."""
    shared: SharedMemory | None = None
    """In which the ranks of a peer sum up before."""
    local_size: int = 1
    """Ranks of a peer."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """One rank of each peer; None: all ranks. It is not kept here, and so ends with the run."""
        return None if self.shared is None else self.shared.across


def _peers(device: torch.device) -> _Peers:
    shared = routing.shared_memory() if device.type == "cpu" else None
    if shared is None or shared.across is None:
        return _Peers(dist.get_world_size(), dist.get_rank())
    size, number = dist.get_world_size(shared.across), dist.get_rank(shared.across)
    return _Peers(size, number, shared, dist.get_world_size() // size)


def sent_between(device: torch.device) -> str:
    """Whose tensors of a device are compressed, in words."""
    found = _peers(device)
    return f"between {found.size} {'ranks' if found.shared is None else 'machines'}"


class QuantizedSum:
    """The sum over all ranks of one vector, again and again.

    As in other all-reduces each peer sums one chunk of the vector up, over the peers in their
    order, and all take its sum; what is sent, once to the one and once by it, is quantized.
    All ranks have the same bits.

    Args:
        length: of the vector.
        like: the sum has its device, and its dtype or float32.
        method: how it is quantized; what that loses is kept for the next time, but with bf16.
    """

    def __init__(self, length: int, like: Tensor, method: Method) -> None:
        self._method, self._peers = method, _peers(like.device)
        step = BLOCK * self._peers.size * self._peers.local_size
        whole = _zeros(-(-max(length, 1) // step) * step, like)
        self.values = whole[:length]
        """What this rank gives, before `start`; the sum over all ranks, after `end`."""
        self.state: dict[str, Tensor] = {}
        """What a checkpoint has to hold, of this rank alone."""
        if method != "bf16":
            of = self._peers.size, self._peers.local_size, self._peers.number
            self.state["peers"] = torch.tensor(of)
            self.state["residual"] = _zeros(len(whole) // self._peers.local_size, like)
        self._whole = whole
        self._finish: Callable[[], None] = _nothing
        self._exchange: Callable[[], None]
        self._received: Tensor

    def start(self) -> None:
        """Begins to send. `advance` and `end` follow; other vectors' may come between them.

        All ranks do all of it in the same order.
        """
        shared = self._peers.shared
        self._whole[len(self.values) :] = 0.0  # NaN, where the last block had one the last time
        if shared is None:
            self._finish = self._send(self._whole)
        else:
            self._finish = shared.start_all_reduce(self._whole, between=self._send)

    def advance(self) -> None:
        """Waits for what the other peers have sent, and sends them the sum of it."""
        size, index, chunks = self._peers.size, self._peers.number, self._chunks
        self._exchange()
        total, came = torch.zeros_like(chunks[:1]), torch.empty_like(chunks[:1])
        for peer, row in enumerate(torch.split(self._received, 1)):
            total += chunks[peer] if peer == index else decode(row, self._method, came)
        sent = encode(total, self._method, self._lost(slice(index, index + 1)))
        self._received = sent.new_empty(size, sent.numel())
        everywhere = sent.expand(size, -1)
        self._exchange = routing.start_all_to_all(self._received, everywhere, self._peers.group)

    def end(self) -> None:
        """Returns when `values` is the sum."""
        self._finish()
        self._finish = _nothing

    def load(self, own: State, ranks: Sequence[State]) -> bool:
        """Takes up what this rank's `state` was; False: there were other peers, and it is left."""
        if not self.state:
            return True
        if not _alike(own, self.state) or not torch.equal(own["peers"], self.state["peers"]):
            return False
        self.state["residual"].copy_(own["residual"])
        return True

    def _send(self, mine: Tensor) -> Callable[[], None]:
        """Begins the exchange of this rank's shard of what its peer is to send."""
        peers = self._peers
        self._chunks = mine.view(peers.size, -1)
        if "residual" in self.state:
            mine += self.state["residual"]
        # What of its own chunk is lost, `advance` knows.
        sent = encode(self._chunks, self._method, self._lost(slice(None)))
        self._received = torch.empty_like(sent)
        self._exchange = routing.start_all_to_all(self._received, sent, peers.group)
        return self._take

    def _take(self) -> None:
        self._exchange()
        decode(self._received, self._method, self._chunks)

    def _lost(self, rows: slice) -> Tensor | None:
        """Where what is lost of some chunks is kept."""
        residual = self.state.get("residual")
        return None if residual is None else residual.view(self._peers.size, -1)[rows]


class LowRankSum:
    """The sum over all ranks of matrices, as two narrow ones each, again and again.

    One step of a power iteration each time, from where the last one came to (algorithms 1 and 2 of
    Vogels et al.). It is linear: the sum depends on the sum of what the ranks give, not on who
    gives it, up to rounding. All ranks have the same bits where their processors are of one kind,
    as each multiplies the narrow matrices itself.

    Args:
        shapes: of the tensors; their first axis is that of the matrices' rows.
        like: the sums have its device, and its dtype or float32.
        rank: columns of the narrow matrices.
        start: how often everything is sent as it is, before that begins.
        seed: of the narrow matrices that it begins with.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        like: Tensor,
        *,
        rank: int,
        start: int,
        seed: int = 0,
    ) -> None:
        sizes = [shape.numel() for shape in shapes]
        self.values = _zeros(sum(sizes), like)
        """What this rank gives, before `start`; the sum over all ranks, after `end`."""
        self._start, self._matrices, self._rest = start, list[Tensor](), list[Tensor]()
        for shape, part in zip(shapes, torch.split(self.values, sizes), strict=True):
            matrix = part.view(rows := shape[0] if shape else 1, len(part) // max(rows, 1))
            narrow = min(rank, *matrix.shape) * sum(matrix.shape)
            if narrow * _MIN_GAIN < matrix.numel():
                self._matrices.append(matrix)
            else:
                self._rest.append(part)
        self._widths = [min(rank, *matrix.shape) for matrix in self._matrices]
        right = sum(m.shape[1] * w for m, w in zip(self._matrices, self._widths, strict=True))
        generator = torch.Generator().manual_seed(seed)
        self.state = {
            "right": torch.randn(right, generator=generator).to(self.values),
            "residual": self.values.new_zeros(sum(m.numel() for m in self._matrices)),
            "times": torch.zeros((), dtype=torch.int64),
        }
        """What a checkpoint has to hold, of this rank alone."""
        self._finish: Callable[[], None] = _nothing

    def start(self) -> None:
        """Begins to send. `advance` and `end` follow; other vectors' may come between them.

        All ranks do all of it in the same order.
        """
        if self.state["times"] < self._start:
            self._finish = routing.start_all_reduce(self.values)
            return
        for matrix, lost in zip(self._matrices, self._residuals(), strict=True):
            matrix += lost
        pairs = zip(self._matrices, self._right(), strict=True)
        self._lefts = [matrix @ right for matrix, right in pairs]
        self._sent = torch.cat([part.view(-1) for part in (*self._lefts, *self._rest)])
        self._finish = routing.start_all_reduce(self._sent)

    def advance(self) -> None:
        """Waits for the first of the narrow matrices, and sends the second."""
        self._finish()
        if self.state["times"] < self._start:
            self._finish = _nothing
            return
        sizes = [part.numel() for part in (*self._lefts, *self._rest)]
        came = torch.split(self._sent, sizes)
        for part, sums in zip(self._rest, came[len(self._lefts) :], strict=True):
            part.copy_(sums)
        for number, (left, sums) in enumerate(zip(self._lefts, came, strict=False)):
            self._lefts[number] = torch.linalg.qr(sums.view_as(left)).Q
        for matrix, left, right in zip(self._matrices, self._lefts, self._right(), strict=True):
            torch.mm(matrix.T, left, out=right)
        self._finish = routing.start_all_reduce(self.state["right"])

    def end(self) -> None:
        """Returns when `values` is the sum."""
        self._finish()
        if self.state["times"] >= self._start:
            size = dist.get_world_size()
            found = zip(self._matrices, self._lefts, self._right(), self._residuals(), strict=True)
            for matrix, left, right, lost in found:
                sums = left @ right.T
                torch.sub(matrix, sums, alpha=1.0 / size, out=lost).nan_to_num_(0.0, 0.0, 0.0)
                matrix.copy_(sums)
            self.state["right"].nan_to_num_(0.0, 0.0, 0.0)  # as in `encode`
        self._finish = _nothing
        self.state["times"] += 1

    def load(self, own: State, ranks: Sequence[State]) -> bool:
        """Takes up what this rank's `state` was; of another number of ranks, what all had lost."""
        if not ranks or not _alike(ranks[0], self.state):
            return False
        for name in ("right", "times"):
            self.state[name].copy_(ranks[0][name])
        size = dist.get_world_size()
        if len(ranks) == size:
            self.state["residual"].copy_(own["residual"])
        else:
            total = torch.stack([rank["residual"] for rank in ranks]).sum(0)
            self.state["residual"].copy_(total / size)
        return True

    def _right(self) -> list[Tensor]:
        sizes = [m.shape[1] * w for m, w in zip(self._matrices, self._widths, strict=True)]
        parts = torch.split(self.state["right"], sizes)
        return [part.view(-1, w) for part, w in zip(parts, self._widths, strict=True)]

    def _residuals(self) -> list[Tensor]:
        parts = torch.split(self.state["residual"], [m.numel() for m in self._matrices])
        return [part.view_as(m) for part, m in zip(parts, self._matrices, strict=True)]


Sum = QuantizedSum | LowRankSum


class CompressedMeans:
    """What a communication hook of DDP does: the mean over the ranks, in the bucket itself.

    DDP makes its buckets anew after the first step, and in a run that is resumed. What is lost in
    one step is needed in the next, so gradients are put together here, always the same ones.

    Args:
        parameters: those that DDP trains, in its order.
        method: how they are sent.
        rank: of `LowRankSum`.
        start: likewise.
    """

    def __init__(
        self, parameters: Iterable[Tensor], method: Compression, rank: int = 1, start: int = 100
    ) -> None:
        self._scale = 1.0 / dist.get_world_size()
        units = _units(parameters)
        self.sums: list[Sum] = []
        for number, unit in enumerate(units):
            if method == "powersgd":
                shapes = [parameter.shape for parameter in unit]
                made: Sum = LowRankSum(shapes, unit[0], rank=rank, start=start, seed=number)
            else:
                length = sum(parameter.numel() for parameter in unit)
                made = QuantizedSum(length, unit[0], method)
            self.sums.append(made)
        self._counts = list(map(len, units))
        self._places: dict[Tensor, tuple[int, Tensor]] = {}
        for number, (unit, own) in enumerate(zip(units, self.sums, strict=True)):
            parts = torch.split(own.values, [parameter.numel() for parameter in unit])
            for parameter, part in zip(unit, parts, strict=True):
                self._places[parameter] = number, part.view(parameter.shape)
        self._begin()

    def _begin(self) -> None:
        self._missing = list(self._counts)
        self._started: list[Sum] = []
        self._ends: list[Callable[[], None]] = []

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Takes a bucket; its future is there when the last of the buckets has come."""
        if bucket.index() == 0:
            self._begin()  # a backward pass before may have raised
        buffer, gradients = bucket.buffer(), bucket.gradients()
        means = torch.futures.Future[Tensor](devices=[buffer.device] if buffer.is_cuda else [])
        places = [self._places[parameter] for parameter in bucket.parameters()]
        for gradient, (number, place) in zip(gradients, places, strict=True):
            torch.mul(gradient.to(place.dtype), self._scale, out=place)
            self._missing[number] -= 1
            if not self._missing[number]:
                self.sums[number].start()
                self._started.append(self.sums[number])

        def end() -> None:
            for gradient, (_, place) in zip(gradients, places, strict=True):
                gradient.copy_(place)
            means.set_result(buffer)

        self._ends.append(end)
        if bucket.is_last():
            for one in self._started:
                one.advance()
            for one in self._started:
                one.end()
            for each in self._ends:
                each()
            self._begin()
        return means

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank alone has to remember."""
        return {f"{n}.{name}": t for n, s in enumerate(self.sums) for name, t in s.state.items()}

    def load_state_dict(self, own: State, ranks: Sequence[State]) -> bool:
        """Takes up what this rank and all ranks had to remember.

        Returns:
            Whether nothing is lost: quantized sums keep what is theirs only with the same peers.
        """
        taken = []
        for number, each in enumerate(self.sums):
            begin = f"{number}."
            mine, *others = (
                {k.removeprefix(begin): t for k, t in state.items() if k.startswith(begin)}
                for state in (own, *ranks)
            )
            taken.append(each.load(mine, others))
        return all(taken)


def _alike(state: State, own: State) -> bool:
    return {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in own.items()}


def _units(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those that are sent together, in about the order in which a backward pass comes to them."""
    trained = [*parameters]
    total = sum(parameter.nbytes for parameter in trained)
    enough = min(max(total // _UNITS, _LEAST_BYTES), _MOST_BYTES)
    units: dict[Any, list[list[Tensor]]] = {}
    sizes: dict[Any, int] = {}
    for parameter in reversed(trained):
        kind = parameter.dtype, parameter.device
        if sizes.get(kind, enough) >= enough:
            units.setdefault(kind, []).append([])
            sizes[kind] = 0
        units[kind][-1].append(parameter)
        sizes[kind] += parameter.nbytes
    return [unit for of_kind in units.values() for unit in of_kind]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _zeros(count: int, like: Tensor) -> Tensor:
    return torch.zeros(count, dtype=_wide(like.dtype), device=like.device)


def _nothing() -> None:
    """There is nothing to wait for."""
