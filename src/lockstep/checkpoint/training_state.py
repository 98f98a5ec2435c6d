"""The state of a training, as checkpoints and steps in memory store it.

It consists of what `state_dict()` returns of each object that the script has named, of the world,
and of the *replicas*: the copies of the model that DiLoCo's virtual ranks train separately. Each
rank also has a random state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.batch.loader import Loader
from lockstep.checkpoint import layout, sharding
from lockstep.checkpoint.bits import (
    check_virtual_ranks,
    facts_about_bits,
    restore_threads_and_note_differences,
)
from lockstep.checkpoint.checks import BUILD_AS_SAVED, changed_lengths, check_fits
from lockstep.checkpoint.kept_layout import Section, sections_of
from lockstep.checkpoint.kept_reading import RANDOM
from lockstep.checkpoint.modules import PlainState, load_plain, plain_state_dict
from lockstep.checkpoint.optimizer_match import SavedNames, match_optimizers, optimizer_facts
from lockstep.checkpoint.optimizer_state import load_into_torch_optimizer, saved_parameter_dtypes
from lockstep.checkpoint.random_states import RandomStates
from lockstep.checkpoint.rank_parts import keys_of_partial_states
from lockstep.checkpoint.sharding import without_meta
from lockstep.distributed.collectives import Collectives
from lockstep.errors import CheckpointError, LockstepError
from lockstep.optim.deferred_init import shapes_are_enough
from lockstep.settings import Settings
from lockstep.wording import count_noun


class CheckpointWorld(Protocol):
    """The methods of `World` that a checkpoint uses."""

    strategy: str
    """The name of the strategy."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the run's own state, with the integers `step` and `epoch`."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Loads what `state_dict` returned."""

    def print(self, *values: object) -> None:
        """Prints on rank 0."""


class Replicas(Protocol):
    """The methods of `training.virtual_rank_states.VirtualRankStates` that a checkpoint uses."""

    count: int
    """Number of replicas of the run."""

    @property
    def own_virtual_ranks(self) -> list[int]:
        """The virtual ranks that this process computes; each of them trains a replica."""

    def state_dict(self, shared: bool | None = None) -> dict[str, Any]:
        """Returns the states of this process's replicas.

        Args:
            shared: whether the result includes the state that all replicas have in common.
        """

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError if a saved state does not fit this run."""

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Loads a saved state. With None, all replicas start from the present weights."""


class TrainingState:
    """Collects, describes and loads the state of a training.

    Args:
        objects: the objects that the script has named, by name.
        world: the `World`, whose own state is a part of it.
        world_state_without_checks: returns the same as `world.state_dict`, but without asking the
            checks for results that they still hold back, which may take as long as a step.
        replicas: DiLoCo's replicas; None if all ranks train one model.
        random_states: the random states of the ranks.
        settings: the settings of the run.
        collectives: the collectives of the run.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        *,
        world: CheckpointWorld,
        world_state_without_checks: Callable[[], dict[str, Any]],
        replicas: Replicas | None,
        random_states: RandomStates,
        settings: Settings,
        collectives: Collectives,
    ) -> None:
        self._objects = dict(objects)
        self._world = world
        self._world_state_without_checks = world_state_without_checks
        self._replicas = replicas
        self._random_states = random_states
        self._settings = settings
        self._collectives = collectives
        self.module_names = [
            name for name, value in objects.items() if isinstance(value, nn.Module)
        ]
        self._plain_states = {name: PlainState(objects[name]) for name in self.module_names}
        self._optimizer_facts: dict[str, Any] = {}
        """The class of each optimizer and the names of its parameters, for the manifest."""
        self._counts_of_parameters: list[int] = []
        """How many parameters each group of each optimizer had when these facts were collected."""
        for value in objects.values():
            if isinstance(value, Loader):
                _ = value.fingerprint  # computed now: some datasets change during the training

    # Collecting

    def collect(self) -> dict[str, Any]:
        """Returns the present states by name, that of the world as "world".

        `World.state_dict` first waits for the checks of the run that are still going on.
        """
        states: dict[str, Any] = {"world": self._world.state_dict()}
        for name, value in self._all_objects().items():
            if isinstance(value, nn.Module):
                states[name] = plain_state_dict(value)
            else:
                states[name] = value.state_dict()
        return states

    def collect_sections(self) -> tuple[dict[str, Any], list[Section]]:
        """Returns the facts of the present states (see `facts`), and the states in sections.

        A section is a piece of the state that is kept in memory by itself (`kept_layout.Section`).

        Unlike `collect`, this is called in each step, so it must be fast: it does not wait for the
        checks of the run, and returns the training's own tensors.
        """
        states = self._take_states()

        # A state is partial if this rank has only some of its entries. Under a pipeline, a module
        # has the tensors of other ranks on the meta device. They are left out.
        partial_names = list(self.keys_of_partial(states))
        for name in self.module_names:
            if name in partial_names:
                states[name] = without_meta(states[name])

        optimizer_names = [n for n, value in self._objects.items() if isinstance(value, Optimizer)]
        sections = sections_of(
            states,
            module_names=self.module_names,
            optimizer_names=optimizer_names,
            partial_names=partial_names,
        )

        # Each rank copies its own random state.
        random_state = self._random_states.state()
        random_section = Section(RANDOM, path=("state",), value=random_state, is_partial=True)
        return self.facts(states), [*sections, random_section]

    def _take_states(self) -> dict[str, Any]:
        """Returns the present states by name, as `collect` does, but without waiting for checks."""
        states: dict[str, Any] = {"world": self._world_state_without_checks()}
        for name, value in self._objects.items():
            if isinstance(value, nn.Module):
                states[name] = self._plain_states[name].take()
            else:
                states[name] = value.state_dict()
        if self._replicas is not None:
            # One rank of each machine keeps what the replicas have in common.
            is_first_of_machine = self._collectives.topology.local_rank == 0
            states["replicas"] = self._replicas.state_dict(shared=is_first_of_machine)
        return states

    def keys_of_partial(self, states: Mapping[str, Any]) -> dict[str, list[int | str]]:
        """Returns the keys that this rank has of the states of which it has only some entries."""
        return keys_of_partial_states(states, self._all_objects())

    def ids_changed_only_by_optimizer(self) -> set[int]:
        """Returns the ids of the tensors that change only in the step of a prepared optimizer.

        These are the parameters of the optimizer and the tensors of its state.
        """
        ids: set[int] = set()
        for value in self._objects.values():
            # Prepared optimizers are recognised by their method `load_saved_state`, which those of
            # torch lack: this module must not import the module of their class.
            has_method_of_prepared = hasattr(value, "load_saved_state")
            is_prepared_optimizer = isinstance(value, Optimizer) and has_method_of_prepared
            if not is_prepared_optimizer:
                continue

            for group in value.param_groups:
                ids.update(id(parameter) for parameter in group["params"])
            for state_of_parameter in value.state.values():
                # Some of the values are numbers. Their ids do no harm.
                ids.update(id(item) for item in state_of_parameter.values())
        return ids

    def _all_objects(self) -> dict[str, Any]:
        """Returns all objects whose states are saved, except the world, by name."""
        if self._replicas is None:
            return self._objects
        return {**self._objects, "replicas": self._replicas}

    # Describing

    def facts(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Returns facts about states that are stored beside them, as JSON.

        Example: `{"step": 120, "epoch": 2, "strategy": "ddp", "optimizers": {"optimizer": {"class":
        "SGD", ...}}}`, and with virtual ranks also `"virtual_ranks": 4, "threads": 8` and more.

        Args:
            states: the states of this rank, by name.
        """
        return {
            "step": int(states["world"]["step"]),
            "epoch": self._epoch(states),
            "strategy": self._world.strategy,
            **facts_about_bits(self._settings, self._collectives.device),
            layout.OPTIMIZERS: self._facts_about_optimizers(),
        }

    def _facts_about_optimizers(self) -> dict[str, Any]:
        """Returns the class of each optimizer and the names of its parameters.

        Finding the names takes long, so it is only done again if an optimizer has been given
        further parameters since: then a group has more of them, or there are more groups.
        """
        counts_of_parameters = []
        for value in self._objects.values():
            if isinstance(value, Optimizer):
                counts_of_parameters += [len(group["params"]) for group in value.param_groups]

        if counts_of_parameters != self._counts_of_parameters:
            names = SavedNames({name: self._objects[name] for name in self.module_names})
            self._optimizer_facts = {}
            for name, value in self._objects.items():
                if isinstance(value, Optimizer):
                    self._optimizer_facts[name] = optimizer_facts(value, names)
            self._counts_of_parameters = counts_of_parameters
        return self._optimizer_facts

    def _epoch(self, states: Mapping[str, Any]) -> int:
        """Returns the number of the present epoch.

        In a loop over `world.epochs` the world counts the epochs. In any other loop the loaders do:
        then it is the smallest epoch of the loaders that have started one.
        """
        epoch_of_world = states["world"]["epoch"]
        if epoch_of_world:
            return int(epoch_of_world)

        epochs_of_loaders = []
        for name, value in self._objects.items():
            if not isinstance(value, Loader):
                continue
            epoch = int(states[name]["epoch"])
            if epoch > 0:  # a loader that is only used for evaluation stays at 0
                epochs_of_loaders.append(epoch)
        return min(epochs_of_loaders, default=0)

    # Loading

    def match(self, path: Path | str, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Checks that saved states fit this run. Nothing is loaded.

        Args:
            path: the folder of the checkpoint, or a description such as "step 12 in memory".
            saved: the saved states by name, with the `manifest`.

        Returns:
            The saved states, with those of optimizers in the order of the present parameters.

        Raises:
            CheckpointError: some state does not fit.
        """
        check_virtual_ranks(path, saved["manifest"], self._settings)
        check_fits(path, self._objects, saved)
        if self._replicas is not None and "replicas" in saved:
            self._replicas.check(saved["replicas"])
        has_replicas = self._replicas is not None
        return match_optimizers(path, self._objects, saved, has_replicas=has_replicas)

    def load(self, path: Path | str, saved: Mapping[str, Any]) -> str:
        """Loads saved states into the objects of this run.

        Args:
            path: the folder of the checkpoint, or a description such as "step 12 in memory".
            saved: the saved states by name, as `match` returns them, with the `manifest`. `random`
                has the random state of each rank, or is None.

        Returns:
            A sentence that says what was resumed, and what is now different from what was saved.
        """
        modules = {name: self._objects[name] for name in self.module_names}

        # A model of `deferred_init` has no values yet. The dtypes are read without creating them.
        with shapes_are_enough():
            saved_dtypes = saved_parameter_dtypes(modules, saved)

        # Each note is the end of a sentence, such as "; 4 threads as saved, not 8", or empty.
        notes_about_lengths = ""
        for name, target in {**self._objects, "world": self._world}.items():
            notes_about_lengths += _note_about_length(name, target, saved[name])
            with _explain_misfit(f"resuming {name} from {path}", BUILD_AS_SAVED.format(name)):
                _load_state(target, saved[name], saved_dtypes)

        note_about_replicas = self._load_replicas(path, saved)

        # The results are the same bits only with the same random states, and with the same number
        # of threads.
        manifest = saved["manifest"]
        note_about_rng = self._restore_rng(path, saved)
        note_about_threads = restore_threads_and_note_differences(
            manifest, self._settings.virtual_ranks, self._collectives.device
        )
        # In the order in which the user reads them.
        notes = [note_about_rng, notes_about_lengths, note_about_replicas, note_about_threads]
        return _describe(path, manifest) + "".join(notes)

    def _load_replicas(self, path: Path | str, saved: Mapping[str, Any]) -> str:
        """Loads the replicas of the model that DiLoCo trains, if this run has replicas.

        Returns:
            A note that the saved replicas were left out; "" if there are none, or if they were
            loaded.
        """
        if self._replicas is not None:
            saved_replicas = saved.get("replicas")  # None: all replicas get the present weights
            with _explain_misfit(
                action=f"resuming the replicas from {path}",
                advice=BUILD_AS_SAVED.format("the model"),
            ):
                self._replicas.load_state_dict(saved_replicas)
            return ""

        if "replicas" in saved:
            # Only the saved run has trained replicas. Their shared weights are saved as the model.
            return "; its replicas are left out, the training goes on from their shared weights"
        return ""

    def _restore_rng(self, path: Path | str, saved: Mapping[str, Any]) -> str:
        """Restores the random state of this rank, if the checkpoint has it.

        Returns:
            The result of `RandomStates.restore`: "" or a note that says why it was not restored.
        """
        with _explain_misfit(
            f"resuming the random streams from {path}",
            "resume with the versions of Python and torch that saved them",
        ):
            return self._random_states.restore(saved)


def _describe(path: Path | str, manifest: Mapping[str, Any]) -> str:
    """Describes the checkpoint that was resumed, and the run that saved it.

    Example: "resumed runs/digits/step-000000120 (epoch 2, step 120, strategy ddp, 4 ranks)".
    """
    where = f"from {path}" if isinstance(path, str) else path
    return (
        f"resumed {where} (epoch {manifest['epoch']}, step {manifest['step']}, "
        f"strategy {manifest['strategy']}, {count_noun(manifest['world_size'], 'rank')})"
    )


def _note_about_length(name: str, target: Any, saved: Any) -> str:
    """Returns a note if a scheduler was built for another number of steps than when it was saved.

    Loading its state replaces the new number by the saved one, which may surprise the user.

    Args:
        name: the name under which the user saves the object.
        target: the object of this run. Only schedulers are checked.
        saved: its saved state.

    Returns:
        A note such as "; scheduler keeps T_max=100 as saved, not 200 as built", or "".
    """
    if not isinstance(target, LRScheduler):
        return ""

    # A length is a number of steps for which the scheduler was built, such as `T_max`.
    note = ""
    for length in changed_lengths(target, saved):
        # `length.place` is the path to the attribute, e.g. "T_max".
        note += (
            f"; {name} keeps {length.place}={length.saved} as saved, not {length.built} as built"
        )
    return note


def _load_state(target: Any, saved: Any, saved_dtypes: Mapping[Tensor, torch.dtype]) -> None:
    """Loads a saved state into a module, an optimizer or any other object.

    Args:
        target: the object of this run.
        saved: its saved state. Its tensors may be stored in shards, or mapped from a file.
        saved_dtypes: the dtype that each parameter of this run had when the state was saved.
    """
    if isinstance(target, nn.Module):
        load_plain(target, saved)
    elif isinstance(target, Optimizer):
        state = sharding.reshard_optimizer(saved, target)
        if hasattr(target, "load_saved_state"):
            # It is prepared, and may have only a part of the parameters, so it has a method for it.
            target.load_saved_state(state, saved_dtypes)
        else:
            load_into_torch_optimizer(target, state, saved_dtypes)
    else:
        # The object may keep the tensors that it gets. So they are copied to memory: they may be
        # mapped from a file that is removed later.
        target.load_state_dict(sharding.copy_to_memory(saved))


@contextmanager
def _explain_misfit(action: str, advice: str) -> Iterator[None]:
    """Turns any error that is raised while a state is loaded into a `CheckpointError`.

    Args:
        action: what is being loaded, for the message.
        advice: what to do about an error that has no advice of its own.
    """
    try:
        yield
    except LockstepError as error:
        found = f"{error.was_set}: {error.found}"
        raise CheckpointError(action, found, error.do, code=error.code) from error
    except Exception as error:
        raise CheckpointError(action, f"{type(error).__name__}: {error}", advice) from error
