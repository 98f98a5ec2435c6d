"""For `make docs`: links to what is not on the site become plain text.

In the repository the pages link to tests and examples, and say of a code block how it is tested
(`python no-run`); a site has neither.
"""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls it with the text of each page."""
    markdown = re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)
    return re.sub(r"^```python (?:no-run|fault)$", "```python", markdown, flags=re.M)
