"""A setting is declared once; everything else that names it follows from that or is held to it."""

from __future__ import annotations

import inspect
from pathlib import Path

import click
import pytest

import lockstep
from lockstep.cli.run import command
from lockstep.errors import SettingError
from lockstep.settings import DECLARATIONS, Settings, resolve_settings, settings_of_ranks

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
