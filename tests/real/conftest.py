"""Programs of other libraries, as they are installed: `make real` runs them, in .venv-real.

Nothing is downloaded: models are built from their configurations, data are made.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGES = (
    *("transformers", "peft", "accelerate", "datasets", "lightning"),
    *("webdataset", "litdata", "streaming"),
)
_MISSING = [name for name in PACKAGES if not find_spec(name)]


def pytest_configure() -> None:
    if _MISSING:
        raise pytest.UsageError(
            f"tests/real needs {', '.join(_MISSING)}, which are not installed here: `make real`"
            " installs them in .venv-real and runs these tests there"
        )


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Hugging Face's libraries keep lies in the test's folder, and the hub is not asked."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
