"""What `python -m build` makes is whole: it runs in an environment that has nothing else."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from ranks import HANG_S

pytestmark = pytest.mark.launcher

ROOT = Path(__file__).parent.parent
SCRIPT = """
import lockstep
with lockstep.init() as world:
    assert world.gather(world.rank) == [0, 1]
    world.print("from", lockstep.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True, timeout=HANG_S)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    source = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "lockstep").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {name for name in names if ".dist-info/" not in name} == source


def test_it_installs_and_runs_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    install = [python, "-m", "pip", "install", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True, capture_output=True, timeout=HANG_S)
    # Its dependencies, without a download: those of this environment, but not its Lockstep, which
    # an editable installation adds by a .pth file, and such files are not read from here.
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [home / "bin" / "lockstep", "run", "--nproc", "2", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    assert f"from {packages}" in done.stdout
