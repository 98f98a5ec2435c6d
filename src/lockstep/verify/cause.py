"""The cause of a difference between two runs, and how its evidence is put into words.

A `Cause` is a code of the catalogue (`lockstep.verify.catalogue`) with the evidence for it, one
sentence each. LS210 means that the cause is not known.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

MAX_ITEMS_IN_TEXT = 6

# What wrappers put before the names of parameters: "module.layer.weight" is "layer.weight".
_WRAPPER_PREFIX = re.compile(r"^((_forward_module|_orig_mod|module|_fsdp_wrapped_module)\.)+")


@dataclass(frozen=True)
class Cause:
    """What explains a difference best."""

    # The code of the catalogue.
    code: str
    # What was found in the records, a sentence each.
    evidence: tuple[str, ...]
    # The tensors that the cause is about; empty if these are all that differ.
    names: tuple[str, ...] = ()
    # The ratio of gradients or learning rates to those of one process, if it is one number.
    ratio: float | None = None
    # Replaces the title of the catalogue's entry if less is known than that title says.
    title: str = ""

    def with_evidence(self, *sentences: str) -> Cause:
        """Returns the same cause with more evidence at the end."""
        return replace(self, evidence=(*self.evidence, *sentences))


def format_items(items: Sequence[object]) -> str:
    """Joins the first items with commas: "a, b and 3 more".

    Args:
        items: texts, numbers, or tuples. A tuple, such as a sample by (loader, epoch, index), is
            shown by its last element.
    """
    words = []
    for item in items[:MAX_ITEMS_IN_TEXT]:
        shown = item[-1] if isinstance(item, tuple) else item
        words.append(str(shown))

    text = ", ".join(words)
    num_left_out = len(items) - len(words)
    if num_left_out:
        text += f" and {num_left_out} more"

    return text


def script_names(names: Iterable[str]) -> list[str]:
    """Returns tensor names as the script knows them: "Net/module.fc.weight" is "fc.weight"."""
    short_names = []
    for name in names:
        name_in_model = name.partition("/")[2] or name  # a name may have no model in front
        short_names.append(_WRAPPER_PREFIX.sub("", name_in_model))
    return short_names


def format_by_process(values: Sequence[object], *, with_reference: bool = True) -> str:
    """Says which processes have which value: "0.1 on one process and rank 0, 0.2 on rank 1".

    Args:
        values: the value on one process, then that on each rank; they may be numbers or texts.
        with_reference: False if there is no value of one process before those of the ranks.
    """
    num_ranks = len(values) - 1 if with_reference else len(values)
    processes = [f"rank {rank}" for rank in range(num_ranks)]
    if with_reference:
        processes.insert(0, "one process")

    processes_by_value: dict[object, list[str]] = defaultdict(list)
    for process, value in zip(processes, values, strict=True):
        processes_by_value[value].append(process)

    texts = []
    for value, names in processes_by_value.items():
        texts.append(f"{value} on {' and '.join(names)}")

    return ", ".join(texts)
