"""How a script is recorded: what the command writes down, and every rank of a run reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

_FILE = "plan.json"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a script is recorded."""

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    local_rank_flag: str | None = None
    """`--local_rank` or `--local-rank` for a script that takes its rank from there."""
    steps: int = 3
    """Of the first optimizer."""
    double: bool = True
    batch_times: int = 1

    def write(self, folder: Path) -> None:
        """For the ranks to read."""
        (folder / _FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_plan(folder: Path) -> Plan:
    """What `Plan.write` wrote."""
    values = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    return Plan(**{**values, "arguments": tuple(values["arguments"])})
