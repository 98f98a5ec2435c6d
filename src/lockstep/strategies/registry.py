"""The registry of the strategies: what can be known about each without importing torch.

Commands need only this, and a run imports only the strategy that it has. What the code of a run
asks a strategy is in its class. To add a strategy, add its file and an `Entry` in `ENTRIES`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import SettingError


@dataclass(frozen=True)
class Entry:
    """What can be known about a strategy without importing torch."""

    name: str
    """What `strategy=` and `--strategy` take. It is also the `name` of the class."""
    class_name: str
    """The class with its options."""
    module: str
    """The module of the class, in `lockstep.strategies`."""
    has_share_for_each_process: bool = False
    """True if there are as many shares as processes."""
    why_one_process: str = ""
    """Why it does not take several processes; empty if it does."""
    uses_all_devices: bool = False
    """True if one process computes on all devices."""
    trains_copies: bool = False
    """True if it trains several copies of the model, whose results are not those of one model."""
    communicates_within_passes: bool = False
    """True if forward and backward passes wait for other ranks inside of torch, where that time is
    not measured: the report counts it as work."""


ENTRIES = (
    Entry("single", "Single", "single", why_one_process="the processes would train apart"),
    Entry(
        "dp",
        "DP",
        "data_parallel.strategy",
        why_one_process="dp is one process for all its devices",
        uses_all_devices=True,
    ),
    Entry("ddp", "DDP", "ddp", has_share_for_each_process=True),
    Entry("fsdp", "FSDP", "fsdp", has_share_for_each_process=True, communicates_within_passes=True),
    Entry("hsdp", "HSDP", "fsdp", has_share_for_each_process=True, communicates_within_passes=True),
    Entry("pipeline", "Pipeline", "pipeline.strategy", communicates_within_passes=True),
    Entry(
        "diloco",
        "DiLoCo",
        "diloco.strategy",
        has_share_for_each_process=True,
        trains_copies=True,
    ),
)
ENTRY_OF_STRATEGY = {entry.name: entry for entry in ENTRIES}
"""All strategies, by the names that `strategy=` and `--strategy` take."""


def entry_of(choice: object) -> Entry:
    """Returns the entry of a strategy; for an unknown name one in which every fact is False.

    Args:
        choice: its name, which options may follow: `"diloco:every=100"`.
    """
    name, _, _ = str(choice).partition(":")
    return ENTRY_OF_STRATEGY.get(name, Entry(name, class_name="", module=""))


def check_number_of_processes(strategy: str, size: int) -> None:
    """Raises SettingError if a strategy supports only one process and there are several.

    Args:
        strategy: name of the strategy.
        size: the world size.
    """
    why_one_process = entry_of(strategy).why_one_process
    if why_one_process and size > 1:
        raise SettingError(
            f"strategy={strategy!r}",
            f"world size {size}: {why_one_process}",
            "use strategy='ddp', or start one process",
        )
