"""Which arguments of the script may differ from rank to rank: those that number the process.

All ranks must have the same arguments, but for those that say which process this is. Launchers pass
`--local_rank 1`. Without a launcher, the script is started once for each process, and an argument
under any name says which one it is: `train.py -rn 0 -ws 2` and `train.py -rn 1 -ws 2`. So an
argument counts as a number of the process if its values on all ranks are the ranks, or one of the
other numberings of `_is_numbering`. Which devices a process uses may differ as well: `--gpu 0,1`.

The same goes for `--rank`, which in some scripts is the rank of an adapter (LoRA): 8 on one machine
and 16 on another is a difference.

With two ranks the values 0 and 1 may be a coincidence, such as `--layers 0` and `--layers 1`. That
is why an argument whose name does not say what it numbers may differ only if no other one does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path

PLACE_FLAGS = frozenset(
    {
        "--local_rank",
        "--local-rank",
        "--node_rank",
        "--node-rank",
        "--machine_rank",
        "--machine-rank",
    }
)
"""Arguments that number the process or its machine, whatever their values are."""
RANK_FLAG = "--rank"
"""It is often given to all processes but the first, in whose script 0 is the default."""

WORDS_OF_PLACES = ("rank", "node", "machine", "host", "proc", "worker", "local")
"""A name with one of these words may say which process or machine it is."""
SHORT_NAMES_OF_PLACES = frozenset({"r", "rn", "nr"})
"""Names that scripts often give to the rank and the machine's number."""

WORDS_OF_DEVICES = ("gpu", "cuda", "device")
SHORT_NAMES_OF_DEVICES = frozenset({"g"})

# Such as `--rank-number=1`, `+dist.rank=1`, `-r1`, `1`, `0,1` and `--device=cuda:1`.
NUMBERED_ARGUMENT = re.compile(
    r"(?P<name>[-+]*[A-Za-z][\w.-]*=|-[A-Za-z]|)(?:cuda:)?(?P<numbers>[0-9]+(?:,[0-9]+)*)"
)


def shared_arguments(argv: Sequence[str]) -> list[str]:
    """Returns the script's name and its arguments, except those of `PLACE_FLAGS`.

    `["/home/me/train.py", "--local_rank", "1", "--lr", "0.1"]` gives `["train.py", "--lr", "0.1"]`.
    """
    if not argv:
        return []
    script_name = Path(argv[0]).name  # machines may have the script in different folders
    shared, _ = _split_off([script_name, *argv[1:]], PLACE_FLAGS)
    return shared


def _split_off(arguments: Sequence[str], flags: Collection[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments without some flags and their values, and these values."""
    others = []
    values = []
    value_follows = False
    for argument in arguments:
        flag, equals_sign, value = argument.partition("=")
        if value_follows:  # `--rank 1`: the value is the next argument
            values.append(argument)
            value_follows = False
        elif flag not in flags:
            others.append(argument)
        elif equals_sign:
            values.append(value)
        else:
            value_follows = True
    return others, values


def leave_out_numbers(
    commands: Sequence[Sequence[str]], hosts: Sequence[str], *, by_hand: bool
) -> list[list[str]]:
    """Returns the arguments of each rank without those that number the process or its machine.

    Args:
        commands: what `shared_arguments` returned on each rank, in the order of the ranks.
        hosts: the machine of each rank.
        by_hand: True if no launcher has numbered the ranks, so that the rank itself may be an
            argument of any name. A launcher starts the same command for all ranks of a machine, in
            which it replaces `${local_rank}`.
    """
    commands, rank_has_its_name = _leave_out_rank(commands, hosts)
    if len({len(command) for command in commands}) != 1:
        return commands  # nothing says which of their arguments belong together
    differing = []
    for position in range(len(commands[0])):
        if len({command[position] for command in commands}) > 1:
            differing.append(position)

    left_out = set()
    for position in differing:
        name_and_values = _read_numbers(commands, position)
        if name_and_values is None:
            continue
        name, values = name_and_values
        if _has_word(name, WORDS_OF_DEVICES, SHORT_NAMES_OF_DEVICES):
            left_out.add(position)
            continue
        if any("," in value for value in values):
            continue
        numbers = [int(value) for value in values]
        local_ranks, ranks_of_machine = _count_on_machines(hosts)
        is_numbering = _is_numbering(numbers, hosts, local_ranks)
        if _has_word(name, WORDS_OF_PLACES, SHORT_NAMES_OF_PLACES):
            may_differ = is_numbering or numbers == ranks_of_machine
        elif by_hand:
            may_differ = is_numbering and len(differing) == 1 and not rank_has_its_name
        else:
            may_differ = numbers == local_ranks
        if may_differ:
            left_out.add(position)
    kept = []
    for command in commands:
        kept.append([text for position, text in enumerate(command) if position not in left_out])
    return kept


def _leave_out_rank(
    commands: Sequence[Sequence[str]], hosts: Sequence[str]
) -> tuple[list[list[str]], bool]:
    """Leaves out `--rank` where its values number the processes.

    Args:
        commands: the arguments of each rank.
        hosts: the machine of each rank.

    Returns:
        The arguments of each rank; and True if `--rank` was left out and its values differ.
    """
    unchanged = [list(command) for command in commands]
    without_rank = []
    numbers = []
    for command in commands:
        others, values = _split_off(command, {RANK_FLAG})
        number = values[-1] if values else "0"
        if not number.isdecimal():
            return unchanged, False
        without_rank.append(others)
        numbers.append(int(number))
    local_ranks, _ = _count_on_machines(hosts)
    if not _is_numbering(numbers, hosts, local_ranks):
        return unchanged, False
    return without_rank, len(set(numbers)) > 1


def _read_numbers(commands: Sequence[Sequence[str]], position: int) -> tuple[str, list[str]] | None:
    """Returns an argument's name and its value on each rank; None if the values are no numbers.

    Args:
        commands: the arguments of each rank.
        position: which of them; of `-rn 1`, the position of the `1`.
    """
    names = set()
    values = []
    for command in commands:
        match = NUMBERED_ARGUMENT.fullmatch(command[position])
        if match is None:
            return None
        name = match["name"]
        before = command[position - 1] if position > 0 else ""
        if not name and before.startswith("-"):
            name = before
        names.add(name)
        values.append(match["numbers"])
    if len(names) != 1:
        return None
    return names.pop(), values


def _has_word(name: str, words: Sequence[str], short_names: frozenset[str]) -> bool:
    """True if the name of an argument, such as `--rank-number=`, has a word or is a short name."""
    plain_name = name.strip("-+=").lower()
    return plain_name in short_names or any(word in plain_name for word in words)


def _is_numbering(numbers: list[int], hosts: Sequence[str], local_ranks: list[int]) -> bool:
    """True if these are the ranks, the local ranks, or the numbers or first ranks of the machines.

    Args:
        numbers: the value of an argument on each rank.
        hosts: the machine of each rank.
        local_ranks: the number of each rank among those of its machine.
    """
    first_rank_of_host: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        first_rank_of_host.setdefault(host, rank)
    first_ranks = [first_rank_of_host[host] for host in hosts]
    if numbers in (local_ranks, first_ranks):
        return True
    # Ranks are 0, 1, 2, 3; machines of two ranks each are 0, 0, 1, 1. The machines are not taken
    # from `hosts`, because two "machines" may be tried out on one.
    if numbers[0] != 0:
        return False
    return all(after - before in (0, 1) for before, after in pairwise(numbers))


def _count_on_machines(hosts: Sequence[str]) -> tuple[list[int], list[int]]:
    """Returns the number of each rank among those of its machine, and how many that machine has."""
    ranks_seen: Counter[str] = Counter()
    local_ranks = []
    for host in hosts:
        local_ranks.append(ranks_seen[host])
        ranks_seen[host] += 1
    return local_ranks, [ranks_seen[host] for host in hosts]
