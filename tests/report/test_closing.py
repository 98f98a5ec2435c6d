from __future__ import annotations

import pytest

from lockstep.communication.traffic import Traffic
from lockstep.extensions.report.closing import print_closing
from lockstep.session.step import Step

pytestmark = pytest.mark.unit


def test_the_last_lines_of_a_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Step, "seconds", 12.4)
    step = Step()
    step.number, step.samples = 3, 36000
    traffic = Traffic()
    traffic.sent, traffic.shared = 3 * 2**20, 2**19
    print_closing(step, ["runs/first", "runs/digits"], traffic, "ddp")
    assert capsys.readouterr().out == (
        "  trained     36 000 samples in 12.4 s, 2 903 samples/s\n"
        "  sent        3.0 MiB by rank 0 to other ranks, 0.5 MiB into shared memory\n"
        "  checkpoint  runs/digits\n"
    )


def test_what_is_not_known_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    step = Step()
    print_closing(step, ["runs"], Traffic(), "ddp")
    assert capsys.readouterr().out == ""
    step.number = 1
    print_closing(step, [], Traffic(), "ddp", resumed_step=1)
    assert capsys.readouterr().out == "  trained     nothing after step 1, which was resumed\n"
    print_closing(step, ["runs"], Traffic(), "ddp", resumed_step=0)
    assert capsys.readouterr().out == "  checkpoint  runs\n"
    traffic = Traffic()
    traffic.sent = 2**20  # what is not torch's
    print_closing(step, ["runs"], traffic, "fsdp")
    assert capsys.readouterr().out == "  checkpoint  runs\n"
