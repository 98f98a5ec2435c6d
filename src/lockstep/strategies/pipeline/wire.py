"""The messages between the stages of a pipeline.

A message consists of tensors. The *spec* of a tensor is its shape and dtype, which the receiver
must know. Before the first message for an *input kind* (`input_kind`) the specs of its tensors are
sent. A message is *posted* when its receives have been started (`irecv`) and are not waited for
yet. *Marks* are bytes that precede the tensors of a message and tell the receiver how to understand
them.

The specs may also depend on the values of the inputs: transformers, for example, makes no attention
mask for a batch without padding, so one tensor less is sent. All ranks of a pipeline have the
inputs, but only the sender learns the specs. So if inputs contain integers or booleans, each
message of a known kind has a mark, which says whether the message has the known specs. If it does
not, tensors of zeros complete the receives that are posted, and the new specs and the real tensors
follow.

Specs and marks are sent as CPU tensors over Gloo, even where the other tensors are sent from GPU to
GPU over NCCL. Python has to read them; reading a value from the GPU would make this process wait
until the GPU has finished all queued work, and the GPU would then be idle.

Where the tensors travel over Gloo, too, the marks are at the end of the last tensor's bytes. In a
message of their own they would cost as much as another tensor.

With NCCL the tensors of a message are one batch of point-to-point operations, which is one launch.

Activations and gradients have separate process groups. In a common group NCCL would process them in
the order in which they were started, and two neighbours that both send first would wait for each
other forever.

Over Gloo, the receives of the next message of a training pass are posted as soon as a message has
arrived, if it had the same specs as the previous one. The reason is that Gloo sends nothing before
the receive is posted. If data is already waiting at that time, it arrives while the posting thread
still holds Gloo's lock, for which Gloo's own thread then spins.

Both sides know what was posted. If the next message turns out to be a different one, the sender
first completes the posted receives with zeros, which the receiver drops. So there are these cases:

    the message is ...                       what the sender sends
    1. the first of its kind                 (zeros for posted receives), its specs, its tensors
    2. like the last one of its kind         (mark: True), its tensors
    3. unlike the last one of its kind       (mark: False), zeros for the last specs, its specs,
                                             its tensors

In the cases 2 and 3, receives that were posted for another kind are completed with zeros, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.communication.routing import carrier_device
from lockstep.distributed import tensor_bytes
from lockstep.errors import UsageError
from lockstep.strategies.pipeline.input_kind import InputKind, store_in_cache


class TensorSpec(NamedTuple):
    """The shape and dtype of a tensor, in values that can be sent as JSON."""

    dtype: str
    """The name of the dtype, such as "float32"."""
    shape: tuple[int, ...]
    requires_grad: bool = False
    """True if the receiver sends back a gradient of the tensor."""

    @property
    def num_bytes(self) -> int:
        """The size of the tensor's data in bytes."""
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
    """The specs of a message's tensors, and its number of marks."""

    tensors: tuple[TensorSpec, ...]
    num_marks: int = 0


class PostedMessage(NamedTuple):
    """A message whose receives were started and are not waited for yet."""

    spec: MessageSpec
    marks: Tensor
    """One byte for each mark, on the CPU; valid when all of `works` are done. It may share its
    memory with the last tensor of `data`, which the marks follow."""
    data: list[Tensor]
    """The bytes of each tensor; valid when all of `works` are done."""
    works: list[dist.Work]
    """The receives that are under way."""


class Message(NamedTuple):
    """A message that was received, or that is to be sent."""

    marks: list[bool]
    tensors: list[Tensor]


class Wire:
    """A connection between two ranks of a pipeline, on which one sends and the other receives.

    Args:
        group: the process group of the pipeline's ranks.
        device: the device on which received tensors are needed.
        tag: the tag of the messages, which differs from those of other wires in the same group.
            NCCL ignores tags, so there messages must be received in the order in which they were
            sent.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, tag: int) -> None:
        self._group = group
        self._device = device
        self._tag = tag
        self._carrier_device = carrier_device(device, group)
        """The device of the tensors that are sent: the CPU over Gloo, the GPU over NCCL."""
        self._sends: list[tuple[dist.Work, list[Tensor]]] = []
        """Sends that may still be running, with the data that they send."""
        self._specs_of_kind: dict[Hashable, tuple[TensorSpec, ...]] = {}
        """The specs of the latest message of each kind. Both sides remember and forget the same
        kinds at the same time."""
        self._previous_specs: tuple[TensorSpec, ...] | None = None
        """The specs of the previous message."""
        self._posted_by_receiver: MessageSpec | None = None
        """On the sending side: what the receiving side has posted early."""
        self._posted: PostedMessage | None = None
        """On the receiving side: the message that was posted early."""

    def send(
        self,
        tensors: Sequence[Tensor],
        to: int,
        kind: InputKind | None = None,
        *,
        may_receive_next_early: bool = False,
    ) -> None:
        """Starts sending a message. Its specs are sent first, unless the receiver knows them.

        The module's docstring lists the three cases.

        Args:
            tensors: any number of tensors.
            to: the rank that calls `receive`.
            kind: the kind of the input; None if unknown.
            may_receive_next_early: True if another message is certain to follow, so that the
                receiver may start receiving it early. Both sides must pass the same value.

        Raises:
            UsageError: the specs differ from those of the previous message of this kind, and the
                values of the input cannot be the reason.
        """
        specs = tuple(TensorSpec.of(tensor) for tensor in tensors)
        known_specs = self._specs_of_kind.get(kind)
        expected = None if known_specs is None else _spec_of_message(known_specs, kind)

        # The receiver may have posted receives for a message like the previous one. If this message
        # is different, zeros complete them.
        if self._posted_by_receiver is not None and self._posted_by_receiver != expected:
            self._send_zeros(self._posted_by_receiver, to)

        marks: list[bool] = []
        if expected is None:  # case 1
            self._send_specs(specs, to, kind)
        elif _has_mark(kind):
            has_known_specs = specs == known_specs
            if has_known_specs:  # case 2
                marks = [True]
            else:  # case 3. The mark is among these zeros, so the receiver reads it as False.
                self._send_zeros(expected, to)
                self._send_specs(specs, to, kind)
        elif specs != known_specs:
            raise UsageError(
                "a pipeline between whose stages the form of activations changes",
                f"the same kind of input first gave {_describe(expected.tensors)}, "
                f"now {_describe(specs)}",
                "let the shapes of activations depend on the shapes of inputs alone, and "
                "freeze or unfreeze parameters only between two global batches",
            )

        self.send_with_known_specs(tensors, to, marks)

        self._posted_by_receiver = None
        if self._may_post_next_message(specs, may_receive_next_early):
            self._posted_by_receiver = _spec_of_message(specs, kind)

        self._previous_specs = specs

    def send_with_known_specs(
        self, tensors: Sequence[Tensor], to: int, marks: Sequence[bool] = ()
    ) -> None:
        """Starts sending a message whose specs and number of marks the receiver knows.

        Args:
            tensors: any number of tensors.
            to: the receiving rank.
            marks: the marks of the message.
        """
        data = [tensor_bytes.to_bytes(tensor).to(self._carrier_device) for tensor in tensors]
        self._send_marks_and_data(torch.tensor(marks, dtype=torch.uint8), data, to)
        self._drop_finished_sends()

    def _send_marks_and_data(self, marks: Tensor, data: list[Tensor], to: int) -> None:
        """Starts sending the marks of a message and the bytes of its tensors.

        Args:
            marks: one byte for each mark, on the CPU.
            data: the bytes of each tensor, on the carrier's device.
            to: the receiving rank.
        """
        if self._marks_follow_data(len(marks), len(data)):
            data_and_marks = torch.cat([data[-1], marks])
            data = [*data[:-1], data_and_marks]
        else:
            self._send_from_cpu(marks, to)
        self._send_batch(data, to)

    def _marks_follow_data(self, num_marks: int, num_tensors: int) -> bool:
        """Returns True if the marks of a message are at the end of its last tensor's bytes.

        The receiver reads the marks in Python, so they must not be on a GPU: reading them there
        would make it wait for all work of the GPU.
        """
        return self.sends_over_gloo and num_marks > 0 and num_tensors > 0

    def _drop_finished_sends(self) -> None:
        """Drops the data of finished sends, which `_sends` keeps alive until it is sent."""
        self._sends = [(work, data) for work, data in self._sends if not work.is_completed()]

    def receive(
        self, source: int, kind: InputKind | None = None, *, may_receive_next_early: bool = False
    ) -> list[Tensor]:
        """Receives the message that `send` sends.

        If gradients are needed, its tensors are leaves of the autograd graph.

        Args:
            source: the rank that calls `send`.
            kind: the same kind that is passed to `send`.
            may_receive_next_early: True if another message is certain to follow. Its receives may
                then be posted now. Both sides must pass the same value.
        """
        known_specs = self._specs_of_kind.get(kind)
        if known_specs is None:  # the message is the first of its kind
            self._drop_posted()  # receives that were posted, if any, are for another kind
            specs, tensors = self._receive_with_specs(source, kind)
        else:
            specs, tensors = self._receive_of_known_kind(source, kind, known_specs)

        # If this message has the specs of the previous one, the next one most likely has them too.
        # Its receives are then posted now.
        if self._may_post_next_message(specs, may_receive_next_early):
            self._posted = self.post_receives(source, _spec_of_message(specs, kind))

        self._previous_specs = specs
        for tensor, spec in zip(tensors, specs, strict=True):
            if spec.requires_grad and torch.is_grad_enabled():
                tensor.requires_grad_()

        return tensors

    def _receive_of_known_kind(
        self, source: int, kind: InputKind | None, known_specs: tuple[TensorSpec, ...]
    ) -> tuple[tuple[TensorSpec, ...], list[Tensor]]:
        """Receives a message of a kind that was received before; returns its specs and its tensors.

        If the kind does not depend on values, only the tensors arrive. Otherwise the sender says by
        a mark whether they have the known specs:

            the known specs     the mark True, the tensors
            other specs         the mark False, zeros with the known specs; then the new specs, the
                                tensors

        Args:
            source: the sending rank.
            kind: the kind of the input.
            known_specs: the specs of the previous message of this kind.
        """
        expected = _spec_of_message(known_specs, kind)
        message = self._receive_with_known_spec(source, expected)
        new_specs_follow = message.marks == [False]  # without a mark it is []
        if new_specs_follow:
            return self._receive_with_specs(source, kind)
        return known_specs, message.tensors

    def _receive_with_known_spec(self, source: int, expected: MessageSpec) -> Message:
        """Receives a message in the receives that were posted for it, or that are posted now."""
        posted = self._posted
        if posted is None or posted.spec != expected:
            self._drop_posted()  # receives that were posted, if any, are for another kind
            posted = self.post_receives(source, expected)
        self._posted = None
        return self.take(posted)

    def _receive_with_specs(
        self, source: int, kind: InputKind | None
    ) -> tuple[tuple[TensorSpec, ...], list[Tensor]]:
        """Receives a message whose specs are sent first; returns its specs and its tensors."""
        specs = self._receive_specs(source, kind)
        message = self.take(self.post_receives(source, MessageSpec(specs)))
        return specs, message.tensors

    def _drop_posted(self) -> None:
        """Waits for receives that were posted for another message, if any, and drops the zeros.

        The sender knows of these receives, and completes them with zeros before the real message.
        """
        posted = self._posted
        self._posted = None
        if posted is not None:
            self.take(posted)

    def _may_post_next_message(
        self, specs: tuple[TensorSpec, ...], may_receive_next_early: bool
    ) -> bool:
        """Returns True if the receiver posts the receives of the next message now.

        The receiver does if two messages in a row had the same specs, because the next message will
        most likely have them, too. The sender comes to the same result.

        Args:
            specs: the specs of the present message.
            may_receive_next_early: True if another message is certain to follow.
        """
        has_specs_of_previous = specs == self._previous_specs
        return has_specs_of_previous and may_receive_next_early and self.can_receive_early

    @property
    def sends_over_gloo(self) -> bool:
        """True if the tensors are sent over Gloo, from CPU to CPU; False with NCCL."""
        return self._carrier_device.type == "cpu"

    @property
    def can_receive_early(self) -> bool:
        """True if receives may be posted long before their message arrives, as over Gloo.

        Gloo sends nothing before a receive is posted. With NCCL, a posted receive would keep the
        GPU busy until the message arrives.
        """
        return self.sends_over_gloo

    def post_receives(self, source: int, spec: MessageSpec) -> PostedMessage:
        """Starts receiving a message, given its specs and its number of marks.

        The marks are received on the CPU over Gloo, because Python reads them. The tensors are
        received together, on the device that carries them: with NCCL, from GPU to GPU.
        """
        if self._marks_follow_data(spec.num_marks, len(spec.tensors)):
            return self._post_data_with_marks(source, spec)
        return self._post_marks_and_data(source, spec)

    def _post_data_with_marks(self, source: int, spec: MessageSpec) -> PostedMessage:
        """Starts receiving a message whose marks come behind the bytes of its last tensor.

        This saves a message.
        """
        num_bytes = [tensor_spec.num_bytes for tensor_spec in spec.tensors]
        num_bytes[-1] += spec.num_marks
        received = self._allocate(num_bytes)
        works = self._start_batch(dist.irecv, received, source)

        # Both are views of what is received last.
        data_of_last_tensor, marks = received[-1].tensor_split([-spec.num_marks])
        return PostedMessage(spec, marks, [*received[:-1], data_of_last_tensor], works)

    def _post_marks_and_data(self, source: int, spec: MessageSpec) -> PostedMessage:
        """Starts receiving a message whose marks, if it has any, are a message by themselves."""
        data = self._allocate([tensor_spec.num_bytes for tensor_spec in spec.tensors])
        marks = torch.empty(spec.num_marks, dtype=torch.uint8)
        works: list[dist.Work] = []
        if spec.num_marks:
            work = dist.irecv(marks, source, self._group, self._tag)
            assert work is not None  # this rank is in the group
            works.append(work)

        works += self._start_batch(dist.irecv, data, source)
        return PostedMessage(spec, marks, data, works)

    def _allocate(self, sizes: Sequence[int]) -> list[Tensor]:
        """Allocates tensors of the given numbers of bytes, on the device that carries messages."""
        device = self._carrier_device
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]

    def take(self, posted: PostedMessage) -> Message:
        """Waits for the receives of a message, and returns the message."""
        # Over NCCL, `wait` returns at once and makes the GPU wait for the tensors. Only for the
        # marks, which arrive on the CPU over Gloo, this process waits.
        for work in posted.works:
            work.wait()

        marks = [bool(mark) for mark in posted.marks.tolist()]
        tensors: list[Tensor] = []
        for spec, data in zip(posted.spec.tensors, posted.data, strict=True):
            dtype: torch.dtype = getattr(torch, spec.dtype)
            tensors.append(tensor_bytes.from_bytes(data.to(self._device), dtype, spec.shape))
        return Message(marks, tensors)

    def wait(self) -> None:
        """Waits until everything has been sent."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _send_specs(self, specs: tuple[TensorSpec, ...], to: int, kind: InputKind | None) -> None:
        """Sends the specs of the tensors that follow. Both sides then remember them.

        They are sent as JSON text: first its length in bytes, then the bytes.
        """
        text = torch.tensor(list(json.dumps(specs).encode()), dtype=torch.uint8)
        self._send_from_cpu(torch.tensor([len(text)]), to)
        self._send_from_cpu(text, to)
        store_in_cache(self._specs_of_kind, kind, specs)

    def _receive_specs(self, source: int, kind: InputKind | None) -> tuple[TensorSpec, ...]:
        """Receives the specs that `_send_specs` sends, and remembers them.

        Args:
            source: the sending rank.
            kind: the kind of the input. None if unknown; then nothing is remembered.
        """
        length = torch.empty(1, dtype=torch.int64)
        dist.recv(length, source, self._group, self._tag)
        text = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(text, source, self._group, self._tag)

        specs: list[TensorSpec] = []
        for dtype, shape, requires_grad in json.loads(bytes(text.tolist())):
            specs.append(TensorSpec(dtype, tuple(shape), requires_grad))

        store_in_cache(self._specs_of_kind, kind, tuple(specs))
        return tuple(specs)

    def _send_zeros(self, spec: MessageSpec, to: int) -> None:
        """Sends zeros to complete receives that were posted for another message.

        For example, the receiver has posted receives for a message of kind A, and the next message
        is of kind B. The zeros complete the receives of A. The receiver knows that the message is
        of kind B, and drops them.

        If the next message is of kind A, but has other specs, the receiver learns it from the mark
        of this message, which says whether the known specs hold. The mark is 0 as well, so it says
        False, and the receiver drops the zeros.
        """
        zeros: list[Tensor] = []
        for tensor_spec in spec.tensors:
            zeros.append(
                torch.zeros(tensor_spec.num_bytes, dtype=torch.uint8, device=self._carrier_device)
            )
        marks = torch.zeros(spec.num_marks, dtype=torch.uint8)
        self._send_marks_and_data(marks, zeros, to)

    def _send_from_cpu(self, data: Tensor, to: int) -> None:
        """Starts sending a tensor that is on the CPU on both sides. An empty tensor is not sent."""
        if len(data) == 0:
            return
        work = dist.isend(data, to, self._group, self._tag)
        assert work is not None  # this rank is in the group
        self._sends.append((work, [data]))

    def _send_batch(self, data: list[Tensor], to: int) -> None:
        """Starts sending the tensors of a message."""
        for work in self._start_batch(dist.isend, data, to):
            self._sends.append((work, data))

    def _start_batch(
        self, operation: Callable[..., object], data: list[Tensor], peer: int
    ) -> list[dist.Work]:
        """Starts sending or receiving the tensors of a message, except for empty ones.

        Args:
            operation: `dist.isend` or `dist.irecv`.
            data: the bytes of each tensor.
            peer: the rank to send to or to receive from.

        Returns:
            The operations to wait for: one for all tensors (NCCL), or one for each tensor (Gloo).
        """
        tensors = [tensor for tensor in data if len(tensor)]
        if self.sends_over_gloo:
            works = [operation(tensor, peer, self._group, self._tag) for tensor in tensors]
            return cast("list[dist.Work]", works)  # none is None: this rank is in the group

        if not tensors:
            return []
        # Even a single operation is a batch, because torch warns of NCCL operations outside of one.
        operations: list[dist.P2POp] = []
        for tensor in tensors:
            operations.append(dist.P2POp(operation, tensor, peer, self._group, self._tag))
        return dist.batch_isend_irecv(operations)


def _has_mark(kind: InputKind | None) -> bool:
    """Returns True if messages of this kind have a mark once their specs are known."""
    return kind is not None and kind.depends_on_values


def _spec_of_message(specs: tuple[TensorSpec, ...], kind: InputKind | None) -> MessageSpec:
    """Returns the specs and the number of marks of a message whose kind is known."""
    return MessageSpec(specs, num_marks=1 if _has_mark(kind) else 0)


def _describe(specs: Sequence[TensorSpec]) -> str:
    """Returns the specs as text for an error message."""
    if not specs:
        return "nothing"
    return ", ".join(str(spec) for spec in specs)
