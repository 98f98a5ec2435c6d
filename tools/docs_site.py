"""For `make docs`: what is different on the site and in the repository.

In the repository the pages link to tests and examples, and say of a code block how it is tested
(`python no-run`), and a line leads to the page in the other language; on the site a menu does.
The site says which version it describes. Each language has a search index of its own.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from pymdownx.slugs import slugify

_slug = slugify(case="lower")
HEADING = re.compile(r"^(#+) ([^\n]*)$|^```.*?^```$", re.M | re.S)


def on_config(config: Any) -> None:
    """MkDocs calls it once: the version stands at the end of each page."""
    root = Path(config.config_file_path).parent
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.copyright = f"{project['name']} {project['version']} · {project['license']}"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs calls it with the text of each page."""
    markdown = re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)
    markdown = re.sub(r"^```python (?:no-run|fault)$", "```python", markdown, flags=re.M)
    markdown = re.sub(r"^\[(?:English|中文)\]\([^)]+\)\n", "", markdown, flags=re.M)
    source = Path(page.file.abs_src_path)
    if source.name.endswith(".zh.md"):
        english = source.with_name(source.name.replace(".zh.md", ".md"))
        markdown = with_english_anchors(markdown, english.read_text(encoding="utf-8"))
    return markdown


def with_english_anchors(chinese: str, english: str) -> str:
    """Gives each Chinese heading the anchor of the English one as well.

    A link that someone has sent then leads to the same place in both languages.
    """
    names = iter([_slug(match[2], "-") for match in HEADING.finditer(english) if match[1]])

    def heading(match: re.Match[str]) -> str:
        level, title = match[1], match[2]
        if not level:  # a block of code
            return match[0]
        name = next(names)
        if name == _slug(title, "-"):
            return match[0]
        return f'{level} <a id="{name}"></a>{title}'

    return HEADING.sub(heading, chinese)


def on_post_page(output: str, config: Any, **_: Any) -> str:
    """MkDocs calls it with the HTML of each page: the Chinese ones search in `zh/search`.

    The theme looks for the index, and for what it finds there, relative to `base`.
    """
    if config.theme["language"] == "zh":
        output = output.replace('"base": ".."', '"base": "."')
    return output


CHINESE_IN_ENGLISH_BOOST = 0.01
"""Multiplies the scores of Chinese pages in the English search, where they come last."""
PAGES_OF_RESULTS = ("gpu.html",)
RESULTS_BOOST = 0.3
"""Multiplies the scores of these pages, so that others that are about GPUs as well come first."""
SECTION_OF_RESULTS_BOOST = 0.001
"""Multiplies the scores of their sections. Their headings name what was run, such as "kill, resume,
compile". As a word in a heading counts a thousand times, they would come before the pages that say
how to resume."""


def search_boost(location: str) -> float:
    """Returns what multiplies the score of an entry of an index.

    Args:
        location: the address of a page or a section, such as "zh/gpu.html#on-a-gpu".
    """
    boost = 1.0
    if location.startswith("zh/"):
        boost *= CHINESE_IN_ENGLISH_BOOST
    page, _, section = location.removeprefix("zh/").partition("#")
    if page in PAGES_OF_RESULTS:
        boost *= SECTION_OF_RESULTS_BOOST if section else RESULTS_BOOST
    return boost


@event_priority(-200)  # after the plugins, which write one index for both languages
def on_post_build(config: Any) -> None:
    """MkDocs calls it when all pages are written.

    The English search finds Chinese pages as well, after the English ones: a reader may come to an
    English page first and type Chinese there.
    """
    site = Path(config.site_dir)
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    english = []
    chinese = []
    for entry in index["docs"]:
        location = entry["location"]
        english.append({**entry, "boost": search_boost(location)})
        if location.startswith("zh/"):
            own_location = location.removeprefix("zh/")
            chinese.append({**entry, "location": own_location, "boost": search_boost(own_location)})
    for folder, entries in ((site / "search", english), (site / "zh" / "search", chinese)):
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**index, "docs": entries}, ensure_ascii=False, separators=(",", ":"))
        (folder / "search_index.json").write_text(text, encoding="utf-8")
        script = f"var __index = {text}"  # as the plugin `offline` has it
        (folder / "search_index.js").write_text(script, encoding="utf-8")
    [worker] = (site / "assets" / "javascripts" / "workers").glob("search.*.min.js")
    worker.write_text(with_whole_words(worker.read_text(encoding="utf-8")), encoding="utf-8")


def with_whole_words(script: str) -> str:
    """Mends how the theme cuts a Chinese query into the words of the index.

    Its loop ends one character early: of two words it looks up the first alone.
    """
    cut = re.compile(r"(?<=;)(\w)<=?((\w)\.length;\1\+\+\)\3\.slice\(\w,\1\)in )")
    places = len(cut.findall(script))
    if places != 1:
        raise PluginError(f"this mkdocs-material cuts queries in {places} places, not in one")
    return cut.sub(r"\1<=\2", script)
