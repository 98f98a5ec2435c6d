"""One stage of a model, run through the user's own forward.

No code is traced or rewritten. Every rank calls the forward of the whole model; the submodules of
other stages stand there as stubs, which compute shapes on the meta device and remember them. What
comes before the stage's first submodule runs on such shapes, its first submodule is given what the
stage before has sent instead, and what comes after the first submodule of the next stage is shapes
again. Submodules without parameters (but BatchNorms) run everywhere, on real values where they are
given such.

So the forward can be any Python, as long as each stage needs of the stages before no more than the
arguments of its first submodule, and of the model's own inputs whatever it likes.

Where a stage begins and ends is noticed before the hooks of its first submodule run, so that what
these compute (`torch.nn.utils.weight_norm` makes the weight in one) is part of the stage.

Random numbers inside a model that is cut into stages.

The streams of the ranks of one pipeline are equal, so that what a training loop draws (a mask, say)
is the same on all of them. What the model's forward draws comes from streams of its own: outside of
the stage the same on every rank, because the forward runs on all of them for the same micro-batch;
inside of it another one for every stage, or the dropout of two stages would drop the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.distributed.seeding import mix_seed
from lockstep.distributed.torch_compat import DisableTorchFunctionSubclass, pytree
from lockstep.errors import UsageError
from lockstep.strategies.pipeline.shapes import (
    Arguments,
    Shape,
    Shapes,
    all_tensors,
    leave_statistics,
    like,
    map_shapes,
    on_meta,
    shape_of,
    signature,
)
from lockstep.strategies.pipeline.split import Split

_REMEMBERED = 64
"""Kinds of input for which a stub remembers its output."""


class Passage:
    """One run of the model's forward for one stage: what came in, and what goes out."""

    def __init__(
        self,
        stage: int,
        received: Sequence[Tensor] | None,
        seed: int,
        device: torch.device,
        shape: type[Shape],
    ) -> None:
        self.stage = stage
        self.received = received
        """The tensors among the arguments of the stage's first submodule; None for stage 0."""
        self.sent: list[Tensor] | None = None
        """Those for the next stage; None until it is reached."""
        self.inside = received is None
        """Whether real values are computed just now."""
        self._seed = seed
        self._device = device
        self._begun = False
        self._gradients = torch.is_grad_enabled()
        self._shapes = Shapes(shape, device)

    def __enter__(self) -> Passage:
        if not self.inside:
            self._outside()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.inside:
            self._back()

    def begin(self) -> None:
        """The first submodule of the stage is called: what it draws is the stage's own."""
        if not self._begun:
            self._begun = True
            draw_from(seed_of_stage(self._seed, self.stage), self._device)

    def enter(self, arguments: Arguments) -> Arguments:
        """The first submodule of the stage is called: what was received takes the place."""
        self._back()
        self.inside = True
        received = [_writable(t) if t.requires_grad else t for t in self.received or ()]
        plain = all_tensors(arguments)
        leaves, spec = (arguments[0], None) if plain else pytree.tree_flatten(arguments)
        if sum(isinstance(leaf, Tensor) for leaf in leaves) != len(received):
            raise UsageError(
                "a pipeline over this model",
                f"stage {self.stage} is called with another number of tensors than stage "
                f"{self.stage - 1} has sent",
                "build the arguments of the stage's first submodule in the same way on all ranks",
            )
        if spec is None:
            return tuple(received), {}
        filled = [received.pop(0) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        found: Arguments = pytree.tree_unflatten(filled, spec)
        return found

    def leave(self, arguments: Arguments) -> None:
        """The first submodule of the next stage is called: that is what it is sent."""
        self.sent = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in self.sent):
            raise _reaches_back(self.stage)
        self.inside = False
        self._outside()

    def _outside(self) -> None:
        torch.set_grad_enabled(False)
        self._shapes.__enter__()

    def _back(self) -> None:
        self._shapes.__exit__(None, None, None)
        torch.set_grad_enabled(self._gradients)


class StagedModel:
    """A model of which this process runs some stages.

    The parameters of the other stages are moved to the meta device, in place.

    Args:
        module: the user's, on the CPU or its device.
        split: where it is cut.
        stages: those to keep.
        device: for what is kept.
    """

    def __init__(
        self, module: nn.Module, split: Split, stages: Sequence[int], device: torch.device
    ) -> None:
        self.module = module
        self.gone: list[nn.Parameter] = []
        """Parameters that are on other ranks now, and the shapes that are here in their place."""
        self._goes_back = False
        self._passage: Passage | None = None
        self._device = device
        self._shape: type[Shape] = type("Shape", (Shape,), {})
        self._stages = frozenset(stages)
        self._last = len(split.cuts)
        firsts = set(split.cuts)
        self.gone += _move(module, split, self._stages, device)
        _send_plain_tensors(module, split)
        for name, stage in split.pieces.items():
            piece = module.get_submodule(name)
            here = stage in self._stages
            # Whoever runs several stages is a stub of its own submodules now and then.
            shadow = on_meta(piece) if here and len(self._stages) > 1 else piece
            stub = None
            if shadow is not piece or not here:
                leave_statistics(shadow)
                stub = _Stub(shadow.forward)
            piece.forward = stands_in = _Piece(self, name, stage, name in firsts, piece, stub)
            if name in firsts:
                piece.register_forward_pre_hook(stands_in.arrive, prepend=True, with_kwargs=True)

    def run(
        self, stage: int, received: Sequence[Tensor] | None, arguments: Arguments, seed: int
    ) -> tuple[Passage, Any]:
        """Runs a stage for the model's arguments; what the forward returns, shapes for the most.

        Args:
            stage: its number.
            received: from the stage before; None for the first one.
            arguments: of the model's forward.
            seed: of the random numbers, equal for all stages of a micro-batch.

        Raises:
            UsageError: the model cannot be cut there.
        """
        made = Passage(stage, received, seed, self._device, self._shape)
        with drawing_from(seed, self._device), made as passage, self._running(passage):
            try:
                output = self.module(*arguments[0], **arguments[1])
            except (RuntimeError, NotImplementedError) as error:
                if "meta" in str(error).lower() and not isinstance(error, torch.OutOfMemoryError):
                    raise _reaches_back(stage) from error
                raise
        last = stage == self._last
        if not (passage.inside if last else passage.sent is not None):
            raise _out_of_order(f"the first submodule of stage {stage + (not last)}", stage)
        if last and any(isinstance(x, Tensor) and x.is_meta for x in pytree.tree_leaves(output)):
            raise _reaches_back(stage)
        return passage, output

    @contextmanager
    def _running(self, passage: Passage) -> Iterator[None]:
        self._passage = passage
        try:
            yield
        finally:
            self._passage = None

    @contextmanager
    def going_back(self) -> Iterator[None]:
        """A backward pass runs inside, in which checkpointed submodules run their forward again."""
        self._goes_back = True
        kind = self._device.type
        on = torch.is_autocast_enabled(kind)  # a caller's, in whose forward pass this is done
        try:
            with torch.autocast(kind, enabled=False) if on else nullcontext():
                yield
        finally:
            self._goes_back = False

    def arrive(self, name: str, stage: int, first: bool, arguments: Arguments) -> Arguments:
        """A submodule is about to be called: begins or ends the stage that runs; its arguments."""
        passage = self._passage
        if passage is None:
            return arguments
        if stage == passage.stage:
            passage.begin()
        if (stage == passage.stage) == passage.inside:
            return arguments
        if stage == passage.stage:
            if passage.sent is not None or not first:
                raise _out_of_order(name, stage)
            return passage.enter(arguments)
        if stage != passage.stage + 1 or not first:
            raise _out_of_order(name, stage)
        passage.leave(arguments)
        return arguments

    def call(
        self,
        name: str,
        stage: int,
        first: bool,
        arguments: Arguments,
        forward: Callable[..., Any],
        stub: _Stub | None,
    ) -> Any:
        """A submodule of some stage is called."""
        passage = self._passage
        if passage is None:
            if self._goes_back and stage in self._stages:
                return forward(*arguments[0], **arguments[1])
            raise UsageError(
                f"a call of the model's submodule {name or 'itself'} around the prepared model",
                "under a pipeline no rank holds the whole model",
                "call the object that world.prepare returned",
                code="LS302",
            )
        arguments = self.arrive(name, stage, first, arguments)
        if stage == passage.stage:
            return forward(*arguments[0], **arguments[1])
        if stub is None:
            raise RuntimeError(f"no stub for {name}, a submodule of stage {stage}")
        # Not what the stub remembers: the caller may change its shape in place.
        return map_shapes(self._as_shape, stub(arguments))

    def _as_shape(self, tensor: Tensor) -> Tensor:
        return tensor.as_subclass(self._shape)


class _Piece:
    """Stands in for the `forward` of a submodule that belongs to one stage."""

    def __init__(
        self,
        model: StagedModel,
        name: str,
        stage: int,
        first: bool,
        piece: nn.Module,
        stub: _Stub | None,
    ) -> None:
        self._model = model
        self._what = name, stage, first
        self.__wrapped__ = piece.forward
        self._stub = stub

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.call(*self._what, (args, kwargs), self.__wrapped__, self._stub)

    def arrive(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Its first forward pre-hook."""
        return self._model.arrive(*self._what, (args, kwargs))


class _Received(torch.autograd.Function):
    """What was received, as a tensor that the model may write to: a leaf it may not.

    The gradient arrives at the leaf.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """The same memory; not `detach()`, which is a view of a leaf."""
        return leaf.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """As it is."""
        return gradient


def _writable(leaf: Tensor) -> Tensor:
    found: Tensor = _Received.apply(leaf)  # type: ignore[no-untyped-call]
    return found


class _Stub:
    """Answers with the shapes of a submodule's output, computed once for each kind of input."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._known: dict[Any, Any] = {}

    def __call__(self, arguments: Arguments) -> Any:
        with DisableTorchFunctionSubclass():  # asking a `Shape` would be slow
            kind = signature(arguments)
        if kind is None or kind not in self._known:
            args, kwargs = pytree.tree_map_only(Tensor, shape_of, arguments)
            output = self._forward(*args, **kwargs)
            if kind is None:
                return output
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[kind] = output
        return self._known[kind]


def _move(
    module: nn.Module, split: Split, stages: frozenset[int], device: torch.device
) -> list[nn.Parameter]:
    """Moves everything to where it belongs: the device, or nowhere; returns what is gone."""
    gone: list[nn.Parameter] = []
    for name, part in module.named_modules():
        piece = next((p for p in split.pieces if _within(name, p)), None)
        for own, parameter in list(part._parameters.items()):
            if parameter is None:
                continue
            stage = split.own[f"{name}.{own}".lstrip(".")] if piece is None else split.pieces[piece]
            if stage in stages:
                parameter.data = parameter.data.to(device)
            elif not parameter.is_meta:
                shape = nn.Parameter(like(parameter), parameter.requires_grad)
                part._parameters[own] = shape
                gone += [parameter, shape]
        foreign = piece is not None and split.pieces[piece] not in stages
        for own, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[own] = buffer.to("meta" if foreign else device)
    return gone


def _send_plain_tensors(module: nn.Module, split: Split) -> None:
    """In evaluation torch's encoder makes nested tensors of padded ones, for all of its layers.

    They are an optimisation of its own, and have no shape that could be sent.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.TransformerEncoder) and not any(
            _within(name, piece) for piece in split.pieces
        ):
            part.use_nested_tensor = False


def _within(name: str, piece: str) -> bool:
    return not piece or name == piece or name.startswith(f"{piece}.")


def _reaches_back(stage: int) -> UsageError:
    return UsageError(
        f"a pipeline whose stage {stage} begins there",
        "the model uses a value of another stage beside what its first submodule is called with (a "
        "skip connection, a mask made of activations), or asks for a value of an activation",
        "cut it at another place: lockstep.strategies.Pipeline(split=[...]) names the submodules "
        "that begin the stages",
    )


def _out_of_order(name: str, stage: int) -> UsageError:
    return UsageError(
        "a pipeline over a model whose submodules are not called in the order they are registered",
        f"{name}, of stage {stage}, is called before or after its turn",
        "register the submodules in the order of the forward pass, or name the cuts: "
        "lockstep.strategies.Pipeline(split=[...])",
    )


@contextmanager
def drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's streams of the CPU and the device start at a seed; afterwards they are as before."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        draw_from(seed, device)
        yield


def draw_from(seed: int, device: torch.device) -> None:
    """Torch's streams of the CPU and the device start at a seed."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def seed_of_stage(seed: int, stage: int) -> int:
    """Of what a stage draws, from that of the whole forward pass."""
    return mix_seed(seed, stage, 0x57A6E)
