"""Were the model and the optimizer that are trained given to `world.prepare`?

A model that was not prepared is trained on each rank apart: nothing averages its gradients. What a
loss reaches is read from autograd's graph, in the first backward passes of each line that calls
`world.backward`. A loss that reaches no parameter of a prepared module may still be meant: learned
inputs, averages made by hand, a DDP of the user's own. So the parameters are compared: they must
have been equal on all ranks at first, and not be any more some steps later.

An optimizer that was not prepared and holds parameters of a prepared module steps in each
micro-batch, and no check sees it. Torch tells of every step of every optimizer.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.distributed.process_group import Run, store_at_end
from lockstep.distributed.torch_compat import is_sharded, never_compiled
from lockstep.errors import warn
from lockstep.extensions.checks.base import Check
from lockstep.optim.precision import Precision
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import PreparedModule, parameters_of
from lockstep.user_code import Location, user_location
from lockstep.wording import join_first

WATCHED_BACKWARDS = 100
"""Backward passes of a run in which the graphs of losses are looked at."""
WALKS_WHERE_RIGHT = 2
"""Graphs that are read for a line of the script, where they reach a prepared parameter."""
BACKWARDS_TO_PART = 10
"""After so many backward passes the parameters that the ranks train apart are compared."""
MIN_PARAMETERS_OF_MODEL = 2
"""A single parameter that is in no prepared module is rather a learned input than a model."""
MAX_NODES = 200_000
"""Of a larger graph it is not known what it reaches."""
MAX_NUMBERS_OF_PARAMETER = 64
"""So many numbers of each parameter are compared."""


class PreparationCheck(Check):
    """Looks at what losses reach and at what optimizers hold, where there are several ranks."""

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._backwards = 0
        self._right: dict[Location, int] = {}
        """For lines that call `world.backward`: how often what they reach was right."""
        self._apart: dict[Location, TrainedApart] = {}
        """Models that no prepared module holds, by the line that trains them."""
        self._prepared_optimizers: list[Any] = []
        self._several = run.joined is not None and run.collectives.data_parallel.size > 1
        if self._several:
            hook = register_optimizer_step_pre_hook(self._before_any_step)
            self._unhook = hook.remove

    def optimizer_prepared(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """Its steps, and those of optimizers inside of it, are as they should be."""
        self._prepared_optimizers.append(optimizer)

    def before_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Looks at what the loss reaches, in the first backward passes of the user's line."""
        self._backwards += 1
        if not self._several or (self._backwards > WATCHED_BACKWARDS and not self._apart):
            return
        if not self.run.collectives.contributes or not loss.requires_grad:
            return
        place = user_location()
        if place is None or self._right.get(place, 0) >= WALKS_WHERE_RIGHT:
            return
        known = self._apart.get(place)
        if known is not None and (known.posted or known.first is None):
            return
        reached = leaves_of(loss, {id(p) for p in self._prepared_parameters()})
        if reached is None or self._may_be_meant(reached):
            self._right[place] = self._right.get(place, 0) + 1
            self._apart.pop(place, None)
            return
        parameters = [leaf for leaf in reached if isinstance(leaf, nn.Parameter)]
        if known is None or not known.is_of(parameters):
            self._apart[place] = TrainedApart(place, parameters)
            return
        known.backwards += 1
        known.look()
        if known.backwards >= BACKWARDS_TO_PART:
            self._post(known)

    def _prepared_parameters(self) -> list[Tensor]:
        found: list[Tensor] = []
        for wrapped in self.wrapped:
            found += wrapped.module.parameters()
            found += wrapped.unsharded_parameters
            for old, new in wrapped.replaced_parameters:
                found += [old] if new is None else [old, new]
        return found

    def _may_be_meant(self, reached: Sequence[Tensor]) -> bool:
        """Whether these leaves, none of which is prepared, are no model that is trained apart."""
        parameters = [leaf for leaf in reached if isinstance(leaf, nn.Parameter)]
        if len(parameters) < MIN_PARAMETERS_OF_MODEL or any(map(is_sharded, parameters)):
            return True
        for wrapped in self.wrapped:
            trained = [p for p in wrapped.module.parameters() if p.requires_grad]
            if not trained:
                return True  # what feeds a frozen model is learned: a prompt, an attack
        return False

    def _post(self, apart: TrainedApart) -> None:
        """Tells the other ranks how the parameters are now; the last rank to come compares."""
        joined = self.run.joined
        if joined is None or apart.posted or apart.first is None:
            return
        apart.posted = True
        apart.look()
        key = f"trained apart/{apart.place[0]}:{apart.place[1]}"
        topology = self.run.topology
        joined.store.set(f"{key}/{topology.rank}", json.dumps([apart.first, apart.latest]))
        if joined.store.add(key, 1) < topology.size:
            return
        texts = [joined.store.get(f"{key}/{rank}") for rank in range(topology.size)]
        first, last = zip(*map(json.loads, texts), strict=True)
        if len(set(first)) == 1 < len(set(last)):
            self._warn_of_model(apart)

    def _warn_of_model(self, apart: TrainedApart) -> None:
        prepared = "no prepared module" if self.wrapped else "no module: none was prepared"
        warn(
            "world.backward of a loss that reaches no prepared model",
            f"the {len(apart.shapes)} parameters that it reaches (of shapes "
            f"{join_first(apart.shapes)}) belong to {prepared}; they were equal on all ranks, and "
            "are not any more: each rank trains a model of its own",
            "give the model to world.prepare with its optimizer, and use what it returns: model, "
            "optimizer = world.prepare(model, optimizer)",
            code="LS311",
            at=apart.place,
            on_this_rank=True,
        )

    @never_compiled
    def _before_any_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Called by torch before any optimizer steps; warns once of one that is not prepared."""
        if not self._backwards or any(each.stepping for each in self._prepared_optimizers):
            return
        held = set(map(id, parameters_of(optimizer)))
        given = any(optimizer is each.inner for each in self._prepared_optimizers)
        if not given:
            for each in self._prepared_optimizers:
                if not held.isdisjoint(map(id, parameters_of(each))):
                    return  # a part of the prepared one, such as the optimizer that SAM steps
        held &= {id(p) for p in self._prepared_parameters()}
        if not held:
            return
        self._unhook()
        name = type(optimizer).__name__
        how = "it was given to world.prepare, which returned another one" if given else ""
        warn(
            f"{name}.step() of an optimizer that is not prepared",
            f"{how or f'it holds {len(held)} parameters of a prepared model'}: with micro-batches "
            "it steps in each of them, world.step does not count, and the checks of gradients and "
            "replicas do not run",
            "step what world.prepare returns: model, optimizer = world.prepare(model, optimizer)",
            code="LS407",
        )

    def close(self, failed: bool) -> None:
        """Compares what was not compared yet."""
        if not self._several:
            return
        self._unhook()
        if failed or self.run.joined is None:
            return
        with store_at_end(self.run.joined):
            for apart in list(self._apart.values()):
                self._post(apart)


class TrainedApart:
    """A model that a line of the script trains and that no prepared module holds.

    Args:
        place: that line.
        parameters: those that the loss reaches.
    """

    def __init__(self, place: Location, parameters: Sequence[nn.Parameter]) -> None:
        self.place = place
        self.shapes = [str(tuple(parameter.shape)) for parameter in parameters]
        self.backwards = 1
        self.posted = False
        """The other ranks know how its parameters have become."""
        self._parameters = [ref(parameter) for parameter in parameters]
        self.first = self._fingerprint()
        """Of its parameters, before the first backward pass."""
        self.latest = self.first

    def is_of(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these are the same objects: a copy made for each step is another model."""
        own = {id(reference()) for reference in self._parameters}
        return any(id(parameter) in own for parameter in parameters)

    def look(self) -> None:
        """Remembers how the parameters are now, unless they are gone with the model."""
        now = self._fingerprint()
        if now is not None:
            self.latest = now

    def _fingerprint(self) -> int | None:
        """A CRC-32 over some numbers of each parameter; None: not all can be looked at any more."""
        found = 0
        for reference in self._parameters:
            parameter = reference()
            if parameter is None:
                return None
            if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
                return None
            values = parameter.detach().flatten()
            every = max(1, len(values) // MAX_NUMBERS_OF_PARAMETER)
            some_values = values[::every].contiguous().cpu().view(torch.uint8)
            found = zlib.crc32(bytes(some_values.tolist()), found)
        return found


def leaves_of(loss: Tensor, prepared: Collection[int]) -> list[Tensor] | None:
    """The leaves that a backward pass of the loss would give gradients to.

    Args:
        loss: one element.
        prepared: the ids of all parameters of prepared modules.

    Returns:
        None where one of these is among them, or where the graph is too large to say.
    """
    if loss.grad_fn is None:
        return [loss]
    leaves: list[Tensor] = []
    seen: set[Any] = {loss.grad_fn}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node.name().endswith("AccumulateGrad"):
            if id(node.variable) in prepared:
                return None
            leaves.append(node.variable)
        for follower, _ in node.next_functions:
            if follower is not None and follower not in seen:
                seen.add(follower)
                waiting.append(follower)
        if len(seen) > MAX_NODES:
            return None
    return leaves
