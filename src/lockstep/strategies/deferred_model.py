"""Gives memory and values to the tensors of a prepared model that were built on the meta device.

Each rank allocates memory for its part of the model: its shards (`fsdp`), its stages (`pipeline`)
or everything. The values of a tensor come from one of three *sources*:

- files that were given to `lockstep.load_weights` before `world.prepare`, which are read at once;
- what is loaded after `world.prepare`, such as a checkpoint;
- a *recording*: the operations that the context `lockstep.deferred_init` recorded while the model
  was built, which are now computed. A model that was built in `torch.device("meta")` has recorded
  nothing, so `world.prepare` records the `reset_parameters` of its modules instead.

Computing values may take long, and is unnecessary if a checkpoint is resumed. So it is put off
until values are needed: at the first batch, the first forward pass, or the first call of
`parameters()` or `state_dict()`. Until then parameters are NaN.

Nothing here communicates after `world.prepare`, so values may be needed on a single rank.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.sharding import copy_part
from lockstep.distributed.process_group import Run
from lockstep.errors import RanksDifferError, UsageError
from lockstep.machine.host_memory import note_freed
from lockstep.optim.deferred_init import (
    FileSource,
    RecordedSource,
    Recording,
    Source,
    deferred_init,
    find_source,
    forget_sources,
    values_are_needed,
)
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.settings import Choice
from lockstep.strategies.base import PreparedModule
from lockstep.strategies.replication import broadcast_from_first_rank
from lockstep.torch_compat import (
    convert_tensors,
    members,
    outside_compiled_code,
    reset_method,
    storage_key,
    to_local,
    write_count,
)
from lockstep.wording import count_noun, join_first, with_article

OWN_INIT_METHODS = (
    "init_weights", "_init_weights", "initialize_weights", "reset_lora_parameters",
)  # fmt: skip
"""The names that libraries give to methods that initialise a model. Such a method may give other
values than the `reset_parameters` of the model's layers."""
DEFERRED_INIT_ADVICE = "build the model inside `with lockstep.deferred_init():`"


class DeferredTensor(NamedTuple):
    """A parameter or buffer of the model that was on the meta device."""

    names: list[str]
    """All names of the tensor in the model; several if it is tied."""
    source: Source | None
    """Where its values come from; None if that is not known."""
    is_parameter: bool
    is_in_state: bool
    """False for a buffer that is not in the state dict (`persistent=False`)."""
    from_reset_parameters: bool
    """True if its values come from a `reset_parameters` that `world.prepare` has recorded. The
    constructor of the model might have given it other values."""

    @property
    def recorded(self) -> RecordedSource | None:
        """The recording of the tensor, even if its values come from a file; None without one."""
        return None if self.source is None else self.source.recorded


class DeferredModel(Extension):
    """The tensors of a model that have no values yet.

    Args:
        module: the user's module, before a strategy wraps it.
        run: the run of this process.
        drawn_shapes: for each model of the run that was initialised by `reset_parameters`, the
            shapes of its parameters. This model appends its own.
    """

    def __init__(
        self, module: nn.Module, run: Run, drawn_shapes: list[list[tuple[int, ...]]]
    ) -> None:
        self._module = module
        self._class_name = type(module).__name__  # kept for messages, since FSDP changes the class
        self._drawn_shapes = drawn_shapes
        self._run = run
        keys_of_reset_memory = _record_resets(module)
        self._tensors = _find_tensors(module, keys_of_reset_memory)

        self._tensors_without_values: dict[str, DeferredTensor] = {}
        for tensor in self._tensors:
            for name in tensor.names:
                self._tensors_without_values[name] = tensor

        self._generator_states: dict[int, list[Tensor | None]] = {}
        """The random states of rank 0 with which a recording is computed, by the recording's `id`.
        """
        self._loaded: set[str] = set()
        """The names of tensors whose values were loaded; the same on all ranks."""
        self._computed: set[str] = set()
        """The names of tensors whose values were computed."""
        self._targets: dict[str, Tensor] = {}
        """This rank's part of each tensor whose values are still missing, by name."""
        self._write_counts: dict[str, int] = {}
        """How often each of these parts had been written to when it was filled with NaN. A later
        write shows that the user has given it values."""
        self._prepared = module
        """The module that the strategy returned."""
        self._processors_differ = False
        """True if random numbers may differ between ranks in the last bits.

        Then values are computed in `world.prepare`, and what must be equal is taken from the first
        rank."""
        self._watch_handles: list[Any] = []
        """The hooks that notice when values are needed or loaded; empty when nothing is missing
        (`_may_lack_values`)."""

    @property
    def _may_lack_values(self) -> bool:
        """True from `read_files_and_defer`, which adds the hooks, until all values are there."""
        return bool(self._watch_handles)

    # While the model is prepared

    def fill_buffers(self, device: torch.device) -> None:
        """Allocates the buffers, on each rank in full, and fills those that need no random numbers.

        All ranks call this together, before the strategy wraps the module, since strategies compare
        buffers. Random numbers are drawn later (`fill`), in the order in which the model drew them:
        those of a buffer may come after those of a large parameter. In `fill` the ranks do not wait
        for each other, so the states of the random streams are exchanged here.

        Args:
            device: the device of the buffers.

        Raises:
            UsageError: nothing can ever give values to some buffer.
        """
        self._check_buffers()
        self._take_random_states_of_first_rank()

        _give_memory_to_buffers(self._module, device)
        buffers = dict(self._module.named_buffers(remove_duplicate=False))
        without_values = self._tensors_without_values
        targets = {name: buffers[name] for name in without_values if name in buffers}

        self._read_files(targets)
        without_random_numbers = self._computable_without_random_numbers(targets)
        self._compute(without_random_numbers)

    def _computable_without_random_numbers(
        self, targets: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns those tensors whose values are recorded and need no random numbers."""
        computable: dict[str, Tensor] = {}
        for name, target in targets.items():
            source = self._tensors_without_values[name].source
            if isinstance(source, RecordedSource) and not source.needs_random_numbers:
                computable[name] = target
        return computable

    def give_memory(self, device: torch.device) -> None:
        """Allocates all parameters, for a strategy under which each rank has all of them."""
        convert_tensors(self._module, lambda tensor: with_memory(tensor, device))

    def read_files_and_defer(self, wrapped: PreparedModule) -> list[Choice]:
        """Reads values from files, and puts off computing the others until they are needed.

        Args:
            wrapped: what the strategy returned for the module.

        Returns:
            The lines to print about where values come from.
        """
        without_values = self._parts_without_values()
        self._read_files(without_values)
        self._count_files_as_loaded()
        self._put_off(without_values)

        # From now on, the values that were put off are computed when they are needed first.
        self._watch(wrapped.module)
        # On different processors, the ranks might compute values that differ in the last bits.
        if self._processors_differ:
            self._fill_now_and_share(wrapped)
        return self._choices()

    def _count_files_as_loaded(self) -> None:
        """Counts each tensor whose source is a file as loaded, even if this rank has no part of it.

        The ranks that have a part of it have read that part.
        """
        for tensor in self._tensors:
            if isinstance(tensor.source, FileSource):
                self._loaded.update(tensor.names)

    def _put_off(self, without_values: Mapping[str, Tensor]) -> None:
        """Notes which tensors `fill` has to compute.

        If the user writes to one of them in the meantime, its write count changes, and `fill`
        leaves it as it is.

        Args:
            without_values: this rank's part of each tensor, by name.
        """
        for name, target in without_values.items():
            if name not in self._loaded:
                self._targets[name] = target
                self._write_counts[name] = write_count(target)

    def _fill_now_and_share(self, wrapped: PreparedModule) -> None:
        """Computes all values, and gives all ranks those of the first rank that must be equal.

        On different processors, the same random state may give numbers that differ in the last
        bits. So values are not put off: now all ranks are in `world.prepare` together.
        """
        self.fill()
        for equal in wrapped.equal_tensors():
            tensors = [*equal.parameters.values(), *equal.buffers.values()]
            broadcast_from_first_rank([t for t in tensors if not t.is_meta], equal.group)

    def _parts_without_values(self) -> dict[str, Tensor]:
        """Returns this rank's part of each tensor that still has no values, by name.

        A tensor that is on other ranks is missing from the model, or is on the meta device.
        """
        present = dict(_named_tensors(self._module))
        without_values: dict[str, Tensor] = {}
        for name in self._tensors_without_values:
            is_here = name in present and not present[name].is_meta
            if is_here and name not in self._computed:  # `fill_buffers` has computed some
                without_values[name] = present[name]
        return without_values

    # While it waits

    def begin(self, micro_batch: MicroBatch) -> None:
        """Computes missing values before the first batch is trained."""
        self.fill()

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Computes missing values before a step, for loops without a prepared loader."""
        self.fill()

    def fill(self) -> None:
        """Computes all values that are still missing. Later calls do nothing.

        Raises:
            UsageError: nothing can give values to some tensor.
        """
        if not self._may_lack_values:  # `_stop_watching` has made it False
            return

        self._check_sources()

        missing: dict[str, Tensor] = {}
        for name, target in self._targets.items():
            if name not in self._loaded and not self._was_written(name, target):
                missing[name] = target

        # All missing values are computed now, so remove the hooks that wait until they are needed.
        self._stop_watching()
        self._compute(missing)

    def _stop_watching(self) -> None:
        """Removes the hooks and all references to recordings and files."""
        for handle in self._watch_handles:
            handle.remove()
        self._watch_handles = []
        self._run.extensions.remove(self)
        forget_sources(self._module)

    def release(self) -> None:
        """Removes the hooks at the end of the run, if values are still missing."""
        if self._may_lack_values:
            self._stop_watching()

    def _watch(self, prepared: nn.Module) -> None:
        """Registers hooks that compute missing values when they are needed.

        Other hooks note which of them `load_state_dict` has loaded, so that they are not computed.

        Args:
            prepared: the module that the strategy returned.
        """
        self._prepared = prepared
        parts_without_values: set[nn.Module] = set()
        for path, part in self._module.named_modules(remove_duplicate=False):
            full_names = self._full_names_without_values(path, part)
            if full_names:
                parts_without_values.add(part)
                load_hook = _LoadHook(self._record_loaded, full_names)
                self._watch_handles.append(part.register_load_state_dict_pre_hook(load_hook))

        # Values are needed when one of these submodules, or the whole model, is used.
        for part in {*parts_without_values, self._module, prepared}:
            self._fill_before_use(part)

    def _full_names_without_values(self, path: str, part: nn.Module) -> dict[str, str]:
        """Returns the names in the model of a submodule's own tensors that have no values.

        For example, it returns `{"weight": "encoder.norm.weight"}`, by the names in the submodule.

        Args:
            path: name of the submodule in the model, e.g. "encoder.norm".
            part: the submodule.
        """
        full_names = {}
        own = members(part)
        for own_name in [*own.parameters, *own.buffers]:
            full_name = f"{path}.{own_name}" if path else own_name
            if full_name in self._tensors_without_values:
                full_names[own_name] = full_name
        return full_names

    def _fill_before_use(self, part: nn.Module) -> None:
        """Computes missing values before a module is called, saved or copied."""
        fill_hook = outside_compiled_code(lambda *_: self.fill())
        before_forward = part.register_forward_pre_hook(fill_hook, prepend=True)
        before_state = part.register_state_dict_pre_hook(self._before_state_dict)  # type: ignore[no-untyped-call]
        self._watch_handles += [before_forward, before_state]

        # There are no hooks for `copy.deepcopy`, so the object gets a method `__deepcopy__`.
        # Modules under FSDP have one already, which refuses to copy them.
        if "__deepcopy__" not in vars(part):
            before_copy = _FillBefore(
                part, method="__deepcopy__", fill=self.fill, then=copy.deepcopy
            )
            before_copy.install()
            self._watch_handles.append(before_copy)

    def watch_parameters(self) -> None:
        """Makes the first call of `parameters()` compute missing values.

        Called at the end of `world.prepare`, which calls `parameters()` itself before that.
        """
        if self._may_lack_values:
            for part in {self._prepared, *self._prepared.modules()}:
                handle = _FillBefore(
                    part, method="named_parameters", fill=self.fill, then=_named_parameters
                )
                handle.install()
                self._watch_handles.append(handle)

    def _before_state_dict(self, *_: Any) -> None:
        """A hook that computes missing values before `state_dict()` returns them."""
        if values_are_needed():
            self.fill()

    def _record_loaded(self, names: list[str]) -> None:
        """Records that a state dict has given values to the tensors with these names."""
        for name in names:
            self._loaded.update(self._tensors_without_values[name].names)

    def _was_written(self, name: str, target: Tensor) -> bool:
        """Returns True if the user has given values to a tensor since `world.prepare`.

        A tensor without values was filled with NaN, so what it holds now shows what has happened:

        - no NaN: the user has given values to all elements;
        - only NaN, and nobody has written to it: it still has no values;
        - anything else is an error: some elements have values, or the user has computed with NaN
          (for example, `weight.mul_(2)`).

        Args:
            name: the name of the tensor.
            target: this rank's part of it.

        Raises:
            UsageError: the user has changed only a part of the tensor, or has computed with its
                NaN.
        """
        was_written_to = write_count(target) != self._write_counts[name]
        local = to_local(target)
        can_hold_nan = local.is_floating_point() and local.numel() > 0
        if not can_hold_nan:  # integers, or an empty part
            return was_written_to

        is_nan = local.isnan()
        if not is_nan.any():
            return True
        if is_nan.all() and not was_written_to:
            return False

        # Some elements have values and others NaN, or all are NaN that the user has computed with.
        raise UsageError(
            f"a change of {name} between world.prepare and its first use",
            "it had no values yet, because the model was built on the meta device",
            "change it before world.prepare, inside `with lockstep.deferred_init():`, or after "
            "model.state_dict(), which computes the values",
        )

    # Values

    def _read_files(self, targets: Mapping[str, Tensor]) -> None:
        """Reads the values of those tensors whose source is a file.

        Args:
            targets: this rank's part of each tensor, by name. Tied tensors occur several times.
        """
        ids_already_read: set[int] = set()
        for name, target in targets.items():
            source = self._tensors_without_values[name].source
            if not isinstance(source, FileSource):
                continue
            if id(target) not in ids_already_read:
                copy_part(source.value, target)
                # `copy_part` has freed the memory into which it has read this part of the file.
                note_freed(to_local(target).nbytes)
                ids_already_read.add(id(target))
            self._loaded.add(name)

    def _compute(self, targets: Mapping[str, Tensor]) -> None:
        """Computes the values of tensors by replaying the operations that were recorded.

        Args:
            targets: this rank's part of each tensor, by name. Tied tensors occur several times.
        """
        # A copier has the targets of one recording. The replay calls it with each piece of memory
        # that it has computed, and the copier copies the content to the targets.
        for copier in self._copiers_by_recording(targets):
            recording = copier.recording
            wanted_keys = copier.memory_keys()
            # What was loaded in the meantime is skipped: no random numbers are drawn for it.
            loaded_keys = self._loaded_memory_keys(recording)
            random_states = self._generator_states.get(id(recording))
            recording.replay(wanted_keys, loaded_keys, copier, random_states)

        self._computed.update(targets)

    def _copiers_by_recording(self, targets: Mapping[str, Tensor]) -> list[_CopyToTargets]:
        """Returns one copier for each recording, with the tensors that the recording computes.

        Args:
            targets: this rank's part of each tensor, by name. Tied tensors occur several times.
        """
        copier_of_recording: dict[int, _CopyToTargets] = {}  # by the `id` of the recording
        ids_already_added: set[int] = set()
        for name, target in targets.items():
            if id(target) in ids_already_added:  # a tied tensor, which has another name, too
                continue

            ids_already_added.add(id(target))
            source = self._tensors_without_values[name].source
            assert isinstance(source, RecordedSource)  # `_check_sources` has rejected all others
            recording_id = id(source.recording)
            if recording_id not in copier_of_recording:
                copier_of_recording[recording_id] = _CopyToTargets(source.recording)
            copier_of_recording[recording_id].add(source, target)
        return list(copier_of_recording.values())

    def _loaded_memory_keys(self, recording: Recording) -> set[int]:
        """Returns keys that identify the memory of tensors that were loaded.

        A replay of the recording need not compute this memory.

        Args:
            recording: only the memory of this recording is considered.
        """
        keys: set[int] = set()
        for tensor in self._tensors:
            recorded = tensor.recorded
            if recorded is None or recorded.recording is not recording:
                continue

            # All names of a tied tensor are loaded together, so the first one is enough.
            if tensor.names[0] in self._loaded:
                keys.add(recorded.view.key)

        return keys

    def _take_random_states_of_first_rank(self) -> None:
        """Makes all ranks draw random values from the random states of rank 0.

        All ranks call this together. It also finds out whether the ranks have different processors.

        Raises:
            RanksDifferError: the ranks have called or seeded `deferred_init` a different number of
                times.
        """
        recordings: dict[int, Recording] = {}  # by their `id`, in the same order on all ranks
        for tensor in self._tensors:
            if tensor.recorded is not None:
                recordings[id(tensor.recorded.recording)] = tensor.recorded.recording

        if self._run.collectives.single_process or not recordings:
            return

        # One list of states for each recording. Only rank 0 sends the states, as hexadecimal text;
        # the others send empty texts, from which their number can be seen.
        states_of_recordings: list[list[str]] = []
        for recording in recordings.values():
            texts: list[str] = []
            for state in recording.generator_states():
                if state is None or not self._run.topology.is_main:
                    texts.append("")
                else:
                    texts.append(state.numpy().tobytes().hex())
            states_of_recordings.append(texts)

        processor = torch.backends.cpu.get_cpu_capability()
        reports = self._run.collectives.exchange([processor, states_of_recordings])
        self._processors_differ = any(report[0] != processor for report in reports)

        counts_of_ranks: list[list[int]] = []  # the number of states of each recording, by rank
        for _, texts_of_recordings in reports:
            counts_of_ranks.append([len(texts) for texts in texts_of_recordings])

        if any(num_states != counts_of_ranks[0] for num_states in counts_of_ranks):
            raise RanksDifferError(
                "world.prepare of a model on the meta device",
                "ranks have called lockstep.deferred_init, or have seeded inside it, differently "
                f"often: {counts_of_ranks}",
                "build the same models in the same contexts on every rank",
            )

        _, texts_of_first_rank = reports[0]
        for recording_id, texts in zip(recordings, texts_of_first_rank, strict=True):
            states: list[Tensor | None] = []
            for text in texts:
                state_bytes: Tensor | None = None
                if text:
                    state_bytes = torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
                states.append(state_bytes)
            self._generator_states[recording_id] = states

    # Checks, and what is printed

    def _check_buffers(self) -> None:
        """Raises UsageError for buffers that can never get values.

        A buffer that is not persistent is in no file, so it has no values if nobody has recorded
        how they were computed.
        """
        names = [t.names[0] for t in self._tensors if t.source is None and not t.is_in_state]
        if names:
            raise UsageError(
                f"world.prepare of {with_article(self._class_name)} on the meta device",
                f"{join_first(names)} would have no values: no file has buffers that are not "
                "persistent, and torch.device('meta') does not keep what they were computed from",
                f"{DEFERRED_INIT_ADVICE}, or give their modules a method reset_parameters",
            )

    def _check_sources(self) -> None:
        """Raises UsageError if it is not known where some values of the model should come from."""
        unknown: list[str] = []
        is_reset: list[str] = []
        shapes: list[tuple[int, ...]] = []  # of the parameters that `reset_parameters` gives values
        for tensor in self._tensors:
            if tensor.names[0] in self._loaded:
                continue
            if tensor.source is None:
                unknown.append(tensor.names[0])
            elif tensor.from_reset_parameters and tensor.is_parameter:
                is_reset.append(tensor.names[0])
                shapes.append(tensor.source.shape)

        what = (
            f"the first use of {with_article(self._class_name)} that was built on the meta device"
        )
        if unknown:
            raise UsageError(
                what,
                f"nothing has given values to {join_first(unknown)}",
                f"load them: lockstep.load_weights(model, folder) or checkpoint.resume(); or "
                f"{DEFERRED_INIT_ADVICE}, which draws them as on the CPU",
            )

        own_method = _own_init_method(self._module)
        if is_reset and own_method is not None:
            raise UsageError(
                what,
                f"{join_first(is_reset)} would be drawn by reset_parameters, but the model has a "
                f"method {own_method}: if the constructor calls it, its values are lost on the "
                "meta device",
                f"{DEFERRED_INIT_ADVICE}, which draws what the constructor draws on the CPU, or "
                "load all weights",
            )

        if shapes and shapes in self._drawn_shapes:
            raise UsageError(
                f"{what}, beside another one with the same shapes",
                "whether one is a copy of the other, and begins with the same values, is not known",
                f"{DEFERRED_INIT_ADVICE}; then copy.deepcopy(model) and AveragedModel(model) begin "
                "with the values of the model, and a model that is built anew with its own",
            )

        self._drawn_shapes.append(shapes)

    def _choices(self) -> list[Choice]:
        """Returns the printed lines about where values come from, with the number of tensors."""
        num_tensors = Counter(_origin_of_values(tensor) for tensor in self._tensors)
        reasons = {
            _Origin.FILES: "each rank reads its part from files",
            _Origin.RECORDED: "as the same code gives on the CPU, unless they are loaded before",
            _Origin.RESET: "drawn by reset_parameters, unless they are loaded before",
            _Origin.UNKNOWN: "have to be loaded before the first step",
        }
        choices: list[Choice] = []
        for origin, reason in reasons.items():
            if num_tensors[origin]:
                choices.append(Choice("values", count_noun(num_tensors[origin], "tensor"), reason))
        return choices


class _Origin(Enum):
    """The source of the values of a tensor."""

    FILES = auto()
    RECORDED = auto()
    """The operations of the constructor were recorded, and will be replayed."""
    RESET = auto()
    """From a `reset_parameters` that `world.prepare` has recorded."""
    UNKNOWN = auto()


def _origin_of_values(tensor: DeferredTensor) -> _Origin:
    """Returns where the values of a tensor come from."""
    if isinstance(tensor.source, FileSource):
        return _Origin.FILES
    if tensor.source is None:
        return _Origin.UNKNOWN
    return _Origin.RESET if tensor.from_reset_parameters else _Origin.RECORDED


class _CopyToTargets:
    """Copies the values that a recording computes to the tensors of this rank.

    Args:
        recording: the recording. Its `replay` calls this object with each piece of memory that it
            has computed.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._targets_of_key: dict[int, list[tuple[RecordedSource, Tensor]]] = {}
        """The tensors whose values are in a piece of recorded memory, each with its place there, by
        the key of that piece."""

    def add(self, source: RecordedSource, target: Tensor) -> None:
        """Adds a tensor that gets its values from the recording.

        Args:
            source: says in which piece of recorded memory the values are.
            target: this rank's part of the tensor.
        """
        self._targets_of_key.setdefault(source.view.key, []).append((source, target))

    def memory_keys(self) -> set[int]:
        """Returns the keys of the pieces of memory from which values are copied."""
        return set(self._targets_of_key)

    def __call__(self, key: int, content: torch.UntypedStorage) -> None:
        """Copies values from a piece of memory that was computed."""
        for source, target in self._targets_of_key[key]:
            copy_part(source.view.in_memory(content), target)


class _LoadHook:
    """A hook of a module that records which of its tensors get values from a loaded state dict.

    Args:
        record_loaded: called with the names, in the whole model, of the tensors that are loaded.
        full_names: the name in the model for each name in the module, for example
            `{"weight": "layers.0.weight"}`.
    """

    def __init__(
        self, record_loaded: Callable[[list[str]], None], full_names: Mapping[str, str]
    ) -> None:
        self._record_loaded = record_loaded
        self._full_names = full_names

    def __call__(self, _: nn.Module, state: Mapping[str, Any], prefix: str, *__: Any) -> None:
        """Called by torch before the module loads a state dict."""
        loaded: list[str] = []
        for own_name, full_name in self._full_names.items():
            if prefix + own_name in state:
                loaded.append(full_name)
        self._record_loaded(loaded)


class _FillBefore:
    """Makes a method of a module compute missing values before it runs.

    After `install` the module has a method of this name itself, which hides that of its class. It
    calls `fill`, which removes it again, and then the original method.

    Args:
        module: the module.
        method: the name of the method.
        fill: computes missing values, and calls `remove`.
        then: runs the original method, with the module and the arguments of the call.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        method: str,
        fill: Callable[[], None],
        then: Callable[..., Any],
    ) -> None:
        self._fill = fill
        self._module = module
        self._method = method
        self._then = then

    def install(self) -> None:
        """Puts a method that fills first in the place of the original one."""
        vars(self._module)[self._method] = self._fill_and_call

    def _fill_and_call(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of the method."""
        if values_are_needed():
            self._fill()
        return self._then(self._module, *args, **kwargs)

    def remove(self) -> None:
        """Restores the original method."""
        del vars(self._module)[self._method]


def _named_parameters(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls `named_parameters` of the module's class, which `_FillBefore` hides on the object."""
    return type(module).named_parameters(module, *args, **kwargs)


@torch.no_grad()
def with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device with the shape of a tensor on the meta device, filled with NaN.

    NaN shows that the values are missing. Tensors of other dtypes are filled with zeros, and a
    tensor that is not on the meta device is returned as it is.
    """
    if not tensor.is_meta:
        return tensor
    real = torch.empty_like(tensor, device=device)
    if real.is_floating_point() or real.is_complex():
        return real.fill_(float("nan"))
    return real.zero_()


def _give_memory_to_buffers(module: nn.Module, device: torch.device) -> None:
    """Allocates the buffers that are on the meta device. Tied buffers stay tied."""
    real_by_id: dict[int, Tensor] = {}
    for part in module.modules():
        buffers = members(part).buffers
        for name, buffer in buffers.items():
            if buffer is not None and buffer.is_meta:
                if id(buffer) not in real_by_id:
                    real_by_id[id(buffer)] = with_memory(buffer, device)
                buffers[name] = real_by_id[id(buffer)]


def _find_tensors(module: nn.Module, keys_of_reset_memory: set[int]) -> list[DeferredTensor]:
    """Returns the tensors of a module that are on the meta device.

    Args:
        module: the user's module.
        keys_of_reset_memory: see `_is_filled_by_reset`.
    """
    parameter_ids = {id(parameter) for parameter in module.parameters()}
    names_in_state = set(module.state_dict())

    # A tied tensor has several names, but is listed once.
    tensor_of_id: dict[int, Tensor] = {}
    names_of_id: dict[int, list[str]] = {}
    for name, tensor in _named_tensors(module):
        if tensor.is_meta:
            tensor_of_id[id(tensor)] = tensor
            names_of_id.setdefault(id(tensor), []).append(name)

    tensors: list[DeferredTensor] = []
    for tensor_id, names in names_of_id.items():
        source = _find_source_by_names(module, names, tensor_of_id[tensor_id])
        tensors.append(
            DeferredTensor(
                names,
                source,
                is_parameter=tensor_id in parameter_ids,
                is_in_state=any(name in names_in_state for name in names),
                from_reset_parameters=_is_filled_by_reset(source, keys_of_reset_memory),
            )
        )

    return tensors


def _is_filled_by_reset(source: Source | None, keys_of_reset_memory: set[int]) -> bool:
    """Returns True if a recorded call of `reset_parameters` computes the values of a tensor.

    Args:
        source: where the values of the tensor come from.
        keys_of_reset_memory: what `_record_resets` has returned.
    """
    return isinstance(source, RecordedSource) and source.view.key in keys_of_reset_memory


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields all parameters and buffers, under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _find_source_by_names(module: nn.Module, names: Sequence[str], tensor: Tensor) -> Source | None:
    """Returns the source of a tensor; None if it has none. A file is preferred to a recording.

    Args:
        module: the user's module.
        names: the names of the tensor in the module. A tied tensor has several, and its source may
            be noted under any of them.
        tensor: the tensor.
    """
    recorded: Source | None = None
    for name in names:
        owner, _, own_name = name.rpartition(".")
        source = find_source(module.get_submodule(owner), own_name, tensor)
        if isinstance(source, FileSource):
            return source
        recorded = recorded or source
    return recorded


# Recording for models that were built in `torch.device("meta")`, which records nothing


def _record_resets(module: nn.Module) -> set[int]:
    """Records calls of `reset_parameters` of submodules that have tensors without a source.

    The recording is then the source of these tensors: a replay computes their values later. Inner
    submodules are reset before outer ones, as in a constructor, which builds the inner ones first.

    Returns:
        The keys of the memory of these tensors, by which the recording knows them.
    """
    without_source = _tensors_without_source(module)
    if not without_source:
        return set()

    # In this context, all operations on tensors of the meta device are recorded, not computed.
    with deferred_init(), torch.no_grad():
        for part in _children_first(module, seen=set()):
            tensors = [*part.parameters(), *part.buffers()]
            reset_parameters = reset_method(part)
            has_tensor_without_source = any(id(tensor) in without_source for tensor in tensors)
            if reset_parameters is not None and has_tensor_without_source:
                # The other tensors of `part` stay as they are.
                _record_reset(reset_parameters, tensors, without_source)

        # Models of Hugging Face's transformers compute buffers in a method of another name.
        _record_buffer_inits(module, without_source)

    return {storage_key(tensor) for tensor in without_source.values()}


def _tensors_without_source(module: nn.Module) -> dict[int, Tensor]:
    """Returns the tensors on the meta device for which no source is known, by their `id`."""
    without_source = {}
    for name, tensor in _named_tensors(module):
        if tensor.is_meta and _find_source_by_names(module, [name], tensor) is None:
            without_source[id(tensor)] = tensor
    return without_source


def _record_reset(
    reset_parameters: Callable[[], object],
    tensors: Sequence[Tensor],
    without_source: Mapping[int, Tensor],
) -> None:
    """Records a call of `reset_parameters` so that it changes only the tensors without a source.

    The caller has entered `deferred_init`, so every operation here is recorded, not computed. The
    method changes all tensors of the submodule. So those that have a source are copied before it,
    and copied back afterwards.

    Args:
        reset_parameters: the method of a submodule.
        tensors: the parameters and buffers of the submodule, all of which the method may change.
        without_source: the tensors of the model without a source, by their `id`.
    """
    with_source = [tensor for tensor in tensors if id(tensor) not in without_source]
    values_before = [tensor.detach().clone() for tensor in with_source]
    reset_parameters()

    # Undo what the method has done to tensors that have a source.
    for tensor, value in zip(with_source, values_before, strict=True):
        tensor.copy_(value)


def _record_buffer_inits(module: nn.Module, without_source: Mapping[int, Tensor]) -> None:
    """Records how models of transformers compute buffers that are in no file, such as `inv_freq`.

    They are computed by `_init_weights(submodule)`, a method of the model. The caller has entered
    `deferred_init`, so the calls made here are recorded. For the submodules of a model within
    another model, the method of the outer model is called first, and then that of the inner model,
    whose values remain.

    Args:
        module: the user's module.
        without_source: the tensors without a source, by their `id`.
    """
    for model in module.modules():
        init_weights = getattr(model, "_init_weights", None)
        if not callable(init_weights):
            continue

        for part in model.modules():
            own = members(part)
            lacks_buffers = any(id(buffer) in without_source for buffer in own.buffers.values())
            has_parameters = any(parameter is not None for parameter in own.parameters.values())
            has_reset_method = reset_method(part) is not None  # the caller has recorded its call
            # `init_weights` would also draw new values for the parameters, if there were any.
            if lacks_buffers and not has_parameters and not has_reset_method:
                init_weights(part)


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Yields each submodule once, after the submodules that it contains.

    Args:
        module: the module to start with.
        seen: the ids of modules that were yielded already, to which the others are added.
    """
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def _own_init_method(module: nn.Module) -> str | None:
    """Returns the name of a method that may initialise more than `reset_parameters`, or None."""
    for part in module.modules():
        for name in OWN_INIT_METHODS:
            if callable(getattr(part, name, None)):
                return name
    return None
