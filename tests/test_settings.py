"""A setting is declared once; everything else that names it follows from that or is held to it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import pytest

import lockstep
from lockstep.cli.run import command
from lockstep.errors import SettingError
from lockstep.settings import (
    DECLARATIONS,
    OPTION_OF_LAUNCHER_VARIABLE,
    VERIFY_VARIABLE,
    Settings,
    check_names_of_variables,
    check_shares,
    parse_shares,
    resolve_settings,
    settings_of_ranks,
    whole_number_from_1,
)

pytestmark = pytest.mark.unit

REFERENCE = Path(__file__).parent.parent / "docs" / "reference.md"
GIVEN_BY_LAUNCHERS = {"rank", "world_size"}


def test_every_setting_is_an_argument_of_init() -> None:
    arguments = set(inspect.signature(lockstep.init).parameters)
    declared = {declaration.name for declaration in DECLARATIONS.values()}
    assert arguments == declared | GIVEN_BY_LAUNCHERS


def test_the_table_of_the_reference_has_every_setting() -> None:
    table = {}
    for line in REFERENCE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().strip("`") for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and cells[0] not in ("argument", "---"):
            table[cells[0]] = (cells[1], cells[2])
    expected = dict.fromkeys(GIVEN_BY_LAUNCHERS, ("", ""))
    for declaration in DECLARATIONS.values():
        option = declaration.option if declaration.help else ""
        variable = declaration.variable if declaration.reader is not None else ""
        expected[declaration.name] = (option, variable)
    assert table == expected


def test_lockstep_run_has_an_option_for_every_setting_with_a_help_text() -> None:
    options = {name for parameter in command.params for name in parameter.opts}
    for declaration in DECLARATIONS.values():
        assert (declaration.option in options) == bool(declaration.help)


def test_an_option_that_cannot_be_read_is_refused_before_anything_starts() -> None:
    from click.testing import CliRunner

    result = CliRunner().invoke(command, ["--num-micro-batches", "0", "train.py"])
    assert result.exit_code == click.UsageError.exit_code
    assert "Invalid value for '--num-micro-batches'" in result.output


def test_ranks_must_agree_on_what_changes_the_numbers() -> None:
    compared = settings_of_ranks(Settings())
    assert {"strategy", "seed", "precision", "num_micro_batches", "shares"} <= set(compared)
    assert not {"device", "join_timeout", "init_method"} & set(compared)
    # The folders may be called differently on each machine.
    one = settings_of_ranks(Settings(report="a"))
    assert one == settings_of_ranks(Settings(report="b"))
    assert one != compared


@pytest.mark.parametrize("text", ["0", "many", "-1"])
def test_a_variable_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(SettingError, match=f"LOCKSTEP_NUM_MICRO_BATCHES={text}"):
        resolve_settings({"LOCKSTEP_NUM_MICRO_BATCHES": text})


@pytest.mark.parametrize(
    ("variable", "value", "found", "do"),
    [
        ("PRECISION", "float16", "precisions are", "did you mean 'fp16'?"),
        ("BACKEND", "glo", "the backends are", "did you mean 'gloo'?"),
        ("DEVICE", "mps", "computes on CPUs", "use cpu"),
        ("SHARES", "1:x", "not whole numbers", "1:2"),
        ("SHARES", "0:0", "one is above 0", "1:2"),
        ("MICRO_BATCH_SIZE", "0", "at least one sample", "give the number"),
        ("SEED", "-1", "a seed is", "pass a whole number"),
        ("JOIN_TIMEOUT", "nan", "not a time above 0", "give seconds"),
        ("PRECISON", "bf16", "there is no such setting", "did you mean LOCKSTEP_PRECISION?"),
        ("NPROC", "2", "no variable stands for --nproc", "lockstep run --nproc ... SCRIPT"),
        ("WORLD_SIZE", "2", "no variable stands for --nproc", "lockstep run --nproc ... SCRIPT"),
        ("SYNC_BATCHNORM", "0", "for sync_batchnorm", "pass sync_batchnorm to lockstep.init"),
        ("MICROBATCH_SIZE", "4", "no such setting", "did you mean LOCKSTEP_MICRO_BATCH_SIZE?"),
    ],
)
def test_a_variable_that_no_run_can_have(variable: str, value: str, found: str, do: str) -> None:
    variables = {f"LOCKSTEP_{variable}": value}
    with pytest.raises(SettingError) as caught:
        resolve_settings(variables)
    assert caught.value.was_set == f"LOCKSTEP_{variable}={value}"
    assert found in caught.value.found
    assert do in caught.value.do


def test_no_variable_of_locksteps_own_is_taken_for_a_setting_that_was_misspelt() -> None:
    source = Path(lockstep.__file__).parent
    text = "".join(path.read_text(encoding="utf-8") for path in source.rglob("*.py"))
    variables = set(re.findall(r"LOCKSTEP_[A-Z_]*[A-Z]", text))
    assert {"LOCKSTEP_EVIDENCE", "LOCKSTEP_TOKEN", "LOCKSTEP_QUIET"} <= variables
    check_names_of_variables(
        dict.fromkeys(variables - {"LOCKSTEP_PRECISON", "LOCKSTEP_NPROC"}, "1")
    )


def test_an_option_of_the_launcher_has_a_variable_or_one_is_refused() -> None:
    known = {*OPTION_OF_LAUNCHER_VARIABLE, "QUIET", "MODULE", "FROM_FILE"}
    known.update(declaration.name.upper() for declaration in DECLARATIONS.values())
    names = {
        str(option.name).upper() for option in command.params if isinstance(option, click.Option)
    }
    assert names <= known


@pytest.mark.parametrize(
    ("size", "do"),
    [
        (1, "leave shares out: there is one rank"),
        (2, "for example 1:2"),
        (3, "give 3 whole numbers, one for each rank, for example 1:1:2"),
        (64, "give 64 whole numbers, one for each rank"),
    ],
)
def test_the_advice_for_shares_fits_the_number_of_ranks(size: int, do: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse_shares("1:2:3:4", size)
    assert do in caught.value.do


@pytest.mark.parametrize("shares", [[], (), [0, 0], [1, -1]])
def test_shares_of_which_none_is_above_zero_are_refused(shares: Sequence[int]) -> None:
    with pytest.raises(SettingError) as caught:
        check_shares(shares)
    assert caught.value.found == "shares are at least 0, and one is above 0"


WHOLE_NUMBERS = [
    declaration.name
    for declaration in DECLARATIONS.values()
    if declaration.reader is whole_number_from_1
]


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
@pytest.mark.parametrize("value", [0, True, 1.5, "2"])
def test_a_whole_number_is_checked_by_its_declaration(name: str, value: object) -> None:
    with pytest.raises(SettingError, match="it is not a whole number of at least 1") as caught:
        resolve_settings({}, **{name: value})
    assert caught.value.was_set == f"{name}={value!r}"


def test_what_the_user_gives_becomes_the_value_of_the_field() -> None:
    given = {"join_timeout": timedelta(minutes=1), "collective_timeout": 5, "ledger": Path("runs")}
    settings = resolve_settings({"LOCKSTEP_LEDGER": "runs"}, **given)
    assert (settings.join_timeout_s, settings.collective_timeout_s) == (60.0, 5.0)
    assert settings.ledger == "runs"
    with pytest.raises(SettingError, match="collective_timeout='soon'"):
        resolve_settings({}, collective_timeout="soon")
    with pytest.raises(SettingError, match="report='C:"):
        resolve_settings({}, report="C:\\runs")
    with pytest.raises(SettingError, match="LOCKSTEP_REPORT=C:"):
        resolve_settings({"LOCKSTEP_REPORT": "C:\\runs"})


def test_batchnorm_is_synchronised_unless_there_are_virtual_ranks() -> None:
    given: list[dict[str, Any]] = [
        {},
        {"sync_batchnorm": False},
        {"virtual_ranks": 2},
        {"virtual_ranks": 2, "sync_batchnorm": True},
    ]
    found = [resolve_settings({}, **values).synchronises_batchnorm for values in given]
    assert found == [True, False, False, True]


def test_verify_has_virtual_ranks_only_where_one_process_can_compute_them() -> None:
    by_bits = {VERIFY_VARIABLE: json.dumps({"virtual_ranks_of_verify": 2})}
    settings = resolve_settings(by_bits, sync_batchnorm=True)
    assert (settings.virtual_ranks, settings.synchronises_batchnorm) == (2, False)
    settings = resolve_settings(by_bits, sync_batchnorm=True, virtual_ranks=3)
    assert (settings.virtual_ranks, settings.synchronises_batchnorm) == (3, True)
    reference = {VERIFY_VARIABLE: json.dumps({"reference_of_verify": True})}
    found = []
    for sync_batchnorm in (True, None):
        settings = resolve_settings(reference, sync_batchnorm=sync_batchnorm, virtual_ranks=3)
        found.append(settings.virtual_ranks)
    assert found == [None, 3]
