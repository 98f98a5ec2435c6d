"""Models on the meta device whose initial values are computed later, one tensor at a time.

A tensor on the meta device has a shape but no memory. `deferred_init` is a context in which tensors
are created there, and every operation on them is recorded. Later `world.prepare` allocates each
rank's part of the model, and `Recording.replay` runs the recorded operations on real tensors: it
computes the values that the same code would have given on the CPU, keeps what is needed, and frees
each tensor after its last use. So a rank never holds the whole model.

The operations run on the CPU, in the order in which they were recorded, with the random stream as
it was at that time. So the values depend neither on the number of ranks nor on the strategy.

A tensor of a module has a *source* if it is known where its values come from: a recording, or a
file that `lockstep.load_weights` was given. A module stores the sources of its own tensors in an
attribute, so copies of the module have them, too. A piece of memory is identified by a *key*
(`storage_key`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from lockstep.distributed.seeding import mix_seed
from lockstep.machine.host_memory import note_freed
from lockstep.torch_compat import (
    TorchDispatchMode,
    copy_operation,
    device_constructors,
    members,
    pytree,
    reads_number,
    replacing_trunc_normal,
    storage_key,
    written_arguments,
)

META = torch.device("meta")
CPU = torch.device("cpu")
SOURCES_ATTRIBUTE = "lockstep_sources_of_values"
SEED_AFTER_DEFERRED_INIT = 0xDEFE2
"""Mixed into the seed with which the random stream continues after the context."""
OPERATIONS_THAT_OVERWRITE = (
    "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_",
    "normal_", "random_", "uniform_", "zero_",
)  # fmt: skip
"""In-place operations whose result does not depend on the previous values of the tensor."""
OPERATIONS_WITHOUT_VALUES = (
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
)  # fmt: skip
"""Operations that allocate memory without writing to it."""
IS_META: Any = Tensor.is_meta.__get__  # type: ignore[attr-defined]
GET_DEVICE: Any = Tensor.device.__get__
"""The functions with which a mode is called if the attribute `is_meta` or `device` of a tensor is
read."""
COPY = copy_operation()
FACTORIES_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)
"""Functions that create a tensor from given numbers, which torch would drop on the meta device."""


class View(NamedTuple):
    """The position of a tensor in its memory."""

    key: int
    """Identifies the memory; see `storage_key`."""
    num_bytes: int
    """The size of the memory, which other tensors may share."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """Returns the view of a tensor on the meta device."""
        return cls(
            storage_key(tensor),
            tensor.untyped_storage().nbytes(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
        )

    def fills_memory(self) -> bool:
        """Returns True if the tensor occupies all of its memory."""
        num_elements = 1
        for size in self.shape:
            num_elements *= size
        return num_elements * self.dtype.itemsize == self.num_bytes

    def in_memory(self, storage: torch.UntypedStorage) -> Tensor:
        """Returns the tensor at this position in real memory."""
        empty = torch.empty(0, dtype=self.dtype, device=CPU)
        return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(eq=False)
class _Call:
    """A recorded call of an operation, in which `View`s stand for tensors on the meta device."""

    operation: Callable[..., Any]
    args: Any
    kwargs: Any
    outputs: list[View]
    """The tensors that the operation has created, in the order in which it returns them."""
    reads: frozenset[int]
    """Keys of the memory that it reads: that of its arguments, except what it overwrites."""
    overwrites: frozenset[int]
    """Keys of the memory that it overwrites, so that earlier content is not needed."""
    writes: frozenset[int]
    """Keys of all memory that it writes to, including its outputs."""
    is_random: bool


class _GeneratorOfUser(NamedTuple):
    """A generator that the user has passed to an operation."""

    original: torch.Generator
    """It is kept alive, so that no other object gets its `id`."""
    at_first_use: torch.Generator
    """A copy with the state that it had then."""


@dataclass(eq=False)
class _StreamBegins:
    """Marks where in a recording a context began, or where the script seeded inside one."""

    state: Tensor | None
    """The state to which the random stream is set; None if it continues from the previous context.
    """


class Recording:
    """The operations that were called in `deferred_init`, in order."""

    def __init__(self) -> None:
        self.calls: list[_Call | _StreamBegins] = []
        self.state_at_end: Tensor | None = None
        """The state of the random stream when the latest context ended. If the next context begins
        with this state, it continues where the latest one ended, as on the CPU."""
        self._state_now: Tensor | None = None
        """The state of the process's random stream, which does not advance within a context."""
        self._storages: dict[int, torch.UntypedStorage] = {}
        """Keeps storages on the meta device, which need no memory, alive, so that their keys stay
        unique."""
        self._generators: dict[int, _GeneratorOfUser] = {}
        """The generators that the user has passed to operations, by their `id`."""

    def knows(self, tensor: Tensor) -> bool:
        """Returns True if a recorded operation has created or changed a tensor."""
        return storage_key(tensor) in self._storages

    def generator_states(self) -> list[Tensor | None]:
        """Returns the states to which contexts and seeds have set the random stream, in order."""
        return [call.state for call in self.calls if isinstance(call, _StreamBegins)]

    def begin_context(self) -> None:
        """Records that a context begins."""
        state = torch.get_rng_state()
        goes_on = self.state_at_end is not None and torch.equal(self.state_at_end, state)
        self.calls.append(_StreamBegins(None if goes_on else state))
        self._state_now = state

    def _record_seeding(self) -> None:
        """Records the random stream's state if the script has seeded it within the context.

        It is called before each recorded draw. Recorded operations draw nothing themselves, so a
        new state can only come from the script, e.g. from `torch.manual_seed`.
        """
        state = torch.get_rng_state()
        if self._state_now is None or not torch.equal(self._state_now, state):
            self.calls.append(_StreamBegins(state))
            self._state_now = state

    def add(self, operation: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Records a call of an operation, unless it writes nothing, such as a view.

        Args:
            operation: the operation.
            args: its positional arguments.
            kwargs: its keyword arguments.
            result: what it returned on the meta device.
        """
        written = [t for t in written_arguments(operation, args, kwargs) if _is_meta(t)]
        arguments = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_meta(leaf)]
        keys_of_arguments = {storage_key(argument) for argument in arguments}

        outputs: list[View] = []
        for leaf in pytree.tree_leaves(result):
            # A result in the memory of an argument is a view of it, or the argument itself.
            if _is_meta(leaf) and storage_key(leaf) not in keys_of_arguments:
                outputs.append(View.of(leaf))

        if not written and not outputs:
            return

        name = operation.overloadpacket.__name__
        if name in OPERATIONS_WITHOUT_VALUES:
            return

        is_random = torch.Tag.nondeterministic_seeded in operation.tags
        if is_random:
            self._record_seeding()

        overwrites: set[int] = set()
        if name in OPERATIONS_THAT_OVERWRITE:
            for tensor in written:
                if View.of(tensor).fills_memory():
                    overwrites.add(storage_key(tensor))

        reads: set[int] = set()
        for argument in arguments:
            is_target = any(argument is tensor for tensor in written)
            if not (is_target and storage_key(argument) in overwrites):
                reads.add(storage_key(argument))

        writes = {storage_key(tensor) for tensor in written}
        for tensor in [*arguments, *pytree.tree_leaves(result)]:
            if _is_meta(tensor):
                self._storages[storage_key(tensor)] = tensor.untyped_storage()

        recorded_args, recorded_kwargs = pytree.tree_map(self._recorded_argument, (args, kwargs))
        self.calls.append(
            _Call(
                operation,
                recorded_args,
                recorded_kwargs,
                outputs=outputs,
                reads=frozenset(reads),
                overwrites=frozenset(overwrites),
                writes=frozenset(writes | {view.key for view in outputs}),
                is_random=is_random,
            )
        )

    def add_drawing_function(
        self, function: Callable[..., Any], tensor: Tensor, args: Any, kwargs: dict[str, Any]
    ) -> None:
        """Records a call of a function that draws a tensor, as if it were one operation.

        Args:
            function: a function such as `nn.init.trunc_normal_`, which writes all elements of its
                first argument.
            tensor: its first argument, on the meta device.
            args: its further positional arguments.
            kwargs: its keyword arguments.
        """
        # If the script has seeded the random stream since the last draw, the replay must seed it
        # too before it calls the function.
        self._record_seeding()

        key = storage_key(tensor)
        self._storages[key] = tensor.untyped_storage()  # kept alive, so that the key stays unique

        # If the tensor is a slice, such as `weight[:10]`, the rest of the memory keeps its content.
        # Such a call counts as one that reads it, so that the calls before it are replayed too.
        memory = frozenset([key])
        nothing: frozenset[int] = frozenset()
        overwrites_all = View.of(tensor).fills_memory()

        arguments = ((tensor, *args), kwargs)
        recorded_args, recorded_kwargs = pytree.tree_map(self._recorded_argument, arguments)
        self.calls.append(
            _Call(
                function,
                recorded_args,
                recorded_kwargs,
                outputs=[],
                reads=nothing if overwrites_all else memory,
                overwrites=memory if overwrites_all else nothing,
                writes=memory,
                is_random=True,
            )
        )

    def _recorded_argument(self, leaf: Any) -> Any:
        """Returns the object that stands for an argument in the recording."""
        if _is_meta(leaf):
            return View.of(leaf)
        if isinstance(leaf, Tensor):  # a constant, which the script may change later
            return leaf.detach().clone()
        if isinstance(leaf, torch.device) and leaf == META:  # the call is replayed on the CPU
            return CPU

        if isinstance(leaf, torch.Generator):
            if id(leaf) not in self._generators:
                # The state at its first use, with which a replay begins.
                copy = leaf.clone_state()
                self._generators[id(leaf)] = _GeneratorOfUser(leaf, copy)
            return _GeneratorWithId(id(leaf))

        return leaf

    # Replaying

    def draws(self, keys: Iterable[int]) -> bool:
        """Returns True if computing the content of some memory takes random numbers.

        Args:
            keys: the keys of the memory.
        """
        needed = self._needed_calls(set(keys))
        for call, is_needed in zip(self.calls, needed, strict=True):
            if is_needed and isinstance(call, _Call) and call.is_random:
                return True
        return False

    def replay(
        self,
        keys: set[int],
        keys_filled_otherwise: set[int],
        deliver: Callable[[int, torch.UntypedStorage], None],
        states: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Computes the final content of some memory, on the CPU.

        Random numbers for tensors whose values come from elsewhere are not drawn. All others are
        drawn, even if they are not needed on this rank, so that values do not depend on what a rank
        needs.

        Args:
            keys: the keys of the memory that is needed.
            keys_filled_otherwise: the keys of the memory of tensors whose values come from
                elsewhere.
            deliver: called with a key and the content of that memory, as soon as it is final.
            states: the states of the random stream to use instead of `generator_states()`.
        """
        if states is None:
            states = self.generator_states()

        needed = self._needed_calls(keys)
        needed_elsewhere = self._needed_calls(keys_filled_otherwise - keys)

        # Decide which calls run, from the last one to the first. `stream_is_needed` is True if a
        # later needed call draws from the stream as it is at this point.
        remaining_states = list(states)
        runs: list[bool] = []
        stream_is_needed = False
        for number in reversed(range(len(self.calls))):
            call = self.calls[number]

            # The stream is set, or goes on, only if a later call draws from it. If it is set to a
            # given state, the draws before have no influence on that.
            if isinstance(call, _StreamBegins):
                runs.append(stream_is_needed)
                sets_stream = remaining_states.pop() is not None
                if sets_stream:
                    stream_is_needed = False
                continue

            # For a needed draw, the draws before it must advance the stream to the right state.
            if call.is_random and needed[number]:
                stream_is_needed = True

            # But draws for tensors whose values come from elsewhere are not part of the sequence,
            # unless their results are needed for another tensor as well.
            writes_to_filled = not keys_filled_otherwise.isdisjoint(call.writes)
            is_for_filled = writes_to_filled or needed_elsewhere[number]
            only_advances_stream = call.is_random and stream_is_needed and not is_for_filled
            runs.append(needed[number] or only_advances_stream)

        runs.reverse()
        _Replay(self, keys, needed, runs, deliver, states).run()

    def _needed_calls(self, keys: set[int]) -> list[bool]:
        """Decides for each call whether it contributes to the final content of some memory.

        It goes through the calls from the last to the first, and keeps track of the memory whose
        content matters at that point (the live memory of a compiler). For the final content of w:

            zeros -> w           not needed: all of w is overwritten later
            ones -> x            needed, because x matters
            normal_(y)           not needed
            w.copy_(x)           needed: it writes w. Before it, x matters instead of w.

        Args:
            keys: the keys of the memory whose final content is needed.
        """
        keys_that_matter = set(keys)
        needed: list[bool] = []
        for call in reversed(self.calls):
            if isinstance(call, _StreamBegins):  # it writes to no memory
                needed.append(False)
                continue
            if keys_that_matter.isdisjoint(call.writes):
                needed.append(False)
                continue

            # The call writes to memory that matters. What matters before the call?
            needed.append(True)
            keys_of_new_memory = {view.key for view in call.outputs}
            keys_that_matter -= keys_of_new_memory  # it does not exist before the call
            keys_that_matter -= call.overwrites  # its earlier content is lost
            keys_that_matter |= call.reads

        needed.reverse()
        return needed

    def compute(self, tensor: Tensor) -> Tensor:
        """Computes the values that a tensor on the meta device has at the end of the recording."""
        view = View.of(tensor)
        content: dict[int, torch.UntypedStorage] = {}
        self.replay({view.key}, set(), content.__setitem__)
        return view.in_memory(content[view.key])

    def copies_of_generators(self) -> dict[int, torch.Generator]:
        """Returns new copies of the user's generators in their initial states, by `id`."""
        copies: dict[int, torch.Generator] = {}
        for identifier, generator in self._generators.items():
            copies[identifier] = generator.at_first_use.clone_state()
        return copies


@dataclass(frozen=True)
class _GeneratorWithId:
    """Stands in the recorded arguments for a generator that the user has passed."""

    identifier: int


class _Replay:
    """One run of a recording.

    Args:
        recording: the recording to run.
        keys: the keys of the memory whose content is delivered.
        needed: for each call, True if its result is needed.
        runs: for each call, True if it is run. A call that is run although its result is not needed
            only advances the random stream.
        deliver: called with a key and the content of that memory.
        states: the states of the random stream, as from `Recording.generator_states`.
    """

    def __init__(
        self,
        recording: Recording,
        keys: set[int],
        needed: list[bool],
        runs: list[bool],
        deliver: Callable[[int, torch.UntypedStorage], None],
        states: Sequence[Tensor | None],
    ) -> None:
        self._recording = recording
        self._keys = keys
        self._result_is_needed = needed
        self._must_run = runs
        self._deliver = deliver
        self._states = iter(states)
        self._generators = recording.copies_of_generators()
        self._memory: dict[int, torch.UntypedStorage] = {}
        self._last_use = self._find_last_uses()

    def _find_last_uses(self) -> dict[int, list[int]]:
        """Returns, for the number of each needed call, the keys of memory that it uses last.

        That memory can be freed after the call. The number of a call is its index in the recording.
        """
        last_use: dict[int, list[int]] = {}
        keys_used_later: set[int] = set()
        calls = self._recording.calls
        for number in reversed(range(len(calls))):
            call = calls[number]
            if isinstance(call, _StreamBegins):  # it sets the random stream and uses no memory
                continue

            # A call whose result is not needed uses none of this memory. It may run to draw random
            # numbers, which go into a tensor of its own (`_call`).
            if not self._result_is_needed[number]:
                continue

            used = call.reads | call.writes
            last_use[number] = [key for key in used if key not in keys_used_later]
            keys_used_later |= used

        return last_use

    def run(self) -> None:
        """Runs the calls that must run. Afterwards the default random stream is as it was before.

        A `_StreamBegins` among the calls marks where the random stream is set to another state:

            _StreamBegins    the recording begins
            empty, normal_
            _StreamBegins    the script has called `torch.manual_seed`
            empty, normal_
        """
        state_before = torch.get_rng_state()
        try:
            with torch.no_grad():
                for number, call in enumerate(self._recording.calls):
                    must_run = self._must_run[number]
                    if isinstance(call, _StreamBegins):
                        self._begin_stream(is_used=must_run)
                    elif must_run:
                        self._call(call, result_is_needed=self._result_is_needed[number])
                        self._free(number)
        finally:
            torch.set_rng_state(state_before)

    def _begin_stream(self, *, is_used: bool) -> None:
        """Sets the random stream to its state at the next `_StreamBegins` of the recording.

        Args:
            is_used: False if no call that runs draws from this stream. It is then only passed over.
        """
        # There is a state for each `_StreamBegins`, in order. None means that the stream goes on as
        # it is.
        state = next(self._states)
        if is_used and state is not None:
            torch.set_rng_state(state)

    def _free(self, number: int) -> None:
        """Frees memory that is not used after a call. Content that is wanted is delivered first.

        Args:
            number: the place of the call in the recording.
        """
        for key in self._last_use.get(number, ()):
            content = self._memory.pop(key)
            is_wanted = key in self._keys
            if is_wanted:
                self._deliver(key, content)
            num_bytes = content.nbytes()
            del content  # the last reference: only now the memory is free
            note_freed(num_bytes)

    def _call(self, call: _Call, *, result_is_needed: bool) -> None:
        """Runs an operation on real tensors.

        Args:
            call: the recorded call.
            result_is_needed: False if the call only advances the random stream. It then gets zeros
                as arguments, in memory of its own, which is dropped afterwards.
        """
        memory = self._memory
        keys_to_zero: frozenset[int] = frozenset()
        if not result_is_needed:
            # All operations accept zeros: `torch.bernoulli`, for example, wants probabilities.
            memory = {}
            keys_to_zero = call.reads

        # A `View` stands for a tensor in the recorded arguments. It is a named tuple, so torch must
        # be told that it is a leaf and not a container.
        def make_real(argument: Any) -> Any:
            return self._real_argument(argument, memory, keys_to_zero)

        args, kwargs = pytree.tree_map(make_real, (call.args, call.kwargs), is_leaf=_is_view)
        result = call.operation(*args, **kwargs)
        if result_is_needed:
            self._keep_outputs(call, result, args, kwargs)

    def _real_argument(
        self, recorded: Any, memory: dict[int, torch.UntypedStorage], keys_to_zero: Collection[int]
    ) -> Any:
        """Returns the real argument for a recorded one.

        Args:
            recorded: the recorded argument. A `View` stands for a tensor: it says which memory the
                tensor has (by a key), and its shape, strides and dtype.
            memory: the real memory by key. Missing memory is added to it.
            keys_to_zero: keys of the memory that is filled with 0 when it is added.
        """
        if isinstance(recorded, _GeneratorWithId):
            return self._generators[recorded.identifier]
        if not isinstance(recorded, View):
            return recorded

        view = recorded
        if view.key not in memory:
            # No call that was run has created it: `torch.empty`, for example, is not recorded.
            allocated = torch.empty(view.num_bytes, dtype=torch.uint8, device=CPU)
            if view.key in keys_to_zero:
                allocated.zero_()
            memory[view.key] = allocated.untyped_storage()
        return view.in_memory(memory[view.key])

    def _keep_outputs(self, call: _Call, result: Any, args: Any, kwargs: Any) -> None:
        """Keeps the memory of the tensors that an operation has created, for later calls.

        `call.outputs` has a `View` for each of them: the layout that the tensor had on the meta
        device (shape, strides, size), and the key under which later calls look for its memory.

        Args:
            call: the recorded call.
            result: what the operation has returned.
            args: the real positional arguments.
            kwargs: the real keyword arguments.
        """
        if not call.outputs:
            return

        # The operation may also have returned its arguments, or views of them. These are not new.
        returned = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        created = _without_arguments(returned, args, kwargs)
        for view, tensor in zip(call.outputs, created, strict=True):
            has_same_strides = tuple(tensor.stride()) == view.stride
            has_same_size = tensor.untyped_storage().nbytes() == view.num_bytes
            if has_same_strides and has_same_size:
                self._memory[view.key] = tensor.untyped_storage()
            else:
                # On the CPU the operation has chosen another layout than on the meta device. Later
                # calls expect the recorded one, so the values are copied to memory of that layout.
                allocated = torch.empty(view.num_bytes, dtype=torch.uint8, device=CPU)
                self._memory[view.key] = allocated.untyped_storage()
                view.in_memory(self._memory[view.key]).copy_(tensor)


def _is_view(leaf: Any) -> bool:
    """Returns True for a `View`, whose fields torch's pytree would otherwise treat as leaves."""
    return isinstance(leaf, View)


def _without_arguments(returned: list[Tensor], args: Any, kwargs: Any) -> list[Tensor]:
    """Returns those results of an operation that do not share memory with its arguments."""
    keys_of_arguments: set[int] = set()
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            keys_of_arguments.add(storage_key(leaf))
    return [tensor for tensor in returned if storage_key(tensor) not in keys_of_arguments]


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


# Sources


@dataclass(frozen=True, eq=False)
class RecordedSource:
    """A source whose values are computed by a recording."""

    recording: Recording
    view: View

    @property
    def recorded(self) -> RecordedSource:
        """This source. A `FileSource` has a recorded source beside the file."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.view.shape

    @property
    def needs_random_numbers(self) -> bool:
        """True if the values depend on random numbers."""
        return self.recording.draws([self.view.key])


@dataclass(frozen=True, eq=False)
class FileSource:
    """A source whose values are in a file."""

    value: Any
    """A memory-mapped tensor, or a `LazyTensor`."""
    recorded: RecordedSource | None
    """The source that the tensor would have without the file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return tuple(self.value.shape)


Source: TypeAlias = RecordedSource | FileSource


class Sources(dict[str, Source]):
    """The sources of a module's own tensors, by name.

    Copies of the module have the same sources.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Sources:
        """Returns a dictionary with the same sources."""
        return Sources(self)

    def __reduce__(self) -> tuple[Callable[[], Sources], tuple[()]]:
        """Leaves sources out of pickles, as recordings and open files belong to this process."""
        return Sources, ()


def sources_of(module: nn.Module) -> Sources:
    """Returns the sources of a module's own tensors, as a dictionary to which more can be added."""
    sources: Sources = vars(module).setdefault(SOURCES_ATTRIBUTE, Sources())
    return sources


def find_source(module: nn.Module, name: str, tensor: Tensor) -> Source | None:
    """Returns from where a tensor on the meta device gets its values; None if nothing is known.

    A source is a file or a recording. Of these, the first one that there is counts:

    1. The file that was noted under the tensor's name: it was loaded after the initialization.
    2. The latest recording, if it knows this very tensor.
    3. The recording that was noted under the tensor's name. A copy of a module, whose tensors no
       recording knows, has copied this note.

    The second comes before the third because the note may belong to an earlier tensor:
    `decoder.weight = embedding.weight` replaces the tensor, and keeps the note.

    Args:
        module: the module that has the tensor.
        name: the name of the tensor in the module.
        tensor: the tensor.
    """
    noted: Source | None = vars(module).get(SOURCES_ATTRIBUTE, {}).get(name)
    # A note for another shape belongs to an earlier tensor.
    if noted is not None and noted.shape != tuple(tensor.shape):
        noted = None

    if isinstance(noted, FileSource):
        return noted
    if _latest_recording is not None and _latest_recording.knows(tensor):
        return RecordedSource(_latest_recording, View.of(tensor))
    return noted


@contextmanager
def shapes_are_enough() -> Iterator[None]:
    """A context in which `state_dict()` of a prepared model does not compute missing values."""
    global _shapes_are_enough
    before = _shapes_are_enough
    _shapes_are_enough = True
    try:
        yield
    finally:
        _shapes_are_enough = before


def values_are_needed() -> bool:
    """Returns False within the context `shapes_are_enough`."""
    return not _shapes_are_enough


def forget_sources(module: nn.Module) -> None:
    """Removes the sources of a module and of its submodules after they were used.

    The next context begins a new recording. Other models keep the recordings that they need.
    """
    global _latest_recording
    for part in module.modules():
        vars(part).pop(SOURCES_ATTRIBUTE, None)
    _latest_recording = None


# Recording


_latest_recording: Recording | None = None
"""The recording to which contexts of this process add. Models refer to it until they have values.
"""
_is_recording = False
_shapes_are_enough = False


@contextmanager
def deferred_init() -> Iterator[None]:
    """A context in which models are built without memory, to be filled by `world.prepare`.

    Tensors are created on the meta device, and operations on them are recorded. `prepare` gives
    each rank its part of the model. Tensors that are not loaded (by `lockstep.load_weights` or from
    a checkpoint) get the values that the same code would have given them on the CPU: by the
    constructor, and by `model.apply(...)` and `model.init_weights()` inside the context. This
    includes buffers.

    If the first model is built right after `lockstep.init`, its values have the same bits as on the
    CPU. Random numbers that are drawn after the context differ from those after building on the
    CPU.

    Raises:
        UsageError: the code in the context needs a value that is not known yet.
    """
    global _is_recording, _latest_recording
    if _is_recording:
        yield
        return

    if _latest_recording is None:
        _latest_recording = Recording()

    recording = _latest_recording
    recording.begin_context()
    num_calls_before = len(recording.calls)
    modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def note_module(module: nn.Module, _name: str, _tensor: Any) -> None:
        """Records a module in which something is registered; called by torch."""
        modules.add(module)

    hooks = [
        register_module_parameter_registration_hook(note_module),
        register_module_buffer_registration_hook(note_module),
        register_module_module_registration_hook(note_module),
    ]

    def draw(original: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Replaces `nn.init.trunc_normal_` within the context."""
        with outside_deferred_init():
            if tensor.is_meta:
                recording.add_drawing_function(original, tensor, args, kwargs)
                return tensor
        return original(tensor, *args, **kwargs)

    _is_recording = True
    try:
        with replacing_trunc_normal(draw), _OnMeta(), _Recorder(recording):
            yield
    finally:
        _is_recording = False
        for hook in hooks:
            hook.remove()

    for module in list(modules):
        for part in module.modules():
            _note_sources(part, recording)

    if any(isinstance(c, _Call) and c.is_random for c in recording.calls[num_calls_before:]):
        # The script must not draw the same random numbers that the model will use.
        number = int(torch.empty((), dtype=torch.int64).random_())
        torch.default_generator.manual_seed(mix_seed(number, SEED_AFTER_DEFERRED_INIT))
        recording.state_at_end = torch.get_rng_state()


def _note_sources(module: nn.Module, recording: Recording) -> None:
    """Notes at a module that a recording has the values of its tensors on the meta device."""
    own = members(module)
    for name, tensor in [*own.parameters.items(), *own.buffers.items()]:
        if tensor is None or not tensor.is_meta or not recording.knows(tensor):
            continue

        # `View.of` returns the key that stands for the tensor's memory in the recording, and which
        # part of this memory the tensor is.
        recorded = RecordedSource(recording, View.of(tensor))

        sources = sources_of(module)
        existing = sources.get(name)
        if isinstance(existing, FileSource):
            # `lockstep.load_weights` was called inside the context: the values come from the file.
            # `recorded` names the memory that a replay for other tensors has to leave out.
            sources[name] = FileSource(existing.value, recorded=recorded)
        else:
            sources[name] = recorded


@contextmanager
def outside_deferred_init() -> Iterator[None]:
    """A context in which nothing is recorded, and tensors are created on their usual devices."""
    global _is_recording
    before = _is_recording
    _is_recording = False
    try:
        yield
    finally:
        _is_recording = before


class _OnMeta(TorchFunctionMode):
    """Creates tensors on the meta device instead of the CPU, and makes them claim to be on the CPU.

    Torch's own context `torch.device("meta")` would drop the numbers of `torch.tensor([1, 2])`. And
    code that sees the meta device, such as `nn.init.trunc_normal_`, often initialises nothing.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of each of its functions."""
        kwargs = kwargs or {}
        if not _is_recording:
            return func(*args, **kwargs)
        if func == IS_META:
            return False

        if func == GET_DEVICE:
            device = func(*args, **kwargs)
            return CPU if device == META else device

        # `world.prepare` chooses the device.
        if func in (torch.Tensor.cpu, torch.Tensor.cuda) and _is_meta(args[0]):
            return args[0]

        if func is torch.Tensor.to and _is_meta(args[0]):
            args = tuple(META if _is_device(arg) else arg for arg in args)
            if kwargs.get("device") is not None:
                kwargs = {**kwargs, "device": META}
            return func(*args, **kwargs)

        if func is torch.Tensor.new_tensor and _is_meta(args[0]):
            like, *args = args
            func = torch.tensor
            kwargs = {"dtype": like.dtype, **kwargs, "device": CPU}

        makes_tensor = func in device_constructors()
        is_for_cpu = _is_cpu(kwargs.get("device"))
        is_for_default_device = makes_tensor and kwargs.get("device") is None
        if not is_for_cpu and not is_for_default_device:
            return func(*args, **kwargs)
        if func not in FACTORIES_FROM_DATA:
            return func(*args, **{**kwargs, "device": META})
        if args and isinstance(args[0], Tensor):
            return func(*args, **{**kwargs, "device": args[0].device})

        requires_grad = kwargs.pop("requires_grad", False)
        tensor = func(*args, **{**kwargs, "device": CPU})
        return tensor.to(META).requires_grad_(requires_grad)


def _is_device(value: Any) -> bool:
    """Returns True for an argument that names a device."""
    return isinstance(value, str | torch.device) or type(value) is int


def _is_cpu(value: Any) -> bool:
    """Returns True for an argument that names the CPU."""
    if isinstance(value, str):
        return value.partition(":")[0] == "cpu"
    return isinstance(value, torch.device) and value.type == "cpu"


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds every operation on tensors on the meta device to a recording."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operation."""
        kwargs = kwargs or {}
        if not _is_recording:
            return func(*args, **kwargs)

        if reads_number(func):
            # For example `x.item()`, where x is an element of `torch.linspace(0, rate, depth)`.
            args, kwargs = pytree.tree_map(self._value_of, (args, kwargs))

        is_copy_to_cpu = func is COPY and _is_cpu(kwargs.get("device"))
        if is_copy_to_cpu and self._recording.knows(args[0]):  # `x.tolist()`, for example
            return self._recording.compute(args[0]).to(kwargs.get("dtype"))

        result = func(*args, **kwargs)
        self._recording.add(func, args, kwargs, result)
        return result

    def _value_of(self, leaf: Any) -> Any:
        """Returns the real tensor for one on the meta device, if its values are known."""
        if _is_meta(leaf) and self._recording.knows(leaf):
            return self._recording.compute(leaf)
        return leaf
