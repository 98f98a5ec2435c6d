"""The pages: what they say of flags, errors, files and links is so."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import shlex
import signal
from pathlib import Path

import click
import pages
import pytest
import schemas
from click.testing import CliRunner
from messages import MESSAGES
from torch.distributed.run import get_args_parser

import lockstep
from lockstep import errors
from lockstep.cli.main import main
from lockstep.cli.run import command as run_command
from lockstep.session.extension import PHASES
from lockstep.settings import resolve_settings

pytestmark = pytest.mark.unit

README = pages.ROOT / "README.md"
GUIDE = pages.ROOT / "docs" / "from_one_device_to_many.md"
REFERENCE = pages.ROOT / "docs" / "reference.md"
RUNNING = pages.ROOT / "docs" / "running_it.md"
TROUBLE = pages.ROOT / "docs" / "troubleshooting.md"
LANGUAGES = {"python", "python no-run", "python fault", "sh", "yaml", "toml", "text", "diff"}
"""`python no-run` needs several machines; `python fault`: see `test_hanging_page.py`."""

SIGNAL = re.compile(r"\bSIG[A-Z]+")

each_page = pytest.mark.parametrize(
    "page", pages.PAGES, ids=lambda p: str(p.relative_to(pages.ROOT))
)


def commands() -> list[str]:
    """Every shell line of the pages."""
    found = []
    for page in pages.ENGLISH:
        for block in pages.blocks(page):
            found += block.text.splitlines() if block.info == "sh" else []
    return found


def rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the table that follows a heading, without its head."""
    section = page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", section.partition("\n## ")[0], re.M)
    assert table is not None, f"no table below {heading!r}"
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in table[0].splitlines()[2:]
    ]


@each_page
def test_no_block_hides_python_under_another_name(page: Path) -> None:
    fences = re.findall(r"^ *(?:```|~~~)", page.read_text(encoding="utf-8"), re.M)
    found = pages.blocks(page)
    assert len(fences) == 2 * len(found)
    for block in found:
        assert block.info in LANGUAGES, f"line {block.line}"
        if block.info in ("sh", "text"):
            assert not re.search(r"^\s*(import |from \w+ import|>>>)", block.text, re.M)


def test_the_commands_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "debugged.py").touch()
    (tmp_path / "examples").symlink_to(pages.ROOT / "examples")
    ours = [line for line in commands() if "lockstep run" in line]
    if "--shutdown-timeout" not in get_args_parser().format_help():  # torch 2.11 has no such flag
        ours = [line for line in ours if "--shutdown-timeout" not in line]
    assert len(ours) > 5
    for line in ours:
        words = shlex.split(line, comments=True)
        flags = words[words.index("run") + 1 :]
        result = CliRunner().invoke(main, ["run", "--dry-run", *flags])
        assert result.exit_code == 0, f"{line}\n{result.output}"


def test_launch_files_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    [block] = [block for block in pages.blocks(RUNNING) if block.info == "toml"]
    (tmp_path / "lockstep.toml").write_text(block.text)
    result = CliRunner().invoke(main, ["run", "--dry-run", "train.py"])
    assert result.exit_code == 0, result.output
    assert "nproc, precision, max-restarts from lockstep.toml" in result.output


def test_make_targets_are_there() -> None:
    makefile = (pages.ROOT / "Makefile").read_text()
    asked = {w for line in commands() if line.startswith("make") for w in line.split()[1:2]}
    assert asked == {"train", "test", "check", "gpu", "gpu-table"}
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in asked)


def test_the_readmes_activate_the_environment_that_make_creates() -> None:
    for name in ("README.md", "README.zh-CN.md"):
        text = (pages.ROOT / name).read_text(encoding="utf-8")
        start = text.index("make train ")
        assert start < text.index(". .venv/bin/activate") < text.index("```sh\npip install")
    recipe = (pages.ROOT / "Makefile").read_text().split("$(VENV)/.installed:")[1]
    assert recipe.index("takes some minutes") < recipe.index("pip install --quiet")


def test_the_difference_in_the_readme_is_that_of_the_files() -> None:
    [block] = [block for block in pages.blocks(README) if block.info == "diff"]
    lines = block.text.splitlines()
    for name, sign in (("plain_torch.py", "-"), ("with_lockstep.py", "+")):
        shown = [line[1:] for line in lines if not line or line[0] in f" {sign}"]
        script = (pages.ROOT / "examples" / "digits" / name).read_text()
        after_docstring = script.split('"""', 2)[2]
        assert [line for line in shown if line] == [x for x in after_docstring.splitlines() if x]


def test_the_runs_in_the_readme_print_the_same_on_one_and_on_two_processes() -> None:
    [block] = [b for b in pages.blocks(README) if "with_lockstep.py" in b.text and b.info == "text"]
    one, two = re.split(r"^\$ lockstep", block.text, flags=re.M)
    epochs = re.compile(r"epoch \d: .*")
    assert epochs.findall(one) == epochs.findall(two)
    assert len(epochs.findall(one)) == 5


def test_the_front_page_of_the_site_shows_what_the_readme_shows() -> None:
    front = pages.ROOT / "docs" / "README.md"
    shown = [block.text for block in pages.blocks(README)]
    assert len(pages.blocks(front)) == 4
    assert [block.text for block in pages.blocks(front) if block.text not in shown] == []
    assert rows(front, "Figures") == rows(README, "Figures")


def test_the_page_for_agents_names_every_schema_and_what_the_report_has() -> None:
    page = (pages.ROOT / "docs" / "for_agents.md").read_text(encoding="utf-8")
    assert set(re.findall(r"schemas/(\w+)\.json", page)) == {*schemas.NAMES}
    section = page.partition("\n## What to read in the report\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    assert named >= {*PHASES}
    report = json.loads((schemas.FOLDER / "report.json").read_text(encoding="utf-8"))
    assert named - {*PHASES} <= report["properties"].keys()


def test_the_table_of_settings() -> None:
    table = rows(REFERENCE, "Settings")
    arguments = [cells[0].strip("`") for cells in table]
    assert sorted(arguments) == sorted(inspect.signature(lockstep.init).parameters)
    flags = {name for cells in table for name in re.findall(r"--[\w-]+", cells[1])}
    own = {cells[0].strip("`") for cells in rows(RUNNING, "Options of lockstep run")}
    options = [o for o in run_command.params if isinstance(o, click.Option) and not o.hidden]
    assert flags | own == {
        next(name for name in option.opts if name.startswith("--")) for option in options
    }
    for name, cells in zip(arguments, table, strict=True):
        variable = f"LOCKSTEP_{name.upper()}"
        # Devices are checked only if there are virtual ranks, and a trace goes into the report.
        needed = {
            "check_devices": {"LOCKSTEP_VIRTUAL_RANKS": "7"},
            "trace_step": {"LOCKSTEP_REPORT": "x"},
        }.get(name, {})
        value = {"precision": "bf16", "backend": "gloo", "device": "cuda"}.get(name, "7")
        has_effect = False
        with contextlib.suppress(errors.SettingError):  # what only a script can set is refused
            has_effect = resolve_settings({variable: value, **needed}) != resolve_settings(needed)
        assert cells[2] == (f"`{variable}`" if has_effect else ""), name


def test_the_tables_of_errors() -> None:
    joining = {cells[0].strip("`") for cells in rows(REFERENCE, "Errors while joining")}
    kinds = {kind.__name__ for kind in errors.JoinError.__subclasses__()}
    assert joining == kinds | {"RanksDifferError", "SettingError"}
    codes = {
        name: int(cells[1])
        for cells in rows(REFERENCE, "lockstep.errors")
        for name in re.findall(r"`(\w+)`", cells[0])
    }
    assert codes.keys() >= {kind.__name__ for kind in errors.LockstepError.__subclasses__()}
    assert codes == {name: getattr(errors, name).exit_code for name in codes}


def test_the_table_of_exit_codes() -> None:
    table = rows(TROUBLE, "Exit codes")
    codes = {int(cells[0]) for cells in table if cells[0].isdigit()}
    kinds = {kind for name in dir(errors) if isinstance(kind := getattr(errors, name), type)}
    ours = {kind for kind in kinds if issubclass(kind, errors.LockstepError)}
    signals = {128 + getattr(signal, name) for cells in table for name in SIGNAL.findall(cells[1])}
    lost = {errors.EXIT_DEADLOCK, errors.EXIT_LOST_RANK}
    assert codes == {0} | lost | {kind.exit_code for kind in ours} | signals
    assert len(signals) == 4
    for cells in table:
        for name in re.findall(r"`(\w+Error)`", cells[2]):
            if hasattr(errors, name):
                assert getattr(errors, name).exit_code == int(cells[0]), name


def test_the_table_of_mistakes_quotes_the_messages() -> None:
    told = (text.partition("\n  do:    ")[2] for text in MESSAGES.values())
    advice = {text.partition("\n  more:  ")[0] for text in told}
    table = rows(GUIDE, "Common mistakes")
    assert len(table) > 10
    for mistake, quoted in table:
        assert quoted.strip("`") in advice, mistake


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get on GitHub."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@each_page
def test_its_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_every_page_is_on_the_site() -> None:
    found = [page for page in pages.ENGLISH if page.parent.name == "docs"]
    site = (pages.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert sorted(re.findall(r"[\w.-]+\.md$", site, re.M)) == [page.name for page in found]
