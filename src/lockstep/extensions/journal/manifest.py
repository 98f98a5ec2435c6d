"""The manifest of a run: what else decides its bits, for the comparison of two journals."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch

from lockstep.distributed import manifest
from lockstep.distributed.numerics import read_numerics
from lockstep.distributed.process_group import Run
from lockstep.settings import settings_of_ranks

SETTINGS_WITHOUT_EFFECT = frozenset(
    {"ledger", "report", "journal", "journal_every", "measure_link"}
)
"""Settings that do not change what is computed."""


def run_manifest(run: Run, strategy: str) -> dict[str, str]:
    """Returns texts by name: command, code, settings, versions, devices and threads of this rank.

    Args:
        run: of this process.
        strategy: its name.
    """
    settings: dict[str, object] = {}
    for name, value in settings_of_ranks(run.settings).items():
        if name not in SETTINGS_WITHOUT_EFFECT:
            settings[name] = value
    texts = manifest.collect(settings)
    texts["strategy"] = strategy
    texts["processes"] = str(run.topology.size)
    texts["device"] = run.device.type
    texts["threads"] = str(torch.get_num_threads())
    texts["deterministic"] = str(torch.are_deterministic_algorithms_enabled())
    for name, text in read_numerics(run.device).items():
        if name not in texts:
            texts[name] = text
    folder = _script_folder()
    texts["modules beside the script"] = _hash_of_modules(folder)
    texts["git commit"] = git_commit(folder)
    return texts


def _script_folder() -> Path:
    """Returns the folder of the script that runs, or the working directory in a notebook."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path.cwd() if script is None else Path(script).absolute().parent


def _hash_of_modules(folder: Path) -> str:
    """Returns a hash of the modules that were imported from a folder or below it.

    Installed packages, in a virtual environment within the folder, do not count.
    """
    paths: set[Path] = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and Path(file).is_relative_to(folder):
            paths.add(Path(file))
    digest = hashlib.sha256()
    for path in sorted(paths):
        is_installed = "site-packages" in path.parts or "dist-packages" in path.parts
        if not is_installed and path.is_file():
            digest.update(str(path.relative_to(folder)).encode())
            digest.update(path.read_bytes())
    return f"sha256 {digest.hexdigest()}"


def git_commit(folder: Path) -> str:
    """Returns the commit that is checked out in the repository of a folder; "none": there is none.

    It reads git's files (gitrepository-layout(5)), so that no process has to be started.
    """
    repositories = [parent for parent in (folder, *folder.parents) if (parent / ".git").exists()]
    if not repositories:
        return "none"
    git_folder = repositories[0] / ".git"
    try:
        if git_folder.is_file():  # of a worktree or a submodule: "gitdir: /path/to/folder"
            text = git_folder.read_text(encoding="utf-8")
            git_folder = repositories[0] / text.removeprefix("gitdir:").strip()
        head = (git_folder / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return head
        reference = head.removeprefix("ref:").strip()
        common_folder = git_folder
        if (git_folder / "commondir").exists():  # a worktree has its branches elsewhere
            text = (git_folder / "commondir").read_text(encoding="utf-8")
            common_folder = git_folder / text.strip()
        if (common_folder / reference).exists():
            return (common_folder / reference).read_text(encoding="utf-8").strip()
        packed = (common_folder / "packed-refs").read_text(encoding="utf-8")
    except OSError:
        return "none"
    for line in packed.splitlines():
        # Such as "1f0c2e... refs/heads/main".
        commit, _, name = line.partition(" ")
        if name == reference:
            return commit
    return "none"  # the first commit is still to be made
