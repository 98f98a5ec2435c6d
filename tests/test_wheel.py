"""What `python -m build` makes is whole: it runs in an environment that has nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tomllib
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


def build(kind: str, folder: Path) -> Path:
    """Builds a wheel or a source distribution into the folder."""
    command = [sys.executable, "-m", "build", kind, "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True, timeout=HANG_S)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("--wheel", tmp_path_factory.mktemp("dist"))


@pytest.mark.thorough
def test_the_index_would_take_both(wheel: Path, tmp_path: Path) -> None:
    source = build("--sdist", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "twine", "--no-color", "check", "--strict", wheel, source],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.stdout.count("PASSED") == 2, done.stdout + done.stderr


def test_the_conda_recipe_has_the_name_version_and_dependencies_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = (ROOT / "deploy" / "conda" / "recipe.yaml").read_text()
    run = recipe.partition("\n  run:\n")[2].partition("\n\n")[0]
    needed = {line.strip().removeprefix("- ").replace(" ", "") for line in run.splitlines()}
    dependencies = {text.replace("torch>", "pytorch>") for text in project["dependencies"]}
    assert needed == dependencies | {f"python{project['requires-python']}"}
    [(command, target)] = project["scripts"].items()
    for text in (
        f"  name: {project['name']}\n",
        f'  version: "{project["version"]}"\n',
        f"  summary: {project['description']}\n",
        f"  license: {project['license']}\n",
        f"      - {command} = {target}\n",
    ):
        assert text in recipe
    [hatchling] = re.findall(r"- hatchling (\S+)", recipe)
    assert f"hatchling{hatchling}" in (ROOT / "pyproject.toml").read_text()


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
