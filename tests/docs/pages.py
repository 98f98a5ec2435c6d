"""The pages of the documentation, their fenced blocks, and a way to run their Python.

As a script, `python pages.py FOLDER PAGE...` runs each page in a process of its own, forked from
one that has imported torch, and in a folder of its own, `FOLDER/<name of the page>`.
"""

from __future__ import annotations

import doctest
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
ENGLISH = [page for page in PAGES if not re.search(r"\.zh(-CN)?\.md$", page.name)]
"""The others have the same programs, as `test_two_languages.py` sees."""
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """One fenced block: what stands behind its opening fence, its text, its first line's number."""

    info: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(m["info"].strip(), m["text"], text.count("\n", 0, m.start("text")) + 1)
        for m in _FENCE.finditer(text)
    ]


def run(page: Path) -> int:
    """Runs every `python` block, one after another in one namespace; returns how many.

    A failure is raised or ends in exit code 1.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    chosen = [block for block in blocks(page) if block.info == "python"]
    for block in chosen:
        if ">>>" in block.text:
            run_examples(block, page, namespace)
        else:  # the blank lines give each line the number that it has in the page
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), namespace)
    return len(chosen)


def run_examples(block: Block, page: Path, namespace: dict[str, Any]) -> None:
    """Runs the `>>>` lines of a block and compares what they print."""
    test = doctest.DocTestParser().get_doctest(
        block.text, namespace, page.name, str(page), block.line - 1
    )
    test.globs = namespace  # the parser copies it
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test, clear_globs=False)
    if runner.summarize(verbose=False).failed:
        raise SystemExit(1)


def run_forked(folder: Path, page: Path) -> None:
    """Runs a page in a process of its own; `<folder>.log` is what it prints."""
    if os.fork() == 0:
        folder.mkdir()
        os.chdir(folder)
        os.environ["TMPDIR"] = str(folder)
        log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout.write(f"{run(page)} blocks run\n")
        sys.exit()
    os.wait()


if __name__ == "__main__":
    import lockstep.world  # noqa: F401  torch is imported once

    for name in sys.argv[2:]:
        run_forked(Path(sys.argv[1]) / Path(name).name, Path(name))
