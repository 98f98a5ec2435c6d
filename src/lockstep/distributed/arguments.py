"""Which arguments of the script may differ from rank to rank.

All ranks must have the same arguments, except where a difference is known to be harmless. Four
kinds of arguments may differ:

- the number of the process or its machine, such as `--rank 1`, `--node_rank 1` or `-rn 1`. The name
  must say so, and the value on each rank must be the rank, the local rank, or the number or first
  rank of the machine. `--rank 8` and `--rank 16` is another model.
- which devices the process uses, such as `--gpu 0`, `--device cuda:1` or `--devices 0,1`;
- how many processes the machine has, such as `--nproc_per_node 2`, if it has so many;
- the number of the process under any name, where nothing else can be its number. Without a launcher
  the script is started once for each process, and `train.py -x 0` and `train.py -x 1` may be how
  each one gets its rank. So one argument may differ, if the script itself has numbered the
  processes and no other argument differs. The first process may then leave the argument out, as
  its number is the default. A launcher that replaces `${local_rank}` starts one command for all
  processes of a machine, so what differs among them is the local rank.

A name says what an argument is only if each of its words belongs to that kind: `--lora-rank`,
`--batch-size-per-gpu`, `--num-workers` and `--preprocess` are settings of the training.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NOUNS_OF_PLACES = frozenset({"rank", "node", "machine", "host", "rn", "nr"})
"""Words for a process or a machine. Scripts often call the rank `-rn`, and the node `-nr`."""
NOUNS_OF_MACHINES = frozenset({"node", "machine", "host", "nr"})
NOUNS_OF_PROCESSES = frozenset({"process", "proc", "worker"})
"""Words that name a process only beside a word for a number: `--process-id`. `--process 1` may be
a switch."""
WORDS_FOR_NUMBERS = frozenset({"id", "idx", "index", "number"})
NOUNS_OF_DEVICES = frozenset({"gpu", "gpus", "cuda", "device", "devices"})
NOUNS_OF_COUNTS = frozenset(
    {"nproc", "nprocs", "procs", "processes", "ngpu", "ngpus", "gpus", "devices"}
)
"""Words for the number of processes, of which each uses one device."""

WORDS_BESIDE_PLACES = WORDS_FOR_NUMBERS | {
    *("local", "global", "world", "group", "current", "this", "my", "first", "start")
}
WORDS_BESIDE_DEVICES = WORDS_FOR_NUMBERS | {"ids", "visible", "local"}
WORDS_BESIDE_COUNTS = frozenset({"num", "n", "number", "of", "per", "node", "machine", "host"})
SECTIONS = frozenset({"dist", "distributed", "ddp", "env", "runtime", "trainer"})
"""Sections of a configuration in which such arguments are: `+dist.rank=1`, `trainer.devices=0`."""

# `--rank=1`, `rank=1` and `+dist.rank=1`, or `-r1` and `-rn1`, or a value whose name stands before
# it.
NAME_AND_VALUE = re.compile(
    r"(?P<name>[-+]*[A-Za-z][\w.-]*=|-[A-Za-z]{1,2}(?=[0-9])|)(?P<value>.+)"
)
# A number, as `int` reads it, that no other text stands for: not `01`.
NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
# `0`, `cuda:1`, `0,1`, `[0,1]`. No machine has a hundred devices.
DEVICES = re.compile(r"(?:[a-z]+:)?[0-9]{1,2}(?:,(?:[a-z]+:)?[0-9]{1,2})*")


PLACE_FLAGS = (
    *("--rank", "--local_rank", "--local-rank", "--node_rank", "--node-rank"),
    *("--machine_rank", "--machine-rank"),
)
"""Flags that are often given to all processes but the first, for which the script has the default
0."""
BLANK = "..."
"""Stands for a value that may differ."""


@dataclass(frozen=True)
class Place:
    """The numbers of one process, which its arguments may contain."""

    rank: int
    local_rank: int
    machine: int
    processes_of_machine: int


def command_of_script(argv: Sequence[str]) -> list[str]:
    """Returns the name of the script, without its folder, and its arguments.

    Machines may have the script in different folders.
    """
    if not argv:
        return []
    return [Path(argv[0]).name, *argv[1:]]


@dataclass(frozen=True)
class Launch:
    """How the processes were started: it decides which arguments may be a process's number."""

    places: Sequence[Place]
    """In the order of the ranks."""
    rank_set_by_script: bool
    """The script has given `init` the rank, which may then come from an argument of any name."""
    ranks_set_by_hand: bool
    """The script or the user has numbered the processes, and no launcher."""
    has_macro: bool
    """The launcher replaces `${local_rank}` in the arguments."""


def blank_out_harmless_differences(
    commands: Sequence[Sequence[str]], launch: Launch
) -> list[list[str]]:
    """Returns the arguments of each rank, with `...` for each value that differs and may.

    `train.py --rank 0 --lr 0.1` and `train.py --rank 1 --lr 0.1` both become
    `train.py --rank ... --lr 0.1`.

    Args:
        commands: what `command_of_script` returned on each rank, in the order of the ranks.
        launch: how the ranks were started.
    """
    aligned = _with_rank_flags_last(commands, launch)
    if not _are_equally_long(aligned):
        return aligned  # nothing says which of their arguments belong together

    num_arguments = len(aligned[0])
    differing_positions = []
    for position in range(num_arguments):
        if len({command[position] for command in aligned}) > 1:
            differing_positions.append(position)

    # If only one argument differs, it may be the rank under any name: `train.py -x 0` and
    # `train.py -x 1`.
    is_only_difference = len(differing_positions) == 1

    # The values are read from `aligned` and blanked in a copy.
    blanked = [list(command) for command in aligned]
    for position in differing_positions:
        name_and_values = _read_argument(aligned, position)
        if name_and_values is None:
            continue

        name, values = name_and_values
        if _may_differ(name, values, launch, is_only_difference=is_only_difference):
            for command in blanked:
                command[position] = _blank_out_value(command[position])

    return blanked


def _with_rank_flags_last(commands: Sequence[Sequence[str]], launch: Launch) -> list[list[str]]:
    """Returns the arguments of each rank, so that each flag has the same position on all ranks.

    A flag such as --rank may be missing on some ranks. It goes last on all ranks, with 0 where it
    is missing:

        train.py -v             train.py -v --rank 0
        train.py --rank=1 -v    train.py -v --rank 1

    If the script itself has set the rank, the flag may have any name, such as -rn.

    Args:
        commands: the arguments of each rank.
        launch: how the ranks were started.
    """
    aligned = [list(command) for command in commands]
    for flag in PLACE_FLAGS:
        if any(_values_of_flag(command, flag) for command in aligned):
            aligned = [_with_flag_last(command, flag) for command in aligned]
    if launch.rank_set_by_script:
        return _with_missing_flag_last(aligned)
    return aligned


def _blank_out_value(argument: str) -> str:
    """Replaces the value of an argument: `--rank=1` -> `--rank=...`, `1` -> `...`, `-r1` -> `...`.

    A value without its name belongs to the flag before it, as in `--rank 1`.
    """
    if "=" not in argument:
        return BLANK
    name, _ = argument.rsplit("=", maxsplit=1)
    return f"{name}={BLANK}"


def _values_of_flag(command: Sequence[str], flag: str) -> list[str]:
    """Returns the values that a flag has, usually one; empty if the flag is not given."""
    _, values = _split_off(command, flag)
    return values


def _with_flag_last(command: Sequence[str], flag: str) -> list[str]:
    """Returns the arguments with a flag and its value at the end, with 0 if it is not given.

    `["train.py", "--rank=1", "-v"]` gives `["train.py", "-v", "--rank", "1"]`. Of several values
    the last one counts, as in argparse.
    """
    others, values = _split_off(command, flag)
    value = values[-1] if values else "0"
    return [*others, flag, value]


def _with_missing_flag_last(commands: Sequence[list[str]]) -> list[list[str]]:
    """Gives the value 0 to ranks that leave out a flag such as -rn, and puts it last on all ranks.

        train.py          train.py -rn 0
        train.py -rn 1    train.py -rn 1

    Nothing changes if all ranks have as many arguments, or another flag is missing, too.
    """
    if _are_equally_long(commands):
        return list(commands)

    for flag in _flags_in(max(commands, key=len)):
        if not _some_ranks_leave_out(flag, commands):
            continue

        # It is the only flag that is missing if all commands are equally long with it.
        commands_with_flag = [_with_flag_last(command, flag) for command in commands]
        if _are_equally_long(commands_with_flag):
            return commands_with_flag
    return list(commands)


def _some_ranks_leave_out(flag: str, commands: Sequence[list[str]]) -> bool:
    """True if a flag with a value, such as -rn in `train.py -rn 1`, is missing on some ranks.

    In `train.py -v` the flag -v has no value, so it is a switch, and does not count.
    """
    commands_without_value = [command for command in commands if not _values_of_flag(command, flag)]
    is_switch = any(flag in command for command in commands_without_value)
    return bool(commands_without_value) and not is_switch


def _are_equally_long(commands: Sequence[Sequence[str]]) -> bool:
    """Returns True if all commands have the same number of arguments."""
    return len({len(command) for command in commands}) == 1


def _flags_in(command: Sequence[str]) -> list[str]:
    """Returns the flags of a command: `-rn` and `--lr` of `train.py -rn 1 --lr=0.1 7`."""
    flags = []
    for argument in command:
        if argument.startswith("-"):
            flag, _ = _flag_and_value(argument)
            flags.append(flag or argument)
    return flags


def _flag_and_value(argument: str) -> tuple[str, str]:
    """Returns the flag and the value of an argument that has both, and otherwise two empty texts.

    `--rank=1` gives ("--rank", "1"), and `-r1` gives ("-r", "1").
    """
    match = NAME_AND_VALUE.fullmatch(argument)
    if match is None or not match["name"]:
        return "", ""
    return match["name"].removesuffix("="), match["value"]


def _split_off(command: Sequence[str], flag: str) -> tuple[list[str], list[str]]:
    """Returns the arguments without a flag and its values, and the values.

    With the flag `--rank`, both `train.py --rank 1 -v` and `train.py --rank=1 -v` are split into
    `["train.py", "-v"]` and `["1"]`.
    """
    others: list[str] = []
    values: list[str] = []
    remaining = iter(command)
    for argument in remaining:
        flag_of_value, value = _flag_and_value(argument)
        if argument == flag:  # `--rank 1`: the next argument is the value, if there is one
            values += itertools.islice(remaining, 1)
        elif flag_of_value == flag:  # `--rank=1`
            values.append(value)
        else:
            others.append(argument)
    return others, values


def _may_differ(name: str, values: list[str], launch: Launch, *, is_only_difference: bool) -> bool:
    """True if an argument is of one of the kinds that this module's docstring lists.

    `launch.places` has a *place* for each rank: its rank, its local rank, and its machine.

    Args:
        name: name of the argument; empty if it has none.
        values: its value on each rank.
        launch: how the ranks were started.
        is_only_difference: True if no other argument differs. Only then may an argument of any name
            be taken for the rank.
    """
    # The devices of the process: `--gpu 0`, `--device cuda:1`.
    if _names_devices(name) and all(_are_devices(value) for value in values):
        return True

    if not all(NUMBER.fullmatch(value) for value in values):
        return False

    numbers = [int(value) for value in values]

    # The number of the process or its machine: `--rank 1`, `--node_rank 1`.
    if _names_place(name):
        return _are_ranks_as_named(name, numbers, launch)

    # The number of processes on the machine: `--nproc_per_node 2`.
    if _names_count(name):
        return numbers == [place.processes_of_machine for place in launch.places]

    # A script that gives `init` the rank may have read it from any argument: `train.py -x 1`.
    if launch.rank_set_by_script:
        return is_only_difference and _are_ranks_or_machines(numbers, launch.places)

    # The user wrote `train.py -x ${local_rank}`, and the launcher has replaced the macro.
    return launch.has_macro and numbers == [place.local_rank for place in launch.places]


def _are_ranks_as_named(name: str, numbers: list[int], launch: Launch) -> bool:
    """True if the numbers are ranks, local ranks, machines, or first ranks of machines.

    The examples below are of four ranks, of which two are on each of two machines.

    Args:
        name: name of the argument, which is that of a rank or a machine.
        numbers: its value on each rank.
        launch: how the ranks were started.
    """
    # The ranks [0, 1, 2, 3], the local ranks [0, 1, 0, 1], or the machines [0, 0, 1, 1].
    if _are_ranks_or_machines(numbers, launch.places):
        return True

    # The first rank of each rank's machine: [0, 0, 2, 2].
    first_ranks_of_machines = [place.rank - place.local_rank for place in launch.places]
    if numbers == first_ranks_of_machines:
        return True

    # The machines in another order: [1, 1, 0, 0].
    names_machine = bool(_words(name) & NOUNS_OF_MACHINES)
    if names_machine and _are_machines_in_any_order(numbers, launch.places):
        return True

    # The user tries out a run of two machines on one: `--node_rank` is [0, 0, 1, 1], although all
    # four processes are on the same machine.
    return launch.ranks_set_by_hand and _counts_up(numbers)


def _read_argument(
    commands: Sequence[Sequence[str]], position: int
) -> tuple[str, list[str]] | None:
    """Returns the name of an argument and its value on each rank.

    Two ranks with `train.py --rank 0` and `train.py --rank 1` have ("--rank", ["0", "1"]) at
    position 2. If they have `train.py --rank=0` and so on, it is ("--rank=", ["0", "1"]) at
    position 1.

    Args:
        commands: the arguments of each rank.
        position: the index of the argument's value in each of these lists.

    Returns:
        The name and the values. None if the name is not the same on all ranks, or if a value is
        empty.
    """
    names = set()
    values = []
    for command in commands:
        # `--rank=1` is matched as "--rank=" and "1", `-r1` as "-r" and "1", and `1` as "" and "1".
        match = NAME_AND_VALUE.fullmatch(command[position])
        if match is None:  # the argument is an empty text
            return None

        names.add(match["name"] or _flag_before(command, position))
        values.append(match["value"])

    if len(names) != 1:
        return None
    return names.pop(), values


def _flag_before(command: Sequence[str], position: int) -> str:
    """Returns the flag whose value is the argument at a position; empty if there is none.

    In `--rank 1` the flag of `1` is `--rank`. In `--lr=0.1 1` the `1` has none, since `--lr` has
    its value already.
    """
    if position == 0:
        return ""
    argument_before = command[position - 1]
    has_value_already = "=" in argument_before
    is_flag = argument_before.startswith("-") and not has_value_already
    return argument_before if is_flag else ""


def _names_place(name: str) -> bool:
    """True for names such as `--rank`, `--node-id=` and `-rn`, and not for `--lora-rank`."""
    if _has_only(name, NOUNS_OF_PLACES, WORDS_BESIDE_PLACES | NOUNS_OF_PROCESSES):
        return True
    has_number = bool(_words(name) & WORDS_FOR_NUMBERS)
    return has_number and _has_only(name, NOUNS_OF_PROCESSES, WORDS_BESIDE_PLACES)


def _names_devices(name: str) -> bool:
    """True for names such as `--gpu`, `--device_ids` and `--cuda-device`, not for `--per-gpu`."""
    return _has_only(name, NOUNS_OF_DEVICES, WORDS_BESIDE_DEVICES)


def _names_count(name: str) -> bool:
    """True for names such as `--nproc_per_node` and `--num-gpus`."""
    return _has_only(name, NOUNS_OF_COUNTS, WORDS_BESIDE_COUNTS)


def _has_only(name: str, nouns: frozenset[str], other_words: frozenset[str]) -> bool:
    """True if a name has one of the nouns, and no words but nouns and the others."""
    words = _words(name)
    return bool(words & nouns) and words <= nouns | other_words | SECTIONS


def _words(name: str) -> set[str]:
    """Returns the words of a name: `--local_rank=` and `--localRank` have "local" and "rank"."""
    separated = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name.strip("-+="))
    return set(re.split(r"[-_.]", separated.lower()))


def _are_devices(value: str) -> bool:
    """True for `0`, `cuda:1`, `0,1` and `[0,1]`: numbers of different devices."""
    without_brackets = value.removeprefix("[").removesuffix("]")
    if DEVICES.fullmatch(without_brackets) is None:
        return False
    devices = without_brackets.split(",")
    return len(set(devices)) == len(devices)


def _are_ranks_or_machines(numbers: list[int], places: Sequence[Place]) -> bool:
    """True if these are the ranks, the local ranks, or the numbers of the machines.

    Args:
        numbers: the value of an argument on each rank.
        places: the numbers of each rank.
    """
    return numbers in (
        [place.rank for place in places],
        [place.local_rank for place in places],
        [place.machine for place in places],
    )


def _counts_up(numbers: list[int]) -> bool:
    """True for numbers such as 0, 0, 1, 1, 2: from 0 on, and none is left out."""
    if numbers[0] != 0:
        return False
    return all(after - before in (0, 1) for before, after in itertools.pairwise(numbers))


def _are_machines_in_any_order(numbers: list[int], places: Sequence[Place]) -> bool:
    """True if each machine has a number of its own, and these numbers are 0, 1, 2 and so on.

    Torchrun numbers machines in the order in which they happen to meet. The user may have numbered
    them in another order: [1, 1, 0, 0] for two machines with two ranks each.

    Args:
        numbers: the value of an argument on each rank.
        places: the numbers of each rank.
    """
    machines = [place.machine for place in places]
    pairs = set(zip(machines, numbers, strict=True))
    num_machines = len(set(machines))
    return len(pairs) == num_machines and set(numbers) == set(range(num_machines))
