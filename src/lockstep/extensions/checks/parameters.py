"""Checks that a prepared module still trains the parameters that it had in `World.prepare`.

Strategies register their hooks on the parameters that a module has in `World.prepare`. A parameter
that is added, replaced, unfrozen or moved later has no hook, so its gradient is not averaged over
the ranks. Torch does not report such changes. Therefore the modules are checked in the first steps
of the run, at the first global batch of every pass over a loader, and occasionally in between. In
all other steps only a few parameters of each module are looked at, which shows at once that a whole
model was converted, as by `model.double()`, or a backbone unfrozen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.checkpoint.modules import plain_name_function
from lockstep.distributed.process_group import Run
from lockstep.errors import warn_about
from lockstep.extensions.checks.base import Check
from lockstep.optim.precision import Precision
from lockstep.session.check_schedule import check_due
from lockstep.strategies.base import (
    PreparedModule,
    changed_parameters_error,
    describe_change_of_kind,
    not_averaged_error,
)
from lockstep.wording import join_first


class ParameterState(NamedTuple):
    """The properties of a parameter that must not change after its module is prepared."""

    may_be_trained: bool
    """True if the parameter required a gradient, or may do so later."""
    dtype: torch.dtype
    device: torch.device

    def still_holds_for(self, parameter: Tensor) -> bool:
        """Returns False if a parameter is trained now and has another property than this."""
        if not parameter.requires_grad:
            return True
        is_unfrozen = not self.may_be_trained
        is_same_kind = parameter.dtype == self.dtype and parameter.device == self.device
        return is_same_kind and not is_unfrozen


class SampledParameter(NamedTuple):
    """A parameter that is looked at in every step, and how it was in `World.prepare`."""

    reference: ReferenceType[Tensor]
    state: ParameterState


class PreparedParameters(NamedTuple):
    """The parameters of a module as they were in `World.prepare`."""

    names: set[str]
    """Their names, without the parts that wrappers add (see `checkpoint.modules`)."""
    state_of_parameter: MutableMapping[Tensor, ParameterState]
    """The keys are the parameters themselves, by weak references."""
    looked_at_in_every_step: list[SampledParameter]
    """The first and the last of the parameters that may be trained, and of those that may not."""


class Change(NamedTuple):
    """A change of a trained parameter since `World.prepare`."""

    text: str
    """The name of the parameter and how it was changed, for example "fc.weight unfrozen"."""
    harms_virtual_ranks: bool
    """True if virtual ranks on one process are trained wrongly. They do sum the gradients of an
    unfrozen parameter, since the sum has all parameters that the module had in `prepare`."""


class ParameterCheck(Check):
    """Checks that the trained parameters of prepared modules have not changed."""

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._prepared: dict[int, PreparedParameters] = {}
        """By the id of the module."""
        self._has_warned = False
        self._has_several_processes = not run.collectives.single_process
        self._has_virtual_ranks = run.settings.virtual_ranks is not None

    def module_prepared(self, wrapped: PreparedModule) -> None:
        """Records the parameters of a module as they are now."""
        module = wrapped.module
        to_plain_name = plain_name_function(module)  # "module.fc.weight" -> "fc.weight"
        names: set[str] = set()
        state_of_parameter: MutableMapping[Tensor, ParameterState] = WeakTensorKeyDictionary()
        for name, parameter in module.named_parameters():
            names.add(to_plain_name(name))
            # With some strategies, a frozen parameter may be unfrozen later.
            may_be_trained = parameter.requires_grad or wrapped.may_unfreeze
            state_of_parameter[parameter] = ParameterState(
                may_be_trained, parameter.dtype, parameter.device
            )
        self._prepared[id(module)] = PreparedParameters(
            names, state_of_parameter, looked_at_in_every_step=_sample(state_of_parameter)
        )

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Raises an error if trained parameters have changed since `World.prepare`.

        In a run of one process without virtual ranks, such a change does no harm, so this only
        warns, and only once.

        Raises:
            UsageError: if a parameter has changed, and its gradient is not averaged over processes
                or virtual ranks.
        """
        if self._has_warned and not self._has_virtual_ranks:
            return

        if not self._must_look_at_all() and not self._samples_have_changed(modules):
            return

        changes: list[Change] = []
        for module in modules:
            changes += self._changes(module)
        if not changes:
            return

        texts = [change.text for change in changes]
        some_harm_virtual_ranks = any(change.harms_virtual_ranks for change in changes)
        if self._has_several_processes or (self._has_virtual_ranks and some_harm_virtual_ranks):
            raise not_averaged_error(texts)

        if self._has_warned:  # of an unfrozen parameter, which virtual ranks sum rightly
            return
        self._has_warned = True
        effect = "with several processes their gradients would not be averaged"
        warn_about(changed_parameters_error(f"{join_first(texts)}; {effect}"))

    def _must_look_at_all(self) -> bool:
        """Returns True if all parameters are looked at in this step, and not only a few of them.

        Scripts often unfreeze or replace layers between two epochs, so the first global batch of
        every pass over a loader is always checked.
        """
        step = self.run.step
        is_first_of_pass = step.training_pass.number == 1  # counted from 1
        num_steps_with_this_one = step.number + 1
        return is_first_of_pass or check_due(num_steps_with_this_one)

    def _samples_have_changed(self, modules: Sequence[nn.Module]) -> bool:
        """Returns True if sampled parameters of modules have changed, where that does harm."""
        changes_may_harm = self._has_several_processes or self._has_virtual_ranks
        if not changes_may_harm:
            return False

        for module in modules:
            for reference, state in self._prepared[id(module)].looked_at_in_every_step:
                parameter = reference()
                if parameter is not None and not state.still_holds_for(parameter):
                    return True
        return False

    def _changes(self, module: nn.Module) -> list[Change]:
        """Returns how each trained parameter of a module has changed."""
        prepared = self._prepared[id(module)]
        to_plain_name = plain_name_function(module)  # "module.fc.weight" -> "fc.weight"
        changes: list[Change] = []
        for full_name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            name = to_plain_name(full_name)
            before = prepared.state_of_parameter.get(parameter)
            if before is None:  # the parameter is an object that did not exist in `prepare`
                how = "replaced" if name in prepared.names else "added"
                changes.append(Change(f"{name} {how}", harms_virtual_ranks=True))
                continue

            change_of_kind = describe_change_of_kind(name, parameter, before.dtype, before.device)
            if not before.may_be_trained:
                is_converted = change_of_kind != ""
                changes.append(Change(f"{name} unfrozen", harms_virtual_ranks=is_converted))
            elif change_of_kind:
                changes.append(Change(change_of_kind, harms_virtual_ranks=True))
        return changes


def _sample(state_of_parameter: Mapping[Tensor, ParameterState]) -> list[SampledParameter]:
    """Returns the first and the last parameter that may be trained, and those that may not."""
    sampled: list[SampledParameter] = []
    for may_be_trained in (True, False):
        of_kind = [
            SampledParameter(ref(parameter), state)
            for parameter, state in state_of_parameter.items()
            if state.may_be_trained == may_be_trained
        ]
        sampled += of_kind[:1]
        sampled += of_kind[1:][-1:]
    return sampled
