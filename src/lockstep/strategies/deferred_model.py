"""Gives memory and values to the tensors of a prepared model that were built on the meta device.

Each rank gives memory to what it has of the model: its shards (`fsdp`), its stages (`pipeline`) or
all. Values come from files that `lockstep.load_weights` was given before `world.prepare`, and are
read at once; from what is loaded after `world.prepare`, such as a checkpoint; and else they are
computed from what the context `lockstep.deferred_init` has recorded. A model that was built in
`torch.device("meta")` has recorded nothing, so `reset_parameters` of its modules is recorded in
`world.prepare`.

Computing may take long, and a checkpoint that is resumed makes it needless. So it is put off until
values are needed: until the first batch, the first forward pass, or the first call of
`parameters()` or `state_dict()`. Until then parameters are NaN.

While it waits, nothing here communicates, so values may be needed on one rank alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.sharding import copy_part
from lockstep.distributed.process_group import Run
from lockstep.distributed.torch_compat import (
    convert_tensors,
    members,
    outside_compiled_code,
    reset_method,
    storage_key,
    to_local,
    write_counts,
)
from lockstep.errors import RanksDifferError, UsageError
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
from lockstep.strategies.replication import take_from_first
from lockstep.wording import count_noun, join_first, with_article

OWN_INIT_METHODS = (
    "init_weights", "_init_weights", "initialize_weights", "reset_lora_parameters",
)  # fmt: skip
"""What libraries call the methods that initialise a model otherwise than `reset_parameters` of its
layers does."""
DEFERRED_INIT_ADVICE = "build the model inside `with lockstep.deferred_init():`"


class DeferredTensor(NamedTuple):
    """A tensor of the model that was on the meta device."""

    names: list[str]
    """All its names; several if it is tied."""
    source: Source | None
    """None: no values are known."""
    is_parameter: bool
    is_in_state: bool
    """False for a buffer that no state dict has (`persistent=False`)."""
    is_reset: bool
    """True if its values are those of a `reset_parameters` that `world.prepare` has called."""

    @property
    def recorded(self) -> RecordedSource | None:
        """What would compute its values, also if they come from a file."""
        if isinstance(self.source, FileSource):
            return self.source.recorded
        return self.source


class DeferredModel(Extension):
    """The tensors of a model that have no values yet.

    Args:
        module: the user's, before a strategy wraps it.
        run: of this process.
        drawn_shapes: the shapes of the parameters of each model of the run that `reset_parameters`
            has drawn. This model adds its own.
    """

    def __init__(
        self, module: nn.Module, run: Run, drawn_shapes: list[list[tuple[int, ...]]]
    ) -> None:
        self._module = module
        self._class_name = type(module).__name__  # FSDP changes it
        self._drawn_shapes = drawn_shapes
        self._run = run
        keys_of_resets = _record_resets(module)
        self._tensors = _find_tensors(module, keys_of_resets)

        self._group_of_name: dict[str, DeferredTensor] = {}
        for tensor in self._tensors:
            for name in tensor.names:
                self._group_of_name[name] = tensor

        self._states: dict[int, list[Tensor | None]] = {}
        """By the id of a recording, its `generator_states` on rank 0."""
        self._loaded: set[str] = set()
        """Names of tensors that were loaded; the same on all ranks."""
        self._computed: set[str] = set()
        self._targets: dict[str, Tensor] = {}
        """By name what this rank has of the tensors whose values are put off."""
        self._write_counts: dict[str, int] = {}
        """How often each of them had been written to when it was NaN throughout."""
        self._prepared = module
        """What the strategy has made of the module."""
        self._processors_differ = False
        """True if the ranks would draw other last bits. Then they draw in `world.prepare`, and take
        what must be equal from the first of them."""
        self._handles: list[Any] = []
        """Of the hooks that notice when values are needed, or loaded."""

    # While the model is prepared

    def fill_buffers(self, device: torch.device) -> None:
        """Gives memory to the buffers, on each rank in full, and values as far as they are known.

        All ranks call it together. It comes before the strategy, which compares buffers.

        Raises:
            UsageError: nothing could ever give values to one of them.
        """
        self._check_buffers()
        self._take_states_of_first_rank()
        _give_memory_to_buffers(self._module, device)
        buffers = dict(self._module.named_buffers(remove_duplicate=False))
        targets = {name: buffers[name] for name in self._group_of_name if name in buffers}
        self._read_files(targets)

        computable: dict[str, Tensor] = {}
        for name, target in targets.items():
            source = self._group_of_name[name].source
            # One that is drawn at random waits for what is drawn before it.
            if isinstance(source, RecordedSource):
                if not source.recording.draws([source.view.key]):
                    computable[name] = target

        self._compute(computable)

    def give_memory(self, device: torch.device) -> None:
        """Gives memory to all parameters, for a strategy under which each rank has all of them."""
        convert_tensors(self._module, lambda tensor: with_memory(tensor, device))

    def put_off(self, wrapped: PreparedModule) -> list[Choice]:
        """Reads files, and waits with the rest until values are needed.

        Args:
            wrapped: what the strategy has made of the module.

        Returns:
            What is to be printed.
        """
        present = dict(_named_tensors(self._module))
        targets: dict[str, Tensor] = {}
        for name in self._group_of_name:
            is_here = name in present and not present[name].is_meta
            if is_here and name not in self._computed:
                targets[name] = present[name]

        self._read_files(targets)

        # Files are read on all ranks, so this is what all ranks have loaded, other stages included.
        for tensor in self._tensors:
            if isinstance(tensor.source, FileSource):
                self._loaded.update(tensor.names)

        for name, target in targets.items():
            if name not in self._loaded:
                self._targets[name] = target
                self._write_counts[name] = write_counts([target])[0]

        self._watch(wrapped.module)
        if self._processors_differ:
            self.fill()
            for equal in wrapped.equal_tensors():
                tensors = [*equal.parameters.values(), *equal.buffers.values()]
                take_from_first([t for t in tensors if not t.is_meta], equal.group)

        return self._choices()

    # While it waits

    def begin(self, micro_batch: MicroBatch) -> None:
        """Computes what is missing, before the first batch is trained."""
        self.fill()

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Computes what is missing, if a loop has no loader of Lockstep's."""
        self.fill()

    def fill(self) -> None:
        """Computes all values that are missing, and ends the waiting.

        Raises:
            UsageError: it is not known where some of them should come from.
        """
        if not self._handles:  # done
            return

        self._check_sources()

        missing: dict[str, Tensor] = {}
        for name, target in self._targets.items():
            if name not in self._loaded and not self._was_written(name, target):
                missing[name] = target

        self._end_waiting()
        self._compute(missing)

    def _end_waiting(self) -> None:
        """Removes the hooks and all references to recordings and files."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._run.extensions.remove(self)
        forget_sources(self._module)

    def release(self) -> None:
        """Ends the waiting at the end of the run."""
        if self._handles:
            self._end_waiting()

    def _watch(self, prepared: nn.Module) -> None:
        """Registers hooks that call `fill` when values are needed, and note what is loaded."""
        self._prepared = prepared
        fill = outside_compiled_code(lambda *_: self.fill())
        parts = {prepared, self._module}
        for path, part in self._module.named_modules(remove_duplicate=False):
            own = members(part)
            own_names: dict[str, str] = {}
            for own_name in [*own.parameters, *own.buffers]:
                name = f"{path}.{own_name}" if path else own_name
                if name in self._group_of_name:
                    own_names[own_name] = name

            if own_names:
                parts.add(part)
                note = _NoteLoaded(self._note_loaded, own_names)
                self._handles.append(part.register_load_state_dict_pre_hook(note))

        for part in parts:
            self._handles.append(part.register_forward_pre_hook(fill, prepend=True))
            before_state = part.register_state_dict_pre_hook(self._before_state_dict)  # type: ignore[no-untyped-call]
            self._handles.append(before_state)
            # Modules under FSDP refuse to be copied.
            if "__deepcopy__" not in vars(part):
                self._handles.append(_FillBefore(self.fill, part, "__deepcopy__", copy.deepcopy))

    def watch_parameters(self) -> None:
        """Computes what is missing when the user asks for `parameters()`.

        Called at the end of `world.prepare`, which asks for them itself.
        """
        if self._handles:
            for part in {self._prepared, *self._prepared.modules()}:
                handle = _FillBefore(self.fill, part, "named_parameters", _named_parameters)
                self._handles.append(handle)

    def _before_state_dict(self, *_: Any) -> None:
        """A hook: computes what is missing before `state_dict()` returns it."""
        if values_are_needed():
            self.fill()

    def _note_loaded(self, names: list[str]) -> None:
        """Notes that tensors of these names have got values from a state dict."""
        for name in names:
            self._loaded.update(self._group_of_name[name].names)

    def _was_written(self, name: str, target: Tensor) -> bool:
        """Returns True if the user has given a tensor values since `world.prepare`.

        Raises:
            UsageError: something was computed from the NaN that it held, or a part was written.
        """
        local = to_local(target)
        if not local.is_floating_point() or not local.numel():
            return write_counts([target])[0] != self._write_counts[name]

        is_nan = local.isnan()
        if not is_nan.any():
            return True
        if is_nan.all() and write_counts([target])[0] == self._write_counts[name]:
            return False

        raise UsageError(
            f"a change of {name} between world.prepare and its first use",
            "it had no values yet, because the model was built on the meta device",
            "change it before world.prepare, inside `with lockstep.deferred_init():`, or after "
            "model.state_dict(), which computes the values",
        )

    # Values

    def _read_files(self, targets: Mapping[str, Tensor]) -> None:
        """Reads the values of tensors that are in files."""
        done: set[int] = set()
        for name, target in targets.items():
            source = self._group_of_name[name].source
            if isinstance(source, FileSource):
                if id(target) not in done:
                    copy_part(source.value, target)
                done.add(id(target))
                self._loaded.add(name)

    def _compute(self, targets: Mapping[str, Tensor]) -> None:
        """Computes the values of tensors by replaying what was recorded."""
        recordings: dict[int, Recording] = {}
        targets_of_key: dict[int, dict[int, list[tuple[RecordedSource, Tensor]]]] = {}
        done: set[int] = set()
        for name, target in targets.items():
            source = self._group_of_name[name].source
            assert isinstance(source, RecordedSource)  # others are named by `_check_sources`
            self._computed.add(name)
            if id(target) in done:  # tied
                continue

            done.add(id(target))
            identifier = id(source.recording)
            recordings[identifier] = source.recording
            by_key = targets_of_key.setdefault(identifier, {})
            by_key.setdefault(source.view.key, []).append((source, target))

        for identifier, recording in recordings.items():
            by_key = targets_of_key[identifier]
            deliver = _Deliver(by_key)
            states = self._states.get(identifier)
            recording.replay(set(by_key), self._keys_loaded(recording), deliver, states)

    def _keys_loaded(self, recording: Recording) -> set[int]:
        """Returns the keys of tensors that were loaded, whose values are not drawn."""
        keys: set[int] = set()
        for tensor in self._tensors:
            recorded = tensor.recorded
            if recorded is not None and recorded.recording is recording:
                if tensor.names[0] in self._loaded:
                    keys.add(recorded.view.key)
        return keys

    def _take_states_of_first_rank(self) -> None:
        """Has all ranks draw from the random stream of rank 0.

        Raises:
            RanksDifferError: the ranks have not called `deferred_init`, or seeded, equally often.
        """
        recordings: dict[int, Recording] = {}
        for tensor in self._tensors:
            if tensor.recorded is not None:
                recordings[id(tensor.recorded.recording)] = tensor.recorded.recording

        if self._run.collectives.single_process or not recordings:
            return

        states_of_recordings: list[list[str]] = []
        for recording in recordings.values():
            states: list[str] = []
            for state in recording.generator_states():
                if state is None or not self._run.topology.is_main:
                    states.append("")
                else:
                    states.append(state.numpy().tobytes().hex())
            states_of_recordings.append(states)

        processor = torch.backends.cpu.get_cpu_capability()
        reports = self._run.collectives.exchange([processor, states_of_recordings])
        self._processors_differ = any(report[0] != processor for report in reports)
        counts_of_ranks = [[len(states) for states in report[1]] for report in reports]

        if any(counts != counts_of_ranks[0] for counts in counts_of_ranks):
            raise RanksDifferError(
                "world.prepare of a model on the meta device",
                "ranks have called lockstep.deferred_init, or have seeded inside it, differently "
                f"often: {counts_of_ranks}",
                "build the same models in the same contexts on every rank",
            )

        for identifier, states_on_main in zip(recordings, reports[0][1], strict=True):
            self._states[identifier] = []
            for text in states_on_main:
                as_bytes: Tensor | None = None
                if text:
                    as_bytes = torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
                self._states[identifier].append(as_bytes)

    # Checks and texts

    def _check_buffers(self) -> None:
        """Raises UsageError for buffers that have no values and that no state dict will have."""
        names: list[str] = []
        for tensor in self._tensors:
            if tensor.source is None and not tensor.is_in_state:
                names.append(tensor.names[0])

        if names:
            raise UsageError(
                f"world.prepare of {with_article(self._class_name)} on the meta device",
                f"{join_first(names)} would have no values: no file has buffers that are not "
                "persistent, and torch.device('meta') does not keep what they were computed from",
                f"{DEFERRED_INIT_ADVICE}, or give their modules a method reset_parameters",
            )

    def _check_sources(self) -> None:
        """Raises UsageError if it is not known where values of the model should come from."""
        unknown: list[str] = []
        is_reset: list[str] = []
        shapes: list[tuple[int, ...]] = []
        for tensor in self._tensors:
            if tensor.names[0] in self._loaded:
                continue
            if tensor.source is None:
                unknown.append(tensor.names[0])
            elif tensor.is_reset and tensor.is_parameter:
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
        """Describes where values come from."""
        num_from_files = 0
        num_recorded = 0
        num_reset = 0
        num_unknown = 0

        for tensor in self._tensors:
            if isinstance(tensor.source, FileSource):
                num_from_files += 1
            elif tensor.source is None:
                num_unknown += 1
            elif tensor.is_reset:
                num_reset += 1
            else:
                num_recorded += 1

        choices: list[Choice] = []
        for number, reason in (
            (num_from_files, "read from files, by each rank its part"),
            (num_recorded, "as the same code gives on the CPU, unless they are loaded before"),
            (num_reset, "drawn by reset_parameters, unless they are loaded before"),
            (num_unknown, "have to be loaded before the first step"),
        ):
            if number:
                choices.append(Choice("values", count_noun(number, "tensor"), reason))

        return choices


class _Deliver:
    """Copies computed memory to the tensors of this rank.

    Args:
        targets_of_key: by the key of memory, the tensors that have their values there.
    """

    def __init__(self, targets_of_key: dict[int, list[tuple[RecordedSource, Tensor]]]) -> None:
        self._targets_of_key = targets_of_key

    def __call__(self, key: int, content: torch.UntypedStorage) -> None:
        for source, target in self._targets_of_key[key]:
            copy_part(source.view.in_memory(content), target)


class _NoteLoaded:
    """A hook of a module that notes which of its own tensors a state dict has.

    Args:
        note: called with their names in the model.
        names: in the model, by the names in the module.
    """

    def __init__(self, note: Callable[[list[str]], None], names: Mapping[str, str]) -> None:
        self._note = note
        self._names = names

    def __call__(self, _: nn.Module, state: Mapping[str, Any], prefix: str, *__: Any) -> None:
        self._note([name for own, name in self._names.items() if prefix + own in state])


class _FillBefore:
    """Makes a method of a module compute missing values first.

    Args:
        fill: computes them, and removes this.
        module: the module.
        method: name of the method.
        call: called in its place, with the module and its arguments.
    """

    def __init__(
        self, fill: Callable[[], None], module: nn.Module, method: str, call: Callable[..., Any]
    ) -> None:
        self._fill = fill
        self._module = module
        self._method = method
        self._call = call
        vars(module)[method] = self._fill_and_call

    def _fill_and_call(self, *args: Any, **kwargs: Any) -> Any:
        if values_are_needed():
            self._fill()
        return self._call(self._module, *args, **kwargs)

    def remove(self) -> None:
        """Gives the module its method back."""
        del vars(self._module)[self._method]


def _named_parameters(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls the method of the module's class."""
    return type(module).named_parameters(module, *args, **kwargs)


@torch.no_grad()
def with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor with memory on a device for one on the meta device; any other as it is.

    It is NaN throughout, so that nobody takes what it holds for values.
    """
    if not tensor.is_meta:
        return tensor
    real = torch.empty_like(tensor, device=device)
    if real.is_floating_point() or real.is_complex():
        return real.fill_(float("nan"))
    return real.zero_()


def _give_memory_to_buffers(module: nn.Module, device: torch.device) -> None:
    """Gives memory to the buffers on the meta device; tied ones stay tied."""
    real_by_id: dict[int, Tensor] = {}
    for part in module.modules():
        buffers = members(part).buffers
        for name, buffer in buffers.items():
            if buffer is not None and buffer.is_meta:
                if id(buffer) not in real_by_id:
                    real_by_id[id(buffer)] = with_memory(buffer, device)
                buffers[name] = real_by_id[id(buffer)]


def _find_tensors(module: nn.Module, keys_of_resets: set[int]) -> list[DeferredTensor]:
    """Returns the tensors of a module that are on the meta device."""
    parameter_ids = {id(parameter) for parameter in module.parameters()}
    names_in_state = set(module.state_dict())
    tensor_of_id: dict[int, Tensor] = {}
    names_of_id: dict[int, list[str]] = {}

    for name, tensor in _named_tensors(module):
        if tensor.is_meta:
            tensor_of_id[id(tensor)] = tensor
            names_of_id.setdefault(id(tensor), []).append(name)

    found: list[DeferredTensor] = []
    for identifier, names in names_of_id.items():
        source = _source_of_any(module, names, tensor_of_id[identifier])
        is_reset = isinstance(source, RecordedSource) and source.view.key in keys_of_resets
        found.append(
            DeferredTensor(
                names,
                source,
                is_parameter=identifier in parameter_ids,
                is_in_state=not names_in_state.isdisjoint(names),
                is_reset=is_reset,
            )
        )

    return found


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields all parameters and buffers under all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _source_of_any(module: nn.Module, names: Sequence[str], tensor: Tensor) -> Source | None:
    """Returns the source of a tensor, by any of its names. A file comes before a recording."""
    recorded: Source | None = None
    for name in names:
        owner, _, own_name = name.rpartition(".")
        source = find_source(module.get_submodule(owner), own_name, tensor)
        if isinstance(source, FileSource):
            return source
        recorded = recorded or source
    return recorded


# What `torch.device("meta")` does not record


def _record_resets(module: nn.Module) -> set[int]:
    """Records `reset_parameters` of the submodules that have tensors without a source.

    Submodules come before what they are in, as constructors call it.

    Returns:
        The keys of the memory of these tensors.
    """
    lacking: dict[int, Tensor] = {}
    for name, tensor in _named_tensors(module):
        if tensor.is_meta and _source_of_any(module, [name], tensor) is None:
            lacking[id(tensor)] = tensor

    if not lacking:
        return set()

    with deferred_init(), torch.no_grad():
        for part in _children_first(module, set()):
            tensors = [*part.parameters(), *part.buffers()]
            method = reset_method(part)
            if method is None or not any(id(tensor) in lacking for tensor in tensors):
                continue

            # A tensor that has values already gets them back.
            others = [tensor for tensor in tensors if id(tensor) not in lacking]
            values = [tensor.detach().clone() for tensor in others]
            method()
            for tensor, value in zip(others, values, strict=True):
                tensor.copy_(value)

        _recompute_buffers(module, lacking)

    return {storage_key(tensor) for tensor in lacking.values()}


def _recompute_buffers(module: nn.Module, lacking: Mapping[int, Tensor]) -> None:
    """Records how models of transformers compute buffers that no file has (`inv_freq`).

    They do it in `_init_weights(submodule)`, a method of the model.
    """
    for model in module.modules():
        compute = getattr(model, "_init_weights", None)
        if not callable(compute):
            continue

        for part in model.modules():
            own = members(part)
            has_parameters = any(parameter is not None for parameter in own.parameters.values())
            lacks_buffers = any(id(buffer) in lacking for buffer in own.buffers.values())
            if lacks_buffers and not has_parameters and reset_method(part) is None:
                compute(part)


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Yields all submodules once, each after those that are in it."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def _own_init_method(module: nn.Module) -> str | None:
    """Returns the name of a method that may initialise more than `reset_parameters` does."""
    for part in module.modules():
        for name in OWN_INIT_METHODS:
            if callable(getattr(part, name, None)):
                return name
    return None
