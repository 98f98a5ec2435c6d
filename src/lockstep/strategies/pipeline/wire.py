"""What the stages of a pipeline send each other: messages of tensors whose *specs* both sides know.

A *spec* is the shape and dtype of a tensor. Each tensor is one point-to-point operation. Before
the first message for an *input kind* (`input_kind`) its specs are sent. A *posted* receive is one
that was started (`irecv`) and is waited for later. A *flag* ahead of a message says if it has the
known specs.

The specs may also depend on the values of the inputs: transformers makes no attention mask for a
batch without padding, so one tensor less is sent. Every rank of a pipeline has the inputs, but only
the sender learns the specs. So if inputs hold whole numbers or booleans, a flag of one byte goes
ahead of each message of a known kind. It says whether the message has the known specs. If not,
tensors of zeros complete the receives that are posted, and the new specs and the real tensors
follow.

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
from collections.abc import Hashable, Sequence
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


FLAG_SPEC = TensorSpec("uint8", (1,))
"""The flag ahead of a message: 1 if the message has the specs that are known of its kind."""


class PostedReceive(NamedTuple):
    """A receive that was started and is not waited for yet."""

    spec: TensorSpec
    data: Tensor
    """The bytes of the tensor, once `work` is done."""
    work: dist.Work | None
    """None for a tensor without elements, which is not sent."""


class Wire:
    """One direction between two ranks of a pipeline, of which one sends and the other receives.

    Args:
        group: of the pipeline's ranks.
        device: where received tensors are needed.
        tag: of the messages; other models that use the same group have other tags.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, tag: int) -> None:
        self._group = group
        self._device = device
        self._tag = tag
        self._carrier = carrier_device(device, group)
        """The device of the data that is sent."""
        self._sends: list[tuple[dist.Work, Tensor]] = []
        """Sends that may still run, with their data."""
        self._specs_of_kind: dict[Hashable, list[TensorSpec]] = {}
        """Both sides remember and forget the same kinds at the same time."""
        self._previous_specs: list[TensorSpec] | None = None
        """The specs of the message before, without a flag."""
        self._posted_by_receiver: list[TensorSpec] | None = None
        """Sending side: what the receiving side has posted ahead of time."""
        self._posted: list[PostedReceive] = []
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
        specs = [TensorSpec.of(tensor) for tensor in tensors]
        known_specs = self._specs_of_kind.get(kind)
        expected = None if known_specs is None else _with_flag(known_specs, kind)
        # The receiver may have posted receives for a message like the one before. If this one is
        # different, zeros complete them.
        if self._posted_by_receiver is not None and self._posted_by_receiver != expected:
            self._send_zeros(self._posted_by_receiver, to)

        if known_specs is None:  # the first message of this kind
            self._send_specs(specs, to, kind)
        elif _has_flag(kind):
            self._send_flag(specs, known_specs, to, kind)
        elif specs != known_specs:
            raise UsageError(
                "a pipeline between whose stages the form of activations changes",
                f"the same kind of input first gave {_describe(known_specs)}, "
                f"now {_describe(specs)}",
                "let the shapes of activations depend on the shapes of inputs alone, and "
                "freeze or unfreeze parameters between two global batches",
            )
        self.send_known(tensors, to)

        self._posted_by_receiver = None
        if self._posts_next_message(specs, more):
            self._posted_by_receiver = _with_flag(specs, kind)
        self._previous_specs = specs

    def _send_flag(
        self,
        specs: list[TensorSpec],
        known_specs: list[TensorSpec],
        to: int,
        kind: InputKind | None,
    ) -> None:
        """Sends the flag that says whether the tensors that follow have the known specs.

        If they have not, the receiver still waits for tensors of the known specs. So zeros complete
        these receives, and the new specs follow.

        Args:
            specs: of the tensors that follow.
            known_specs: of the last message of this kind.
            to: the rank that receives.
            kind: of the input.
        """
        has_known_specs = specs == known_specs
        flag = torch.full((1,), int(has_known_specs), dtype=torch.uint8, device=self._carrier)
        self._start_send(flag, to)
        if not has_known_specs:
            self._send_zeros(known_specs, to)
            self._send_specs(specs, to, kind)

    def send_known(self, tensors: Sequence[Tensor], to: int) -> None:
        """Starts to send tensors whose specs the other side knows."""
        for tensor in tensors:
            self._start_send(tensor_bytes.to_bytes(tensor).to(self._carrier), to)
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
            self._posted = self.post_receives(source, _with_flag(specs, kind))
        self._previous_specs = specs
        for tensor, spec in zip(tensors, specs, strict=True):
            if spec.requires_grad and torch.is_grad_enabled():
                tensor.requires_grad_()
        return tensors

    def _receive_of_known_kind(
        self, source: int, kind: InputKind | None, known_specs: list[TensorSpec]
    ) -> tuple[list[TensorSpec], list[Tensor]]:
        """Receives a message of a kind that came before; returns its specs and its tensors.

        They are the known specs, unless a flag ahead of the tensors says that they are others.

        Args:
            source: the rank that sends.
            kind: of the input.
            known_specs: of the last message of this kind.
        """
        expected = _with_flag(known_specs, kind)
        if [receive.spec for receive in self._posted] != expected:
            self._drop_posted()
            self._posted = self.post_receives(source, expected)
        posted = self._posted
        self._posted = []
        tensors = self.take(posted)
        if not _has_flag(kind):
            return known_specs, tensors
        flag = tensors.pop(0)
        if flag:  # 1: the tensors have the known specs
            return known_specs, tensors
        # These tensors are zeros. The new specs and the real tensors follow.
        return self._receive_with_specs(source, kind)

    def _receive_with_specs(
        self, source: int, kind: InputKind | None
    ) -> tuple[list[TensorSpec], list[Tensor]]:
        """Receives a message whose specs are sent ahead; returns its specs and its tensors."""
        specs = self._receive_specs(source, kind)
        return specs, self.take(self.post_receives(source, specs))

    def _drop_posted(self) -> None:
        """Waits for the receives that were posted for a message like the one before.

        The message that comes is a different one, so the sender completes them with zeros.
        """
        posted = self._posted
        self._posted = []
        self.take(posted)

    def _posts_next_message(self, specs: list[TensorSpec], more: bool) -> bool:
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

    def post_receives(self, source: int, specs: Sequence[TensorSpec]) -> list[PostedReceive]:
        """Starts to receive tensors of known specs, in the order in which they are sent."""
        posted: list[PostedReceive] = []
        for spec in specs:
            data = torch.empty(spec.num_bytes, dtype=torch.uint8, device=self._carrier)
            work = None
            if spec.num_bytes:
                work = dist.irecv(data, source, self._group, self._tag)
            posted.append(PostedReceive(spec, data, work))
        return posted

    def take(self, posted: Sequence[PostedReceive]) -> list[Tensor]:
        """Waits for receives, and returns the tensors."""
        tensors: list[Tensor] = []
        for spec, data, work in posted:
            if work is not None:
                work.wait()
            dtype: torch.dtype = getattr(torch, spec.dtype)
            tensors.append(tensor_bytes.from_bytes(data.to(self._device), dtype, spec.shape))
        return tensors

    def wait(self) -> None:
        """Returns when everything is sent."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _send_specs(self, specs: list[TensorSpec], to: int, kind: InputKind | None) -> None:
        """Sends the specs of the tensors that follow; both sides then remember them.

        They are sent as JSON: first its length in bytes, then the bytes.
        """
        text = torch.tensor(list(json.dumps(specs).encode()), dtype=torch.uint8)
        self._start_send(torch.tensor([len(text)]), to)
        self._start_send(text, to)
        remember(self._specs_of_kind, kind, specs)

    def _receive_specs(self, source: int, kind: InputKind | None) -> list[TensorSpec]:
        """Receives what `_send_specs` sends."""
        length = torch.empty(1, dtype=torch.int64)
        dist.recv(length, source, self._group, self._tag)
        text = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(text, source, self._group, self._tag)
        specs: list[TensorSpec] = []
        for dtype, shape, requires_grad in json.loads(bytes(text.tolist())):
            specs.append(TensorSpec(dtype, tuple(shape), requires_grad))
        remember(self._specs_of_kind, kind, specs)
        return specs

    def _send_zeros(self, specs: Sequence[TensorSpec], to: int) -> None:
        """Completes receives that the other side has posted, where other tensors are to follow."""
        for spec in specs:
            zeros = torch.zeros(spec.num_bytes, dtype=torch.uint8, device=self._carrier)
            self._start_send(zeros, to)

    def _start_send(self, data: Tensor, to: int) -> None:
        """Starts to send bytes. Nothing is sent for a tensor without any."""
        if len(data) == 0:
            return
        work = dist.isend(data, to, self._group, self._tag)
        if work is not None:  # None: this rank is not in the group
            self._sends.append((work, data))


def _has_flag(kind: InputKind | None) -> bool:
    """Returns True if a flag goes ahead of each message of a kind, once its specs are known."""
    return kind is not None and kind.depends_on_values


def _with_flag(specs: Sequence[TensorSpec], kind: InputKind | None) -> list[TensorSpec]:
    """Returns the specs of a whole message of a known kind: with the flag, if it has one."""
    if _has_flag(kind):
        return [FLAG_SPEC, *specs]
    return list(specs)


def _describe(specs: Sequence[TensorSpec]) -> str:
    """Returns the specs as text for an error message."""
    if not specs:
        return "nothing"
    return ", ".join(str(spec) for spec in specs)
