"""How `lockstep verify` runs a script once: the number of processes, and the settings.

The *reference* is the run on one process, with which runs on several processes are compared. Each
run has a folder, in which its `RunConfig` is stored for the processes that are started.
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
from lockstep.strategies.registry import entry_of

# The smallest number of steps that are compared, no matter how long they take.
MIN_STEPS = 3

# OpenMP's threads are told to sleep while they wait for each other. By default they spin, and if
# other programs use the cores too, a thread that spins takes the core that another one needs. In
# float64, torch's grouped convolutions make the threads wait thousands of times in a step.
OMP_WAIT_POLICY = "passive"

_CONFIG_FILE = "run_config.pickle"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of one run of the script."""

    name: str
    nproc: int
    script: Script
    # Number of steps after which the run ends, of the optimizer with the most steps.
    steps: int = MIN_STEPS
    # Time limit after which no further step is made, except for the first `MIN_STEPS`; None for no
    # limit.
    seconds: float | None = None
    # Precision of all computation, "fp64" or "fp32". It is ignored if bits are compared.
    precision: str = "fp64"
    # If it is a number, bits are compared: the script computes in its own precision, with this
    # number of virtual ranks unless it sets one itself.
    virtual_ranks: int | None = None
    # Factor by which the batch size of torch's DataLoaders is enlarged.
    batch_size_factor: int = 1
    # Folder in which the run on several processes keeps its batches for the reference; None to keep
    # none.
    batches_folder: Path | None = None
    # Settings of Lockstep that replace those of the script; see `lockstep.settings`.
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def compares_bits(self) -> bool:
        """Whether the run is compared bit by bit, and not within a tolerance."""
        return self.virtual_ranks is not None

    @property
    def trains_replicas(self) -> bool:
        """Whether the strategy trains several replicas; then the reference must do so too."""
        return entry_of(self.overrides.get("strategy")).trains_copies

    def reference_config(self, batch_size_factor: int = 1) -> RunConfig:
        """Returns the configuration of the run on one process that this run is compared with.

        Args:
            batch_size_factor: factor by which the batch size of torch's DataLoaders is enlarged.
        """
        name = "1 process"
        # Settings that replace those of the script. None resets a setting that is meant for several
        # processes.
        overrides: dict[str, Any] = {"shares": None}

        # When bits are compared, one process must use the same micro-batches, because rounding
        # depends on them. Otherwise it computes each global batch in one piece.
        if not self.compares_bits:
            overrides["micro_batch_size"] = None  # no micro-batches
            overrides["reference_of_verify"] = True  # no virtual ranks for synchronized BatchNorm

        if self.trains_replicas:
            overrides["strategy"] = self.overrides["strategy"]
            name += f", strategy {self.overrides['strategy']}"

        return replace(
            self, name=name, nproc=1, batch_size_factor=batch_size_factor, overrides=overrides
        )

    def environment(self) -> dict[str, str]:
        """Returns the environment variables for the processes of the run.

        They include the variables of this process.
        """
        settings: dict[str, Any]
        if self.compares_bits:
            settings = {"virtual_ranks_of_verify": self.virtual_ranks}
        else:
            settings = {
                "precision": self.precision,
                "uncompressed": True,  # compressed gradients would differ from those of one process
            }

        overrides = {**settings, **self.overrides}
        environment = {**os.environ, VERIFY_VARIABLE: json.dumps(overrides)}

        # `setdefault` keeps what the user has set. The runs get different hash seeds, so that a
        # script whose results depend on the order of a set has other results in each of them.
        environment.setdefault("PYTHONHASHSEED", _hash_seed(self.nproc))
        environment.setdefault("OMP_WAIT_POLICY", OMP_WAIT_POLICY)
        return environment

    def write(self, folder: Path) -> None:
        """Writes the configuration into the folder of the run."""
        (folder / _CONFIG_FILE).write_bytes(pickle.dumps(self))


def _hash_seed(nproc: int) -> str:
    """Returns a seed that decides in which order Python iterates over a set of strings.

    Each number of processes has another seed. So a script whose results depend on this order has
    other results in each run, and is found. (With Python's default, a random seed, two runs may
    have the same order by chance.)
    """
    return str(nproc)


def read_run_config(folder: Path) -> RunConfig:
    """Reads the configuration from the folder of a run."""
    config: RunConfig = pickle.loads((folder / _CONFIG_FILE).read_bytes())
    return config
