from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from ranks import HANG_S

from lockstep.cli.explain_topics import TOPICS, Topic, find_topic
from lockstep.cli.main import main
from lockstep.verify.catalogue import ENTRIES

pytestmark = pytest.mark.launcher

PAGES = Path(__file__).parents[2] / "docs"


def explain(*arguments: str, columns: int = 90) -> str:
    result = CliRunner().invoke(main, ["explain", *arguments], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= max(columns, 100)
    return result.output


@pytest.mark.parametrize("columns", [60, 90, 300])
def test_an_entry_is_printed_in_full(columns):
    output = explain("LS303", columns=columns)
    assert "\n      model.head = nn.Linear(512, 10)\n" in output
    words = output.split()
    entry = ENTRIES["LS303"]
    told = f"{entry.code}: {entry.title} Why {entry.cause} What to do {entry.cure}"
    assert words == told.split()
    prose = [line for line in output.splitlines() if not line.startswith("      ")]
    assert max(map(len, prose)) <= min(columns, 100)


def test_several_are_listed_and_one_is_told():
    assert explain().count("\n  LS") == len(ENTRIES)
    listed = explain("batchnorm")
    assert "LS306" in listed
    assert "LS307" in listed
    assert listed.endswith("\nTo read one of them: lockstep explain LS306\n")
    assert explain("BatchNorm", "micro-batch").startswith("LS307:")
    assert explain("LS399").startswith("There is no LS399; the nearest is:\nLS309:")


def test_nothing_is_found():
    result = CliRunner().invoke(main, ["explain", "xyzzy"])
    assert result.exit_code == 2
    assert "Nothing in the catalogue is about 'xyzzy'" in result.output


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("LS999", "There is no LS999. Codes are LS101-LS1"),
        ("LS1234", "There is no LS1234. "),
        ("nosuch", "about 'nosuch'. There are topics: deadlock, "),
    ],
)
def test_what_there_is_instead_is_listed(query: str, text: str) -> None:
    result = CliRunner().invoke(main, ["explain", query])
    assert result.exit_code == 2
    assert text in result.output
    assert "lockstep explain lists all" in result.output


def test_several_codes_and_a_pasted_hint() -> None:
    both = explain("LS303", "ls205")
    assert both.startswith("LS303: ")
    assert "\nLS205: " in both
    assert explain("[LS303: lockstep explain LS303]") == explain("303")
    assert explain("LS").count("\n  LS") == len(ENTRIES)
    assert explain("12").startswith("There is no LS12; the nearest are:\n")


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_topics_without_a_code(topic: Topic) -> None:
    for word in topic.words:
        assert find_topic(word) is topic, "no other topic has the same word"
        assert explain(word).startswith(f"{topic.name}\n\n  {topic.text[:30]}")
    for extension in (".md", ".zh.md"):
        page, _, heading = topic.page.partition("#")
        text = (PAGES / f"{page}{extension}").read_text(encoding="utf-8")
        if heading and extension == ".md":
            headings = [line.lower().replace(" ", "-") for line in text.splitlines()]
            assert f"##-{heading}" in headings


def test_entries_are_listed_behind_a_topic() -> None:
    output = explain("hang")
    assert output.index("deadlock") < output.index("\nCodes in whose texts these words stand:\n")
    assert "LS303" not in output, "it has only unchanged words, such as changed"


def test_it_does_not_import_torch():
    code = (
        "import sys\n"
        "from lockstep.cli.main import main\n"
        "try: main(['explain', 'LS101'])\n"
        "finally: assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("LS101: ")
