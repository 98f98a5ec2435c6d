"""Finds out which tensor of a file belongs to which of a model, if wrappers have changed the names.

DDP and DataParallel put `module.` before every name below them, `torch.compile` puts `_orig_mod.`,
and people's own classes put `model.` or `net.`. No prefix is removed blindly: every combination of
removing such prefixes from the names of the file and adding others is tried against the names of
the model, and the one that makes most of them equal is used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product

from lockstep.checkpoint.differences import OptionalShape
from lockstep.distributed.torch_compat import COMPILED_CHILD_NAME

WRAPPER_PARTS = (COMPILED_CHILD_NAME, "module")
"""Parts of names that wrappers add anywhere in a model."""
REMOVABLE_PARTS = ((), (COMPILED_CHILD_NAME,), ("module",), WRAPPER_PARTS)
"""What is tried to be removed from the names of a file: nothing, one of these parts, or both."""
PREFIX_PARTS = frozenset({*WRAPPER_PARTS, "model", "net"})
"""Parts that may stand at the beginning of all names."""


@dataclass(frozen=True)
class _Renaming:
    """A way to turn the names of a file into names of a model."""

    removed_parts: tuple[str, ...]
    """Parts that are removed wherever they stand before the last part of a name."""
    removed_prefix: str
    """Removed after that. A name that does not begin with it has no counterpart."""
    added_prefix: str
    """Put before the names in the end."""

    def apply(self, names: Mapping[str, str], model: Collection[str]) -> dict[str, str]:
        """Returns those new names that are names of the model, by the names in the file.

        Args:
            names: the names without `removed_parts`, by the names in the file.
            model: the names of the model.
        """
        new_names = {}
        for name_in_file, name in names.items():
            if name.startswith(self.removed_prefix):
                new_name = self.added_prefix + name[len(self.removed_prefix) :]
                if new_name in model:
                    new_names[name_in_file] = new_name
        return new_names

    def num_changes(self) -> int:
        """Returns how many parts of names it removes or adds."""
        # Prefixes such as "module.model." have a dot after each part.
        num_removed = len(self.removed_parts) + self.removed_prefix.count(".")
        return num_removed + self.added_prefix.count(".")

    def describe(self) -> tuple[str, ...]:
        """Returns a text for each change, such as "removed the prefix 'module.'"."""
        changes = [f"removed every {part + '.'!r}" for part in self.removed_parts]
        if self.removed_prefix:
            changes.append(f"removed the prefix {self.removed_prefix!r}")
        if self.added_prefix:
            changes.append(f"added the prefix {self.added_prefix!r}")
        return tuple(changes)


@dataclass(frozen=True)
class Match:
    """Which names of a file belong to which names of a model."""

    names: Mapping[str, str]
    """The name in the model by the name in the file, for those that have one."""
    num_fitting: int
    """How many of them have the same shape on both sides."""
    changes: tuple[str, ...]
    """What was done to the names of the file, as texts."""


def match_names(file: Mapping[str, OptionalShape], model: Mapping[str, OptionalShape]) -> Match:
    """Finds the renaming that turns most names of the file into names of the model.

    Every renaming is tried that removes parts inside of names, then removes a prefix, then adds a
    prefix. All names are changed in the same way; two names never become one.

    Args:
        file: the shapes of the file's tensors by name.
        model: the shapes of the model's tensors by name.
    """
    best = Match({}, 0, ())
    best_score = (-1, -1, 0)  # lower than that of any renaming
    model_prefixes = _known_prefixes(model)
    for removed_parts in REMOVABLE_PARTS:
        inner_names = {name: remove_parts(name, removed_parts) for name in file}
        if len(set(inner_names.values())) < len(inner_names):
            continue  # two names would become one
        if removed_parts and list(inner_names.values()) == list(file):
            continue  # no name has these parts, so this is the first case again
        file_prefixes = _known_prefixes(inner_names.values())
        for removed_prefix, added_prefix in product(file_prefixes, model_prefixes):
            renaming = _Renaming(removed_parts, removed_prefix, added_prefix)
            names = renaming.apply(inner_names, model)
            fitting = [name for name, new_name in names.items() if file[name] == model[new_name]]
            # The best has most names with equal shapes, then most names, then fewest changes.
            score = (len(fitting), len(names), -renaming.num_changes())
            if score > best_score:
                best = Match(names, len(fitting), renaming.describe())
                best_score = score
    return best


def _known_prefixes(names: Collection[str]) -> list[str]:
    """Returns all prefixes of known parts that some name begins with, the empty one first.

    For "module.model.weight" these are "", "module." and "module.model.".
    """
    prefixes = {""}
    for name in names:
        prefix = ""
        for part in name.split(".")[:-1]:
            if part not in PREFIX_PARTS:
                break
            prefix += f"{part}."
            prefixes.add(prefix)
    return sorted(prefixes, key=lambda prefix: (len(prefix), prefix))


def remove_parts(name: str, parts: Collection[str]) -> str:
    """Returns a tensor's name without these parts, wherever they stand before its last part."""
    *leading_parts, last_part = name.split(".")
    remaining = [part for part in leading_parts if part not in parts]
    return ".".join([*remaining, last_part])
