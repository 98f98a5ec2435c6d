"""Runs one stage of a model by calling the user's own forward.

A *piece* is a submodule that belongs to a single stage. Every rank calls the forward of the whole
model, but only computes values in its own stage, from the call of the stage's first piece to the
call of the next stage's first piece. Before and after that it computes *shapes* (tensors without
values, `shapes`), and the pieces of other stages return shapes that were computed once.

When the first piece of a stage is called, its arguments are replaced by the tensors that the
previous stage has sent. When the first piece of the next stage is called, its arguments are sent
there. Submodules without parameters (except BatchNorms) run on all ranks, on values within the
stage and on shapes elsewhere.

No code is traced or rewritten, so the forward may be any Python code. A stage may use the model's
inputs, but from earlier stages it may only use the arguments of its first piece.

The beginning and the end of a stage are noticed before the hooks of its first piece run, so that
whatever these hooks compute is part of the stage (`torch.nn.utils.weight_norm` computes the weight
in one).

Random numbers: All ranks of a pipeline have the same random streams, so that the training loop
draws the same numbers on all of them (for a mask, for example). The model's forward uses other
streams. Where shapes are computed, they are the same on all ranks, which run the same forward for
the same micro-batch. Within a stage they differ from those of other stages; otherwise two stages
would have the same dropout masks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.distributed.seeding import mix_seed
from lockstep.errors import UsageError
from lockstep.strategies.deferred_model import with_memory
from lockstep.strategies.pipeline.input_kind import Arguments, signature, store_in_cache
from lockstep.strategies.pipeline.shapes import (
    Shape,
    copy_to_meta,
    map_tensors,
    only_shapes,
    shape_of,
    skip_normalisation,
)
from lockstep.strategies.pipeline.split import Split
from lockstep.torch_compat import (
    DisableTorchFunctionSubclass,
    compiled_code_runs_eagerly,
    convert_tensors,
    members,
    pytree,
)

SAVE_WHOLE_MODEL_ADVICE = (
    "call lockstep.save_weights(model, path) on all ranks and load the file into a whole model (in "
    "transformers by from_pretrained), or use strategy='ddp'"
)
"""Advice for users who need the whole model, for example to generate text."""
STAGE_SEED_TAG = 0x57A6E
"""Mixed into the seeds of stages, so that no other random stream has the same seed."""


class StagedModel:
    """A model of which this process runs some stages.

    The parameters of all other stages are moved to the meta device, in place.

    Args:
        module: the user's model, on the CPU or on its device.
        split: where the model is cut.
        stages: the numbers of this process's stages.
        device: the device of these stages.
    """

    def __init__(
        self, module: nn.Module, split: Split, stages: Sequence[int], device: torch.device
    ) -> None:
        self.module = module
        self.in_backward = False
        """True during a backward pass, in which activation checkpointing runs pieces again."""
        self.stage_run: StageRun | None = None
        """The forward pass through a stage that is running; None if there is none."""
        self._device = device
        self._cuts = split.cuts
        self._last_stage = len(split.cuts)
        self.parameters_on_other_ranks = _move_to_stages(module, split, frozenset(stages), device)
        """Parameters that are on other ranks now, and the parameters without values that replaced
        them."""
        self.parameters_of_stage = _parameters_of_stages(module, split, stages)
        _disable_nested_tensors(module, split)
        for name, stage in split.pieces.items():
            self._replace_forward(name, stage, stages, is_first_of_stage=name in split.cuts)

    def _replace_forward(
        self, name: str, stage: int, stages: Sequence[int], *, is_first_of_stage: bool
    ) -> None:
        """Replaces the forward of a piece by a `_PieceForward`.

        The new forward runs the piece in its own stage, and returns the shapes of its output
        elsewhere.

        Args:
            name: the name of the piece.
            stage: the stage that the piece belongs to.
            stages: the stages of this process.
            is_first_of_stage: True if the stage begins with this piece.
        """
        piece = self.module.get_submodule(name)
        was_replaced = isinstance(vars(piece).get("forward"), _PieceForward)
        if was_replaced:  # the same piece is registered under another name
            return

        stage_is_here = stage in stages
        shape_forward = _shape_forward_of(
            piece, stage_is_here=stage_is_here, has_several_stages_here=len(stages) > 1
        )
        forward = _PieceForward(
            model=self,
            name=name,
            stage=stage,
            is_first_of_stage=is_first_of_stage,
            stage_is_here=stage_is_here,
            __wrapped__=piece.forward,  # computes values, while the piece's own stage runs
            shape_forward=shape_forward,  # computes shapes, while another stage runs
        )
        piece.forward = forward
        if is_first_of_stage:  # its call begins this stage, and ends the one before
            piece.register_forward_pre_hook(forward.before, prepend=True, with_kwargs=True)

    def run(
        self, stage: int, received: Sequence[Tensor] | None, arguments: Arguments, seed: int
    ) -> tuple[list[Tensor] | None, Any]:
        """Runs one stage for the given arguments of the model.

        Args:
            stage: the number of the stage.
            received: the tensors from the previous stage; None for the first stage.
            arguments: the arguments of the model's forward.
            seed: the seed of the random numbers, equal for all stages of a micro-batch.

        Returns:
            The tensors for the next stage (None from the last stage), and what the model's forward
            returned, which consists of shapes except in the last stage.

        Raises:
            UsageError: the model cannot be cut there.
        """
        # The submodules of the model are called below. Those that belong to a single stage (pieces)
        # find this object in `self.stage_run`, and tell it when the stage begins and ends.
        stage_run = StageRun(stage, received, seed, self._device)
        self.stage_run = stage_run
        args, kwargs = arguments
        gpus = [self._device] if self._device.type == "cuda" else []
        try:
            with torch.random.fork_rng(gpus):
                seed_streams(seed, self._device)
                with stage_run.computing_shapes_outside_stage():
                    output = self.module(*args, **kwargs)
        except RuntimeError as error:
            # The model has used the value of a shape, or mixed shapes and values. The message of
            # torch is then, for example, "Tensor.item() cannot be called on meta tensors".
            concerns_meta_tensors = "meta" in str(error).lower()
            if concerns_meta_tensors and not isinstance(error, torch.OutOfMemoryError):
                raise _uses_other_stage_error(stage) from error
            raise
        finally:
            self.stage_run = None

        self._check_has_run(stage_run, output)
        return stage_run.sent, output

    def _check_has_run(self, stage_run: StageRun, output: Any) -> None:
        """Raises UsageError if a forward pass has not run its stage from beginning to end.

        Args:
            stage_run: the forward pass through the stage.
            output: what the model's forward returned.
        """
        stage = stage_run.stage

        # Every stage except the last one ends where the next stage begins.
        if stage < self._last_stage:
            next_stage = stage + 1
            if not stage_run.has_ended:
                raise _not_called_error(self._first_piece_of(next_stage), next_stage)
            return

        # The last stage computes values from the call of its first piece to the end of the forward
        # pass. So if it does not compute values now, its first piece was not called.
        first_piece_was_called = stage_run.computes_values
        if not first_piece_was_called:
            raise _not_called_error(self._first_piece_of(stage), stage)

        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                raise _uses_other_stage_error(stage)

    def _first_piece_of(self, stage: int) -> str:
        """Returns the name of the piece with which a stage begins, except for stage 0."""
        return self._cuts[stage - 1]

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """A context in which backward passes must run.

        It allows pieces to run again, for activation checkpointing.
        """
        self.in_backward = True
        try:
            # A backward pass computes in the dtypes that its forward pass has chosen, so torch
            # advises to run it outside of autocast. But the pass may run in a call of the model,
            # which the user may have put into an autocast context.
            with torch.autocast(self._device.type, enabled=False):
                yield
        finally:
            self.in_backward = False


@dataclass(eq=False)
class StageRun:
    """One run of the model's forward for one stage, with the tensors that it receives and sends."""

    stage: int
    received: Sequence[Tensor] | None
    """The tensors that replace those in the arguments of the stage's first piece; None for stage 0.
    """
    seed: int
    device: torch.device
    sent: list[Tensor] | None = None
    """The tensors for the next stage; None until its first piece is called."""
    has_own_seed: bool = False
    """True if a piece of the stage was called, from which on the stage has its own random numbers.
    """
    computes_values: bool = True
    """True while values are computed, False while shapes are computed."""
    _shape_contexts: ExitStack = field(default_factory=ExitStack)
    """Holds the context in which shapes are computed, while it is entered."""

    @contextmanager
    def computing_shapes_outside_stage(self) -> Iterator[None]:
        """A context for the forward pass, in which shapes are computed before and after the stage.

        `begin_values` and `end` tell where the stage begins and ends.
        """
        with self._shape_contexts:  # leaves, at the end, the context of shapes if it is entered
            # Only stage 0 computes values from the start of the forward pass.
            if self.stage > 0:
                self._begin_shapes()
            yield

    @property
    def has_ended(self) -> bool:
        """True if the next stage's first piece was called, and what it is given is in `sent`."""
        return self.sent is not None

    def use_own_seed(self) -> None:
        """Gives the stage its own random numbers, when one of its pieces is called first."""
        if not self.has_own_seed:
            self.has_own_seed = True
            seed_streams(mix_seed(self.seed, self.stage, STAGE_SEED_TAG), self.device)

    def begin_values(self, arguments: Arguments) -> Arguments:
        """Starts computing values, when the stage's first piece is called.

        Args:
            arguments: the arguments of the piece, whose tensors are shapes.

        Returns:
            The arguments, with the received tensors in place of the shapes.
        """
        self._shape_contexts.close()  # leaves the context in which shapes are computed
        self.computes_values = True

        # A received tensor that needs a gradient is a leaf of the autograd graph, and torch does
        # not allow in-place operations on leaves. The model may use some, so it gets the result of
        # an identity function instead.
        assert self.received is not None  # stage 0 receives nothing, and never calls this method
        tensors: list[Tensor] = []
        for tensor in self.received:
            if tensor.requires_grad:
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

        # Replace each shape by the next received tensor: `end` sends them in the order of the
        # leaves.
        remaining = iter(tensors)
        filled: Arguments = pytree.tree_map_only(Tensor, lambda _: next(remaining), arguments)
        return filled

    def end(self, arguments: Arguments) -> None:
        """Ends the stage, when the next stage's first piece is called.

        Stores the tensors among the arguments of that piece in `sent`. From then on only shapes are
        computed.
        """
        self.sent = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in self.sent):
            raise _uses_other_stage_error(self.stage)
        self._begin_shapes()

    def _begin_shapes(self) -> None:
        """Starts computing shapes instead of values."""
        self.computes_values = False
        self._shape_contexts.enter_context(only_shapes(self.device))


@dataclass(eq=False)
class _PieceForward:
    """The callable that replaces the `forward` of a piece."""

    model: StagedModel
    name: str
    stage: int
    is_first_of_stage: bool
    """True if the stage begins with this piece."""
    stage_is_here: bool
    """True if this process runs the stage of the piece."""
    __wrapped__: Callable[..., Any]
    """The original forward of the piece."""
    shape_forward: Callable[..., Any] | None
    """A forward that computes shapes; None if this process runs no other stage."""
    cached_outputs: dict[Any, Any] = field(default_factory=dict)
    """The shapes of the output that were computed so far, by the kind of input."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the piece if its stage is running; otherwise returns the shapes of its output."""
        stage_run = self.model.stage_run
        if stage_run is None:
            is_recomputed = self.model.in_backward and self.stage_is_here
            if is_recomputed:  # by activation checkpointing
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

        # Return new tensors, because the caller may change their shapes in place.
        return map_tensors(output, lambda tensor: tensor.as_subclass(Shape))

    def before(self, _piece: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Begins or ends the running stage if the call of this piece is where it begins or ends.

        It is called before the piece runs: as a forward pre-hook if the piece is the first of its
        stage, and otherwise by `__call__`. The running stage computes shapes, then values from its
        own first piece to the first piece of the next stage, and then shapes again.

        Returns:
            The arguments for the piece.
        """
        stage_run = self.model.stage_run
        if stage_run is None:  # no stage is running, for example in the backward pass
            return args, kwargs
        if self.stage == stage_run.stage:
            return self._before_own_stage(stage_run, (args, kwargs))
        return self._before_other_stage(stage_run, (args, kwargs))

    def _before_own_stage(self, stage_run: StageRun, arguments: Arguments) -> Arguments:
        """Begins the stage that runs, which is that of this piece, if it has not begun yet.

        A stage begins at its first piece, and stage 0 at the start of the forward pass.

        Returns:
            The arguments for the piece.

        Raises:
            UsageError: the stage has not begun, or has ended, and this piece cannot begin it.
        """
        stage_run.use_own_seed()  # for what the pieces draw; later calls do nothing
        is_between_begin_and_end = stage_run.computes_values
        if is_between_begin_and_end:
            return arguments

        can_begin = self.is_first_of_stage and not stage_run.has_ended
        if not can_begin:
            raise _out_of_order_error(self.name, self.stage)
        return stage_run.begin_values(arguments)

    def _before_other_stage(self, stage_run: StageRun, arguments: Arguments) -> Arguments:
        """Ends the running stage if the next stage begins at this piece.

        Args:
            stage_run: the run of the running stage, which is not that of this piece.
            arguments: the arguments of the piece.

        Returns:
            The arguments for the piece.

        Raises:
            UsageError: the running stage has begun, and this piece cannot end it.
        """
        is_between_begin_and_end = stage_run.computes_values
        if not is_between_begin_and_end:
            return arguments

        next_stage = stage_run.stage + 1
        next_stage_begins = self.is_first_of_stage and self.stage == next_stage
        if not next_stage_begins:
            raise _out_of_order_error(self.name, self.stage)

        stage_run.end(arguments)
        return arguments

    def _output_shapes(self, arguments: Arguments) -> Any:
        """Returns the shapes of the piece's output, computed once for each kind of input."""
        # Shapes are only needed while another stage than the piece's own runs.
        assert self.shape_forward is not None

        # Reading attributes of a `Shape`, a subclass of Tensor, is slow without this context.
        with DisableTorchFunctionSubclass():
            kind = signature(arguments)  # None if unknown: then nothing is remembered

        if kind is not None and kind in self.cached_outputs:
            return self.cached_outputs[kind]

        args, kwargs = pytree.tree_map_only(Tensor, shape_of, arguments)
        with compiled_code_runs_eagerly():
            output = self.shape_forward(*args, **kwargs)
        store_in_cache(self.cached_outputs, kind, output)  # does nothing without a kind
        return output


class _ReceivedTensor(torch.autograd.Function):
    """The identity function. Its result is not a leaf of the autograd graph.

    So the model may write to the result of a received tensor. The memory is not copied, and the
    gradient arrives at the received tensor.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """Returns a tensor with the same memory; `detach()` would return a view of the leaf."""
        return leaf.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Passes the gradient on unchanged."""
        return gradient


def _move_to_stages(
    module: nn.Module, split: Split, stages: frozenset[int], device: torch.device
) -> list[nn.Parameter]:
    """Moves the tensors of this process's stages to its device, and all others to the meta device.

    Returns:
        The parameters whose values are on other ranks now: the original parameters, which an
        optimizer may hold, and those on the meta device that replaced them in the module.
    """
    parameters_on_other_ranks: list[nn.Parameter] = []
    for module_name, part in module.named_modules():
        names_here: set[str] = set()
        for name, _ in part.named_parameters(recurse=False, remove_duplicate=False):
            path = f"{module_name}.{name}" if module_name else name
            if split.stage_of(path) in stages:
                names_here.add(name)
        parameters_on_other_ranks += _move_parameters(part, names_here, device)

        # A module with parts in several stages has no stage (None). All ranks need its buffers.
        stage = split.stage_of(module_name)
        stage_is_here = stage is None or stage in stages
        _move_buffers(part, device if stage_is_here else torch.device("meta"))

    return parameters_on_other_ranks


def _move_parameters(
    part: nn.Module, names_here: Collection[str], device: torch.device
) -> list[nn.Parameter]:
    """Moves some parameters of a module to a device, and all others to the meta device.

    Args:
        part: the module that has the parameters, in itself and not in a submodule.
        names_here: the names of the parameters to move to the device.
        device: the device.

    Returns:
        The other parameters, and those on the meta device that replaced them.
    """
    parameters_here: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
        if name in names_here:
            parameters_here.append(parameter)
            continue

        others.append(parameter)
        if not parameter.is_meta:  # it is already if the model was built on the meta device
            others.append(_replace_by_meta(part, name, parameter))

    _move_to_device(part, parameters_here, device)
    return others


def _move_buffers(part: nn.Module, device: torch.device) -> None:
    """Moves the buffers that a module has in itself to a device."""
    for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
        _replace_buffer(part, name, buffer.to(device))


def _replace_by_meta(part: nn.Module, attribute: str, parameter: nn.Parameter) -> nn.Parameter:
    """Replaces a parameter of a module by one on the meta device, and returns the new one."""
    meta_parameter = nn.Parameter(shape_of(parameter), parameter.requires_grad)
    part.register_parameter(attribute, meta_parameter)
    return meta_parameter


def _replace_buffer(part: nn.Module, attribute: str, buffer: Tensor) -> None:
    """Replaces a buffer of a module, without changing whether state dicts contain it."""
    members(part).buffers[attribute] = buffer  # the dict in which the module keeps its buffers


def _move_to_device(
    part: nn.Module, parameters: Sequence[nn.Parameter], device: torch.device
) -> None:
    """Moves some parameters of a module to a device, in place.

    If the model was built on the meta device, there are no values to move. Then new memory is
    allocated, which gets its values later.

    Args:
        part: the module that has the parameters, in itself and not in a submodule.
        parameters: the parameters to move.
        device: the device.
    """
    meta_ids: set[int] = set()
    for parameter in parameters:
        if parameter.is_meta:
            meta_ids.add(id(parameter))
        else:
            parameter.data = parameter.data.to(device)

    # The `data` of a parameter cannot move away from the meta device, so these are replaced.
    if meta_ids:
        give_memory = partial(_give_memory, ids=meta_ids, device=device)
        convert_tensors(part, give_memory, recurse=False)


def _shape_forward_of(
    piece: nn.Module, *, stage_is_here: bool, has_several_stages_here: bool
) -> Callable[..., Any] | None:
    """Returns the forward with which this process computes the shapes of a piece's output.

    In it, normalisation layers return the shape of their input (`skip_normalisation`): they could
    not read statistics without values, or would wait for other ranks.

    Args:
        piece: the piece, before its forward is replaced.
        stage_is_here: True if this process runs the stage of the piece.
        has_several_stages_here: True if this process runs several stages.
    """
    # The piece itself only ever computes shapes here.
    if not stage_is_here:
        skip_normalisation(piece)
        return piece.forward

    # The only stage of this process needs no shapes of its own output.
    if not has_several_stages_here:
        return None

    # The piece holds values. While another stage of this process runs, the shapes are computed by a
    # copy on the meta device.
    shape_copy = copy_to_meta(piece)
    skip_normalisation(shape_copy)
    return shape_copy.forward


def _parameters_of_stages(
    module: nn.Module, split: Split, stages: Sequence[int]
) -> dict[int, list[nn.Parameter]]:
    """Returns the parameters of each stage of this process, by the number of the stage."""
    parameters_of_stage: dict[int, list[nn.Parameter]] = {stage: [] for stage in stages}
    for name, parameter in module.named_parameters():
        stage = split.stage_of(name)
        if stage in parameters_of_stage:
            parameters_of_stage[stage].append(parameter)
    return parameters_of_stage


def _give_memory(tensor: Tensor, ids: set[int], device: torch.device) -> Tensor:
    """Allocates a tensor if its `id` is among `ids`; returns any other tensor unchanged."""
    return with_memory(tensor, device) if id(tensor) in ids else tensor


def _disable_nested_tensors(module: nn.Module, split: Split) -> None:
    """Prevents torch's encoders, if they are cut, from making nested tensors in evaluation.

    Nested tensors are an optimisation for padded inputs. They have no fixed shape that could be
    sent.
    """
    for name, part in module.named_modules():
        is_cut = split.stage_of(name) is None
        if is_cut and isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False


def _uses_other_stage_error(stage: int) -> UsageError:
    """Returns the error for a stage that uses values of another stage."""
    return UsageError(
        f"a pipeline whose stage {stage} begins at the place that world.prepare has printed",
        "the model uses a value of another stage that is not an argument of the stage's first "
        "submodule (a skip connection, a mask made of activations), or it reads the value of an "
        "activation",
        "cut it at another place: lockstep.strategies.Pipeline(split=[...]) names the cuts",
    )


def _out_of_order_error(name: str, stage: int) -> UsageError:
    """Returns the error for a piece that is called before or after its stage runs."""
    return UsageError(
        "a pipeline over a model whose submodules are not called in the order they are registered",
        f"{name}, of stage {stage}, is called before or after its turn",
        "register the submodules in the order of the forward pass, or name the cuts: "
        "lockstep.strategies.Pipeline(split=[...])",
    )


def _not_called_error(name: str, stage: int) -> UsageError:
    """Returns the error for a forward pass that has not called the first piece of a stage.

    Args:
        name: the name of that piece.
        stage: the number of the stage.
    """
    return UsageError(
        f"a pipeline whose stage {stage} begins at {name}",
        f"the forward pass ended without a call of {name}, so stage {stage} has nothing to compute",
        "begin the stages at submodules that every forward pass calls: "
        "lockstep.strategies.Pipeline(split=[...]); leave submodules that are never called out of "
        "the model",
    )


def seed_streams(seed: int, device: torch.device) -> None:
    """Seeds torch's random streams of the CPU and of a device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
