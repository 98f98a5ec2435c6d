"""How `lockstep verify` runs a script once: on how many processes, with which settings.

The *reference* is the run on one process, with which the runs on several processes are compared.
Each run has a folder, in which its `RunConfig` lies for the processes that are started.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.run.start.worker import Script
from lockstep.settings import VERIFY_VARIABLE

# At least so many steps are compared, however long they take.
MIN_STEPS = 3

_CONFIG_FILE = "run_config.pickle"

# The strategy that trains several copies of the model (replicas) with other parameters, so that its
# numbers are not those of one model.
_STRATEGY_WITH_REPLICAS = "diloco"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run of the script."""

    name: str
    nproc: int
    script: Script
    # The run ends after this number of steps of the optimizer that makes the most.
    steps: int = MIN_STEPS
    # No further step is made after this time, apart from the first `MIN_STEPS`; None: no limit.
    seconds: float | None = None
    # What everything is computed in, "fp64" or "fp32". Without meaning if bits are compared.
    precision: str = "fp64"
    # None, or bits are compared: the script computes in its own precision, with this number of
    # virtual ranks if it sets none.
    virtual_ranks: int | None = None
    # The batch size of torch's DataLoaders is multiplied by this number.
    batch_times: int = 1
    # The folder in which the run on several processes keeps its batches for the reference; None: it
    # does not keep them.
    batches_folder: Path | None = None
    # Settings of Lockstep that replace those of the script; see `lockstep.settings`.
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def compares_bits(self) -> bool:
        """Whether the run is compared bit by bit, and not within a tolerance."""
        return self.virtual_ranks is not None

    @property
    def trains_replicas(self) -> bool:
        """Whether the strategy trains several replicas, so that the reference must do so too."""
        strategy = str(self.overrides.get("strategy"))
        strategy_name = strategy.partition(":")[0]  # options follow the colon
        return strategy_name == _STRATEGY_WITH_REPLICAS

    def reference(self, batch_times: int = 1) -> RunConfig:
        """Returns the run on one process with which this one is compared.

        Args:
            batch_times: the batch size of torch's DataLoaders is multiplied by this number.
        """
        name = "1 process"
        # These settings of the script are for several processes. None takes them back: one process
        # has the whole batch. With virtual ranks a process has several parts, which are computed in
        # pieces of the script's size: that decides their bits.
        overrides: dict[str, Any] = {"shares": None}
        if not self.compares_bits:
            overrides["micro_batch_size"] = None

        if self.trains_replicas:
            overrides["strategy"] = self.overrides["strategy"]
            name += f", strategy {self.overrides['strategy']}"

        return replace(self, name=name, nproc=1, batch_times=batch_times, overrides=overrides)

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of the run's processes, with those of this process."""
        # Compressed gradients would differ from those of one process, so compression is off.
        settings: dict[str, Any] = {"precision": self.precision, "uncompressed": True}
        if self.compares_bits:
            settings = {"virtual_ranks_of_verify": self.virtual_ranks}

        overrides = {**settings, **self.overrides}
        return {
            # Python orders sets of texts by this seed. By default it is random, so that a script
            # which depends on the order is found by chance only. Here the order differs for certain
            # between runs on different numbers of processes.
            "PYTHONHASHSEED": str(self.nproc),
            **os.environ,
            VERIFY_VARIABLE: json.dumps(overrides),
        }

    def write(self, folder: Path) -> None:
        """Writes the configuration into the folder of the run."""
        (folder / _CONFIG_FILE).write_bytes(pickle.dumps(self))


def read_run_config(folder: Path) -> RunConfig:
    """Reads the configuration from the folder of a run."""
    config: RunConfig = pickle.loads((folder / _CONFIG_FILE).read_bytes())
    return config
