"""Collects the manifest of a run: everything besides the training that may decide its bits.

When the journals of two runs differ, comparing their manifests shows possible causes: another
version of torch, another setting, another commit of the code.
"""

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
    """Describes how this rank computes: its command, code, settings, versions, device and threads.

    Args:
        run: the run that this process belongs to.
        strategy: name of the strategy.

    Returns:
        A text for each entry, by name, for example `{"device": "cuda", "threads": "8", ...}`.
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

    # Some of the numerics, such as the version of torch, are in the manifest already.
    for name, text in read_numerics(run.device).items():
        if name not in texts:
            texts[name] = text

    folder = _script_folder()
    texts["modules beside the script"] = _hash_of_modules(folder)
    texts["git commit"] = git_commit(folder)
    return texts


def _script_folder() -> Path:
    """Returns the folder of the running script, or the working directory in a notebook."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path.cwd() if script is None else Path(script).absolute().parent


def _hash_of_modules(folder: Path) -> str:
    """Hashes the names and the code of the modules that were imported from a folder.

    Modules in subfolders are included, but not the packages that are installed in a virtual
    environment within the folder.
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
    """Returns the commit that is checked out in the git repository around a folder.

    Reads git's files (see gitrepository-layout(5)) rather than starting a process.

    Returns:
        The hash of the commit; "none" if there is no repository, or no commit in it.
    """
    repositories = [parent for parent in (folder, *folder.parents) if (parent / ".git").exists()]
    if not repositories:
        return "none"
    repository = repositories[0]  # the innermost one
    try:
        return _read_commit(repository)
    except OSError:
        return "none"


def _read_commit(repository: Path) -> str:
    """Returns the hash of the commit that is checked out in a repository, or "none".

    Raises:
        OSError: if a file of git's is missing or cannot be read.
    """
    git_folder = _git_folder(repository)

    # HEAD holds the commit itself, or the branch: "ref: refs/heads/main".
    head = (git_folder / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref:"):
        return head
    branch = head.removeprefix("ref:").strip()
    return _commit_of_branch(git_folder, branch)


def _git_folder(repository: Path) -> Path:
    """Returns the folder in which git keeps the state of a repository."""
    git_folder = repository / ".git"
    if git_folder.is_file():  # a worktree or a submodule; the file says "gitdir: /path/to/folder"
        text = git_folder.read_text(encoding="utf-8")
        git_folder = repository / text.removeprefix("gitdir:").strip()
    return git_folder


def _commit_of_branch(git_folder: Path, branch: str) -> str:
    """Returns the hash of the commit at the end of a branch; "none" if it has no commit yet."""
    # A worktree keeps its branches in the folder of the main repository.
    branches_folder = git_folder
    if (git_folder / "commondir").exists():
        text = (git_folder / "commondir").read_text(encoding="utf-8")
        branches_folder = git_folder / text.strip()

    # The commit of a branch is in a file of its own, or in a line of a common file, such as
    # "1f0c2e... refs/heads/main".
    if (branches_folder / branch).exists():
        return (branches_folder / branch).read_text(encoding="utf-8").strip()
    packed = (branches_folder / "packed-refs").read_text(encoding="utf-8")
    for line in packed.splitlines():
        commit, _, name = line.partition(" ")
        if name == branch:
            return commit
    return "none"
