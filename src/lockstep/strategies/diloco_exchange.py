"""What replicas exchange under DiLoCo: the means over all of them of what each has.

An exchange is one all-reduce of what is sent as it is. What is quantized is gathered instead, and
every rank adds up the same rows in the order of the replicas: so the numbers depend on them alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lockstep.communication import routing
from lockstep.communication.quantize import BLOCK, Method, decode, encode
from lockstep.distributed.process_group import Run, carrier_device
from lockstep.errors import SettingError
from lockstep.strategies.replication import start_sum
from lockstep.wording import count_noun

GROUP, ACROSS = "replica", "across replicas"
"""Names of groups: the ranks that compute the same replicas, and one rank of each replica."""


class Exchange:
    """Between all replicas of a run, in halves: what begins one returns what waits for it.

    Those that are begun one after the other are waited for in the same order, on all ranks.
    """

    def __init__(self, run: Run, replicas: int) -> None:
        self._run, self._replicas = run, replicas

    def start_means(self, sums: Sequence[Tensor]) -> Callable[[], None]:
        """Begins to replace the sums over this rank's replicas by the means over all."""
        size = self._run.topology.size
        end = start_sum(sums) if size > 1 else lambda: None

        def wait() -> None:
            end()
            for each in sums:  # a replica on several ranks is in the sum as often
                each.div_(max(self._replicas, size))

        return wait

    def start_quantized(
        self,
        own: Sequence[Tensor],
        lost: Sequence[Tensor | None],
        means: Sequence[Tensor],
        method: Method,
    ) -> tuple[Sequence[Tensor | None], Callable[[], None]]:
        """Begins to fill `means` with the means over all replicas of what is sent of each.

        Args:
            own: a vector of each replica of this rank.
            lost: what the exchange before has lost of each, which is added.
            means: as many values together as a vector has.
            method: how they are quantized.

        Returns:
            What is lost of each, but with bf16; and what waits for the means.
        """
        length = len(own[0])
        padding = -length % BLOCK if length else BLOCK  # of an empty parameter
        values = F.pad(torch.stack([*own]), (0, padding))
        for row, more in zip(values, lost, strict=True):
            row += 0.0 if more is None else more
        left = None if method == "bf16" else torch.empty_like(values)
        encoded = encode(values, method, left)
        gather = self._start_gather(encoded)

        def wait() -> None:
            total, came = torch.zeros_like(values[:1]), torch.empty_like(values[:1])
            for row in torch.split(gather().to(total.device), 1):
                total += decode(row, method, came)
            total = total[0, :length].div_(self._replicas)
            parts = torch.split(total, [mean.numel() for mean in means])
            for mean, part in zip(means, parts, strict=True):
                mean.copy_(part.view_as(mean))

        return lost if left is None else [*left], wait

    def _start_gather(self, own: Tensor) -> Callable[[], Tensor]:
        """Begins to bring the rows of all replicas together; what this returns gives them.

        Where replicas do not divide evenly, there are rows of zeros in it, which stand for zeros.
        The ranks of one replica send a part of its row each, and tell each other what has come.
        """
        across, group = self._run.groups.get(ACROSS), self._run.groups.get(GROUP)
        if across is None or (size := dist.get_world_size(across)) == 1:
            return lambda: own
        most, places = -(-self._replicas // size), dist.get_world_size(group)
        sent = F.pad(own, (0, 0, 0, most - len(own))).to(carrier_device(own.device, across))
        if places > 1:
            each = -(-own.shape[1] // places)
            parts = torch.split(F.pad(sent, (0, each * places - own.shape[1])), each, 1)
            sent = parts[dist.get_rank(group)].contiguous()
        received = sent.new_empty(size * most, sent.shape[1])
        everywhere = sent.view(1, -1).expand(size, -1)
        exchange = routing.start_all_to_all(received.view(size, -1), everywhere, across)

        def end() -> Tensor:
            exchange()
            if places == 1:
                return received
            came = received.new_empty(places, *received.shape)
            routing.all_gather(came, received, group)
            return torch.cat(list(came), 1)[:, : own.shape[1]].contiguous()

        return end


def cut(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Cuts tensors of these sizes, in their order, into fragments of nearly equal size.

    Raises:
        SettingError: there are fewer tensors.
    """
    if count > max(1, len(sizes)):
        raise SettingError(
            f"DiLoCo(fragments={count})",
            f"the model has {count_noun(len(sizes), 'parameter')} to train",
            "use fewer fragments",
        )
    ends = list(itertools.accumulate(sizes))
    cuts = [0]
    for fragment in range(1, count):
        wanted = ends[-1] * fragment / count
        room = range(cuts[-1] + 1, len(sizes) - (count - fragment) + 1)
        cuts.append(min(room, key=lambda at: abs(ends[at - 1] - wanted)))
    return [list(range(a, b)) for a, b in itertools.pairwise([*cuts, len(sizes)])]
