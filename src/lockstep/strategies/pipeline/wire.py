"""What the stages of a pipeline send each other: tensors whose form both sides know.

Communication: one point-to-point message a tensor. Before the first message of a kind (the same
kind of input through the same stage) its form is sent: how many tensors of which shape and dtype.
Activations and gradients go over process groups of their own: over one, NCCL would keep them in the
order in which they were asked for, and two neighbours that both send first would wait for ever.

Over Gloo the next message of a training pass is asked for when the one before it has come, if the
two before had the same form: Gloo sends nothing that nobody has asked for, and where the data waits
for the question its answer comes while the asking thread still holds Gloo's lock, for which Gloo's
own thread then spins. Both sides know what was asked for, so where the next message turns out to be
another one, one that was made up answers first.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed import collectives
from lockstep.distributed.process_group import carrier_device
from lockstep.errors import UsageError

_REMEMBERED = 256
"""Kinds of which each side of a cut remembers the form. Both forget at the same moment."""
_DTYPES = tuple(sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str))


Kind = tuple[int, Hashable]
"""Of a message: the stage it goes to, and what decides about its form."""


@dataclass(frozen=True)
class Form:
    """What a tensor looks like."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    trained: bool = False
    """A gradient comes back for it."""

    @property
    def size(self) -> int:
        """Bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name} {self.shape} with{'' if self.trained else 'out'} a gradient"

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """The form of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


class Expected(NamedTuple):
    """A tensor that was asked for."""

    form: Form
    data: Tensor
    work: dist.Work | None


class Wire:
    """One direction between the ranks of a pipeline.

    Args:
        group: of the pipeline's ranks.
        device: where tensors are needed.
        tag: of its messages, which those of other models over the same group do not have.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, tag: int) -> None:
        self._group = group
        self._device = device
        self._tag = tag
        self._carrier = carrier_device(device, group)
        self._under_way: list[tuple[dist.Work, Tensor]] = []
        self._forms: dict[int, dict[Hashable, list[Form]]] = {}
        self._last_sent: list[Form] | None = None
        self._last_received: list[Form] | None = None
        self._asked: list[Form] | None = None
        """What the other side has asked for before its time."""
        self._expected: list[Expected] = []
        """What this side has asked for before its time."""

    def send(
        self, tensors: Sequence[Tensor], to: int, kind: Kind | None, *, more: bool = False
    ) -> None:
        """Starts to send; says first what it looks like, where the kind is new.

        Args:
            tensors: any.
            to: the rank that calls `receive`.
            kind: of the message; None: unknown.
            more: it will be followed by another one, on both sides.

        Raises:
            UsageError: other shapes than the last time for the same kind of input.
        """
        forms = [Form.of(tensor) for tensor in tensors]
        known = self._known(kind)
        if self._asked is not None and self._asked != known:
            for form in self._asked:
                self._start(torch.zeros(form.size, dtype=torch.uint8, device=self._carrier), to)
        if known is None:
            text = torch.tensor(_encoded(forms), dtype=torch.int64)
            self._start(torch.tensor([len(text)]), to)
            self._start(text, to)
            self._remember(kind, forms)
        elif known != forms:
            raise UsageError(
                "a pipeline between whose stages the form of activations changes",
                f"the same kind of input first gave {_in_words(known)}, now {_in_words(forms)}",
                "let the shapes of activations depend on the shapes of inputs alone, and freeze or "
                "unfreeze parameters between two global batches",
            )
        self.send_known(tensors, to)
        repeats, self._last_sent = forms == self._last_sent, forms
        self._asked = forms if repeats and more and self.expects_early else None

    def send_known(self, tensors: Sequence[Tensor], to: int) -> None:
        """Starts to send what the other side expects."""
        for tensor in tensors:
            self._start(collectives.to_bytes(tensor).to(self._carrier), to)
        self._under_way = [(w, data) for w, data in self._under_way if not w.is_completed()]

    def receive(self, source: int, kind: Kind | None, *, more: bool = False) -> list[Tensor]:
        """What `send` sends, with a gradient to come back where it needs one."""
        forms = self._known(kind)
        expected, self._expected = self._expected, []
        if expected and [each.form for each in expected] != forms:
            self.take(expected)
            expected = []
        if forms is None:
            length = torch.empty(1, dtype=torch.int64)
            dist.recv(length, source, self._group, self._tag)
            text = torch.empty(int(length), dtype=torch.int64)
            dist.recv(text, source, self._group, self._tag)
            forms = _read(text.tolist())
            self._remember(kind, forms)
        tensors = self.take(expected or self.expect(source, forms))
        repeats, self._last_received = forms == self._last_received, forms
        if repeats and more and self.expects_early:
            self._expected = self.expect(source, forms)
        for tensor, form in zip(tensors, forms, strict=True):
            if form.trained and torch.is_grad_enabled():
                tensor.requires_grad_()
        return tensors

    @property
    def expects_early(self) -> bool:
        """Whether it is worth asking before: Gloo sends nothing that nobody has asked for.

        A GPU that waits for a message with NCCL is busy with it.
        """
        return self._carrier.type == "cpu"

    def expect(self, source: int, forms: Sequence[Form]) -> list[Expected]:
        """Asks for tensors of known form; they are asked for in the order in which they come."""
        found = []
        for form in forms:
            data = torch.empty(form.size, dtype=torch.uint8, device=self._carrier)
            work = dist.irecv(data, source, self._group, self._tag) if form.size else None
            found.append(Expected(form, data, work))
        return found

    def take(self, expected: Sequence[Expected]) -> list[Tensor]:
        """Waits for what was asked for."""
        found = []
        for form, data, work in expected:
            if work is not None:
                work.wait()
            found.append(collectives.from_bytes(data.to(self._device), form.dtype, form.shape))
        return found

    def share(self, tensors: Sequence[Tensor] | None, source: int) -> list[Tensor]:
        """Rank `source`'s tensors on all ranks of the group; the others pass None."""
        mine = [] if tensors is None else [Form.of(tensor.detach()) for tensor in tensors]
        text = torch.tensor(_encoded(mine), dtype=torch.int64)
        length = torch.tensor([len(text)])
        dist.broadcast(length, source, self._group)
        text = text if tensors is not None else torch.empty(int(length), dtype=torch.int64)
        dist.broadcast(text, source, self._group)
        found = []
        for place, form in enumerate(_read(text.tolist())):
            if tensors is not None:
                data = collectives.to_bytes(tensors[place]).to(self._carrier, copy=True)
            else:
                data = torch.empty(form.size, dtype=torch.uint8, device=self._carrier)
            if form.size:
                dist.broadcast(data, source, self._group)
            found.append(collectives.from_bytes(data.to(self._device), form.dtype, form.shape))
        return found

    def wait(self) -> None:
        """Returns when everything that was sent has gone."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def _known(self, kind: Kind | None) -> list[Form] | None:
        return None if kind is None else self._forms.get(kind[0], {}).get(kind[1])

    def _remember(self, kind: Kind | None, forms: list[Form]) -> None:
        if kind is not None:
            known = self._forms.setdefault(kind[0], {})
            if len(known) >= _REMEMBERED:
                known.clear()
            known[kind[1]] = forms

    def _start(self, data: Tensor, to: int) -> None:
        work = dist.isend(data, to, self._group, self._tag) if len(data) else None
        if work is not None:
            self._under_way.append((work, data))


def marked(tensor: Tensor) -> Form:
    """Of the message with a tensor's gradient: its bytes, and one that says if there is any."""
    return Form(torch.uint8, (tensor.numel() * tensor.element_size() + 1,))


def with_mark(tensor: Tensor) -> Tensor:
    """The message with a tensor's gradient, `(bytes + 1,)`.

    No gradient is not one of zeros: plain torch leaves parameters alone that nothing depends on.
    """
    if tensor.grad is None:
        return torch.zeros(marked(tensor).shape, dtype=torch.uint8, device=tensor.device)
    data = collectives.to_bytes(tensor.grad)
    return torch.cat([data, data.new_ones(1)])


def without_mark(message: Tensor, tensor: Tensor) -> Tensor | None:
    """The gradient of a tensor, from what `with_mark` made on the other side."""
    if not message[-1]:
        return None
    return collectives.from_bytes(message[:-1], tensor.dtype, tensor.shape)


def _in_words(forms: Sequence[Form]) -> str:
    return ", ".join(map(str, forms)) or "nothing"


def _encoded(forms: Sequence[Form]) -> list[int]:
    numbers = []
    for form in forms:
        numbers += [_DTYPES.index(form.dtype), form.trained, len(form.shape), *form.shape]
    return numbers


def _read(numbers: list[int]) -> list[Form]:
    forms = []
    while numbers:
        dtype, trained, dims, *rest = numbers
        forms.append(Form(_DTYPES[dtype], tuple(rest[:dims]), bool(trained)))
        numbers = rest[dims:]
    return forms
