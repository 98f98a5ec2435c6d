"""Matches the names of tensors in a file with those in a model, if wrappers have changed them.

DDP and DataParallel put `module.` before every name below them, `torch.compile` puts `_orig_mod.`,
and users' own classes put `model.` or `net.`. No prefix is removed blindly: every combination of
removing such prefixes from the names in the file and adding others is compared with the names in
the model, and the combination that makes most names equal is used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product

from lockstep.checkpoint.differences import OptionalShape
from lockstep.torch_compat import COMPILED_CHILD_NAME

WRAPPER_PARTS = (COMPILED_CHILD_NAME, "module")
"""Parts of names that wrappers add anywhere in a model."""
REMOVABLE_PARTS = ((), (COMPILED_CHILD_NAME,), ("module",), WRAPPER_PARTS)
"""What is tried to be removed from the names of a file: nothing, one of these parts, or both."""
PREFIX_PARTS = frozenset({*WRAPPER_PARTS, "model", "net"})
"""Parts that may stand at the beginning of all names."""


@dataclass(frozen=True)
class _Renaming:
    """A way to turn the names in a file into names in a model."""

    removed_parts: tuple[str, ...]
    """Parts that are removed anywhere in a name, except as its last part."""
    removed_prefix: str
    """The prefix that is removed next. Names without it have no counterpart in the model."""
    added_prefix: str
    """The prefix that is added last."""

    def apply(self, cleaned_names: Mapping[str, str], model: Collection[str]) -> dict[str, str]:
        """Removes and adds the prefixes, and keeps the names that are then in the model.

        Args:
            cleaned_names: {name in the file: the same name without `removed_parts`}.
            model: the names in the model.

        Returns:
            {name in the file: name in the model}.
        """
        model_names = {}
        for file_name, cleaned_name in cleaned_names.items():
            if not cleaned_name.startswith(self.removed_prefix):
                continue
            new_name = self.added_prefix + cleaned_name[len(self.removed_prefix) :]
            if new_name in model:
                model_names[file_name] = new_name
        return model_names

    def num_changes(self) -> int:
        """Returns how many parts this renaming removes or adds."""
        # Prefixes such as "module.model." have a dot after each part.
        num_removed = len(self.removed_parts) + self.removed_prefix.count(".")
        return num_removed + self.added_prefix.count(".")

    def describe(self) -> tuple[str, ...]:
        """Returns a text for each change: ("removed the prefix 'module.'",)."""
        changes = [f"removed every {part + '.'!r}" for part in self.removed_parts]
        if self.removed_prefix:
            changes.append(f"removed the prefix {self.removed_prefix!r}")
        if self.added_prefix:
            changes.append(f"added the prefix {self.added_prefix!r}")
        return tuple(changes)


@dataclass(frozen=True)
class Match:
    """The names in a file, matched with the names in a model."""

    name_pairs: Mapping[str, str]
    """{name in the file: name in the model}, for the names that are in both."""
    num_fitting: int
    """How many of these tensors have the same shape on both sides."""
    changes: tuple[str, ...]
    """What was done to the names of the file, as texts."""


def match_names(
    file_shapes: Mapping[str, OptionalShape], model_shapes: Mapping[str, OptionalShape]
) -> Match:
    """Finds the renaming that turns most names in a file into names in a model.

    A renaming removes certain parts inside names, then removes a prefix, then adds a prefix. All
    combinations are tried. A renaming changes all names in the same way, and is not used if it
    would make two names equal.

    Args:
        file_shapes: the shapes of the file's tensors by name.
        model_shapes: the shapes of the model's tensors by name.
    """
    best = Match(name_pairs={}, num_fitting=0, changes=())
    best_score = (-1, -1, 0)  # lower than the score of any renaming
    model_prefixes = _known_prefixes(model_shapes)
    for removed_parts in REMOVABLE_PARTS:
        cleaned_names = {name: remove_parts(name, removed_parts) for name in file_shapes}
        two_become_equal = len(set(cleaned_names.values())) < len(cleaned_names)
        if two_become_equal:
            continue
        no_name_has_these_parts = list(cleaned_names.values()) == list(file_shapes)
        if removed_parts and no_name_has_these_parts:
            continue  # this is the same as removing none

        # Prefixes that wrappers may have added, such as "module.".
        file_prefixes = _known_prefixes(cleaned_names.values())
        for removed_prefix, added_prefix in product(file_prefixes, model_prefixes):
            renaming = _Renaming(removed_parts, removed_prefix, added_prefix)
            name_pairs = renaming.apply(cleaned_names, model_shapes)
            num_fitting = sum(
                file_shapes[file_name] == model_shapes[model_name]
                for file_name, model_name in name_pairs.items()
            )

            # The best renaming has the most names with equal shapes; among these the most names;
            # among these the fewest changes.
            score = (num_fitting, len(name_pairs), -renaming.num_changes())
            if score > best_score:
                best = Match(name_pairs, num_fitting, changes=renaming.describe())
                best_score = score
    return best


def _known_prefixes(names: Collection[str]) -> list[str]:
    """Returns the prefixes of these names that wrappers may have added, the empty one first.

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
    """Removes certain parts from a tensor's name, except from its end.

    Without "_orig_mod": "block._orig_mod.weight" becomes "block.weight".
    """
    *leading_parts, last_part = name.split(".")
    remaining = [part for part in leading_parts if part not in parts]
    return ".".join([*remaining, last_part])
