"""What the stages of a pipeline send each other: tensors whose form both sides know.

Communication: one point-to-point message a tensor. Before the first message of a kind (the same
kind of input through the same stage) its form is sent: how many tensors of which shape and dtype.

The form may also depend on the values of the inputs: transformers makes no attention mask for a
batch without padding, so one tensor less crosses the cut. Every rank of a pipeline has the inputs,
but only the sender learns the form. So where inputs hold whole numbers or booleans, one byte goes
ahead of each message of a known kind and says if it has the form known; if not, tensors that were
made up answer what the receiver has asked for, and the new form and the real tensors follow.

Activations and gradients go over process groups of their own: over one, NCCL would keep them in the
order in which they were asked for, and two neighbours that both send first would wait for ever.

Over Gloo the next message of a training pass is asked for when the one before it has come, if the
two before had the same form: Gloo sends nothing that nobody has asked for, and where the data waits
for the question its answer comes while the asking thread still holds Gloo's lock, for which Gloo's
own thread then spins. Both sides know what was asked for, so where the next message turns out to be
another one, one that was made up answers first.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed import collectives
from lockstep.distributed.process_group import carrier_device
from lockstep.errors import UsageError
from lockstep.strategies.pipeline.stage import remember


class Form(NamedTuple):
    """What a tensor looks like, in values that JSON can say."""

    dtype: str
    shape: tuple[int, ...]
    trained: bool = False
    """A gradient comes back for it."""

    @property
    def size(self) -> int:
        """Bytes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.Size(self.shape).numel() * dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape} with{'' if self.trained else 'out'} a gradient"

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """The form of a tensor."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(dtype, tuple(tensor.shape), tensor.requires_grad)


SAME_FORM = Form("uint8", (1,))
"""Of the byte that goes ahead of a message whose form depends on values: 1 if its form is known."""


class Kind(NamedTuple):
    """What decides about the form of activations, apart from the values of inputs."""

    parts: Hashable
    """Equal for calls of one kind."""
    by_value: bool
    """Inputs hold whole numbers or booleans, and a forward pass may branch on them."""


class Expected(NamedTuple):
    """A tensor that was asked for."""

    form: Form
    data: Tensor
    work: dist.Work | None


class Wire:
    """One direction between two ranks of a pipeline, of which one sends and the other receives.

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
        self._forms: dict[Hashable, list[Form]] = {}
        """By kind; both sides forget at the same moment."""
        self._last: list[Form] | None = None
        self._asked: list[Form] | None = None
        """What the other side has asked for before its time."""
        self._expected: list[Expected] = []
        """What this side has asked for before its time."""

    def send(
        self, tensors: Sequence[Tensor], to: int, kind: Kind | None = None, *, more: bool = False
    ) -> None:
        """Starts to send; says first what it looks like, where the kind is new.

        Args:
            tensors: any.
            to: the rank that calls `receive`.
            kind: what decides about the form; None: unknown.
            more: it will be followed by another one, on both sides.

        Raises:
            UsageError: other shapes than the last time for the same kind of input, which holds
                neither whole numbers nor booleans.
        """
        forms = [Form.of(tensor) for tensor in tensors]
        known = self._forms.get(kind)
        awaited = None if known is None else _with_byte(known, kind)
        if self._asked is not None and self._asked != awaited:
            self._send_made_up(self._asked, to)
        if known is None:
            self._send_form(forms, to, kind)
        elif known != forms:
            if awaited == known:
                raise UsageError(
                    "a pipeline between whose stages the form of activations changes",
                    f"the same kind of input first gave {_in_words(known)}, now {_in_words(forms)}",
                    "let the shapes of activations depend on the shapes of inputs alone, and "
                    "freeze or unfreeze parameters between two global batches",
                )
            self._start(torch.zeros(1, dtype=torch.uint8, device=self._carrier), to)
            self._send_made_up(known, to)
            self._send_form(forms, to, kind)
        elif awaited != known:
            self._start(torch.ones(1, dtype=torch.uint8, device=self._carrier), to)
        self.send_known(tensors, to)
        repeats, self._last = forms == self._last, forms
        self._asked = _with_byte(forms, kind) if repeats and more and self.expects_early else None

    def send_known(self, tensors: Sequence[Tensor], to: int) -> None:
        """Starts to send what the other side expects."""
        for tensor in tensors:
            self._start(collectives.to_bytes(tensor).to(self._carrier), to)
        self._under_way = [(w, data) for w, data in self._under_way if not w.is_completed()]

    def receive(self, source: int, kind: Kind | None = None, *, more: bool = False) -> list[Tensor]:
        """What `send` sends, with a gradient to come back where it needs one."""
        forms = self._forms.get(kind)
        awaited = None if forms is None else _with_byte(forms, kind)
        expected, self._expected = self._expected, []
        if expected and [each.form for each in expected] != awaited:
            self.take(expected)
            expected = []
        if forms is None or awaited is None:
            forms = self._receive_form(source, kind)
            tensors = self.take(self.expect(source, forms))
        else:
            tensors = self.take(expected or self.expect(source, awaited))
            if awaited != forms:
                same_form = tensors.pop(0)
                if not same_form:
                    forms = self._receive_form(source, kind)
                    tensors = self.take(self.expect(source, forms))
        repeats, self._last = forms == self._last, forms
        if repeats and more and self.expects_early:
            self._expected = self.expect(source, _with_byte(forms, kind))
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
            dtype: torch.dtype = getattr(torch, form.dtype)
            found.append(collectives.from_bytes(data.to(self._device), dtype, form.shape))
        return found

    def wait(self) -> None:
        """Returns when everything that was sent has gone."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def _send_form(self, forms: list[Form], to: int, kind: Kind | None) -> None:
        """Sends what the tensors that follow look like, which both sides then remember."""
        text = torch.tensor(list(json.dumps(forms).encode()), dtype=torch.uint8)
        self._start(torch.tensor([len(text)]), to)
        self._start(text, to)
        remember(self._forms, kind, forms)

    def _receive_form(self, source: int, kind: Kind | None) -> list[Form]:
        """What `_send_form` sends."""
        length = torch.empty(1, dtype=torch.int64)
        dist.recv(length, source, self._group, self._tag)
        text = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(text, source, self._group, self._tag)
        said = json.loads(bytes(text.tolist()))
        forms = [Form(dtype, tuple(shape), trained) for dtype, shape, trained in said]
        remember(self._forms, kind, forms)
        return forms

    def _send_made_up(self, forms: Sequence[Form], to: int) -> None:
        """Answers what the other side has asked for, where it gets something else."""
        for form in forms:
            self._start(torch.zeros(form.size, dtype=torch.uint8, device=self._carrier), to)

    def _start(self, data: Tensor, to: int) -> None:
        work = dist.isend(data, to, self._group, self._tag) if len(data) else None
        if work is not None:
            self._under_way.append((work, data))


def _with_byte(forms: Sequence[Form], kind: Kind | None) -> list[Form]:
    """What is sent for a kind whose form is known: where it depends on values, a byte ahead."""
    return [SAME_FORM, *forms] if kind is not None and kind.by_value else list(forms)


def marked(tensor: Tensor) -> Form:
    """Of the message with a tensor's gradient: its bytes, and one that says if there is any."""
    return Form("uint8", (tensor.numel() * tensor.element_size() + 1,))


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
