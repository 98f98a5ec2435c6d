"""Where scripts went another way, and what they wrote to, told of ranks that part."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
import torch
import warm

from lockstep.verify.cause import Cause
from lockstep.verify.divergence import Divergence
from lockstep.verify.line_findings import describe_writes, new_branches, splitting_branches
from lockstep.verify.recording import writes
from lockstep.verify.recording.branches import NOTE_OUTCOME, Branches, add_notes
from lockstep.verify.recording.tensor_values import storage_address
from lockstep.verify.tolerance import FLOAT64
from lockstep.verify.training_record import RankUpdate, Update

pytestmark = pytest.mark.unit

MODULE = """
def sign(n):
    if n > 0:
        return "plus"
    while n < -1:
        n += 1
    return "minus" if n else "none"


def njit(function):
    return function


@njit
def compiled(n):
    return 1 if n else 0
"""


def test_tests_are_told_and_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("get_code", "source_to_code"):
        monkeypatch.setattr(SourceFileLoader, name, getattr(SourceFileLoader, name))
    branches = Branches()
    branches.install()
    path = tmp_path / "signs.py"
    path.write_text(MODULE)
    module = ModuleType("signs")
    code = SourceFileLoader("signs", str(path)).get_code("signs")
    assert code is not None
    exec(code, module.__dict__)
    assert not (tmp_path / "__pycache__").exists()
    branches.pop_outcomes()
    assert [module.sign(n) for n in (2, -3)] == ["plus", "minus"]
    assert branches.pop_outcomes() == {
        (str(path), 3, 4): 3,
        (str(path), 5, 6): 3,
        (str(path), 7, 7): 1,
    }
    assert (module.sign(0), module.compiled(0)) == ("none", 0)
    assert branches.pop_outcomes() == {(str(path), n, m): 2 for n, m in ((3, 4), (5, 6), (7, 7))}


REPORTS = """
if rank == 0:
    print(f"loss {loss.item():.3f}")
if step % 10 == 0 and rank == 0:
    logger.info("step %d", step)
    history.append(float(loss))
else:
    pass
if rank == 0:
    print("once")
    model.eval()
"""


def test_tests_that_only_decide_what_is_printed_are_not_told() -> None:
    told = ast.unparse(add_notes(ast.parse(REPORTS), "train.py"))
    assert told.count(NOTE_OUTCOME) == 1
    assert f"if {NOTE_OUTCOME}(('train.py', 9, 11), rank == 0)" in told


PLACE = ("/u/train.py", 7, 9)


def steps(*ways: tuple[int, int, int]) -> Divergence:
    """What a test came to in each step on one process, and on two ranks; they part in the last."""
    runs = [
        [Update([RankUpdate(branch_outcomes={PLACE: each[n]}) for n in ranks]) for each in ways]
        for ranks in ((0,), (1, 2))
    ]
    return Divergence(*runs, FLOAT64, len(ways) - 1, "gradients")


@pytest.mark.parametrize(
    ("ways", "told"),
    [
        (((1, 1, 1), (1, 2, 2)), "true on one process, false on rank 0 and rank 1"),
        (((1, 1, 1), (2, 2, 1)), "false on one process and rank 0, true on rank 1"),
        (((1, 1, 2), (1, 1, 2)), ""),  # so it was before
        (((1, 1, 1), (3, 1, 2)), ""),  # as data may have it
        (((1, 2, 2),), ""),  # of what comes before the first step
        (((1, 1, 1), (1, 0, 1)), ""),
    ],
)
def test_another_way_is_told_where_it_is_new(
    ways: tuple[tuple[int, int, int], ...], told: str
) -> None:
    words = new_branches(steps(*ways), Cause("LS402", ()))
    assert len(words) == bool(told)
    assert all(f"train.py:7: {told}" in text for text in words)


def test_another_way_of_the_first_step_is_told_where_nothing_else_is_known() -> None:
    (words,) = new_branches(steps((1, 2, 2)), Cause("LS210", ("nothing",)))
    assert words.startswith(
        "in this step the test took another branch at train.py:7: true on one process"
    )
    assert new_branches(steps((1, 2, 2)), Cause("LS210", (words,))) == []


def test_ranks_that_went_different_ways_at_the_end() -> None:
    other = ("/u/train.py", 3, 3)
    (words,) = splitting_branches([{other: 1, PLACE: 1}, {other: 3, PLACE: 2}])
    assert words.endswith("train.py:7: true on rank 0, false on rank 1")
    assert not splitting_branches([{PLACE: 1}, {}])
    assert not splitting_branches([])


def test_the_line_that_wrote_is_told_with_what_it_is_under() -> None:
    stack = (("/u/net.py", 20), ("/u/train.py", 8))
    case = steps((1, 1, 2))
    ranks = [replace(case.actual[0], write_stacks={"w": stack}), case.actual[1]]
    case = replace(case, parallel_run=[Update(ranks)])
    assert describe_writes(case, ["v"]) == []
    assert describe_writes(case, ["w"]) == [
        "rank 0 last wrote to them by net.py:20; of rank 1 no write was seen",
        "that is under train.py:7: true on rank 0, false on rank 1",
    ]
    both = [replace(rank, write_stacks={"w": stack}) for rank in ranks]
    assert describe_writes(replace(case, parallel_run=[Update(both)]), ["w"]) == [
        "ranks 0-1 last wrote to them by net.py:20"
    ]


def test_a_write_by_no_line_of_the_script_leaves_the_last_one_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, bias = torch.ones(2), torch.ones(2)
    log = writes.WriteLog()
    log.watched_addresses = frozenset({storage_address(weight), storage_address(bias)})
    monkeypatch.setattr(writes, "user_stack", lambda: (("train.py", 3),))
    log.note_write(weight)
    monkeypatch.setattr(writes, "user_stack", lambda: ())
    log.note_write(weight)
    log.note_write(bias)
    assert log.pop_stacks() == {storage_address(weight): (("train.py", 3),)}


TRAINING = """
import copy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(4)
x = torch.randn(48, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=12 // size, sampler=DistributedSampler(data, shuffle=False))
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)))
teacher = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
teacher.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
{before}
for x, y in loader:
    with torch.no_grad():
        wanted = {target}
    loss = F.mse_loss(model(x), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {after}
"""
AVERAGED = """if rank == 0:
        with torch.no_grad():
            teacher[0].weight.mul_(0.9)
"""


@pytest.mark.parametrize(
    ("before", "target", "after", "code", "told"),
    [
        (
            "",
            "y + teacher(x)",
            AVERAGED,
            "LS304",
            [
                "rank 0 last wrote to them by train.py:32: teacher[0].weight.mul_(0.9); "
                "of rank 1 no write was seen",
                "that is under train.py:30: if rank == 0: true on rank 0, false on rank 1",
            ],
        ),
        (
            "",
            "y",
            "plateau.step((2 * rank - 1) * plateau.last_epoch)",
            "LS402",
            ["ReduceLROnPlateau was given", "it was set by train.py:30: plateau.step("],
        ),
        (
            "teacher.train()",
            "teacher(x)",
            "",
            "LS306",
            ["the statistics of BatchNorm layers of a model that is not trained: 1"],
        ),
    ],
)
def test_what_made_the_ranks_part_is_told(
    before: str, target: str, after: str, code: str, told: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        TRAINING.replace("{before}", before).replace("{target}", target).replace("{after}", after)
    )
    first = warm.verify(script, steps=4).as_json()["findings"][0]
    assert first["code"] == code, first
    for text in told:
        assert any(text in seen for seen in first["seen"]), first["seen"]
