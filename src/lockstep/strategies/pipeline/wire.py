"""What the stages of a pipeline send each other: messages of tensors whose *specs* both sides know.

The *spec* of a tensor is its shape and dtype. Before the first message for an *input kind*
(`input_kind`) the specs of its tensors are sent. A *posted* message is one whose receives were
started (`irecv`) and are waited for later. *Marks* are bytes ahead of the tensors of a message that
tell the receiving side how to understand them.

The specs may also depend on the values of the inputs: transformers makes no attention mask for a
batch without padding, so one tensor less is sent. Every rank of a pipeline has the inputs, but only
the sender learns the specs. So if inputs hold whole numbers or booleans, each message of a known
kind has a mark, which says whether the message has the known specs. If not, tensors of zeros
complete the receives that are posted, and the new specs and the real tensors follow.

Specs and marks travel as CPU tensors, so over Gloo, also where the tensors travel from GPU to GPU
over NCCL. Python reads them. To read a value from the GPU would make this process wait until the
GPU has done all that was queued before, and the GPU would be idle until more is queued.

The tensors of a message are one batch of point-to-point operations: with NCCL, one launch for all.

Activations and gradients have process groups of their own. In a common group NCCL would process
them in the order in which they were started, and two neighbours that both send first would wait
for each other forever.

Over Gloo the receives of the next message of a training pass are posted as soon as a message has
come, if it had the same specs as the one before. Gloo sends nothing before its receive is posted.
If data already waits, it arrives while the posting thread still holds Gloo's lock, for which Gloo's
own thread then spins. Both sides know what was posted; if the next message turns out to be another
one, zeros complete the posted receives first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.communication.routing import carrier_device
from lockstep.distributed import tensor_bytes
from lockstep.errors import UsageError
from lockstep.strategies.pipeline.input_kind import InputKind, remember


class TensorSpec(NamedTuple):
    """The form of a tensor, in values that JSON can hold."""

    dtype: str
    """Such as "float32"."""
    shape: tuple[int, ...]
    requires_grad: bool = False
    """True if a gradient comes back for the tensor."""

    @property
    def num_bytes(self) -> int:
        """The size of the tensor's data."""
        dtype: torch.dtype = getattr(torch, self.dtype)  # such as `torch.float32`
        return torch.Size(self.shape).numel() * dtype.itemsize

    def __str__(self) -> str:
        with_or_without = "with" if self.requires_grad else "without"
        return f"{self.dtype} {self.shape} {with_or_without} a gradient"

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Returns the spec of a tensor."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(dtype, tuple(tensor.shape), tensor.requires_grad)


class MessageSpec(NamedTuple):
    """The form of a message."""

    tensors: tuple[TensorSpec, ...]
    num_marks: int = 0


class PostedMessage(NamedTuple):
    """A message whose receives were started and are not waited for yet."""

    spec: MessageSpec
    marks: Tensor
    """One byte for each mark, once all of `works` are done; on the CPU."""
    data: list[Tensor]
    """The bytes of the tensors, once all of `works` are done."""
    works: list[dist.Work]


class Message(NamedTuple):
    """A message that was received."""

    marks: list[bool]
    tensors: list[Tensor]


class Wire:
    """One direction between two ranks of a pipeline, of which one sends and the other receives.

    Args:
        group: of the pipeline's ranks.
        device: where received tensors are needed.
        tag: of the messages; other wires that use the same group have other tags. NCCL knows no
            tags: there, messages must be received in the order in which they were sent.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, tag: int) -> None:
        self._group = group
        self._device = device
        self._tag = tag
        self._carrier = carrier_device(device, group)
        """The device of the tensors that are sent."""
        self._sends: list[tuple[dist.Work, list[Tensor]]] = []
        """Sends that may still run, with their data."""
        self._specs_of_kind: dict[Hashable, tuple[TensorSpec, ...]] = {}
        """Both sides remember and forget the same kinds at the same time."""
        self._previous_specs: tuple[TensorSpec, ...] | None = None
        """The specs of the message before."""
        self._posted_by_receiver: MessageSpec | None = None
        """Sending side: what the receiving side has posted ahead of time."""
        self._posted: PostedMessage | None = None
        """Receiving side: what it has posted ahead of time."""

    def send(
        self,
        tensors: Sequence[Tensor],
        to: int,
        kind: InputKind | None = None,
        *,
        more: bool = False,
    ) -> None:
        """Starts to send a message; the specs go ahead if this kind has other known specs or none.

        Args:
            tensors: any number.
            to: the rank that calls `receive`.
            kind: of the input; None: unknown.
            more: True if another message will follow. Both sides must pass the same.

        Raises:
            UsageError: the specs are not the known ones, and the input's values cannot be the
                reason.
        """
        specs = tuple(TensorSpec.of(tensor) for tensor in tensors)
        known_specs = self._specs_of_kind.get(kind)
        expected = None if known_specs is None else _spec_of_known_kind(known_specs, kind)

        # The receiver may have posted receives for a message like the one before. If this one is
        # different, zeros complete them.
        if self._posted_by_receiver is not None and self._posted_by_receiver != expected:
            self._send_zeros(self._posted_by_receiver, to)

        marks: list[bool] = []
        if expected is None:  # the first message of this kind
            self._send_specs(specs, to, kind)
        elif _has_mark(kind):
            has_known_specs = specs == known_specs
            if has_known_specs:
                marks = [True]
            else:
                # The mark is False, as the zeros are for the tensors and the mark.
                self._send_zeros(expected, to)
                self._send_specs(specs, to, kind)
        elif specs != known_specs:
            raise UsageError(
                "a pipeline between whose stages the form of activations changes",
                f"the same kind of input first gave {_describe(expected.tensors)}, "
                f"now {_describe(specs)}",
                "let the shapes of activations depend on the shapes of inputs alone, and "
                "freeze or unfreeze parameters between two global batches",
            )

        self.send_known(tensors, to, marks)

        self._posted_by_receiver = None
        if self._posts_next_message(specs, more):
            self._posted_by_receiver = _spec_of_known_kind(specs, kind)

        self._previous_specs = specs

    def send_known(self, tensors: Sequence[Tensor], to: int, marks: Sequence[bool] = ()) -> None:
        """Starts to send a message whose form the other side knows.

        Args:
            tensors: any number.
            to: the rank that receives.
            marks: of the message.
        """
        self._send_from_cpu(torch.tensor(marks, dtype=torch.uint8), to)
        self._send_batch(
            [tensor_bytes.to_bytes(tensor).to(self._carrier) for tensor in tensors], to
        )
        # Sends that are done need their data no longer.
        self._sends = [(work, data) for work, data in self._sends if not work.is_completed()]

    def receive(
        self, source: int, kind: InputKind | None = None, *, more: bool = False
    ) -> list[Tensor]:
        """Receives what `send` sends, as leaves of the autograd graph if gradients are needed.

        Args:
            source: the rank that calls `send`.
            kind: as for `send`.
            more: as for `send`.
        """
        known_specs = self._specs_of_kind.get(kind)
        if known_specs is None:  # the first message of this kind
            self._drop_posted()
            specs, tensors = self._receive_with_specs(source, kind)
        else:
            specs, tensors = self._receive_of_known_kind(source, kind, known_specs)

        # The next message will most likely have the same specs, so it is waited for already.
        if self._posts_next_message(specs, more):
            self._posted = self.post_receives(source, _spec_of_known_kind(specs, kind))

        self._previous_specs = specs
        for tensor, spec in zip(tensors, specs, strict=True):
            if spec.requires_grad and torch.is_grad_enabled():
                tensor.requires_grad_()

        return tensors

    def _receive_of_known_kind(
        self, source: int, kind: InputKind | None, known_specs: tuple[TensorSpec, ...]
    ) -> tuple[tuple[TensorSpec, ...], list[Tensor]]:
        """Receives a message of a kind that came before; returns its specs and its tensors.

        They are the known specs, unless the mark says that they are others.

        Args:
            source: the rank that sends.
            kind: of the input.
            known_specs: of the last message of this kind.
        """
        expected = _spec_of_known_kind(known_specs, kind)
        if self._posted is None or self._posted.spec != expected:
            self._drop_posted()
            self._posted = self.post_receives(source, expected)

        posted = self._posted
        self._posted = None
        message = self.take(posted)
        if all(message.marks):  # the one mark is True, or there is none
            return known_specs, message.tensors

        # These tensors are zeros. The new specs and the real tensors follow.
        return self._receive_with_specs(source, kind)

    def _receive_with_specs(
        self, source: int, kind: InputKind | None
    ) -> tuple[tuple[TensorSpec, ...], list[Tensor]]:
        """Receives a message whose specs are sent ahead; returns its specs and its tensors."""
        specs = self._receive_specs(source, kind)
        message = self.take(self.post_receives(source, MessageSpec(specs)))
        return specs, message.tensors

    def _drop_posted(self) -> None:
        """Waits for the receives that were posted for a message like the one before.

        The message that comes is a different one, so the sender completes them with zeros.
        """
        posted = self._posted
        self._posted = None
        if posted is not None:
            self.take(posted)

    def _posts_next_message(self, specs: tuple[TensorSpec, ...], more: bool) -> bool:
        """Returns True if the receiving side posts the receives of the next message now.

        It does so if the next message will most likely have the same specs: this one has those of
        the one before. Both sides come to the same result.

        Args:
            specs: of the present message.
            more: True if another message will follow.
        """
        return specs == self._previous_specs and more and self.posts_early

    @property
    def posts_early(self) -> bool:
        """True if it is worth posting receives ahead of time: Gloo sends nothing before.

        With NCCL it is not: a GPU is busy with a receive as long as it waits for the message.
        """
        return self._carrier.type == "cpu"

    def post_receives(self, source: int, spec: MessageSpec) -> PostedMessage:
        """Starts to receive a message of known form."""
        marks = torch.empty(spec.num_marks, dtype=torch.uint8)
        data: list[Tensor] = []
        for tensor_spec in spec.tensors:
            data.append(torch.empty(tensor_spec.num_bytes, dtype=torch.uint8, device=self._carrier))

        works: list[dist.Work] = []
        if spec.num_marks:
            work = dist.irecv(marks, source, self._group, self._tag)
            assert work is not None  # this rank is in the group
            works.append(work)

        works += self._start_batch(dist.irecv, data, source)
        return PostedMessage(spec, marks, data, works)

    def take(self, posted: PostedMessage) -> Message:
        """Waits for the receives of a message, and returns it.

        Over NCCL this process itself waits for the marks alone. The GPU waits for the tensors.
        """
        for work in posted.works:
            work.wait()
        marks = [bool(mark) for mark in posted.marks.tolist()]
        tensors: list[Tensor] = []
        for spec, data in zip(posted.spec.tensors, posted.data, strict=True):
            dtype: torch.dtype = getattr(torch, spec.dtype)
            tensors.append(tensor_bytes.from_bytes(data.to(self._device), dtype, spec.shape))
        return Message(marks, tensors)

    def wait(self) -> None:
        """Returns when everything is sent."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _send_specs(self, specs: tuple[TensorSpec, ...], to: int, kind: InputKind | None) -> None:
        """Sends the specs of the tensors that follow; both sides then remember them.

        They are sent as JSON: first its length in bytes, then the bytes.
        """
        text = torch.tensor(list(json.dumps(specs).encode()), dtype=torch.uint8)
        self._send_from_cpu(torch.tensor([len(text)]), to)
        self._send_from_cpu(text, to)
        remember(self._specs_of_kind, kind, specs)

    def _receive_specs(self, source: int, kind: InputKind | None) -> tuple[TensorSpec, ...]:
        """Receives what `_send_specs` sends."""
        length = torch.empty(1, dtype=torch.int64)
        dist.recv(length, source, self._group, self._tag)
        text = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(text, source, self._group, self._tag)

        specs: list[TensorSpec] = []
        for dtype, shape, requires_grad in json.loads(bytes(text.tolist())):
            specs.append(TensorSpec(dtype, tuple(shape), requires_grad))

        remember(self._specs_of_kind, kind, tuple(specs))
        return tuple(specs)

    def _send_zeros(self, spec: MessageSpec, to: int) -> None:
        """Completes receives that the other side has posted, where another message is to follow."""
        zeros: list[Tensor] = []
        for tensor_spec in spec.tensors:
            zeros.append(
                torch.zeros(tensor_spec.num_bytes, dtype=torch.uint8, device=self._carrier)
            )
        self._send_from_cpu(torch.zeros(spec.num_marks, dtype=torch.uint8), to)
        self._send_batch(zeros, to)

    def _send_from_cpu(self, data: Tensor, to: int) -> None:
        """Starts to send a tensor that is on the CPU on both sides. Without elements, it is not."""
        if len(data) == 0:
            return
        work = dist.isend(data, to, self._group, self._tag)
        assert work is not None  # this rank is in the group
        self._sends.append((work, [data]))

    def _send_batch(self, data: list[Tensor], to: int) -> None:
        """Starts to send the tensors of a message."""
        for work in self._start_batch(dist.isend, data, to):
            self._sends.append((work, data))

    def _start_batch(
        self, operation: Callable[..., object], data: list[Tensor], peer: int
    ) -> list[dist.Work]:
        """Starts to send or receive the tensors of a message, except those without elements.

        Args:
            operation: `dist.isend` or `dist.irecv`.
            data: of the tensors.
            peer: the rank that receives or sends them.

        Returns:
            What is to be waited for: one object for all tensors (NCCL) or one for each (Gloo).
        """
        operations: list[dist.P2POp] = []
        for tensor in data:
            if len(tensor):
                operations.append(dist.P2POp(operation, tensor, peer, self._group, self._tag))
        if not operations:
            return []
        # NCCL runs an operation outside of a batch by itself, and torch warns of that.
        return dist.batch_isend_irecv(operations)


def _has_mark(kind: InputKind | None) -> bool:
    """Returns True if each message of a kind has a mark, once its specs are known."""
    return kind is not None and kind.depends_on_values


def _spec_of_known_kind(specs: tuple[TensorSpec, ...], kind: InputKind | None) -> MessageSpec:
    """Returns the form of a message of a known kind: with a mark, if it has one."""
    return MessageSpec(specs, num_marks=1 if _has_mark(kind) else 0)


def _describe(specs: Sequence[TensorSpec]) -> str:
    """Returns the specs as text for an error message."""
    if not specs:
        return "nothing"
    return ", ".join(str(spec) for spec in specs)
