"""Each page is there in English and in Chinese, and both say the same of code and figures."""

from __future__ import annotations

import re
from pathlib import Path

import pages
import pytest

pytestmark = pytest.mark.unit

DOCS = sorted(page for page in pages.ENGLISH if page.parent.name == "docs")
TRANSLATED = [pages.ROOT / "README.md", *DOCS]

each_pair = pytest.mark.parametrize("english", TRANSLATED, ids=lambda page: page.stem)


def in_chinese(english: Path) -> Path:
    """The Chinese version of a page, whether it exists or not."""
    if english.parent == pages.ROOT:  # the name that other repositories use
        return english.with_suffix(".zh-CN.md")
    return english.with_suffix(".zh.md")


def prose(page: Path) -> str:
    """The text without its blocks of code."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def headings(page: Path) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", prose(page), re.M)]


def program(block: pages.Block) -> str:
    """The text of a block; of a program what runs, as its comments may be translated."""
    if block.info == "text":
        return block.text
    text = re.sub(r'"""(.*?)"""', '""', block.text, flags=re.S)
    text = re.sub(r"(^|\s+)#(\s.*)?$", "", text, flags=re.M)
    return "\n".join(line for line in text.splitlines() if line.strip())


def tables(page: Path) -> list[str]:
    return re.findall(r"(?:^ *\|.*\n)+", prose(page) + "\n", re.M)


def facts(table: str) -> set[str]:
    """The names and the numbers in a table, which are not translated."""
    names = [text for text in re.findall(r"`([^`]*)`", table) if " " not in text]
    numbers = re.findall(r"\d+(?:\.\d+)?", re.sub(r"`[^`]*`|\]\([^)]*\)", "", table))
    return {*names, *numbers}


def test_every_page_has_a_chinese_version() -> None:
    assert [page.stem for page in DOCS if not in_chinese(page).exists()] == []


def test_no_chinese_page_is_alone() -> None:
    chinese = {*pages.PAGES} - {*pages.ENGLISH}
    assert chinese == {in_chinese(page) for page in pages.ENGLISH if in_chinese(page).exists()}


@each_pair
def test_both_have_the_same_headings(english: Path) -> None:
    assert headings(in_chinese(english)) == headings(english)


@each_pair
def test_both_have_the_same_listings(english: Path) -> None:
    ours, theirs = pages.blocks(english), pages.blocks(in_chinese(english))
    assert [block.info for block in theirs] == [block.info for block in ours]
    for block, other in zip(ours, theirs, strict=True):
        assert program(other) == program(block), f"lines {block.line} and {other.line}"


@each_pair
def test_both_have_the_same_rows_and_figures(english: Path) -> None:
    ours, theirs = tables(english), tables(in_chinese(english))
    assert [table.count("\n") for table in theirs] == [table.count("\n") for table in ours]
    for table, other in zip(ours, theirs, strict=True):
        assert facts(table) - facts(other) == set(), table.partition("\n")[0]


@each_pair
def test_the_chinese_page_leads_to_chinese_pages(english: Path) -> None:
    page = in_chinese(english)
    for text, path in re.findall(r"\[([^\]]*)\]\(([^)#\s]+\.md)(?:#[^)]*)?\)", prose(page)):
        target = (page.parent / path).resolve()
        if text != "English" and target in pages.ENGLISH:
            assert not in_chinese(target).exists(), (
                f"[{text}]({path}): link {in_chinese(target).name}"
            )
