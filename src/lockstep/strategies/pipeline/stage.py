"""One stage of a model, run through the user's own forward.

No code is traced or rewritten. Every rank calls the forward of the whole model; the submodules of
other stages compute shapes on the meta device there, and remember them. What comes before the
stage's first submodule runs on such shapes, its first submodule is given what the stage before has
sent instead, and what comes after the first submodule of the next stage is shapes again. Submodules
without parameters (but BatchNorms) run everywhere, on real values where they are given such.

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

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed.seeding import mix_seed
from lockstep.distributed.torch_compat import (
    DisableTorchFunctionSubclass,
    NormBase,
    TorchDispatchMode,
    members,
    never_compiled,
    pytree,
)
from lockstep.errors import UsageError
from lockstep.strategies.pipeline.split import Arguments, Split

WHOLE_ELSEWHERE = (
    "call lockstep.save_weights(model, path) on all ranks and load the file into a whole model (in "
    "transformers by from_pretrained), or use strategy='ddp'"
)
"""Advice where somebody needs the whole model, to generate text with, say."""
_REMEMBERED = 256
"""Kinds of input of which it is known what they give; then all are forgotten."""


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
        self.goes_back = False
        """A backward pass is under way; checkpointed submodules run their forward again in it."""
        self.passage: Passage | None = None
        """The run of the forward that is under way."""
        self._device = device
        self._cuts = split.cuts
        self._last = len(split.cuts)
        self.gone = _move(module, split, frozenset(stages), device)
        """Parameters that are on other ranks now, and the shapes that are here in their place."""
        _send_plain_tensors(module, split)
        for name, stage in split.pieces.items():
            piece = module.get_submodule(name)
            if isinstance(vars(piece).get("forward"), _Piece):  # in a second place of the model
                continue
            here, first = stage in stages, name in split.cuts
            shapes = None
            if not here or len(stages) > 1:  # whose own submodules are of another one now and then
                shadow = on_meta(piece) if here else piece
                leave_statistics(shadow)
                shapes = shadow.forward
            piece.forward = _Piece(self, name, stage, first, here, piece.forward, shapes)
            if first:
                arrive = piece.forward.arrive
                piece.register_forward_pre_hook(arrive, prepend=True, with_kwargs=True)

    def run(
        self, stage: int, received: Sequence[Tensor] | None, arguments: Arguments, seed: int
    ) -> tuple[list[Tensor] | None, Any]:
        """Runs a stage for the model's arguments.

        Args:
            stage: its number.
            received: from the stage before; None for the first one.
            arguments: of the model's forward.
            seed: of the random numbers, equal for all stages of a micro-batch.

        Returns:
            What the next stage is sent, None of the last one; and what the forward returns, shapes
            for the most.

        Raises:
            UsageError: the model cannot be cut there.
        """
        self.passage = passage = Passage(stage, received, seed, self._device)
        gpus = [self._device] if self._device.type == "cuda" else []
        try:
            with torch.random.fork_rng(gpus), passage.outside:
                draw_from(seed, self._device)
                if stage:
                    passage.go_outside()
                output = self.module(*arguments[0], **arguments[1])
        except RuntimeError as error:
            if "meta" in str(error).lower() and not isinstance(error, torch.OutOfMemoryError):
                raise _reaches_back(stage) from error
            raise
        finally:
            self.passage = None
        last = stage == self._last
        if last and not passage.inside:
            raise _not_called(self._cuts[stage - 1], stage)
        if not last and passage.sent is None:
            raise _not_called(self._cuts[stage], stage + 1)
        if last and any(isinstance(x, Tensor) and x.is_meta for x in pytree.tree_leaves(output)):
            raise _reaches_back(stage)
        return passage.sent, output

    @contextmanager
    def going_back(self) -> Iterator[None]:
        """A backward pass runs inside."""
        self.goes_back = True
        try:
            # Not under a caller's autocast, in whose forward pass this is done.
            with torch.autocast(self._device.type, enabled=False):
                yield
        finally:
            self.goes_back = False


@dataclass(eq=False)
class Passage:
    """One run of the model's forward for one stage: what came in, and what goes out."""

    stage: int
    received: Sequence[Tensor] | None
    """The tensors among the arguments of the stage's first submodule; None for stage 0."""
    seed: int
    device: torch.device
    sent: list[Tensor] | None = None
    """Those for the next stage; None until it is reached."""
    begun: bool = False
    inside: bool = True
    """Whether real values are computed just now."""
    outside: ExitStack = field(default_factory=ExitStack)
    """What holds where they are not."""

    def begin(self) -> None:
        """A submodule of the stage is called; what the first one draws is the stage's own."""
        if not self.begun:
            self.begun = True
            draw_from(mix_seed(self.seed, self.stage, 0x57A6E), self.device)

    def enter(self, arguments: Arguments) -> Arguments:
        """The first submodule of the stage is called: what was received takes the place."""
        self.outside.close()
        self.inside = True
        received: list[Tensor] = [
            _Received.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
            for tensor in self.received or ()
        ]
        leaves = pytree.tree_leaves(arguments)
        if sum(isinstance(leaf, Tensor) for leaf in leaves) != len(received):
            raise UsageError(
                "a pipeline over this model",
                f"stage {self.stage} is called with another number of tensors than it was sent",
                "build the arguments of the stage's first submodule in the same way on all ranks",
            )
        filled: Arguments = pytree.tree_map_only(Tensor, lambda _: received.pop(0), arguments)
        return filled

    def leave(self, arguments: Arguments) -> None:
        """The first submodule of the next stage is called: that is what it is sent."""
        self.sent = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in self.sent):
            raise _reaches_back(self.stage)
        self.go_outside()

    def go_outside(self) -> None:
        """From here on nothing but shapes is computed."""
        self.inside = False
        self.outside.enter_context(_only_shapes(self.device))


@dataclass(eq=False)
class _Piece:
    """Stands in for the `forward` of a submodule that belongs to one stage."""

    model: StagedModel
    name: str
    stage: int
    first: bool
    """The stage begins with it."""
    here: bool
    """This process runs the stage."""
    __wrapped__: Callable[..., Any]
    """The submodule's own forward."""
    on_meta: Callable[..., Any] | None
    """One that computes shapes; None where this process runs no other stage."""
    known: dict[Any, Any] = field(default_factory=dict)
    """Shapes of the output, by the kind of input."""

    @never_compiled  # of a block that is compiled in place, its own forward is
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the submodule, or gives the shapes of what it would return."""
        passage = self.model.passage
        if passage is None:
            if self.model.goes_back and self.here:
                return self.__wrapped__(*args, **kwargs)
            raise UsageError(
                f"a call of the submodule {self.name or 'itself'} around the prepared model",
                "under a pipeline no rank holds the whole model",
                f"call the object that world.prepare returned; for other methods {WHOLE_ELSEWHERE}",
                code="LS302",
            )
        args, kwargs = self.arrive(None, args, kwargs)
        if self.stage == passage.stage:
            return self.__wrapped__(*args, **kwargs)
        # Not what is remembered: the caller may change its shape in place.
        return map_shapes(lambda t: t.as_subclass(Shape), self._shapes_for((args, kwargs)))

    @never_compiled
    def arrive(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Its first forward pre-hook: begins or ends the stage that runs; returns the arguments."""
        passage = self.model.passage
        if passage is None:
            return args, kwargs
        own = self.stage == passage.stage
        if own:
            passage.begin()
        if own == passage.inside:
            return args, kwargs
        next_one = passage.inside and self.stage == passage.stage + 1
        if not self.first or not (next_one or (own and passage.sent is None)):
            raise _out_of_order(self.name, self.stage)
        if own:
            return passage.enter((args, kwargs))
        passage.leave((args, kwargs))
        return args, kwargs

    def _shapes_for(self, arguments: Arguments) -> Any:
        assert self.on_meta is not None  # this process runs another stage
        with DisableTorchFunctionSubclass():  # asking a `Shape` would be slow
            kind = signature(arguments)
        if kind not in self.known:
            args, kwargs = pytree.tree_map_only(Tensor, shape_of, arguments)
            output = self.on_meta(*args, **kwargs)
            remember(self.known, kind, output)
            return output
        return self.known[kind]


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


def _move(
    module: nn.Module, split: Split, stages: frozenset[int], device: torch.device
) -> list[nn.Parameter]:
    """Moves everything to where it belongs: the device, or nowhere; returns what is gone."""
    gone: list[nn.Parameter] = []
    for name, part in module.named_modules():
        named = part.named_parameters(name, recurse=False, remove_duplicate=False)
        for path, parameter in list(named):
            if split.stage_of(path) in stages:
                parameter.data = parameter.data.to(device)
            elif not parameter.is_meta:
                shape = nn.Parameter(shape_of(parameter), parameter.requires_grad)
                part.register_parameter(path.rpartition(".")[2], shape)
                gone += [parameter, shape]
        stage = split.stage_of(name)
        here = stage is None or stage in stages
        for own, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            members(part).buffers[own] = buffer.to(device if here else "meta")
    return gone


def _send_plain_tensors(module: nn.Module, split: Split) -> None:
    """In evaluation torch's encoder makes nested tensors of padded ones, for all of its layers.

    They are an optimisation of its own, and have no shape that could be sent.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.TransformerEncoder) and split.stage_of(name) is None:
            part.use_nested_tensor = False


def _reaches_back(stage: int) -> UsageError:
    return UsageError(
        f"a pipeline whose stage {stage} begins there",
        "the model uses a value of another stage beside what its first submodule is called with (a "
        "skip connection, a mask made of activations), or asks for a value of an activation",
        "cut it at another place: lockstep.strategies.Pipeline(split=[...]) names the cuts",
    )


def _out_of_order(name: str, stage: int) -> UsageError:
    return UsageError(
        "a pipeline over a model whose submodules are not called in the order they are registered",
        f"{name}, of stage {stage}, is called before or after its turn",
        "register the submodules in the order of the forward pass, or name the cuts: "
        "lockstep.strategies.Pipeline(split=[...])",
    )


def _not_called(name: str, stage: int) -> UsageError:
    """The error where a forward pass has ended and the first submodule of a stage was not called.

    Args:
        name: of that submodule.
        stage: which begins with it.
    """
    return UsageError(
        f"a pipeline whose stage {stage} begins at {name}",
        f"the forward pass ended without a call of {name}, so stage {stage} has nothing to compute",
        "begin the stages at submodules that every forward pass calls: "
        "lockstep.strategies.Pipeline(split=[...]); leave submodules that are never called out of "
        "the model",
    )


def draw_from(seed: int, device: torch.device) -> None:
    """Torch's streams of the CPU and the device start at a seed."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


# Shapes: what tensors of other stages are on a rank of a pipeline


class Shape(Tensor):
    """A tensor of another stage, which is only a shape but says that it is on the device.

    `torch.arange(length, device=x.device)` makes real numbers then, whatever `x` is. What is
    computed with such a tensor is one, too.
    """

    on: ClassVar[torch.device | None] = None
    """Within `_only_shapes`; None while torch itself looks."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it would be."""
        return self.on or super().device


class _Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, whatever is computed with a tensor that is only a shape is one, too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            args, kwargs = pytree.tree_map_only(Tensor, shape_of, (args, kwargs))
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("meta")
        on, Shape.on = Shape.on, None
        try:
            return func(*args, **kwargs)
        finally:
            Shape.on = on


@contextmanager
def _only_shapes(device: torch.device) -> Iterator[None]:
    """What is computed inside is shapes; these say that they are on `device`."""
    Shape.on = device
    try:
        with torch.no_grad(), _Shapes():  # type: ignore[no-untyped-call]
            yield
    finally:
        Shape.on = None


def remember(known: dict[Any, Any], kind: Any, found: Any) -> None:
    """Keeps what was found for a kind of input; nothing for None, which is unknown."""
    if kind is not None:
        if len(known) >= _REMEMBERED:
            known.clear()
        known[kind] = found


def signature(value: Arguments) -> Any:
    """What decides about forms: equal for arguments that a model treats alike; None: unknown."""
    args, kwargs = value
    if not kwargs and all(isinstance(arg, Tensor) for arg in args):  # as nearly always: no nest
        return tuple((arg.shape, arg.dtype, arg.requires_grad) for arg in args)
    leaves, spec = pytree.tree_flatten(value)
    parts = [
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    plain = all(isinstance(p, tuple | int | float | str | bool | None) for p in parts)
    return (str(spec), *parts) if plain else None


def map_shapes(change: Callable[[Tensor], Tensor], nest: Any) -> Any:
    """A nest with its tensors changed."""
    if isinstance(nest, Tensor):  # without the detour that a nest takes
        return change(nest)
    return pytree.tree_map_only(Tensor, change, nest)


def shape_of(tensor: Tensor) -> Tensor:
    """Of this dtype and shape, on the meta device."""
    if tensor.is_meta:
        return tensor
    # `empty_like` on the meta device is Python, and 20 times slower.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def on_meta(piece: nn.Module) -> nn.Module:
    """A copy that has the shapes alone."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in piece.parameters()
    }
    memo |= {id(b): b.detach().to("meta") for b in piece.buffers()}
    own = (thing for part in piece.modules() for thing in vars(part).values())
    # It meets nobody, and what keeps a group would keep its threads after the end of the run.
    memo |= {id(thing): None for thing in own if isinstance(thing, dist.ProcessGroup)}
    return copy.deepcopy(piece, memo)


def leave_statistics(piece: nn.Module) -> None:
    """Its BatchNorms give the shape they get: some ask statistics for a number, or meet ranks."""
    for part in piece.modules():
        if isinstance(part, NormBase):
            part.forward = shape_of
