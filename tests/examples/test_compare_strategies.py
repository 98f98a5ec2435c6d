"""The comparison of the strategies runs, and its picture shows what it printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from ranks import HANG_S

pytestmark = [pytest.mark.launcher, pytest.mark.thorough]

FOLDER = Path(__file__).parents[2] / "examples" / "compare_strategies"
TINY = ["--batch-size", "8", "--length", "32", "--words", "2000", "--width", "64", "--blocks", "6"]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    picture = tmp_path_factory.mktemp("compare") / "memory.svg"
    done = subprocess.run(
        [sys.executable, FOLDER / "compare.py", *TINY, "--picture", picture],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout, picture


def totals(output: str) -> dict[str, tuple[float, float]]:
    """The last table: MiB of the first device and the most of the others, by way."""
    found = re.findall(r"^(DP|balanced DP|DDP|FSDP) +([\d.]+) +([\d.]+)$", output, re.M)
    return {way: (float(first), float(other)) for way, first, other in found}


def test_the_first_device_of_dp_holds_most(made):
    shown = totals(made[0])
    assert list(shown) == ["DP", "balanced DP", "DDP", "FSDP"]
    dp, balanced, ddp, fsdp = shown.values()
    assert dp[0] > balanced[0] > balanced[1] > dp[1]
    assert dp[0] > ddp[0] == ddp[1] > fsdp[0] == fsdp[1]


def test_it_says_what_is_counted(made):
    assert "replicas share the memory of their process" in made[0]
    peaks = re.findall(r"^  measured peak +(\S+) +(\S+)$", made[0], re.M)
    assert [other == "?" for _, other in peaks] == [True, True, False, False]
    assert all(float(first.replace(",", "")) > 0 for first, _ in peaks)


def test_the_picture_is_of_these_numbers(made):
    output, picture = made
    root = ElementTree.parse(picture).getroot()
    words = [text.text for text in root.iter(f"{SVG}text")]
    for way, (first, other) in totals(output).items():
        assert way in words
        assert f"{first:.1f}" in words
        assert f"{other:.1f}" in words
    bottom = {float(r.get("y", 0)) + float(r.get("height", 0)) for r in root.iter(f"{SVG}rect")}
    width, height = (float(root.get(name, 0)) for name in ("width", "height"))
    assert max(bottom) <= height
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.get("x", 0)) < width
        assert 0 < float(text.get("y", 0)) < height
