"""For `make docs`: what is different on the site and in the repository.

In the repository the pages link to tests and examples, and say of a code block how it is tested
(`python no-run`), and a line leads to the page in the other language; on the site a menu does.
The site says which version it describes.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

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
