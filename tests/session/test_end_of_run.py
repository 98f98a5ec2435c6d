"""What the ranks tell each other at the end of a run, when the rank with the store may be gone."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.extensions.checks.evaluation_passes import EvaluationPassesCheck

pytestmark = pytest.mark.unit


class StoreThatIsGone:
    timeout = timedelta(minutes=5)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("the connection was reset")


def test_a_rank_that_ends_after_the_store_compares_no_passes() -> None:
    collectives = SimpleNamespace(single_process=False, rank_histories=[])
    store = StoreThatIsGone()
    run: Any = SimpleNamespace(
        collectives=collectives,
        joined=SimpleNamespace(store=store),
        topology=SimpleNamespace(rank=1, size=2),
        loaders=[],
    )
    unused: Any = None
    EvaluationPassesCheck(run, unused, ()).close(failed=False)
    assert store.timeout == timedelta(minutes=5)
