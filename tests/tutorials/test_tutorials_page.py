"""The page on the tutorials shows the listings that are tested, and names their tests."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
import pages

pytestmark = pytest.mark.unit

PAGE = pages.ROOT / "docs" / "from_tutorials.md"
LISTINGS = sorted((pages.ROOT / "examples" / "tutorials").glob("*.py"))
SHOWN = [block for block in pages.blocks(PAGE) if block.info.startswith("python")]


def lines_of(text: str) -> list[str]:
    """The lines without their indentation, as a page shows the body of a function alone."""
    return [line.strip() for line in text.strip().splitlines()]


def contains(lines: list[str], part: list[str]) -> bool:
    return any(lines[start : start + len(part)] == part for start in range(len(lines)))


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: f"line {block.line}")
def test_a_block_of_the_page_is_a_part_of_a_listing(block: pages.Block) -> None:
    shown = lines_of(block.text)
    assert any(contains(lines_of(path.read_text()), shown) for path in LISTINGS)


def test_the_table_names_all_listings_and_the_tests_that_there_are() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| listing | as given |")[2]
    names = {path.name for path in LISTINGS}
    assert set(re.findall(r"`(\w+\.py)`", table)) == names - {"images.py"}
    source = Path(__file__).with_name("test_tutorials.py").read_text()
    tests = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    assert set(re.findall(r"`(test_\w+)`", table)) <= tests
