"""Describes calls of collectives, so that the ranks can compare what each of them called.

A collective takes a *nest*: a tensor, number or string, or a list or dict of nests. The values
inside are its *leaves*. A `CallDescription` holds the name of the collective and, for each leaf, a
`LeafDescription` (type, dtype and shape). If a leaf cannot be sent, the description includes the
reason, called the *problem*; then all ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lockstep.errors import RanksDifferError
from lockstep.torch_compat import dtypes_named, pytree
from lockstep.wording import describe_type, format_ranks, group_by_key

_MAX_LEAVES_SHOWN = 8
"""How many leaves of a nest are listed in an error."""
_MAX_STRUCTURE_SHOWN = 200
"""How many characters of the structure of a nest are shown in an error."""

CARRIER_DTYPES = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}
"""The dtypes that torch or a backend cannot reduce, and those to which they are converted first."""
CARRIER_DTYPES.update(dict.fromkeys(dtypes_named("float8_e8m0fnu"), torch.float32))

ErrorTexts = tuple[str, str, str]
"""The texts of a `UsageError`: what was set, what was found, what to do."""


class LeafDescription(NamedTuple):
    """The type, dtype and shape of one leaf that a rank passed to a collective."""

    kind: str
    """`tensor`, `int`, `float`, `text`, or the name of a type that cannot be sent."""
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, leaf: Any) -> LeafDescription:
        """Describes a leaf."""
        if isinstance(leaf, Tensor):
            dtype_name = str(leaf.dtype).removeprefix("torch.")
            return cls("tensor", dtype_name, tuple(leaf.shape))
        if isinstance(leaf, int):  # also a bool
            return cls("int")
        if isinstance(leaf, float):
            return cls("float")
        if isinstance(leaf, str):
            return cls("text")
        return cls(type(leaf).__name__)

    @property
    def is_number(self) -> bool:
        """True for one real number (a Python number or a 0-dimensional tensor)."""
        if self.kind == "tensor":
            return not self.shape and "complex" not in self.dtype
        return self.kind in {"int", "float"}

    @property
    def is_floating_point(self) -> bool:
        """True for a Python float and for a tensor of a floating-point dtype."""
        return self.kind == "float" or "float" in self.dtype

    @property
    def num_rows(self) -> int:
        """The size of a tensor's first dimension; 1 for a 0-dimensional tensor."""
        return self.shape[0] if self.shape else 1

    def __str__(self) -> str:
        if self.kind == "tensor":
            return f"{self.dtype}{list(self.shape)}"
        return self.kind


class CallDescription(NamedTuple):
    """One rank's call of a collective, in a form that JSON can hold."""

    name: str
    detail: str = ""
    structure: str = ""
    """The structure of the nest, as text; empty if the collective takes none."""
    leaves: tuple[LeafDescription, ...] = ()
    problem: ErrorTexts | None = None
    """Why this rank cannot take part; all ranks raise it."""
    user_call: str | None = None
    """The call in the user's script that led here, such as "checkpoint.save()"; None if it is not
    known or was not looked up."""

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> CallDescription:
        """Restores a description that was sent as JSON, which turns tuples into lists."""
        name, detail, structure, leaf_fields, problem_fields, user_call = fields

        leaves = []
        for kind, dtype, shape in leaf_fields:
            leaves.append(LeafDescription(kind, dtype, tuple(shape)))

        problem: ErrorTexts | None = None
        if problem_fields is not None:
            problem = cast("ErrorTexts", tuple(problem_fields))

        return cls(name, detail, structure, tuple(leaves), problem, user_call)

    def __str__(self) -> str:
        parts = [self.name]
        if self.detail:
            parts.append(self.detail)
        if self.structure:
            parts.append(f"of {self._describe_leaves()}")
        return " ".join(parts)

    @property
    def is_list(self) -> bool:
        """True if the nest is a list of leaves."""
        return self.structure == _structure_of_list(len(self.leaves))

    def _describe_leaves(self) -> str:
        """Describes the leaves: "float32[2], int", or, if there are many, "a list of 251 texts"."""
        num_leaves = len(self.leaves)
        if num_leaves == 0:
            return "nothing"
        if num_leaves <= _MAX_LEAVES_SHOWN:
            return ", ".join(str(leaf) for leaf in self.leaves)
        if len(set(self.leaves)) == 1 and self.is_list:
            leaf = self.leaves[0]
            plural = f"tensors {leaf}" if leaf.kind == "tensor" else f"{leaf}s"
            return f"{self.structure} {plural}"  # the structure is "a list of 251"

        first_leaves = ", ".join(str(leaf) for leaf in self.leaves[:_MAX_LEAVES_SHOWN])
        return f"{first_leaves}, ... ({num_leaves} values)"


def describe_call(name: str, leaves: Sequence[Any], spec: pytree.TreeSpec) -> CallDescription:
    """Describes a call of a collective.

    Args:
        name: the name of the collective, such as "gather".
        leaves: the leaves of the nest that was passed, as pytree has flattened it.
        spec: the structure of the nest.
    """
    problem = None
    for leaf in leaves:
        problem = find_problem(name, leaf)
        if problem is not None:
            break

    return CallDescription(
        name,
        structure=_structure_text(spec, len(leaves)),
        leaves=tuple(LeafDescription.of(leaf) for leaf in leaves),
        problem=problem,
    )


def _structure_text(spec: pytree.TreeSpec, num_leaves: int) -> str:
    """Returns the structure of a nest as text: "a list of 3", or torch's text of any other nest.

    Torch's text of a list of 3 leaves is `TreeSpec(list, None, [*, *, *])`; of a long list it would
    be huge.
    """
    spec_of_list = pytree.tree_structure([0] * num_leaves)
    is_list_of_leaves = spec.type is list and spec == spec_of_list
    return _structure_of_list(num_leaves) if is_list_of_leaves else str(spec)


def _structure_of_list(length: int) -> str:
    """Returns the structure of a list of leaves, as text."""
    return f"a list of {length}"


def can_be_reduced(descriptions: Sequence[LeafDescription]) -> bool:
    """Returns True if a reduction can combine what the ranks passed as one leaf.

    Tensors must have the same dtype and shape on all ranks. Numbers of different types may be
    mixed.

    Args:
        descriptions: the description of the leaf on each rank.
    """
    if len(set(descriptions)) == 1:
        return True
    return all(description.is_number for description in descriptions)


def can_be_joined(descriptions: Sequence[LeafDescription]) -> bool:
    """Returns True if a gather can concatenate what the ranks passed as one leaf.

    Tensors may have different numbers of rows; everything else must be equal.

    Args:
        descriptions: the description of the leaf on each rank.
    """
    forms = set()
    for leaf in descriptions:
        forms.add((leaf.kind, leaf.dtype, len(leaf.shape), leaf.shape[1:]))
    return len(forms) == 1


def find_problem(name: str, leaf: Any) -> ErrorTexts | None:
    """Returns why the collective with this name cannot take the leaf, or None if it can."""
    if isinstance(leaf, Tensor):
        return _find_problem_of_tensor(name, leaf)
    if isinstance(leaf, float):
        return None
    if isinstance(leaf, int):  # also a bool
        # A broadcast sends integers as text, so they may have any size.
        if leaf.bit_length() < 64 or name == "broadcast":
            return None
        return (
            f"a collective on an integer of {leaf.bit_length()} bits",
            "it does not fit into 64 bits",
            "reduce it as a float, or as two integers",
        )
    if isinstance(leaf, str) and name in {"gather", "broadcast"}:
        return None
    if leaf is None and name == "broadcast":
        return None
    return (
        f"a collective on {describe_type(leaf)}",
        "collectives take tensors, numbers, text (gather and broadcast) and nests of them",
        "convert it first, for example with torch.as_tensor",
    )


def _find_problem_of_tensor(name: str, tensor: Tensor) -> ErrorTexts | None:
    """Returns why the collective with this name cannot take the tensor, or None if it can."""
    was_set = f"world.{name} of a tensor of {tensor.dtype}"
    can_be_sent = _torch_computes_with(tensor.dtype) or tensor.dtype in CARRIER_DTYPES
    if not can_be_sent:
        return was_set, "no backend can carry this dtype", "convert it first"
    if tensor.layout is not torch.strided or tensor.is_meta:
        return was_set, "it is sparse, or has no data", "convert it first, with .to_dense()"
    if name in {"max", "min"} and tensor.is_complex():
        return was_set, "complex numbers have no order", f"take the {name} of its .abs()"
    return None


def find_problem_of_source(source: Any, num_ranks: int) -> ErrorTexts | None:
    """Returns why `source` cannot be the rank that broadcasts, or None if it can."""
    is_a_rank = type(source) is int and 0 <= source < num_ranks
    if is_a_rank:
        return None
    last_rank = num_ranks - 1
    return (
        f"world.broadcast(..., source={source!r})",
        f"it is not the number of a rank: there are {num_ranks} of them",
        f"give an integer from 0 to {last_rank}",
    )


def _torch_computes_with(dtype: torch.dtype) -> bool:
    """Returns True if torch can compute with a dtype, which backends can then send, too.

    It cannot compute with dtypes that are only for storage: quantized ones and those of a few bits.
    """
    try:
        return torch.promote_types(dtype, torch.bool) is not None  # raises for these dtypes
    except RuntimeError:
        return False


@dataclass(frozen=True)
class PackedNest:
    """A nest as a broadcast sends it: one part that is sent as JSON, and the tensors after it."""

    form: dict[str, Any]
    """The part that is sent as JSON. "structure" is the structure of the nest. "leaves" is the list
    of its leaves, with a `LeafDescription` in the place of each tensor."""
    tensors: list[Tensor]
    problem: ErrorTexts | None
    """The reason why the nest cannot be sent, or None. If there is one, the form is empty."""


def pack_nest(value: Any) -> PackedNest:
    """Divides a nest into a part that a broadcast sends as JSON, and its tensors.

    In the part that is sent as JSON, the `form`, each tensor is replaced by its description. For
    `{"a": 3, "b": tensor}`, the leaves of the form are `[3, <dtype and shape of the tensor>]`.

    If the nest cannot be sent, the result contains only the `problem`.
    """
    leaves, spec = pytree.tree_flatten(value)
    problem = describe_call("broadcast", leaves, spec).problem
    if problem is not None:
        return PackedNest(form={}, tensors=[], problem=problem)

    structure = _serialize_if_possible(spec)
    if structure is None:
        problem = (
            "world.broadcast of a nest",
            _describe_unsendable_part(value),
            "send plain dictionaries with text as keys, lists and tuples",
        )
        return PackedNest(form={}, tensors=[], problem=problem)

    tensors = []
    sent_leaves = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            sent_leaves.append(LeafDescription.of(leaf))
        else:
            sent_leaves.append(leaf)

    form = {"leaves": sent_leaves, "structure": structure}
    return PackedNest(form, tensors, problem=None)


def _serialize_if_possible(spec: pytree.TreeSpec) -> str | None:
    """Returns the structure of a nest as text; None if it cannot be restored from the text."""
    try:
        structure = pytree.treespec_dumps(spec)
        return structure if pytree.treespec_loads(structure) == spec else None
    except Exception:  # a user's own container type may raise any error when it is serialized
        return None


def _describe_unsendable_part(value: Any) -> str:
    """Says which part of a nest keeps its structure from being sent, and where that part is.

    Args:
        value: a nest whose structure cannot be sent.
    """
    place, part = _find_unsendable_part(value, "value")
    if isinstance(part, dict):
        for key in part:
            if _serialize_if_possible(pytree.tree_structure({key: 0})) is None:
                return f"{place} has the key {key!r}, which cannot be sent"
    return f"{place} is {describe_type(part)}, whose structure cannot be sent"


def _find_unsendable_part(part: Any, place: str) -> tuple[str, Any]:
    """Finds the innermost part of a nest that cannot be sent, with its place.

    Args:
        part: a nest whose structure cannot be sent.
        place: how Python writes its place, such as `value['a']`.
    """
    for name, child in _named_children(part):
        if _serialize_if_possible(pytree.tree_structure(child)) is None:
            return _find_unsendable_part(child, place + name)
    return place, part


def _named_children(part: Any) -> list[tuple[str, Any]]:
    """Returns the parts directly inside of a part of a nest, each with its index in Python code.

    `{"a": 1}` gives `[("['a']", 1)]`, and `[1, 2]` gives `[("[0]", 1), ("[1]", 2)]`. The text is
    empty for a container whose items have no index.
    """
    # Everything inside of `part` counts as a leaf, so only `part` itself is opened.
    children, _ = pytree.tree_flatten(part, is_leaf=lambda inner: inner is not part)
    is_leaf = len(children) == 1 and children[0] is part
    if is_leaf:
        return []
    if isinstance(part, dict):
        return [(f"[{key!r}]", child) for key, child in zip(part, children, strict=True)]
    if isinstance(part, list | tuple):
        return [(f"[{index}]", child) for index, child in enumerate(children)]
    return [("", child) for child in children]


def calls_differ_error(calls: Sequence[CallDescription]) -> RanksDifferError:
    """Returns the error that all ranks raise if they called different collectives.

    Args:
        calls: the call of each rank, in the order of the ranks.
    """
    found = "; ".join(_describe_call_of_each_rank(calls))

    # First case: the user's script called different functions on different ranks, such as
    # "checkpoint.save()" and "world.gather()". A barrier is named last, since it is rarely the
    # mistake: it waits for anything that the other ranks do.
    user_calls = [call.user_call or _usual_user_call(call.name) for call in calls]
    ranks_of_user_call = group_by_key((name, rank) for rank, name in enumerate(user_calls))
    if len(ranks_of_user_call) > 1:
        ordered = sorted(ranks_of_user_call, key=lambda name: name == "world.barrier()")
        calls_and_ranks = ", ".join(
            f"{name} on {format_ranks(ranks_of_user_call[name])}" for name in ordered
        )
        return RanksDifferError(calls_and_ranks, found, advise_call_on_all_ranks(ordered))

    # Second case: all ranks called the same function, but with different arguments. It may have
    # called different collectives for them, such as "gather" and "exchange".
    collective_names = list(dict.fromkeys(call.name for call in calls))  # without duplicates
    if len(collective_names) == 1:
        what_was_called = user_calls[0].removesuffix("()")
    else:
        what_was_called = f"collectives: {' and '.join(collective_names)}"

    # Lists of text of different lengths are usually names that each rank has collected.
    if all(_gathers_list_of_texts(call) for call in calls):
        return RanksDifferError(
            what_was_called,
            found,
            "gather one text of each rank instead, such as json.dumps(the_list), and take the "
            "result apart with json.loads; the items of a list are gathered one by one, so all "
            "ranks need the same number of them",
        )

    return RanksDifferError(
        what_was_called,
        found,
        "call the same collective with the same structure, shapes and types on every rank",
    )


def _describe_call_of_each_rank(calls: Sequence[CallDescription]) -> list[str]:
    """Describes the calls: `["rank 0: sum of float32[2]", "rank 1: sum of float32[3]"]`.

    If the ranks have called the same collective with nests of different structures, the texts also
    show these: `"rank 0: sum of float32[2] in TreeSpec(dict, ['loss'], [*])"`.

    Args:
        calls: the call of each rank, in the order of the ranks.
    """
    structures = {call.structure for call in calls}
    collective_names = {call.name for call in calls}
    shows_structures = len(structures) > 1 and len(collective_names) == 1
    shortened = _shorten_to_difference(structures)

    texts = []
    for rank, call in enumerate(calls):
        description = _describe_as_users_call(call)
        # The description of a long list already begins with its structure.
        if shows_structures and call.structure not in description:
            description += f" in {shortened[call.structure]}"
        texts.append(f"rank {rank}: {description}")
    return texts


def _describe_as_users_call(call: CallDescription) -> str:
    """Describes a call; an exchange, which users never call, by the call that led to it."""
    if call.name == "exchange" and call.user_call:
        return call.user_call
    return str(call)


def _gathers_list_of_texts(call: CallDescription) -> bool:
    """Returns True for a call such as `world.gather(["a", "b"])`."""
    has_texts_only = all(leaf.kind == "text" for leaf in call.leaves)
    return call.name == "gather" and call.is_list and has_texts_only


def _shorten_to_difference(structures: Collection[str]) -> dict[str, str]:
    """Shortens structures to about where they first differ, each on one line.

    Structures of many items often have the same beginning. If they first differ in the names
    'top1' and 'top5', only the text around these names is shown: `...'loss', 'top1'], [*, *...` and
    `...'loss', 'top5'], [*, *...`.

    Returns:
        The shortened text of each structure.
    """
    on_one_line = {structure: " ".join(structure.split()) for structure in structures}
    num_common_chars = 0
    for chars in zip(*on_one_line.values(), strict=False):  # up to the end of the shortest text
        if len(set(chars)) > 1:
            break
        num_common_chars += 1
    # The first difference is in the middle of the part that is shown.
    begin = max(0, num_common_chars - _MAX_STRUCTURE_SHOWN // 2)

    shortened = {}
    for structure, text in on_one_line.items():
        if len(text) <= _MAX_STRUCTURE_SHOWN:
            shortened[structure] = text
            continue
        end = begin + _MAX_STRUCTURE_SHOWN
        before = "..." if begin > 0 else ""
        after = "..." if end < len(text) else ""
        shortened[structure] = f"{before}{text[begin:end]}{after}"
    return shortened


def advise_call_on_all_ranks(user_calls: Sequence[str]) -> str:
    """Returns the advice for an error about calls that only some ranks made.

    Args:
        user_calls: the calls as the user knows them, such as "world.barrier()".
    """
    if len(user_calls) == 1:
        return (
            f"all ranks must call {user_calls[0]}: take it out of `if world.is_main:`, and let no "
            "rank leave the loop before it earlier than others (break, return)"
        )
    return (
        f"all ranks must call {' and '.join(user_calls)}, in the same order: take what only some "
        "ranks call out of `if world.is_main:`"
    )


def _usual_user_call(collective_name: str) -> str:
    """Returns the call by which a script usually starts a collective: "sum" -> "world.sum()"."""
    if collective_name == "exchange":
        return "a collective of Lockstep's own"
    return f"world.{collective_name}()"
