from __future__ import annotations

import pytest

from lockstep.errors import SettingError
from lockstep.machine.topology import expand_tasks, first_host

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("n[1-3]", "n1"),
        ("n[01-03,7]", "n01"),
        ("n[098-101]", "n098"),
        ("n[9-11]-ib", "n9-ib"),
        ("login,gpu-[2,4],cpu[1-2]", "login"),
        ("gpu-[2,4],login", "gpu-2"),
        ("r[1-2]n[1-2]", "r1n1"),
        ("10.0.0.[5-6],a.b.c", "10.0.0.5"),
    ],
)
def test_the_first_of_a_host_list(text: str, host: str) -> None:
    assert first_host(text) == host


@pytest.mark.parametrize("text", ["", "n[1-", "n[a-b]", "n[]", "a,,b", "n]", "a b"])
def test_what_is_not_a_host_list_is_an_error(text: str) -> None:
    with pytest.raises(SettingError, match="host list"):
        first_host(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2])]
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert expand_tasks(text) == counts


@pytest.mark.parametrize("text", ["", "2x3", "(x3)", "2(x)", "a"])
def test_what_is_not_a_task_list_is_an_error(text: str) -> None:
    with pytest.raises(SettingError, match="tasks per node"):
        expand_tasks(text)
