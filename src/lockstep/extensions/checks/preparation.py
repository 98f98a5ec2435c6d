"""Checks that the model and the optimizer that are trained were given to `World.prepare`.

If a model was not prepared, nothing averages its gradients, and each rank trains a model of its
own. So the first losses that each line of the script gives to `World.backward` are followed through
autograd's graph to its *leaves*: the tensors that would get gradients. A loss that reaches no
prepared parameter may still be right: for learned inputs, averages made by hand, or a DDP of the
user's own. So checksums of the parameters are compared over the ranks: only if these were equal at
first and differ some steps later, the check warns.

An optimizer that was not prepared but has parameters of a prepared module steps in each
micro-batch, and no check sees its steps. Torch calls a hook before every step of any optimizer.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.distributed.process_group import Run, store_at_end
from lockstep.errors import warn
from lockstep.extensions.checks.base import Check
from lockstep.optim.precision import Precision
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import PreparedModule, parameters_of
from lockstep.torch_compat import is_sharded, never_compiled
from lockstep.user_code import Location, user_location
from lockstep.wording import join_first

MAX_BACKWARDS_WATCHED = 100
"""Graphs of losses are read only in the first backward passes of a run, this many."""
MAX_RIGHT_LOSSES_PER_LINE = 2
"""Once this many losses of a line of the script were right, no more graphs of it are read."""
BACKWARDS_BEFORE_COMPARISON = 10
"""Unprepared parameters are compared between the ranks after this many backward passes."""
MIN_PARAMETERS_OF_MODEL = 2
"""A loss that reaches fewer unprepared parameters than this more likely trains an input."""
MAX_NODES_OF_GRAPH = 200_000
"""A larger graph is not read to its end."""
NUMBERS_PER_PARAMETER = 64
"""About this many numbers of each parameter go into a checksum."""


class PreparationCheck(Check):
    """Looks, if there are several ranks, at which parameters losses reach and optimizers have."""

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._num_backwards = 0
        self._num_right_losses: dict[Location, int] = {}
        """For each line of the script, how many of its losses were right or may have been. When
        there are enough of them, the line is not looked at any more."""
        self._unprepared_models: dict[Location, UnpreparedModel] = {}
        """The unprepared models, by the line of the script that trains them."""
        self._prepared_optimizers: list[Any] = []
        """All of class `PreparedOptimizer`; `inner` is the user's optimizer that it steps."""
        self._is_active = run.joined is not None and run.collectives.data_parallel.size > 1
        if self._is_active:
            hook = register_optimizer_step_pre_hook(self._before_any_step)
            self._unhook = hook.remove

    def optimizer_prepared(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """Remembers an optimizer that `World.prepare` returns."""
        self._prepared_optimizers.append(optimizer)

    def before_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Looks for a model that the script trains without having prepared it.

        Each line of the script that calls `World.backward` is watched by itself.
        """
        self._num_backwards += 1
        location = self._line_to_look_at(loss)
        if location is None:  # the line is not watched, or has no loss to look at
            return

        unprepared_parameters = self._unprepared_parameters(loss)
        if unprepared_parameters is None:
            self._note_right_loss(location)
        else:
            self._note_unprepared_model(location, unprepared_parameters)

    def _note_right_loss(self, location: Location) -> None:
        """Counts a loss that reaches a prepared parameter, or needs no prepared model.

        After `MAX_RIGHT_LOSSES_PER_LINE` of them the line is not watched any more.

        Args:
            location: the line that trains on the loss.
        """
        self._num_right_losses[location] = self._num_right_losses.get(location, 0) + 1
        self._unprepared_models.pop(location, None)

    def _note_unprepared_model(
        self, location: Location, unprepared_parameters: list[nn.Parameter]
    ) -> None:
        """Records a loss that reaches only parameters that were not prepared.

        They are the *unprepared model* of the line. After `BACKWARDS_BEFORE_COMPARISON` further
        losses, the checksums of the model are compared between the ranks.

        Args:
            location: the line that trains on the loss.
            unprepared_parameters: the parameters.
        """
        model = self._unprepared_models.get(location)
        if model is None or not model.has_any_of(unprepared_parameters):
            # The first such loss of this line, or the line trains another model now.
            self._unprepared_models[location] = UnpreparedModel(location, unprepared_parameters)
            return

        model.note_backward()
        if model.num_backwards >= BACKWARDS_BEFORE_COMPARISON:
            # After that, the line is not watched any more.
            if self._send_and_compare_checksums(model):
                self._warn_of_model(model)

    def _unprepared_parameters(self, loss: Tensor) -> list[nn.Parameter] | None:
        """Returns the parameters that a loss reaches, if none of them was prepared.

        Returns:
            None if the loss is right, or may be.
        """
        prepared_ids = {id(parameter) for parameter in self._prepared_parameters()}
        leaves = leaves_if_unprepared(loss, prepared_ids)
        if leaves is None or self._may_be_right(leaves):
            return None
        return [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]

    def _line_to_look_at(self, loss: Tensor) -> Location | None:
        """Returns the line of the script that has given this loss to `World.backward`.

        Reading the graph of a loss takes long. So only the first losses of each line are looked at,
        until it is known whether they are right.

        Returns:
            None if the graph of this loss is not to be read.
        """
        if not self._is_active:
            return None

        # Later in the run, lines are only looked at if some line has trained an unprepared model.
        is_beginning_of_run = self._num_backwards <= MAX_BACKWARDS_WATCHED
        if not is_beginning_of_run and not self._unprepared_models:
            return None

        # In a pipeline, only the last stage has the loss.
        is_earlier_stage = not self.run.collectives.contributes
        if is_earlier_stage or not loss.requires_grad:
            return None

        location = user_location()
        if location is None or not self._is_undecided(location):
            return None
        return location

    def _is_undecided(self, location: Location) -> bool:
        """Returns True if further losses of a line are to be looked at.

        That ends once enough of them were right, or once the checksums of the unprepared model that
        the line trains were sent: then the last rank that sends its checksums decides.
        """
        is_known_to_be_right = self._num_right_losses.get(location, 0) >= MAX_RIGHT_LOSSES_PER_LINE
        model = self._unprepared_models.get(location)  # None: no loss of the line was wrong yet
        awaits_decision = model is not None and not model.is_followed
        return not is_known_to_be_right and not awaits_decision

    def _prepared_parameters(self) -> list[Tensor]:
        """Returns all parameters of prepared modules, and those that a strategy has replaced.

        A strategy may put other parameters in the place of the user's, such as shards, or may
        gather shards into whole parameters for the forward pass (`unsharded_parameters`). The
        script may still hold the user's parameters. A loss that reaches a parameter of any of these
        kinds reaches a prepared module.
        """
        parameters: list[Tensor] = []
        for wrapped in self.wrapped:
            parameters += wrapped.module.parameters()
            parameters += wrapped.unsharded_parameters
            for old, new in wrapped.replaced_parameters:
                parameters.append(old)
                if new is not None:  # None: the new parameter is on another rank
                    parameters.append(new)
        return parameters

    def _may_be_right(self, leaves: Sequence[Tensor]) -> bool:
        """Returns True if a script may well train these leaves, though none of them is prepared.

        Args:
            leaves: the leaves of the graph of a loss.
        """
        parameters = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
        if len(parameters) < MIN_PARAMETERS_OF_MODEL:
            return True  # more likely inputs that are learned than a model
        if any(is_sharded(parameter) for parameter in parameters):
            return True  # the user has sharded the model without Lockstep

        # With a frozen model, the script learns inputs of this model: a soft prompt, or an
        # adversarial example.
        for wrapped in self.wrapped:
            is_frozen = not any(p.requires_grad for p in wrapped.module.parameters())
            if is_frozen:
                return True
        return False

    def _send_and_compare_checksums(self, model: UnpreparedModel) -> bool:
        """Writes the checksums of a model to the store of the run. Later calls do nothing.

        The rank that is the last to write compares the checksums of all ranks.

        Returns:
            True on that rank if the ranks have begun with equal parameters and have different ones
            now.
        """
        joined = self.run.joined
        if joined is None:  # this process has joined no others
            return False
        if not model.is_followed:  # its checksums were sent already, or cannot be computed
            return False

        model.checksums_were_sent = True
        model.update_checksum()
        # In the store, the key "trained apart/train.py:12" counts the ranks that have sent their
        # checksums, and "trained apart/train.py:12/3" has the checksums of rank 3.
        file, line = model.location
        key = f"trained apart/{file}:{line}"
        topology = self.run.topology
        checksums = [model.first_checksum, model.latest_checksum]
        joined.store.set(f"{key}/{topology.rank}", json.dumps(checksums))
        num_sent = joined.store.add(key, 1)
        is_last = num_sent >= topology.size
        return is_last and _came_apart(joined.store, key, topology.size)

    def _warn_of_model(self, model: UnpreparedModel) -> None:
        """Warns, on this rank, of an unprepared model that each rank trains in its own way."""
        prepared_modules = self.wrapped
        if prepared_modules:
            owner = "no prepared module"
        else:
            owner = "no module: none was prepared"
        warn(
            "world.backward of a loss that reaches no prepared model",
            found=f"the {len(model.shapes)} parameters that it reaches (of shapes "
            f"{join_first(model.shapes)}) belong to {owner}; they were equal on all ranks, and "
            "are not any more: each rank trains a model of its own",
            do="give the model to world.prepare with its optimizer, and use what it returns: "
            "model, optimizer = world.prepare(model, optimizer)",
            code="LS311",
            at=model.location,
            on_this_rank=True,
        )

    @never_compiled
    def _before_any_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Warns once of an optimizer that is not prepared.

        Torch calls this hook before each step of any optimizer.
        """
        if self._num_backwards == 0:
            return  # nothing was trained yet: scripts step once to create the optimizer's state
        if any(prepared.stepping for prepared in self._prepared_optimizers):
            return  # a prepared optimizer is stepping the optimizer that it wraps

        reason = self._why_step_is_wrong(optimizer)
        if reason is None:
            return

        self._unhook()  # from now on torch does not call this function any more
        name = type(optimizer).__name__
        warn(
            f"{name}.step() of an optimizer that is not prepared",
            found=f"{reason}: with micro-batches "
            "it steps in each of them, world.step does not count, and the checks of gradients and "
            "replicas do not run",
            do="step what world.prepare returns: model, optimizer = world.prepare(model, "
            "optimizer)",
            code="LS407",
        )

    def _why_step_is_wrong(self, optimizer: Optimizer) -> str | None:
        """Returns why the script must not step this optimizer itself, or None if it may.

        `World.prepare` returns a wrapper, which steps the user's optimizer (its `inner`) at the
        right times. The script must step the wrapper, not the inner optimizer, and no other
        optimizer that has parameters of a prepared model.
        """
        ids = {id(parameter) for parameter in parameters_of(optimizer)}
        ids_of_prepared_models = {id(parameter) for parameter in self._prepared_parameters()}
        num_prepared = len(ids & ids_of_prepared_models)
        if num_prepared == 0:
            return None  # an optimizer of something else

        if any(optimizer is prepared.inner for prepared in self._prepared_optimizers):
            return "it was given to world.prepare, which returned another one"

        # A prepared optimizer may itself step another one with the same parameters, as SAM steps an
        # SGD. So an optimizer that shares parameters with a prepared one may be a part of it.
        for prepared in self._prepared_optimizers:
            ids_in_prepared_optimizer = {id(p) for p in parameters_of(prepared)}
            if not ids.isdisjoint(ids_in_prepared_optimizer):
                return None

        # No prepared optimizer has these parameters, so the script must have forgotten to prepare
        # this one.
        return f"it holds {num_prepared} parameters of a prepared model"

    def close(self, failed: bool) -> None:
        """Compares the models that were not compared yet, so that short runs are checked too.

        For that, each rank sends its checksums to the store; the last one to send them compares.
        """
        if not self._is_active:
            return

        self._unhook()
        if failed or self.run.joined is None:
            return

        models_that_came_apart = []
        with store_at_end(self.run.joined):  # if the store is gone, the block ends early
            for model in self._unprepared_models.values():
                if self._send_and_compare_checksums(model):
                    models_that_came_apart.append(model)

        # Outside of the block, which suppresses errors.
        for model in models_that_came_apart:
            self._warn_of_model(model)


def _came_apart(store: dist.Store, key: str, num_ranks: int) -> bool:
    """Returns True if the ranks began with equal parameters and have different ones now.

    Args:
        store: the store of the run.
        key: under it and its rank, each rank has stored its first and its latest checksum.
        num_ranks: the number of ranks.
    """
    first_checksums: set[int] = set()
    latest_checksums: set[int] = set()
    for rank in range(num_ranks):
        first, latest = json.loads(store.get(f"{key}/{rank}"))
        first_checksums.add(first)
        latest_checksums.add(latest)
    were_equal = len(first_checksums) == 1
    are_equal = len(latest_checksums) == 1
    return were_equal and not are_equal


class UnpreparedModel:
    """A model that a line of the script trains and that is in no prepared module.

    Args:
        location: the line.
        parameters: the parameters that the loss of this line reaches.
    """

    def __init__(self, location: Location, parameters: Sequence[nn.Parameter]) -> None:
        self.location = location
        self.shapes = [str(tuple(parameter.shape)) for parameter in parameters]
        self.num_backwards = 1
        self.checksums_were_sent = False
        """True once the checksums are in the store of the run, for the other ranks."""
        self._parameters = [ref(parameter) for parameter in parameters]
        self.first_checksum = self._checksum()
        """The checksum before the first backward pass. None if it cannot be computed."""
        self.latest_checksum = self.first_checksum

    @property
    def is_followed(self) -> bool:
        """True until its checksums are sent, for the comparison with the model of other ranks.

        A model whose checksum cannot be computed is never followed.
        """
        return self.first_checksum is not None and not self.checksums_were_sent

    def note_backward(self) -> None:
        """Counts a backward pass, and computes the checksum anew."""
        self.num_backwards += 1
        self.update_checksum()

    def has_any_of(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Returns True if it has one of these objects.

        A copy that the script makes for each step has none of them: it is another model.
        """
        ids = {id(reference()) for reference in self._parameters}
        return any(id(parameter) in ids for parameter in parameters)

    def update_checksum(self) -> None:
        """Sets `latest_checksum`; leaves it as it was if a parameter no longer exists."""
        checksum = self._checksum()
        if checksum is not None:
            self.latest_checksum = checksum

    def _checksum(self) -> int | None:
        """Returns a CRC-32 over some numbers of each parameter.

        Returns:
            None if a parameter no longer exists, or is not a plain, dense tensor.
        """
        checksum = 0
        for reference in self._parameters:
            parameter = reference()
            if parameter is None:
                return None
            # A subclass, such as a DTensor, may not have its numbers in plain memory.
            is_plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
            if not is_plain:
                return None

            numbers = parameter.detach().flatten()

            # A few numbers from all over the parameter are enough: every step changes most of them.
            stride = max(1, len(numbers) // NUMBERS_PER_PARAMETER)
            as_bytes = numbers[::stride].contiguous().cpu().view(torch.uint8)
            checksum = zlib.crc32(bytes(as_bytes.tolist()), checksum)
        return checksum


def leaves_if_unprepared(loss: Tensor, prepared_ids: Collection[int]) -> list[Tensor] | None:
    """Returns the leaves of the graph of a loss, if it reaches no parameter of a prepared module.

    Args:
        loss: a tensor of one element that has a gradient.
        prepared_ids: the ids of all parameters of prepared modules.

    Returns:
        None if the loss reaches a prepared parameter, or if its graph is too large to read.
    """
    if loss.grad_fn is None:
        return [loss]  # the script trains the loss itself, a parameter of one element

    leaves: list[Tensor] = []
    seen_nodes: set[Any] = {loss.grad_fn}
    nodes_to_visit: list[Any] = [loss.grad_fn]
    while nodes_to_visit:
        node = nodes_to_visit.pop()
        if node.name().endswith("AccumulateGrad"):  # autograd's node that adds to a leaf's gradient
            if id(node.variable) in prepared_ids:
                return None

            leaves.append(node.variable)
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in seen_nodes:
                seen_nodes.add(next_node)
                nodes_to_visit.append(next_node)
        if len(seen_nodes) > MAX_NODES_OF_GRAPH:
            return None
    return leaves
