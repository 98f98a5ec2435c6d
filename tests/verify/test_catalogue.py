"""The catalogue: complete, in good form, the same on its page, and found by code and by words."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lockstep.verify import catalogue
from lockstep.verify.catalogue import ENTRIES, GROUPS

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parent.parent.parent
CODES = list(ENTRIES)


@pytest.mark.parametrize("group", GROUPS)
def test_the_codes_of_a_group_are_counted_from_1(group):
    codes = [code for code in CODES if code.startswith(group)]
    assert codes
    assert codes == [f"{group}{number:02}" for number in range(1, len(codes) + 1)]


def test_every_code_is_in_a_group_and_in_order():
    assert sorted(CODES) == CODES
    assert {code[:3] for code in CODES} == set(GROUPS)


@pytest.mark.parametrize("code", CODES)
def test_an_entry_has_a_line_a_cause_and_a_cure_in_code(code):
    entry = ENTRIES[code]
    assert "\n" not in entry.title
    assert len(entry.title) <= 85
    sentences = re.findall(r"[.:;](?= |\n|$)", re.sub(r"`[^`]*`", "", entry.cause))
    assert 2 <= len(sentences) <= 8
    blocks = [block for block in entry.cure.split("\n\n") if block.startswith("    ")]
    assert blocks
    for block in blocks:
        code = "\n".join(line.removeprefix("    ") for line in block.splitlines())
        # A block that opens a method or a loop may go on in the next one.
        ast.parse(code)


def test_the_page_is_the_catalogue():
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    assert page == catalogue.as_markdown("en"), "lockstep explain --markdown en > docs/findings.md"
    assert re.findall(r"^### (LS\d+)$", page, re.M) == CODES


def test_every_code_that_is_used_is_in_it():
    used = set()
    for path in (ROOT / "src").rglob("*.py"):
        if path.parent.name != "entries":
            used |= set(re.findall(r"\bLS\d{3}\b", path.read_text(encoding="utf-8")))
    assert used <= set(ENTRIES)
    assert {"LS103", "LS104", "LS301", "LS302", "LS303", "LS304", "LS401"} <= used


def codes(words: str) -> list[str]:
    return [entry.code for entry in catalogue.find(words)]


def test_entries_are_found():
    assert codes("LS303") == codes("ls303") == codes("303") == ["LS303"]
    assert codes("LS4") == [code for code in CODES if code.startswith("LS4")]
    assert codes("") == CODES
    assert codes("batchnorm") == ["LS306", "LS307"]
    assert "LS303" in codes("LoRA")
    assert set(codes("shedulers")) >= {"LS401"}  # nearly
    assert codes("LS399") == ["LS309"]
    assert codes("xyzzy") == []
