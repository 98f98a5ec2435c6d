"""The cause of a difference between two runs, and helpers that put its evidence into words.

A `Cause` is a code of the catalogue of findings (`lockstep.verify.catalogue`) together with the
evidence for it, one sentence each. The code LS210 means that the cause is not known.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lockstep.verify.names import path_of
from lockstep.wording import join_and_count

MAX_ITEMS_IN_TEXT = 6

# Prefixes that wrappers add to the names of parameters, as in "module.layer.weight".
_WRAPPER_PREFIX = re.compile(r"^((_forward_module|_orig_mod|module|_fsdp_wrapped_module)\.)+")


@dataclass(frozen=True)
class Cause:
    """The best explanation of a difference."""

    # The code of the catalogue.
    code: str
    # Facts from the records that support the cause, one sentence each.
    evidence: tuple[str, ...]
    # The tensors that the cause is about; empty for all tensors that differ.
    names: tuple[str, ...] = ()
    # The ratio of gradients or learning rates to those of one process, if it is a single number.
    ratio: float | None = None
    # Replaces the title of the catalogue's entry if that title says more than is known.
    title: str = ""

    def with_evidence(self, *sentences: str) -> Cause:
        """Returns a copy of the cause with further evidence at the end."""
        return replace(self, evidence=(*self.evidence, *sentences))


def format_items(items: Sequence[object]) -> str:
    """Lists the first items of a sequence: "a, b and 3 more".

    Args:
        items: strings, numbers, or tuples. A tuple, such as a sample as (loader, epoch, index), is
            represented by its last element.
    """
    names = [str(item[-1] if isinstance(item, tuple) else item) for item in items]
    return join_and_count(names, MAX_ITEMS_IN_TEXT)


def script_names(names: Iterable[str]) -> list[str]:
    """Returns tensor names as the script knows them: "Net/module.fc.weight" becomes "fc.weight"."""
    short_names = []
    for name in names:
        name_in_model = path_of(name) or name  # some names have no model in front
        short_names.append(_WRAPPER_PREFIX.sub("", name_in_model))
    return short_names


def name_ranks(ranks: Iterable[int]) -> list[str]:
    """Names ranks for `format_by_process`: `[0, 2]` becomes `["rank 0", "rank 2"]`."""
    return [f"rank {rank}" for rank in ranks]


def name_reference(num_replicas: int) -> list[str]:
    """Names the records of the run on one process for `format_by_process`.

    Args:
        num_replicas: number of records: one for each replica of the model that the process trains.
    """
    if num_replicas == 1:
        return ["one process"]
    return [f"replica {replica} on one process" for replica in range(num_replicas)]


def format_by_process(values: Sequence[object], processes: Sequence[str]) -> str:
    """Says which processes have which value: "0.1 on one process and rank 0, 0.2 on rank 1".

    Args:
        values: the value of each process; numbers or strings.
        processes: names of the processes, see `name_reference` and `name_ranks`.
    """
    processes_by_value: dict[object, list[str]] = defaultdict(list)
    for process, value in zip(processes, values, strict=True):
        processes_by_value[value].append(process)

    texts = []
    for value, names in processes_by_value.items():
        texts.append(f"{value} on {' and '.join(names)}")

    return ", ".join(texts)
