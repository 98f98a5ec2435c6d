"""Which arguments may differ from rank to rank: those that number the process, by name or value."""

from __future__ import annotations

import pytest

from lockstep.distributed.arguments import leave_out_numbers, shared_arguments

pytestmark = pytest.mark.unit

ONE_MACHINE = ("a", "a")
TWO_MACHINES = ("a", "a", "b", "b")


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        (["/a/train.py", "--lr", "1"], ["train.py", "--lr", "1"]),
        (["t.py", "--local_rank=3", "--lr", "1"], ["t.py", "--lr", "1"]),
        (["t.py", "--local-rank", "3", "x"], ["t.py", "x"]),
        (["t.py", "--node_rank", "1", "--nnodes", "2"], ["t.py", "--nnodes", "2"]),
        (["t.py", "--local_rankings", "3"], ["t.py", "--local_rankings", "3"]),
        (["t.py", "--rank", "1"], ["t.py", "--rank", "1"]),  # its value decides
        (["t.py", "--node_rank"], ["t.py"]),
        ([], []),
    ],
)
def test_arguments_that_name_the_process_are_left_out(argv: list[str], kept: list[str]) -> None:
    assert shared_arguments(argv) == kept


def differ(values: str, arguments: str, hosts: tuple[str, ...], by_hand: bool) -> bool:
    """True if `train.py` with these arguments is told to differ.

    Args:
        values: what stands for `{}` in the arguments on each rank, such as `0 1`.
        arguments: such as `-rn {} -ws 2`.
        hosts: the machine of each rank.
        by_hand: True if no launcher has numbered the ranks.
    """
    commands = [["train.py", *arguments.replace("{}", value).split()] for value in values.split()]
    kept = leave_out_numbers(commands, hosts, by_hand=by_hand)
    return any(command != kept[0] for command in kept)


@pytest.mark.parametrize(
    "arguments",
    [
        *("-rn {} -ws 2", "--rank-number={} --lr 0.1", "{} 2 tcp://host:1", "-q{} -v", "+d.p={}"),
        *("--rank-number {} --gpu {}", "-rn {} -g {}", "-nr {} --device cuda:{}", "--me {} -v 0"),
    ],
)
@pytest.mark.parametrize(
    ("values", "hosts"),
    [
        ("0 1", ONE_MACHINE),
        ("0 1 2", ("a", "a", "a")),
        ("0 1 2 3", TWO_MACHINES),
        ("0 0 1 1", TWO_MACHINES),  # the number of the machine
        ("0 0 1 1", ("a", "a", "a", "a")),  # two machines are tried out on one
        ("0 1 0 1", TWO_MACHINES),  # the local rank
        ("0 0 2 2", TWO_MACHINES),  # the machine's first rank
    ],
)
def test_by_hand_an_argument_of_any_name_may_number_the_processes(
    arguments: str, values: str, hosts: tuple[str, ...]
) -> None:
    assert not differ(values, arguments, hosts, by_hand=True)


@pytest.mark.parametrize(
    ("values", "arguments", "hosts"),
    [
        ("0.1 0.2", "--lr {}", ONE_MACHINE),
        ("0 1", "--lr 0.{}", ONE_MACHINE),
        ("1 2", "--layers {}", ONE_MACHINE),
        ("0 1 3", "-rn {}", ("a", "a", "a")),
        ("1 0", "-rn {}", ONE_MACHINE),  # rank 0 has 1
        ("0 1 0", "-rn {}", ("a", "a", "a")),
        ("0 1", "-rn {} --layers {}", ONE_MACHINE),  # which of them is the rank, only names say
        ("0 1", "--me {} --layers {}", ONE_MACHINE),
        ("0 1", "--me {} --lr 0.{}", ONE_MACHINE),
        ("2 3", "--nodes {}", ONE_MACHINE),
        ("8 16", "--lora-rank {}", ONE_MACHINE),
        ("0 1", "--seed={} -r {}", ONE_MACHINE),
        ("a b", "-rn {}", ONE_MACHINE),
    ],
)
def test_other_differences_are_told(values: str, arguments: str, hosts: tuple[str, ...]) -> None:
    assert differ(values, arguments, hosts, by_hand=True)


@pytest.mark.parametrize(
    ("values", "arguments", "is_told"),
    [
        ("0 1 0 1", "--k={} --more {}", False),  # ${local_rank}, in one command for all ranks
        ("0 0 1 1", "--fold {}", True),  # two runs that met by mistake
        ("0 0 1 1", "-nr {}", False),
        ("0 1 2 3", "--rank-number {}", False),
    ],
)
def test_under_a_launcher_an_argument_of_any_name_may_be_the_local_rank(
    values: str, arguments: str, is_told: bool
) -> None:
    assert differ(values, arguments, TWO_MACHINES, by_hand=False) == is_told


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize(
    ("commands", "is_told"),
    [
        (("--rank 0", "--rank 1"), False),
        (("--rank=0 -v", "-v --rank 1"), False),
        (("-v", "-v --rank 1"), False),  # 0 is the default
        (("--rank 8", "--rank 8"), False),
        (("--rank 8", "--rank 16"), True),  # of an adapter
        (("-v", "-v --rank 8"), True),
        (("--rank 8 --rank 0", "--rank 1"), False),  # the last one counts
        (("--rank 1", "--rank 0"), True),
        (("--rank auto", "--rank 1"), True),
        (("--rank 0 --lr 1", "--rank 1 --lr 2"), True),
    ],
)
def test_the_rank_is_an_argument_that_numbers_the_processes(
    commands: tuple[str, str], is_told: bool, by_hand: bool
) -> None:
    split = [["train.py", *command.split()] for command in commands]
    first, second = leave_out_numbers(split, ONE_MACHINE, by_hand=by_hand)
    assert (first != second) == is_told


def test_beside_the_rank_no_argument_of_any_name_is_the_rank() -> None:
    assert differ("0 1", "--rank {} --layers {}", ONE_MACHINE, by_hand=True)
    assert differ("0 1", "--rank {} --layers={}", ONE_MACHINE, by_hand=True)
    assert not differ("0 1", "--rank 0 --me {}", ONE_MACHINE, by_hand=True)  # of the machine
    commands = [["t.py", "--gpu", "0"], ["t.py", "--rank", "1", "--gpu", "1"]]
    first, second = leave_out_numbers(commands, ONE_MACHINE, by_hand=True)
    assert first == second


def test_the_rank_of_four_processes_on_two_machines() -> None:
    for values in ("0 1 2 3", "0 0 1 1", "0 0 2 2", "0 1 0 1", "8 8 8 8"):
        assert not differ(values, "--rank {}", TWO_MACHINES, by_hand=True)
    for values in ("8 8 16 16", "4 8 16 32", "1 2 3 4"):
        assert differ(values, "--rank {}", TWO_MACHINES, by_hand=True)


def test_what_depends_on_the_machine_may_differ() -> None:
    hosts = ("a", "a", "b")
    for values, arguments in (("2 2 1", "--nproc {}"), ("0,1 0,1 3", "--gpu {}")):
        assert not differ(values, arguments, hosts, by_hand=True)
        assert not differ(values, arguments, hosts, by_hand=False)
    assert differ("2 2 1", "--layers {}", hosts, by_hand=True)


def test_commands_of_different_length_are_left_alone() -> None:
    commands = [["train.py", "-rn", "0"], ["train.py", "-rn", "1", "-v"]]
    assert leave_out_numbers(commands, ONE_MACHINE, by_hand=True) == commands
