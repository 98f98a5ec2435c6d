"""Saves the weights of a model as safetensors, and loads them from every common format.

*Plain names* are the names of the bare model, without the prefixes of wrappers such as DDP. Names
are *tied* if the model uses one tensor under all of them. A model is *spread* over the ranks if
each rank has only shards of its tensors, or only some of its layers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.checkpoint.differences import (
    Differences,
    describe_conflict,
    find_differences,
    shape_of,
    table_of_differences,
)
from lockstep.checkpoint.encoding import why_unstorable
from lockstep.checkpoint.formats.reading import FoundState, read_source, read_values
from lockstep.checkpoint.formats.safetensors import CODE_OF_DTYPE, dtype_error
from lockstep.checkpoint.formats.safetensors_files import (
    DTYPES_TO_CAST,
    TORCH_ENDINGS,
    group_by_size,
    largest_lost_value,
    parse_shard_size,
    write_weights,
)
from lockstep.checkpoint.lazy_tensor import LazyTensor, TensorInMemory
from lockstep.checkpoint.modules import (
    load_plain,
    plain_name_function,
    plain_shapes,
    plain_state_dict,
    unwrap,
)
from lockstep.checkpoint.name_matching import Match, match_names
from lockstep.checkpoint.sharding import in_one_shard, is_meta, reshard, tie_key
from lockstep.checkpoint.shards import TensorInShards
from lockstep.distributed.collectives import Collectives, run_on_all_ranks
from lockstep.distributed.process_group import run_of
from lockstep.errors import CheckpointError, SettingError, warn
from lockstep.file_paths import check_path_of_this_system
from lockstep.keyword_arguments import check_keywords
from lockstep.machine.host_memory import note_freed
from lockstep.optim.deferred_init import (
    FileSource,
    find_source,
    outside_deferred_init,
    sources_of,
)
from lockstep.torch_compat import is_sharded, storage_key, to_local
from lockstep.wording import count_noun, describe_type

MAX_BYTES_IN_MEMORY = 2**24
"""How much `load_weights` reads at a time, besides the model and the mapped file."""
ENDING_OF_NAMES_THAT_MAY_BE_MISSING = "num_batches_tracked"
"""BatchNorm's count of batches. Files from before torch 0.4.1 lack it, and it starts at 0 then."""
DTYPES_TO_SAVE_AS = {*DTYPES_TO_CAST, torch.float8_e4m3fn, torch.float8_e5m2}
"""The other floats of 8 bits hold scales, or have no code in safetensors."""


@dataclass(frozen=True)
class WeightsReport:
    """The result of `load_weights`, under plain names (`unexpected`: under the file's names)."""

    matched: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    """Tensors of another shape, which were not changed: the name and both shapes."""
    changes: tuple[str, ...]
    """What was done to names and dtypes to make them fit, as texts."""


# Saving


@check_keywords("lockstep.save_weights")
def save_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    shard_size: int | str | None = None,
) -> None:
    """Writes a model's parameters and buffers as safetensors, whatever the file is called.

    The names are those of the bare model, whatever it is wrapped in. Tied weights are written
    under each of their names, so that any reader finds them. The file appears completely or not at
    all; missing folders are created. For a prepared model only rank 0 writes, so all ranks may call
    this function under every strategy.

    Communication: none for a model that each rank has completely; the other ranks do not wait for
    the file. A model that is spread over the ranks (`fsdp`, `hsdp`, `pipeline`) is saved by all of
    them together: rank 0 gathers it on the CPU, a tensor at a time.

    Args:
        model: a bare, wrapped or prepared model.
        path: the path of the file. An existing file is replaced once the new one is complete.
        dtype: the dtype to convert floating-point tensors of at least 16 bits to, for example
            `torch.bfloat16`; None to keep their dtypes.
        shard_size: bytes, or a text such as "5GB". A larger model is written to several files
            beside `path`, which are listed in `path` + ".index.json". None: one file.

    Raises:
        CheckpointError: the state holds a value that safetensors cannot store (for example an extra
            state that is not a tensor), a value does not fit into `dtype`, or the file cannot be
            written.
        SettingError: `dtype` is no floating-point dtype, or `shard_size` is no size.
    """
    path = Path(path)
    check_path_of_this_system(f"saving weights to {path}", path)
    if dtype is not None and not dtype.is_floating_point:
        raise SettingError(
            f"saving weights to {path} with dtype={dtype}",
            "it holds no fractions",
            "give torch.float32, torch.bfloat16 or torch.float16",
        )
    if dtype is not None and dtype not in DTYPES_TO_SAVE_AS:
        raise SettingError(
            f"saving weights to {path} with dtype={dtype}",
            "Lockstep does not convert weights to it",
            "give torch.float32, torch.bfloat16 or torch.float16",
        )
    max_file_bytes = None if shard_size is None else parse_shard_size(shard_size)
    if path.suffix in TORCH_ENDINGS:
        _warn_of_ending(path)

    run = run_of(model)
    state = plain_state_dict(model)
    if run is None:  # the model is not prepared, so every process that calls this writes
        write_weights(path, _storable_tensors(state, path), max_file_bytes, dtype)
        return

    is_spread = any(is_sharded(value) or is_meta(value) for value in state.values())
    if is_spread:
        gather_on_main(state, run.collectives)

    def write_on_main() -> None:
        """Writes the file on rank 0; does nothing on the other ranks."""
        if run.topology.is_main:
            write_weights(path, _storable_tensors(state, path), max_file_bytes, dtype)

    if is_spread:
        # All ranks take part anyway. If rank 0 cannot write, all of them raise the error.
        run_on_all_ranks(run.collectives, f"saving weights to {path}", write_on_main)
    else:
        write_on_main()  # the other ranks do not wait


@cache
def _warn_of_ending(path: Path) -> None:
    """Warns that a file of weights has the ending of a file of `torch.save`.

    The warning comes once for each path, because a script may save in every epoch.
    """
    warn(
        f"saving weights to {path}",
        found=f"the file is written as safetensors, and {path.suffix} is the ending of files of "
        "torch.save: torch.load may not read it",
        do=f"call it {path.with_suffix('.safetensors').name} and read it with "
        "lockstep.load_weights, or convert it with lockstep checkpoint convert",
    )


def gather_on_main(state: dict[str, Any], collectives: Collectives) -> None:
    """Gathers on rank 0 the state of a model that is spread over the ranks.

    A sharded tensor is put together from its shards; any other tensor comes from the first rank
    whose copy is not on the meta device. A sharded tensor with two names, such as the tied weights
    of an embedding and the output layer, is gathered once, and stays one tensor.

    Args:
        state: the state of the model. Its values are replaced by whole CPU tensors on rank 0, and
            by None on the other ranks.
        collectives: the collectives of the run. All ranks call this function.
    """
    own_names = [name for name, value in state.items() if not is_meta(value)]
    names_of_ranks = [set(names) for names in collectives.exchange(own_names)]

    # A sharded tensor has the same `tie_key` under each of its names.
    first_name_of_tie: dict[object, str] = {}

    # All ranks have the names in the same order, so they call the same collectives.
    for name, value in state.items():
        tie = tie_key(value) if is_sharded(value) else None  # also None on the meta device
        first_name = name if tie is None else first_name_of_tie.setdefault(tie, name)
        if first_name == name:
            source = _first_rank_with(name, names_of_ranks)
            state[name] = _gather_tensor(value, source, collectives)
        else:
            state[name] = state[first_name]  # gathered already


def _gather_tensor(value: Any, source: int, collectives: Collectives) -> Any:
    """Returns the whole value on rank 0, and None on the other ranks.

    Args:
        value: this rank's value: a tensor, a DTensor, a tensor on the meta device if another rank
            has the values, or a value that is no tensor.
        source: the first rank whose value is not on the meta device.
        collectives: the collectives of the run. All ranks call this function.
    """
    rank_0_lacks_values = source > 0
    if is_sharded(value):
        # All ranks get the whole tensor. It must be on the GPU for that, and the model may not be.
        value = value.to(collectives.device).full_tensor()
    elif rank_0_lacks_values:
        value = collectives.broadcast(value, source)

    if not collectives.topology.is_main:
        return None
    return value.cpu() if isinstance(value, Tensor) else value


def _first_rank_with(name: str, names_of_ranks: list[set[str]]) -> int:
    """Returns the first rank that has the values of a tensor, or 0 if no rank has them.

    Args:
        name: the name of the tensor.
        names_of_ranks: for each rank, the names of the tensors that it has.
    """
    for rank, names in enumerate(names_of_ranks):
        if name in names:
            return rank
    return 0


def _storable_tensors(state: Mapping[str, Any], path: Path) -> dict[str, LazyTensor]:
    """Checks that a safetensors file can hold a state, and returns its tensors as lazy tensors.

    Raises:
        CheckpointError: a safetensors file cannot hold one of the values.
    """
    action = f"saving weights to {path}"
    tensors: dict[str, LazyTensor] = {}
    for name, value in state.items():
        problem_of_value: str | None  # why the value cannot be stored; None if it can be
        if isinstance(value, Tensor):
            problem_of_value = why_unstorable(value)
        else:
            problem_of_value = f"is {describe_type(value)}"
        if problem_of_value is not None:
            raise CheckpointError(
                action,
                f"{name} {problem_of_value}, and the file can hold plain tensors alone",
                "save the whole state with world.checkpoint",
            )

        if value.dtype not in CODE_OF_DTYPE:
            raise dtype_error(action, name, value.dtype)
        tensors[name] = TensorInMemory(value)
    return tensors


# Loading


class _LoadPlan(NamedTuple):
    """The values that `load_weights` is going to copy."""

    groups_of_values: list[dict[str, Any]]
    """The values of the file by the model's plain names, in groups that are read and copied one
    after the other."""
    values: dict[str, Any]
    """All values of the file that fit the model, by its plain names."""
    report: WeightsReport


@check_keywords("lockstep.load_weights")
def load_weights(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, trust: bool = False
) -> WeightsReport:
    """Copies weights from a file into a model, on whatever device the model is.

    Reads safetensors files (also several, with an index), files of `torch.save` (a state dict, also
    under one of the usual keys such as `state_dict` or `model`, or several with an index; a pickled
    model if it is trusted), a folder of `torch.distributed.checkpoint`, a checkpoint of Lockstep,
    and the folder that holds checkpoints. Prefixes that wrappers leave (`module.`, `_orig_mod.`,
    `model.`, `net.`) are removed or added so that the names match the model's. Nothing is copied
    unless all checks have passed, on all ranks if the model is a prepared one.

    Files are mapped, so if many ranks of a machine read the same file, it is in memory once.
    Folders of `torch.distributed.checkpoint` are read some tensors at a time. Only files in the
    format of `torch.save` before torch 1.6 are read completely by each rank.

    Communication: none for a bare model, so any rank may load for itself; one exchange of text
    for a prepared model, which all ranks load together.

    Args:
        model: a bare, wrapped or prepared model.
        path: the file or folder.
        strict: whether the file and the model must have the same names and shapes. Otherwise
            whatever fits is loaded, if that is at least half of the model's names.
        trust: whether the file may run its author's code while it is read, as pickled models do.

    Raises:
        CheckpointError: the file cannot be read, is not trusted, or does not fit, with counts and
            examples; or the model's dtype cannot hold its values.
    """
    with outside_deferred_init():
        return _load_weights(model, Path(path), strict=strict, trust=trust)


def _load_weights(model: nn.Module, path: Path, *, strict: bool, trust: bool) -> WeightsReport:
    """Checks that a file fits a model, and copies its values; `load_weights` calls it.

    The arguments are those of `load_weights`.
    """
    make_plan = partial(_plan_loading, model, path, strict=strict, trust=trust)
    run = run_of(model)
    if run is not None:  # the model is prepared
        # No rank copies anything unless the file fits on all of them.
        plan = run_on_all_ranks(run.collectives, f"loading {path}", make_plan)
    else:
        plan = make_plan()
        _record_sources_of_meta_tensors(model, plan)

    # `load_plain` copies the values, except those for tensors on the meta device.
    for group in plan.groups_of_values:
        values = {}
        for name, value in group.items():
            # Of a tensor in shards, `load_plain` reads only the regions that this rank needs.
            is_in_shards = isinstance(value, TensorInShards)
            values[name] = value if is_in_shards else read_values(value)
        load_plain(model, values, strict=False)  # each group has only some of the names

        # Free the memory of this group before the next one is read. `note_freed` counts it, and
        # returns it to the system once it is much.
        del values
        tensors_of_group = [value for value in group.values() if shape_of(value) is not None]
        note_freed(sum(tensor.nbytes for tensor in tensors_of_group))
    return plan.report


def _record_sources_of_meta_tensors(model: nn.Module, plan: _LoadPlan) -> None:
    """Records, for tensors on the meta device, from where `world.prepare` can read their values.

    Such tensors have no memory yet.
    """
    to_plain_name = plain_name_function(model)
    for name, tensor in model.state_dict().items():
        plain_name = to_plain_name(name)
        if not is_meta(tensor) or plain_name not in plan.values:
            continue

        module_name, _, own_name = name.rpartition(".")
        owner = model.get_submodule(module_name)

        # The new source has the file, and still the recorded initialisation, if there is one.
        former_source = find_source(owner, own_name, tensor)
        initialisation = None if former_source is None else former_source.recorded
        value_in_file = plan.values[plain_name]
        sources_of(owner)[own_name] = FileSource(value_in_file, recorded=initialisation)


def _plan_loading(model: nn.Module, path: Path, *, strict: bool, trust: bool) -> _LoadPlan:
    """Finds out which values of a file fit a model, and plans what to copy. Copies nothing.

    The arguments are those of `load_weights`.

    Raises:
        CheckpointError: the file cannot be read or is not trusted; or it does not fit the model:
            completely if `strict`, otherwise in at least half of the model's names.
    """
    own = plain_shapes(model)
    found, match = _best_match(path, own, trust)

    # The values of the file, under the names of the model.
    state = {name: found.state[old_name] for old_name, name in match.name_pairs.items()}
    for name, value in state.items():
        if isinstance(value, LazyTensor) and not isinstance(value, TensorInShards):
            state[name] = in_one_shard(value)
    tied_groups = _tied_groups(own)
    _check_tied_are_equal(tied_groups, state, path)

    differences = Differences(
        missing=_missing_names(own, state, tied_groups),
        unexpected=tuple(name for name in found.state if name not in match.name_pairs),
        mismatched=find_differences(state, own).mismatched,
    )
    fitting = {
        name: value for name, value in state.items() if not describe_conflict(value, own[name])
    }
    num_covered = len(_add_tied_names(fitting, tied_groups))
    is_enough = num_covered * 2 >= len(own)  # at least half of the model's names
    if (strict and differences) or not is_enough:
        counts = ", ".join(count for count, _ in differences.counted())
        table = table_of_differences(differences, found.state, own)
        advice = "build the model as it was when the file was saved"
        if is_enough:
            advice += ", or pass strict=False to load what fits"
        raise CheckpointError(
            f"loading {path} into {type(unwrap(model)).__name__} with strict={strict}",
            f"of the model's {len(own)} names {num_covered} fit; {counts}\n{table}",
            advice,
        )

    # The file fits by names and shapes. Its values must be there, and fit into the model's dtypes.
    _check_shards(fitting, own)
    _check_values(path, fitting, own)
    changes = [f"read {found.place}"] if found.place else []
    changes += match.changes
    changes += _describe_casts(fitting, own)
    report = WeightsReport(
        matched=tuple(name for name in own if name in fitting),
        missing=differences.missing,
        unexpected=differences.unexpected,
        mismatched=differences.mismatched_texts,
        changes=tuple(changes),
    )
    groups_of_values = _group_values(fitting, _names_read_into_memory(fitting, own))
    return _LoadPlan(groups_of_values, fitting, report)


def _missing_names(
    own: Mapping[str, Any], state: Mapping[str, Any], tied_groups: list[list[str]]
) -> tuple[str, ...]:
    """Returns the names of a model that get no values from a file.

    A tied tensor gets its values if any of its names is in the file.

    Args:
        own: the state of the model by plain names.
        state: the values of the file, under the names of the model.
        tied_groups: the groups of tied names in the model.
    """
    names_with_values = _add_tied_names(state, tied_groups)
    missing = []
    for name in own:
        may_be_missing = name.endswith(ENDING_OF_NAMES_THAT_MAY_BE_MISSING)
        if name not in names_with_values and not may_be_missing:
            missing.append(name)
    return tuple(missing)


def _check_shards(values: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Checks that the shards of all values that will be copied are in their files.

    Tensors on the meta device are skipped, because nothing is copied into them here: in a prepared
    model their values belong to other ranks, and otherwise `world.prepare` reads them.

    Args:
        values: the values that are loaded, by plain names.
        own: the state of the model by plain names.

    Raises:
        CheckpointError: a file does not have a shard.
    """
    for name, value in values.items():
        if isinstance(value, TensorInShards) and not is_meta(own[name]):
            value.check()


def _check_values(path: Path, values: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Checks that the model can hold the values of a file, in its dtypes and layouts.

    Args:
        path: the file or folder, for errors.
        values: the values that are loaded, by plain names.
        own: the state of the model by plain names.

    Raises:
        CheckpointError: a tensor has another layout than in the model (one is sparse), or values
            beyond the range of the model's dtype.
    """
    for name, value in values.items():
        target = own[name]
        if not isinstance(value, Tensor | LazyTensor) or not isinstance(target, Tensor):
            continue
        if is_meta(target):  # its values belong to another rank, or are read later
            continue

        if isinstance(value, Tensor) and value.layout != target.layout:
            raise CheckpointError(
                f"loading {path}",
                f"{name} is a tensor of layout {value.layout} in the file, and of layout "
                f"{target.layout} in the model",
                "save it in the layout of the model, for example with tensor.to_dense()",
            )

        is_dense = isinstance(value, LazyTensor) or value.layout == torch.strided
        if is_dense:  # the range of sparse tensors is not checked
            _check_range(path, name, value, target)


def _check_range(path: Path, name: str, value: Tensor | LazyTensor, target: Tensor) -> None:
    """Checks that the dtype of a tensor of the model can hold the values of a file.

    Args:
        path: the file or folder, for errors.
        name: the name of the tensor.
        value: the values in the file.
        target: the tensor of the model. If it is sharded, each rank checks its own shard.

    Raises:
        CheckpointError: a value is beyond the range of the dtype.
    """
    has_smaller_range = (
        value.dtype in DTYPES_TO_CAST
        and target.dtype.is_floating_point
        and torch.finfo(target.dtype).max < torch.finfo(value.dtype).max
    )
    if not has_smaller_range:
        return

    values_here = to_local(reshard(value, target))
    largest = largest_lost_value(values_here, target.dtype)
    if largest is not None:
        raise CheckpointError(
            f"loading {path}",
            f"the largest value of {name} is {largest:.3g}, beyond what the model's dtype "
            f"{target.dtype} can hold ({torch.finfo(target.dtype).max:.3g})",
            _advice_on_narrow_dtype(target.dtype),
        )


def _advice_on_narrow_dtype(dtype: torch.dtype) -> str:
    """Returns what to do about values beyond the range of a model's dtype."""
    if dtype is torch.bfloat16:
        return "load it into a model in the dtype of the file"
    return "load it into a model in bf16, which has the range of fp32, or in the dtype of the file"


def _names_read_into_memory(values: Mapping[str, Any], own: Mapping[str, Any]) -> set[str]:
    """Returns the names of values that are read into memory before they are loaded.

    These are values in shards, and values for a sharded tensor. All others are copied straight from
    a mapped file into a plain tensor. (A tensor on the meta device takes over the saved values
    later, without a copy.)

    Args:
        values: the values that are loaded, by plain names.
        own: the state of the model by plain names.
    """
    names = set()
    for name, value in values.items():
        is_copied = not is_meta(own[name])
        is_read_first = isinstance(value, TensorInShards) or is_sharded(own[name])
        if is_copied and is_read_first:
            names.add(name)
    return names


def _best_match(path: Path, own: Mapping[str, Any], trust: bool) -> tuple[FoundState, Match]:
    """Finds the state in a file that fits a model best, and how its names must be changed.

    Args:
        path: the file or folder.
        own: the state of the model by plain names.
        trust: as for `load_weights`.
    """
    own_shapes = {name: shape_of(value) for name, value in own.items()}

    # A model with sharded tensors, or with tensors without memory, needs only parts of the file.
    # For any other model the file is mapped into memory, which the ranks of a machine share.
    needs_only_parts = any(is_sharded(value) or is_meta(value) for value in own.values())
    matches = []
    for found in read_source(path, trust=trust, lazy=needs_only_parts).states:
        shapes = {name: shape_of(value) for name, value in found.state.items()}
        matches.append((found, match_names(shapes, own_shapes)))

    def quality(state_and_match: tuple[FoundState, Match]) -> tuple[int, int]:
        """Returns how many tensors fit in name and shape, and then how many fit in name."""
        _, match = state_and_match
        return match.num_fitting, len(match.name_pairs)

    return max(matches, key=quality)


def _group_values(values: Mapping[str, Any], read_into_memory: Set[str]) -> list[dict[str, Any]]:
    """Splits values into groups that are loaded one after the other, to use little memory.

    The values of one submodule stay in one group, because its `load_state_dict` may be overridden
    and need all of them.

    Args:
        values: the values by plain names.
        read_into_memory: the names of values that take memory while they are loaded. The others go
            directly from a mapped file into a plain tensor.
    """
    names_of_module: dict[str, list[str]] = {}
    for name in values:
        module, _, _ = name.rpartition(".")  # "block.0" for "block.0.weight" and "block.0.bias"
        names_of_module.setdefault(module, []).append(name)

    modules_and_bytes = []
    for module, names in names_of_module.items():
        num_bytes = sum(values[name].nbytes for name in names if name in read_into_memory)
        modules_and_bytes.append((module, num_bytes))

    groups = []
    for modules in group_by_size(modules_and_bytes, MAX_BYTES_IN_MEMORY):
        group = {}
        for module in modules:
            for name in names_of_module[module]:
                group[name] = values[name]
        groups.append(group)
    return groups


def _tied_groups(own: Mapping[str, Any]) -> list[list[str]]:
    """Returns the groups of names that stand for one tensor of the model.

    If "embedding.weight" and "head.weight" are tied: `[["embedding.weight", "head.weight"]]`.

    Args:
        own: the state of the model by plain names.
    """
    names_of_tie: dict[object, list[str]] = {}
    for name, value in own.items():
        tie = _tie_of(value)
        if tie is not None:
            names_of_tie.setdefault(tie, []).append(name)
    return [names for names in names_of_tie.values() if len(names) > 1]


def _tie_of(value: Any) -> object:
    """Returns a key that is equal for tied tensors of a model.

    - Tensors with memory are tied if they have the same memory.
    - Tensors on the meta device, which have no memory, are tied if they share a storage object.
    - Anything else has no key (None): values that are no tensors, parameters without a shape yet,
      and empty tensors.
    """
    if shape_of(value) is None:
        return None
    return storage_key(value) if is_meta(value) else tie_key(value)


def _add_tied_names(names: Iterable[str], tied_groups: list[list[str]]) -> set[str]:
    """Returns the given names, plus all names that are tied to one of them."""
    given = set(names)
    result = set(given)
    for group in tied_groups:
        if not given.isdisjoint(group):
            result.update(group)
    return result


def _check_tied_are_equal(
    tied_groups: list[list[str]], state: Mapping[str, Any], path: Path
) -> None:
    """Checks that names that stand for one tensor in the model have equal values in the file.

    Raises:
        CheckpointError: the values of two such names differ.
    """
    for group in tied_groups:
        names = [name for name in group if name in state]
        for name in names[1:]:
            if not _are_equal(state[names[0]], state[name]):
                raise CheckpointError(
                    f"loading {path}",
                    f"{names[0]} and {name} are one tensor in the model, and differ in the file",
                    "untie them in the model before loading",
                )


def _are_equal(first: Any, second: Any) -> bool:
    """Returns True if two tensors of a file have equal shapes and values.

    If their dtypes differ, the second one is converted to the dtype of the first.

    Args:
        first: a tensor that is mapped from the file, or a lazy one.
        second: another tensor of the same kind.
    """
    if first.shape != second.shape:
        return False
    if isinstance(first, Tensor):
        return torch.equal(first, second.to(first.dtype))

    num_per_read = MAX_BYTES_IN_MEMORY // 8  # an element takes 8 bytes at most
    for begin in range(0, first.num_elements, num_per_read):
        end = min(begin + num_per_read, first.num_elements)
        part = first.read_range(begin, end)
        if not torch.equal(part, second.read_range(begin, end).to(part.dtype)):
            return False
    return True


def _describe_casts(values: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Describes the conversions: ["converted 2 tensors from torch.float32 to torch.bfloat16"].

    There is one text for each pair of dtypes.

    Args:
        values: the values that are loaded, by plain names.
        own: the state of the model by plain names.
    """
    counts: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
    for name, value in values.items():
        if isinstance(value, Tensor | TensorInShards) and value.dtype != own[name].dtype:
            counts[value.dtype, own[name].dtype] += 1

    texts = []
    for (saved_dtype, own_dtype), count in counts.items():
        tensors = count_noun(count, "tensor")
        texts.append(f"converted {tensors} from {saved_dtype} to {own_dtype}")
    return texts
