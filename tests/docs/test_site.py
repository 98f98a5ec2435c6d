"""The documentation site: both languages, without a network, and what its search finds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pages
import pytest
from ranks import HANG_S

pytest.importorskip("mkdocs_static_i18n", reason="make docs installs what builds the site")

pytestmark = [pytest.mark.launcher, pytest.mark.thorough]

# What readers of tutorials look for, and the page that answers it.
CHINESE = {
    "断点续训": "checkpoints",
    "多卡": "from_tutorials",
    "显存": "large_batches",
    "单卡": "from_tutorials",
    "梯度累积": "from_one_device_to_many",
    "梯度检查点": "large_batches",
    "预热": "large_batches",
    "卡死": "troubleshooting",
    "端口": "reference",
    "学习率": "from_one_device_to_many",
}
BOTH = {
    "DataParallel": "strategies",
    "BalancedDataParallel": "strategies",
    "spawn": "running_it",
    "launch": "from_tutorials",
    "tcp": "from_tutorials",
    "file": "from_tutorials",
    "NCCL_SOCKET_IFNAME": "running_it",
    "CUDA_VISIBLE_DEVICES": "running_it",
    "find_unused_parameters": "from_one_device_to_many",
    "DistributedSampler": "from_tutorials",
}


# Queries in each language, with the page that must be among the first three.
SAME_QUERIES = {
    "DataParallel": "strategies",
    "BalancedDataParallel": "from_tutorials",
    "mp.spawn": "from_tutorials",
    "torch.distributed.launch": "from_tutorials",
    "tcp://": "from_tutorials",
    "file://": "from_tutorials",
    "NCCL_SOCKET_IFNAME": "running_it",
    "CUDA_VISIBLE_DEVICES": "from_tutorials",
    "find_unused_parameters": "from_tutorials",
    "DistributedSampler": "from_tutorials",
}
QUERIES = {
    "en": {
        "resume": "checkpoints",
        "several GPUs": "strategies",
        "out of memory": "large_batches",
        "gradient accumulation": "from_one_device_to_many",
        "activation checkpointing": "large_batches",
        "warm-up": "from_tutorials",
        "hang": "troubleshooting",
        "port": "reference",
        "learning rate": "from_one_device_to_many",
        "dropout": "same_bits",
        "make gpu": "gpu",
        **SAME_QUERIES,
    },
    "zh": {
        "断点续训": "checkpoints",
        "多卡": "from_tutorials",
        "显存": "large_batches",
        "单卡": "from_one_device_to_many",
        "梯度累积": "from_one_device_to_many",
        "梯度检查点": "large_batches",
        "预热": "large_batches",
        "卡死": "troubleshooting",
        "端口": "reference",
        "学习率": "from_one_device_to_many",
        **SAME_QUERIES,
    },
}
NUM_SHOWN = 3
WRITE_VARIABLE = "WRITE_SEARCH_TABLE"
TABLE = pages.ROOT / "benchmarks" / "results" / "search.md"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built anew; a link that leads nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "TMPDIR": str(folder.parent)}
    done = subprocess.run(
        command, cwd=pages.ROOT, env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def entries(folder: Path) -> list[dict[str, Any]]:
    """The index as the browser reads it, with a server and from the disk."""
    text = (folder / "search_index.json").read_text(encoding="utf-8")
    assert (folder / "search_index.js").read_text(encoding="utf-8") == f"var __index = {text}"
    index = json.loads(text)
    for entry in index["docs"]:
        text = re.sub(r"<[^>]*>", " ", f"{entry['title']} {entry['text']}")
        entry["words"] = set(re.split(index["config"]["separator"], text))
    return index["docs"]


def found(index: list[dict[str, Any]], word: str) -> set[str]:
    """The pages that have the word."""
    return {Path(e["location"].partition("#")[0]).stem for e in index if word in e["words"]}


def test_each_page_is_there_twice(site: Path) -> None:
    names = {page.stem for page in pages.ENGLISH if page.parent.name == "docs"}
    names = names - {"README"} | {"index"}
    assert {path.stem for path in site.glob("*.html")} - {"404"} == names
    assert {path.stem for path in (site / "zh").glob("*.html")} == names


def test_it_names_its_version_and_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>")
    for page in (*site.glob("*.html"), *(site / "zh").glob("*.html")):
        text = page.read_text(encoding="utf-8")
        assert "torch-lockstep 0.1.0" in text
        assert loaded.findall(text) == [], page.name


def test_the_search_has_the_words_that_readers_look_for(site: Path) -> None:
    english, chinese = entries(site / "search"), entries(site / "zh" / "search")
    missing = [
        word for word, page in {**CHINESE, **BOTH}.items() if page not in found(chinese, word)
    ]
    assert missing == []
    assert [word for word, page in BOTH.items() if page not in found(english, word)] == []
    assert [word for word in CHINESE if not found(english, word)] == []
    assert all("boost" in entry for entry in english if entry["location"].startswith("zh/"))
    assert not any(entry["location"].startswith("zh/") for entry in chinese)


def test_a_chinese_query_is_cut_up_to_its_end(site: Path) -> None:
    [worker] = (site / "assets" / "javascripts" / "workers").glob("*.js")
    assert len(re.findall(r"<=\w\.length;\w\+\+\)\w\.slice\(", worker.read_text())) == 1


def first_pages(site: Path, language: str, words: list[str]) -> dict[str, list[str]]:
    """The first pages that the search shows for each query, best first, in a language."""
    folder = site / "search" if language == "en" else site / language / "search"
    done = subprocess.run(
        ["node", Path(__file__).with_name("site_search.mjs"), site, folder],
        input=json.dumps(words),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    return {word: pages_found[:NUM_SHOWN] for word, pages_found in json.loads(done.stdout).items()}


def table_of(found_pages: dict[str, dict[str, list[str]]]) -> str:
    """The page `benchmarks/results/search.md`."""
    lines = [
        "# What the search of the documentation finds",
        "",
        "The first three pages for each query, best first, by the site's own index and scoring; in",
        "bold the page that answers. `tests/docs/test_site.py` checks it; this page is written by",
        f"`{WRITE_VARIABLE}=1 python -m pytest tests/docs/test_site.py`.",
        "",
        "每个搜索词的前三个结果，按网站自己的索引和评分排序；加粗的是回答该问题的页面。",
    ]
    for language, found_of_word in found_pages.items():
        lines += [
            "",
            f"## {language}",
            "",
            "| query | first | second | third |",
            "|---|---|---|---|",
        ]
        for word, found_names in found_of_word.items():
            cells = []
            for name in found_names:
                page = name.removesuffix(".html")
                cells.append(f"**{page}**" if page == QUERIES[language][word] else page)
            lines.append(f"| {' | '.join([f'`{word}`', *cells])} |")
    return "\n".join(lines) + "\n"


@pytest.mark.skipif(shutil.which("node") is None, reason="the site's search runs in node here")
def test_the_page_that_answers_is_among_the_first_hits(site: Path) -> None:
    found_pages = {
        language: first_pages(site, language, [*QUERIES[language]]) for language in QUERIES
    }
    not_found = []
    for language, expected in QUERIES.items():
        for word, page in expected.items():
            if f"{page}.html" not in found_pages[language][word]:
                not_found.append((language, word, found_pages[language][word]))
    assert not_found == []
    # Headings of results name what was run: "kill, resume, compile".
    assert [
        (language, word)
        for language, found_of_word in found_pages.items()
        for word, found_names in found_of_word.items()
        if found_names[0].endswith("gpu.html")
    ] == []
    assert found_pages["en"]["resume"][0] == "checkpoints.html"
    if os.environ.get(WRITE_VARIABLE):
        TABLE.write_text(table_of(found_pages), encoding="utf-8")
