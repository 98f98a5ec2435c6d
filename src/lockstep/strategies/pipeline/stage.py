"""One stage of a model, run through the user's own forward.

A *piece* is a submodule that belongs to one stage. Every rank calls the forward of the whole model.
It is *inside* a stage from the call of the stage's first piece, which is given what the stage
before has sent, to the call of the next stage's first piece, whose arguments are sent on.
*Outside*, shapes are computed instead of values (`shapes`), and pieces of other stages return
shapes that they remember. Submodules without parameters (but not BatchNorms) run everywhere, on
real values inside.

No code is traced or rewritten, so the forward can be any Python. A stage may use the model's own
inputs, but of the stages before it only the arguments of its first piece.

Where a stage begins and ends is noticed before the hooks of its first piece run, so that what these
compute (`torch.nn.utils.weight_norm` makes the weight in one) is part of the stage.

Random numbers: the streams of the ranks of one pipeline are equal, so that what a training loop
draws (a mask, for example) is the same on all of them. What the model's forward draws comes from
other streams. Outside of the stage they are the same on every rank, because the forward runs on all
of them for the same micro-batch. Inside they differ from stage to stage, or the dropout masks of
two stages would be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.distributed.seeding import mix_seed
from lockstep.distributed.torch_compat import (
    DisableTorchFunctionSubclass,
    convert_tensors,
    members,
    never_compiled,
    pytree,
)
from lockstep.errors import UsageError
from lockstep.strategies.deferred_model import with_memory
from lockstep.strategies.pipeline.input_kind import Arguments, remember, signature
from lockstep.strategies.pipeline.shapes import (
    Shape,
    copy_to_meta,
    map_tensors,
    only_shapes,
    shape_of,
    skip_normalisation,
)
from lockstep.strategies.pipeline.split import Split

SAVE_WHOLE_MODEL_ADVICE = (
    "call lockstep.save_weights(model, path) on all ranks and load the file into a whole model (in "
    "transformers by from_pretrained), or use strategy='ddp'"
)
"""Advice for who needs the whole model, to generate text for example."""
STAGE_SEED_TAG = 0x57A6E
"""Mixed into the seeds of stages, so that no other random stream has the same seeds."""


class StagedModel:
    """A model of which this process runs some stages.

    The parameters of the other stages are moved to the meta device, in place.

    Args:
        module: the user's, on the CPU or its device.
        split: where it is cut.
        stages: the stages of this process.
        device: for these stages.
    """

    def __init__(
        self, module: nn.Module, split: Split, stages: Sequence[int], device: torch.device
    ) -> None:
        self.module = module
        self.in_backward = False
        """True during a backward pass, in which checkpointed pieces run their forward again."""
        self.stage_run: StageRun | None = None
        """The run of a stage that is under way."""
        self._device = device
        self._cuts = split.cuts
        self._last_stage = len(split.cuts)
        self.gone = _move_to_stages(module, split, frozenset(stages), device)
        """Parameters that are on other ranks now, and the shapes that took their place."""
        self.parameters_of_stage = _parameters_of_stages(module, split, stages)
        _disable_nested_tensors(module, split)
        for name, stage in split.pieces.items():
            self._replace_forward(name, stage, stages, begins_stage=name in split.cuts)

    def _replace_forward(
        self, name: str, stage: int, stages: Sequence[int], *, begins_stage: bool
    ) -> None:
        """Replaces the forward of a piece by a `_PieceForward`.

        That runs the piece while its own stage runs, and else returns the shapes of its output.

        Args:
            name: of the piece.
            stage: of the piece.
            stages: of this process.
            begins_stage: True if the piece is the first of its stage.
        """
        piece = self.module.get_submodule(name)
        if isinstance(vars(piece).get("forward"), _PieceForward):  # it stands at two places
            return

        is_here = stage in stages
        shape_forward = None
        if not is_here:  # this process computes nothing but shapes with it
            skip_normalisation(piece)
            shape_forward = piece.forward
        elif len(stages) > 1:  # values in its own stage, shapes while another stage runs
            shape_copy = copy_to_meta(piece)
            skip_normalisation(shape_copy)
            shape_forward = shape_copy.forward

        forward = _PieceForward(
            self, name, stage, begins_stage, is_here, piece.forward, shape_forward
        )
        piece.forward = forward
        if begins_stage:
            piece.register_forward_pre_hook(forward.before, prepend=True, with_kwargs=True)

    def run(
        self, stage: int, received: Sequence[Tensor] | None, arguments: Arguments, seed: int
    ) -> tuple[list[Tensor] | None, Any]:
        """Runs a stage for the model's arguments.

        Args:
            stage: its number.
            received: the tensors from the stage before; None for the first stage.
            arguments: of the model's forward.
            seed: of the random numbers, equal for all stages of a micro-batch.

        Returns:
            The tensors for the next stage, or None from the last one; and what the forward
            returned, which is mostly shapes except in the last stage.

        Raises:
            UsageError: the model cannot be cut there.
        """
        stage_run = StageRun(stage, received, seed, self._device)

        # While it is set, the pieces begin and end the stage: see `_PieceForward.before`.
        self.stage_run = stage_run
        args, kwargs = arguments
        gpus = [self._device] if self._device.type == "cuda" else []
        try:
            with torch.random.fork_rng(gpus), stage_run.outside_contexts:
                seed_streams(seed, self._device)
                if stage > 0:  # stage 0 computes values from the beginning of the forward pass
                    stage_run.go_outside()
                output = self.module(*args, **kwargs)
        except RuntimeError as error:
            # torch asks for the value of a shape, or mixes shapes and values. Its message is, for
            # example, "Tensor.item() cannot be called on meta tensors".
            concerns_meta_tensors = "meta" in str(error).lower()
            if concerns_meta_tensors and not isinstance(error, torch.OutOfMemoryError):
                raise _uses_other_stage_error(stage) from error
            raise
        finally:
            self.stage_run = None

        self._check_has_run(stage_run, output)
        return stage_run.sent, output

    def _check_has_run(self, stage_run: StageRun, output: Any) -> None:
        """Raises UsageError if a forward pass has not run its stage from the begin to the end.

        Args:
            stage_run: of the stage.
            output: what the model's forward returned.
        """
        stage = stage_run.stage
        if stage < self._last_stage:
            if stage_run.sent is None:  # the next stage was not reached
                raise _not_called_error(self._cuts[stage], stage + 1)
            return

        if not stage_run.is_inside:  # the last stage has not begun
            raise _not_called_error(self._cuts[stage - 1], stage)

        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                raise _uses_other_stage_error(stage)

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """A backward pass must run inside this context.

        It sets `in_backward`, which allows pieces to run again, for activation checkpointing.
        """
        self.in_backward = True
        try:
            # The caller may be inside the autocast context of its forward pass.
            with torch.autocast(self._device.type, enabled=False):
                yield
        finally:
            self.in_backward = False


@dataclass(eq=False)
class StageRun:
    """One run of the model's forward for one stage: what comes in, and what goes out."""

    stage: int
    received: Sequence[Tensor] | None
    """The tensors among the arguments of the stage's first piece; None for stage 0."""
    seed: int
    device: torch.device
    sent: list[Tensor] | None = None
    """The tensors for the next stage; None until that is reached."""
    has_begun: bool = False
    is_inside: bool = True
    """True while real values are computed."""
    outside_contexts: ExitStack = field(default_factory=ExitStack)
    """Holds the contexts of the outside while the run is there."""

    def begin(self) -> None:
        """Gives the stage random numbers of its own when its first piece is called."""
        if not self.has_begun:
            self.has_begun = True
            seed_streams(mix_seed(self.seed, self.stage, STAGE_SEED_TAG), self.device)

    def go_inside(self, arguments: Arguments) -> Arguments:
        """Begins to compute values, at the call of the stage's first piece.

        Args:
            arguments: of the piece, whose tensors are shapes.

        Returns:
            The arguments with the received tensors in the places of these.
        """
        self.outside_contexts.close()
        self.is_inside = True

        tensors: list[Tensor] = []
        for tensor in self.received or ():
            if tensor.requires_grad:  # a leaf, which torch does not let the model write to
                tensor = _ReceivedTensor.apply(tensor)  # type: ignore[no-untyped-call]
            tensors.append(tensor)

        leaves = pytree.tree_leaves(arguments)
        num_tensors = sum(isinstance(leaf, Tensor) for leaf in leaves)
        if num_tensors != len(tensors):
            raise UsageError(
                "a pipeline over this model",
                f"stage {self.stage} is called with another number of tensors than it was sent",
                "build the arguments of the stage's first submodule in the same way on all ranks",
            )

        # The arguments are shapes; each is replaced by the next received tensor.
        remaining = iter(tensors)
        filled: Arguments = pytree.tree_map_only(Tensor, lambda _: next(remaining), arguments)
        return filled

    def leave(self, arguments: Arguments) -> None:
        """Ends the stage at the call of the next stage's first piece.

        The tensors among the arguments of that piece are put into `sent`, and only shapes are
        computed from here on.
        """
        self.sent = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in self.sent):
            raise _uses_other_stage_error(self.stage)
        self.go_outside()

    def go_outside(self) -> None:
        """From here on only shapes are computed."""
        self.is_inside = False
        self.outside_contexts.enter_context(only_shapes(self.device))


@dataclass(eq=False)
class _PieceForward:
    """Takes the place of the `forward` of a piece."""

    model: StagedModel
    name: str
    stage: int
    begins_stage: bool
    """True if the piece is the first of its stage."""
    is_here: bool
    """True if this process runs the stage."""
    __wrapped__: Callable[..., Any]
    """The forward that the piece had before."""
    shape_forward: Callable[..., Any] | None
    """A forward that computes shapes; None if this process runs no other stage."""
    output_of_kind: dict[Any, Any] = field(default_factory=dict)
    """The shapes of the output, by the kind of input."""

    @never_compiled  # a block that is compiled in place has a compiled forward of its own
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the piece, or returns the shapes of what it would return."""
        stage_run = self.model.stage_run
        if stage_run is None:
            # Activation checkpointing runs the piece again in the backward pass.
            if self.model.in_backward and self.is_here:
                return self.__wrapped__(*args, **kwargs)

            raise UsageError(
                f"a call of the submodule {self.name or 'itself'} around the prepared model",
                "under a pipeline no rank holds the whole model",
                "call the object that world.prepare returned; for other methods "
                f"{SAVE_WHOLE_MODEL_ADVICE}",
                code="LS302",
            )

        args, kwargs = self.before(None, args, kwargs)
        if self.stage == stage_run.stage:
            return self.__wrapped__(*args, **kwargs)

        output = self._output_shapes((args, kwargs))

        # New tensors, because the caller may change the shape of these in place.
        return map_tensors(lambda tensor: tensor.as_subclass(Shape), output)

    @never_compiled
    def before(self, _piece: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Begins or ends the stage that runs, if it begins or ends at this piece.

        It is called before the piece runs: by `__call__`, and as a forward pre-hook of the first
        piece of a stage.

        Returns:
            The arguments for the piece.
        """
        stage_run = self.model.stage_run
        if stage_run is None:  # no stage runs, as when a checkpointed piece is computed again
            return args, kwargs

        is_of_this_stage = self.stage == stage_run.stage
        if is_of_this_stage:
            stage_run.begin()
            if stage_run.is_inside:  # nothing changes
                return args, kwargs
            has_ended = stage_run.sent is not None
            if self.begins_stage and not has_ended:
                return stage_run.go_inside((args, kwargs))
            raise _out_of_order_error(self.name, self.stage)

        if not stage_run.is_inside:  # a piece of another stage, outside: nothing changes
            return args, kwargs

        is_of_next_stage = self.stage == stage_run.stage + 1
        if self.begins_stage and is_of_next_stage:
            stage_run.leave((args, kwargs))
            return args, kwargs

        raise _out_of_order_error(self.name, self.stage)

    def _output_shapes(self, arguments: Arguments) -> Any:
        """Returns the output of `shape_forward`, which is remembered for each kind of input."""
        assert self.shape_forward is not None  # this process runs another stage

        # Reading attributes of a `Shape`, a subclass of Tensor, is slow without this context.
        with DisableTorchFunctionSubclass():
            kind = signature(arguments)  # None if unknown: then nothing is remembered

        if kind in self.output_of_kind:
            return self.output_of_kind[kind]

        args, kwargs = pytree.tree_map_only(Tensor, shape_of, arguments)
        output = self.shape_forward(*args, **kwargs)
        remember(self.output_of_kind, kind, output)
        return output


class _ReceivedTensor(torch.autograd.Function):
    """Makes a tensor that is not a leaf from a received one, so that the model may write to it.

    The gradient arrives at the leaf.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """Returns the same memory; `detach()` would return a view of the leaf."""
        return leaf.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Returns the gradient as it is."""
        return gradient


def _move_to_stages(
    module: nn.Module, split: Split, stages: frozenset[int], device: torch.device
) -> list[nn.Parameter]:
    """Moves what belongs to this process to its device, and the rest to the meta device.

    Returns:
        The parameters of the module whose values are on other ranks now: each original one, and the
        one on the meta device that took its place.
    """
    gone: list[nn.Parameter] = []
    for name, part in module.named_modules():
        parameters = list(part.named_parameters(name, recurse=False, remove_duplicate=False))

        # The model may have been built on the meta device. These get their values later.
        ids_without_memory: set[int] = set()
        for path, parameter in parameters:
            if parameter.is_meta and split.stage_of(path) in stages:
                ids_without_memory.add(id(parameter))

        if ids_without_memory:
            give_memory = partial(_give_memory, ids=ids_without_memory, device=device)
            convert_tensors(part, give_memory, recurse=False)

        for path, parameter in parameters:
            if split.stage_of(path) in stages:
                parameter.data = parameter.data.to(device)
                continue

            gone.append(parameter)
            if not parameter.is_meta:  # one without values needs no replacement
                shape = nn.Parameter(shape_of(parameter), parameter.requires_grad)
                _, _, attribute = path.rpartition(".")
                part.register_parameter(attribute, shape)
                gone.append(shape)

        stage = split.stage_of(name)  # None: a module that a cut goes through, which all ranks need
        is_here = stage is None or stage in stages
        buffers = part.named_buffers(recurse=False, remove_duplicate=False)
        for attribute, buffer in list(buffers):
            members(part).buffers[attribute] = buffer.to(device if is_here else "meta")

    return gone


def _parameters_of_stages(
    module: nn.Module, split: Split, stages: Sequence[int]
) -> dict[int, list[nn.Parameter]]:
    """Returns the parameters of each stage of this process."""
    parameters_of_stage: dict[int, list[nn.Parameter]] = {stage: [] for stage in stages}
    for name, parameter in module.named_parameters():
        stage = split.stage_of(name)
        if stage in parameters_of_stage:
            parameters_of_stage[stage].append(parameter)
    return parameters_of_stage


def _give_memory(tensor: Tensor, ids: set[int], device: torch.device) -> Tensor:
    """Returns a tensor with memory for one with one of these ids, and any other as it is."""
    return with_memory(tensor, device) if id(tensor) in ids else tensor


def _disable_nested_tensors(module: nn.Module, split: Split) -> None:
    """Stops torch's encoders, if they are cut, from making nested tensors in evaluation.

    Nested tensors are an optimisation for padded inputs, and have no shape that could be sent.
    """
    for name, part in module.named_modules():
        is_cut = split.stage_of(name) is None
        if is_cut and isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False


def _uses_other_stage_error(stage: int) -> UsageError:
    """Returns the error of a stage that uses values of another stage."""
    return UsageError(
        f"a pipeline whose stage {stage} begins there",
        "the model uses a value of another stage that is not an argument of the stage's first "
        "submodule (a skip connection, a mask made of activations), or it reads the value of an "
        "activation",
        "cut it at another place: lockstep.strategies.Pipeline(split=[...]) names the cuts",
    )


def _out_of_order_error(name: str, stage: int) -> UsageError:
    """Returns the error of a piece that is called before or after its stage runs."""
    return UsageError(
        "a pipeline over a model whose submodules are not called in the order they are registered",
        f"{name}, of stage {stage}, is called before or after its turn",
        "register the submodules in the order of the forward pass, or name the cuts: "
        "lockstep.strategies.Pipeline(split=[...])",
    )


def _not_called_error(name: str, stage: int) -> UsageError:
    """Returns the error of a forward pass that has not called the first piece of a stage.

    Args:
        name: of that piece.
        stage: that begins with it.
    """
    return UsageError(
        f"a pipeline whose stage {stage} begins at {name}",
        f"the forward pass ended without a call of {name}, so stage {stage} has nothing to compute",
        "begin the stages at submodules that every forward pass calls: "
        "lockstep.strategies.Pipeline(split=[...]); leave submodules that are never called out of "
        "the model",
    )


def seed_streams(seed: int, device: torch.device) -> None:
    """Seeds torch's random streams of the CPU and of the device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
