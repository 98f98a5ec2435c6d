from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lockstep.run.watch.call_table import Mismatch
from lockstep.run.watch.dataclass_json import from_values
from lockstep.run.watch.error_record import ErrorRecord
from lockstep.run.watch.exit_status import ExitReport, ExitStatus, Interruption
from lockstep.run.watch.snapshot import CollectiveCall
from lockstep.run.watch.stacks import Frame
from lockstep.run.watch.verdict import Row, Verdict

pytestmark = pytest.mark.unit

LINE = Frame("train.py", 7, "main")
CALL = CollectiveCall(
    group="0",
    backend="gloo",
    seq=5,
    op="all_reduce",
    input_sizes=((2, 3),),
    output_sizes=((2, 3),),
    dtypes=("float",),
    time_s=1.0,
    frames=(LINE,),
)
ERROR = ErrorRecord(
    type="ValueError", message="m", headline="ValueError: m", line=None, time=2.0, chain=("a: b",)
)
FAILED = ExitStatus(rank=1, host="b", time=3.0, code=1, how="exit code 1", error=ERROR)
HANG = Verdict(
    "deadlock",
    True,
    (0, 1),
    "they wait",
    rows=(Row(0, "a", "waits", LINE, 4.0), Row(1, "b", "waits", None)),
    mismatch=Mismatch("the default group", 5, ((0, CALL), (1, None)), 4),
    advice=("look",),
    waited_s=5.0,
    found_at=9.0,
)


def through_json(report: ExitReport) -> ExitReport:
    return from_values(ExitReport, json.loads(json.dumps(report.to_values())))


def test_an_exit_report_survives_json() -> None:
    full = ExitReport(
        host="b",
        exits=(FAILED,),
        complete=True,
        hang=HANG,
        interrupted=Interruption(signal=2, time=1.0),
    )
    for report in (full, ExitReport(host="b")):
        assert through_json(report) == report


def test_an_exit_report_says_whether_the_run_failed() -> None:
    asked = ExitStatus(rank=0, host="a", time=3.0, code=-15, how="SIGTERM", asked_to_end=2.0)
    well = ExitStatus(rank=0, host="a", time=3.0, code=0, how="exit code 0")
    assert not ExitReport(host="a", exits=(asked, well)).failed
    assert ExitReport(host="a", exits=(FAILED,)).failed
    # It had raised at 2 s, and did not end by itself.
    assert ExitReport(host="a", exits=(replace(FAILED, asked_to_end=2.5),)).failed
    assert ExitReport(host="a", hang=HANG).failed
    assert ExitReport(host="a", interrupted=Interruption(signal=2, time=1.0)).failed
