"""Reading and comparing journals whose files were written by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemas
import torch
from click.testing import CliRunner
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.cli.main import main
from lockstep.errors import CheckpointError, SettingError
from lockstep.extensions.framed_records import MARK, framed, json_content
from lockstep.extensions.journal.file_format import (
    FORMAT_VERSION,
    TensorTable,
    loss_content,
    step_head,
    table_content,
)
from lockstep.extensions.journal.hashing import TensorHasher, TensorPart
from lockstep.extensions.journal.manifest import git_commit
from lockstep.extensions.journal.reading import read_journal
from lockstep.extensions.journal.tensors import owners_by_size

pytestmark = pytest.mark.unit

NAMES = ("a", "b", "running_mean")
NUM_PARAMETERS = 2


def step_record(
    number: int,
    rank: int,
    changes: Mapping[str, int],
    virtual_ranks: Sequence[int],
    *,
    has_hashes: bool = True,
) -> bytes:
    """A step in which rank 0 has written all but half of the weights, which rank 1 has.

    Args:
        number: of the step.
        rank: 0 or 1.
        changes: added to the hash of a name: "gradient 3 b", "weights a", "state b", "loss 3".
        virtual_ranks: which this rank has computed.
        has_hashes: False if only the losses are written down.
    """
    losses = []
    gradients = []
    for virtual_rank in virtual_ranks:
        losses.append(0.5 + changes.get(f"loss {virtual_rank}", 0))
        for name in NAMES[:NUM_PARAMETERS]:
            gradients.append(7 * number + changes.get(f"gradient {virtual_rank} {name}", 0))
    weights = [2**63 + number + changes.get(f"weights {name}", 0) * (1 - rank) for name in NAMES]
    state = []
    if rank == 0:
        state = [number + changes.get(f"state {name}", 0) for name in NAMES[:NUM_PARAMETERS]]
    if not has_hashes:
        return framed(loss_content(number, virtual_ranks, losses))
    head = step_head(number, virtual_ranks, table_number=1)
    hashes = np.array([*gradients, *weights, *state], np.uint64)
    return framed(head + np.array(losses, "<f8").tobytes() + hashes.tobytes())


def write_start(
    folder: Path,
    start: int,
    steps: Sequence[int],
    *,
    begins_at: int | None = None,
    changes: Mapping[int, Mapping[str, int]] | None = None,
    virtual_ranks: int | None = 4,
    every: int = 1,
    manifest: Mapping[str, str] | None = None,
    weights_at_beginning: Mapping[str, int] | None = None,
) -> list[Path]:
    """Writes the two files of a start; `changes` are those of `step_record`, by step."""
    folder.mkdir(exist_ok=True)
    paths = []
    for rank in range(2):
        header = {
            "journal": FORMAT_VERSION, "rank": rank, "ranks": 2, "virtual_ranks": virtual_ranks,
            "every": every, "time": 0.0,
        }  # fmt: skip
        state = tuple(range(NUM_PARAMETERS)) if rank == 0 else ()
        table = TensorTable(NAMES, NUM_PARAMETERS, tuple(range(len(NAMES))), state)
        weights = {"a": 1, "b": 2, **(weights_at_beginning or {})}
        records = [
            framed(json_content(header)),
            framed(json_content({"manifest": {"threads": "1", **(manifest or {})}})),
            framed(
                json_content(
                    {
                        "begins_at": steps[0] if begins_at is None else begins_at,
                        "weights": weights if rank == 0 else {"a": 5},
                    }
                )
            ),
            framed(table_content(table, 1)),
        ]
        half = (virtual_ranks or 0) // 2
        parts = range(half * rank, half * (rank + 1)) if virtual_ranks else [rank]
        for number in steps:
            changes_of_step = (changes or {}).get(number, {})
            has_hashes = number % every == 0
            records.append(step_record(number, rank, changes_of_step, parts, has_hashes=has_hashes))
        path = folder / f"{start:020d}-00.rank{rank}.journal"
        path.write_bytes(b"".join(records))
        paths.append(path)
    return paths


def diff(tmp_path: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        main, ["journal", "diff", str(tmp_path / "a"), str(tmp_path / "b"), *options]
    )
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"gradient 1 b": 1, "gradient 3 a": 1, "weights a": 1},
            [
                "step 2: the gradient diverged first; equal up to step 1",
                "  gradient: virtual rank 1, b; and 1 other virtual rank",
                "  weights after the step: a",
            ],
        ),
        (
            {"loss 3": 1, "gradient 3 a": 1},
            [
                "step 2: the loss diverged first; equal up to step 1",
                "  loss: virtual rank 3, 0.5 in A and 1.5 in B",
                "  gradient: virtual rank 3, a",
            ],
        ),
        (
            {"state b": 1},
            [
                "step 2: the optimizer state diverged first; equal up to step 1",
                "  gradient: equal on all virtual ranks",
                "  optimizer state after the step: b",
            ],
        ),
        (
            {"weights running_mean": 1},
            [
                "step 2: the weights diverged first; equal up to step 1",
                "  gradient: equal on all virtual ranks",
                "  weights after the step: running_mean",
            ],
        ),
        (
            {"weights a": 1, "state b": 1},
            [
                "step 2: the weights and optimizer state diverged first; equal up to step 1",
                "  gradient: equal on all virtual ranks",
                "  optimizer state after the step: b",
                "  weights after the step: a",
            ],
        ),
    ],
)
def test_what_parts_first_is_named(
    changes: dict[str, int], expected: list[str], tmp_path: Path
) -> None:
    write_start(tmp_path / "a", 1, range(4))
    write_start(tmp_path / "b", 1, range(4), changes={2: changes, 3: {"weights b": 9}})
    exit_code, output = diff(tmp_path)
    assert exit_code == 1
    assert output.splitlines()[2:] == [*expected, "the manifests are equal"]
    exit_code, text = diff(tmp_path, "--json", "-")
    comparison = json.loads(text)
    schemas.check("journal_diff", comparison)
    assert comparison["first_difference"]["step"] == 2


def test_equal_journals(tmp_path: Path) -> None:
    write_start(tmp_path / "a", 1, range(4), manifest={"torch": "2.13.0", "seed": "0"})
    write_start(tmp_path / "b", 1, range(6), manifest={"torch": "2.11.0"})
    exit_code, output = diff(tmp_path)
    assert exit_code == 0
    assert output.splitlines()[2:] == [
        "note: 2 steps only in B",
        "equal in every bit: 4 steps",
        "the manifests differ:",
        "  torch: A has 2.13.0, B has 2.11.0",
        "  seed: A has 0, B has none",
    ]


def test_copies_that_a_file_manager_has_made_are_no_files_of_ranks(tmp_path: Path) -> None:
    write_start(tmp_path / "a", 1, range(1, 5))
    paths = write_start(tmp_path / "b", 2, range(1, 5))
    paths[0].with_name(f"{paths[0].stem} (copy).journal").write_bytes(paths[0].read_bytes())
    assert diff(tmp_path)[0] == 0


def test_weights_that_differ_from_the_beginning(tmp_path: Path) -> None:
    write_start(tmp_path / "a", 1, range(2))
    write_start(tmp_path / "b", 1, range(2), weights_at_beginning={"b": 3, "frozen": 1})
    exit_code, output = diff(tmp_path)
    assert exit_code == 1
    assert "the weights differ before the first step: b, frozen\n" in output
    assert read_journal(tmp_path / "a").weights_at_beginning == {"a": 6, "b": 2}


def test_steps_between_those_that_both_have(tmp_path: Path) -> None:
    write_start(tmp_path / "a", 1, range(0, 30, 10))
    write_start(tmp_path / "b", 1, range(21), changes={20: {"weights a": 1}})
    _, output = diff(tmp_path)
    assert (
        "step 20: the weights diverged first; equal up to step 10, the steps between were not "
        "written down by both\n"
    ) in output


ADVICE = (
    "  of steps without hashes only losses are known: to see what diverged before, train both "
    "again with --journal-every 1"
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {13: {"loss 3": 1}, 14: {"loss 0": 1}, 20: {"weights a": 1}},
            [
                "step 13: the loss diverged first; equal up to step 10, and losses up to step 12",
                "  loss: virtual rank 3, 0.5 in A and 1.5 in B",
                ADVICE,
            ],
        ),
        (
            {20: {"gradient 1 a": 1, "weights a": 1}},
            [
                "step 20: the gradient diverged first; equal up to step 10, and losses up to step "
                "19",
                "  gradient: virtual rank 1, a",
                "  weights after the step: a",
                ADVICE,
            ],
        ),
        (
            {11: {"loss 0": 1}},
            [
                "step 11: the loss diverged first; equal up to step 10",
                "  loss: virtual rank 0, 0.5 in A and 1.5 in B",
                ADVICE,
            ],
        ),
        (
            {0: {"gradient 1 a": 1}},
            ["step 0: the gradient diverged first", "  gradient: virtual rank 1, a"],
        ),
    ],
)
def test_steps_of_which_one_has_losses_only(
    changes: dict[int, dict[str, int]], expected: list[str], tmp_path: Path
) -> None:
    """Changes in the other hashes of steps between are not written down in A."""
    write_start(tmp_path / "a", 1, range(25), every=10)
    write_start(tmp_path / "b", 1, range(25), changes={12: {"weights a": 1}, **changes})
    exit_code, output = diff(tmp_path)
    assert exit_code == 1
    assert output.splitlines()[2:] == [*expected, "the manifests are equal"]


def test_journals_with_losses_only(tmp_path: Path) -> None:
    """The steps that both have begin after the first one with hashes."""
    write_start(tmp_path / "a", 1, range(1, 5), every=10)
    write_start(tmp_path / "b", 1, range(1, 5))
    exit_code, output = diff(tmp_path)
    assert exit_code == 0
    assert "equal losses: 4 steps, whose hashes are not in both\n" in output
    write_start(tmp_path / "b", 1, range(1, 5), virtual_ranks=2)
    exit_code, output = diff(tmp_path)
    assert exit_code == 2
    assert "no step has hashes in both" in output


def test_later_attempts_replace_steps(tmp_path: Path) -> None:
    """Start 1 trains to step 9; start 2 begins at step 4, and ends before it has trained as far.
    What start 1 has trained after step 4 has no part in the result."""
    write_start(tmp_path / "a", 1, range(10), changes={6: {"weights a": 1}})
    write_start(tmp_path / "a", 2, range(4, 6), changes={5: {"weights a": 2}})
    journal = read_journal(tmp_path / "a")
    assert journal.steps == [0, 1, 2, 3, 4, 5]
    assert journal.num_trained_again == 2
    write_start(tmp_path / "b", 1, range(6), changes={5: {"weights a": 2}})
    assert diff(tmp_path)[0] == 0
    # A start that was killed before it had written a step, but after it had begun at step 2.
    write_start(tmp_path / "a", 3, [], begins_at=2)
    assert read_journal(tmp_path / "a").steps == [0, 1]


def test_within_a_start_later_attempts_replace_steps_too(tmp_path: Path) -> None:
    write_start(tmp_path / "a", 1, [0, 1, 2, 3, 1, 2])
    assert read_journal(tmp_path / "a").steps == [0, 1, 2]


@pytest.mark.parametrize("num_bytes_lost", [1, 11, 60])
def test_a_torn_last_record_is_left_out(num_bytes_lost: int, tmp_path: Path) -> None:
    path, _ = write_start(tmp_path / "a", 1, range(4))
    path.write_bytes(path.read_bytes()[:-num_bytes_lost])
    journal = read_journal(tmp_path / "a")
    assert journal.steps == [0, 1, 2]
    assert journal.notes == [
        "start 1, rank 0: the last record is incomplete and left out, as if the process was killed "
        "while it wrote",
        "1 step that not all ranks have written down is left out",
    ]


def test_a_damaged_step_is_left_out(tmp_path: Path) -> None:
    path, _ = write_start(tmp_path / "a", 1, range(4))
    data = bytearray(path.read_bytes())
    begin_of_step_2 = [match.start() for match in re.finditer(MARK, data)][-2]
    data[begin_of_step_2 + 30] ^= 1
    path.write_bytes(data)
    journal = read_journal(tmp_path / "a")
    assert journal.steps == [0, 1, 3]
    assert journal.notes[0] == (
        f"start 1, rank 0: 1 place in {path.name} cannot be read, "
        f"the first at byte {begin_of_step_2}"
    )


def test_steps_without_their_table_of_tensors_are_left_out(tmp_path: Path) -> None:
    """Which tensors their hashes belong to is not known."""
    for rank, path in enumerate(write_start(tmp_path / "a", 1, range(2))):
        data = path.read_bytes()
        if rank == 0:
            data = data.replace(b'"tensors"', b'"tensorz"')
        path.write_bytes(data + framed(loss_content(2, [rank], [0.5])))
    journal = read_journal(tmp_path / "a")
    assert journal.steps == [2]
    assert "1 place in" in journal.notes[0]
    assert journal.notes[1] == (
        "start 1, rank 0: the record that names the tensors of 2 steps cannot be read, so "
        "these are left out"
    )


def test_a_start_whose_beginning_is_damaged_on_one_rank_is_left_out_with_a_note(
    tmp_path: Path,
) -> None:
    write_start(tmp_path / "a", 1, range(2))
    path, _ = write_start(tmp_path / "a", 2, [2, 3], begins_at=2)
    data = bytearray(path.read_bytes())
    data[20] ^= 1  # in the header, the first record
    path.write_bytes(data)
    journal = read_journal(tmp_path / "a")
    assert journal.steps == [0, 1]
    assert journal.notes == [
        f"start 2, rank 0: 1 place in {path.name} cannot be read, the first at byte 0",
        "start 2 is left out: its beginning on rank 0 is damaged",
    ]


def test_a_journal_whose_only_beginning_is_damaged_is_an_error_that_names_the_record(
    tmp_path: Path,
) -> None:
    path, _ = write_start(tmp_path / "a", 1, range(2))
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"1 place in {path.name} cannot be read"):
        read_journal(tmp_path / "a")


def test_other_numbers_of_virtual_ranks(tmp_path: Path) -> None:
    write_start(tmp_path / "a", 1, range(2))
    write_start(tmp_path / "b", 1, range(2), virtual_ranks=2, changes={1: {"weights a": 1}})
    exit_code, output = diff(tmp_path)
    assert exit_code == 1
    assert "losses and gradients are not compared" in output
    assert "gradient: equal" not in output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda paths: paths[1].unlink(), "start 1 lacks the file of rank 1"),
        (lambda paths: [path.unlink() for path in paths], "the folder holds none"),
        (lambda paths: paths[0].write_bytes(b""), "no start of the run got as far"),
        (lambda paths: [path.write_bytes(b"x" * 50) for path in paths], "no start of the run"),
        (
            lambda paths: paths[0].write_bytes(framed(json_content({"journal": 9}))),
            f"is of version 9, and {FORMAT_VERSION} is read here",
        ),
    ],
)
def test_folders_that_cannot_be_read(change: Any, message: str, tmp_path: Path) -> None:
    write_start(tmp_path / "a", 1, range(2))
    change(write_start(tmp_path / "b", 1, range(2)))
    exit_code, output = diff(tmp_path)
    assert exit_code == 2
    assert message in output


def test_journals_without_a_common_step(tmp_path: Path) -> None:
    write_start(tmp_path / "a", 1, range(2))
    write_start(tmp_path / "b", 1, range(2, 4))
    exit_code, output = diff(tmp_path)
    assert exit_code == 2
    assert "they have no step in common" in output


def train(folder: Path, learning_rate: float = 0.1, **options: Any) -> None:
    """Four steps of a model with a buffer, on one process without virtual ranks."""
    options = {"journal_every": 1, **options}
    with lockstep.init(device="cpu", journal=folder, **options) as world:
        loader = DataLoader(TensorDataset(torch.arange(8.0).view(8, 1)), batch_size=2)
        model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        model, optimizer, loader = world.prepare(model, optimizer, loader)
        for (x,) in loader:
            world.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def test_runs_without_virtual_ranks(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b")
    exit_code, output = diff(tmp_path)
    assert exit_code == 0
    assert "without virtual ranks gradients are not written down" in output
    train(tmp_path / "c", learning_rate=0.2)
    result = CliRunner().invoke(main, ["journal", "diff", str(tmp_path / "a"), str(tmp_path / "c")])
    assert "step 0: the weights diverged first\n" in result.output
    assert "  weights after the step: 0.weight, 0.bias, 1.weight, ... (4 tensors)" in result.output
    result = CliRunner().invoke(main, ["journal", "show", str(tmp_path / "a"), "--last", "2"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"{tmp_path / 'a'}: 4 steps, 0 to 3; 1 process"
    assert [line.partition(":")[0] for line in lines[-2:]] == ["step 2", "step 3"]
    assert CliRunner().invoke(main, ["journal", "show", str(tmp_path)]).exit_code == 2


def test_every_second_step(tmp_path: Path) -> None:
    train(tmp_path / "a", journal_every=2)
    train(tmp_path / "b")
    journal = read_journal(tmp_path / "a")
    assert [journal.read_step(number).has_hashes for number in journal.steps] == [True, False] * 2
    exit_code, output = diff(tmp_path)
    assert exit_code == 0
    assert "4 steps, 0 to 3; 1 process" in output
    assert "4 steps, 0 to 3; hashes every 2 steps; 1 process" in output
    assert (
        "equal in every bit: 2 steps; equal losses: 2 steps between them, whose hashes are not in "
        "both"
    ) in output
    (tmp_path / "c").mkdir()
    train(tmp_path / "c", learning_rate=0.2, journal_every=4)
    result = CliRunner().invoke(main, ["journal", "diff", str(tmp_path / "a"), str(tmp_path / "c")])
    # Step 0 has parted the weights, but none of those before it have hashes.
    assert "step 0: the weights diverged first\n" in result.output
    assert "--journal-every 1" not in result.output
    result = CliRunner().invoke(main, ["journal", "show", str(tmp_path / "a"), "--last", "2"])
    step_2, step_3 = result.stdout.splitlines()[-2:]
    assert step_2.startswith("step 2: losses ")
    assert "weights" in step_2
    assert step_3.startswith("step 3: losses ")
    assert "weights" not in step_3


def hashes_of(model: torch.nn.Module) -> list[int]:
    parameters = list(model.parameters())
    parts = [TensorPart(tuple(p.shape), p.dtype, place) for place, p in enumerate(parameters)]
    hashes = TensorHasher(parts, len(parts), torch.device("cpu")).hashes(parameters)
    return [number % 2**64 for number in hashes.tolist()]


@pytest.mark.parametrize("has_loader", [True, False])
def test_weights_are_those_after_the_last_optimizer(has_loader: bool, tmp_path: Path) -> None:
    """One optimizer steps for each batch, and after it another for every second one."""
    expected = []
    with lockstep.init(device="cpu", journal=tmp_path, journal_every=1) as world:
        model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))
        often = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        rarely = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
        model, often, rarely = world.prepare(model, often, rarely)
        batches: Any = torch.arange(8.0).view(4, 2, 1)
        if has_loader:
            batches = world.loader(batches.view(8, 1), batch_size=2)
        for number, x in enumerate(batches):
            world.backward(model(x).square().mean())
            often.step()
            # Without a loader every step of an optimizer counts as one.
            if has_loader and number % 2:
                rarely.step()
            often.zero_grad()
            rarely.zero_grad()
            expected.append(hashes_of(model))
    journal = read_journal(tmp_path)
    assert journal.steps == [0, 1, 2, 3]
    assert [journal.read_step(number).weights.tolist() for number in range(4)] == expected


def test_a_checkpoint_is_saved_after_the_steps_before_it(tmp_path: Path) -> None:
    with lockstep.init(device="cpu", journal=tmp_path / "a") as world:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.prepare(model, optimizer)
        checkpoint = world.checkpoint(tmp_path / "b", model=model, optimizer=optimizer)
        for _ in range(3):
            world.backward(model(torch.ones(2, 1)).mean())
            optimizer.step()
        checkpoint.save()
        assert read_journal(tmp_path / "a").steps == [0, 1, 2]


def test_settings_that_make_no_journal(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="not a whole number"):
        lockstep.init(device="cpu", journal=tmp_path, journal_every=0)
    with pytest.raises(SettingError, match="replicas train weights of their own"):
        lockstep.init("diloco", device="cpu", journal=tmp_path)


def test_the_commit_is_read_from_gits_files(tmp_path: Path) -> None:
    assert git_commit(tmp_path) == "none"
    git = tmp_path / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    folder = tmp_path / "package" / "scripts"
    folder.mkdir(parents=True)
    assert git_commit(folder) == "none"
    (git / "packed-refs").write_text("# pack-refs with: peeled\nabc refs/heads/main\n")
    assert git_commit(folder) == "abc"
    (git / "refs" / "heads" / "main").write_text("def\n")
    assert git_commit(folder) == "def"
    worktree = git / "worktrees" / "w"
    worktree.mkdir(parents=True)
    (worktree / "HEAD").write_text("ref: refs/heads/main\n")
    (worktree / "commondir").write_text("../..\n")
    (tmp_path / "package" / ".git").write_text(f"gitdir: {worktree}\n")
    assert git_commit(folder) == "def"
    (worktree / "HEAD").write_text("123\n")
    assert git_commit(folder) == "123"


def test_tensors_are_divided_by_their_sizes() -> None:
    assert owners_by_size([4, 4, 4, 4], 2) == [0, 0, 1, 1]
    assert owners_by_size([1, 1, 100, 1], 3) == [0, 0, 1, 2]
    assert owners_by_size([0, 0], 3) == [0, 0]
    assert owners_by_size([], 2) == []
