from __future__ import annotations

import contextlib
import io
import os
import time

import pytest
import torch
import torch.distributed as dist
from problems import mean_loss, mlp, tensors
from ranks import in_gloo_group, run_ranks

import lockstep
from lockstep.communication.link import Link, measure
from lockstep.communication.traffic import all_reduce_bytes
from lockstep.extensions.report.network_forecast import (
    CompressionCost,
    Network,
    describe_network,
    describe_slow_machine,
    forecast_methods,
    run_delay_s,
    step_seconds,
)

pytestmark = pytest.mark.ranks

GIGABIT = Link(0.0001, 125e6)
COMPRESSIONS = {"bf16": CompressionCost(0.5), "int8": CompressionCost(0.258)}


@pytest.mark.parametrize("bandwidth", [1e5, 12.5e6, 125e6, 1.25e9, 1e11])
def test_a_link_is_measured_by_messages_that_grow(bandwidth: float) -> None:
    took: list[float] = []

    def shift(size: int) -> float:
        took.append(0.0002 + size / bandwidth)
        return took[-1]

    found = measure(shift, lambda seconds: seconds)
    assert found.latency_s == pytest.approx(0.0002, rel=0.1)
    assert found.bandwidth == pytest.approx(bandwidth, rel=0.02)
    assert sum(took) < 1.0


def test_what_disturbs_one_message_does_not_count() -> None:
    # What each of three messages takes beyond its bytes, of 64 KiB and then of 256 KiB.
    took = iter([*[0.0002] * 18, 0.09, 0.02, 0.05, 0.08, 0.15, 0.03])
    found = measure(lambda size: next(took) + (size > 1) * size / 5e6, lambda seconds: seconds)
    assert found == Link(0.0002, pytest.approx(196_608 / (0.01 + 196_608 / 5e6)), 2)
    assert str(found) == "31.9 Mb/s"
    assert str(Link(0.0, 1.25e9)) == "10000 Mb/s"


def test_the_slowest_of_the_machines_counts() -> None:
    found = measure(lambda size: 0.0, lambda seconds: 0.05)  # this rank takes no part
    assert found.latency_s == 0.05


def test_the_time_of_a_step() -> None:
    assert step_seconds(0.1, 125e6, Link(0.01, 125e6)) == pytest.approx(1.12)
    assert step_seconds(0.1, 125e6, Link(0.01, 125e6), hidden_s=0.5) == pytest.approx(0.62)
    assert step_seconds(0.1, 125e6, GIGABIT, hidden_s=2.0) == pytest.approx(0.1)
    assert all_reduce_bytes(12, 2) == 12
    assert all_reduce_bytes(12, 4) == 18


def seen(waiting_s: float, **other: object) -> Network:
    values = {"compute_s": 0.08, "local_size": 2, "hierarchical": False, **other}
    return Network(waiting_s=waiting_s, gradient_bytes=44_000_000, **values)  # type: ignore[arg-type]


def times(found: Network, link: Link = GIGABIT, **other: CompressionCost) -> dict[str, float]:
    return {name: t for name, t, _ in forecast_methods(found, link, {**COMPRESSIONS, **other})}


def test_other_methods_are_predicted_from_what_was_seen() -> None:
    sending = 66e6 / 125e6 + 0.0002
    found, total = times(seen(sending)), 0.08 + sending
    assert found["hierarchical"] == pytest.approx(total / (0.08 + 0.352), rel=0.001)
    assert found["bf16"] == pytest.approx(total / (0.08 + 0.176), rel=0.002)
    assert found["int8"] == pytest.approx(total / (0.08 + 0.352 * 0.258), rel=0.002)
    assert found["diloco every=50"] == pytest.approx(total / (0.08 + 0.352 / 50), rel=0.001)
    same = [
        name for name, _, same in forecast_methods(seen(sending), GIGABIT, COMPRESSIONS) if same
    ]
    assert same == ["hierarchical"]
    slower = times(seen(sending), bf16=CompressionCost(0.5, compress_s=1.0))
    assert slower["bf16"] < 1 < slower["int8"]


def test_what_is_hidden_or_slower_than_measured_stays_so() -> None:
    hidden = times(seen(0.352 - 0.03, hierarchical=True))
    assert "hierarchical" not in hidden
    assert hidden["bf16"] == pytest.approx((0.08 + 0.322) / (0.08 + 0.146), rel=0.002)
    slow = times(seen(0.704, hierarchical=True))
    assert slow["bf16"] == pytest.approx((0.08 + 0.704) / (0.08 + 0.352), rel=0.002)
    half = Link(0.0001, 125e6 / 2)  # measured too slow: sending cannot have taken so long
    fast = times(seen(0.352 - 0.03, hierarchical=True), half)
    assert fast["bf16"] == pytest.approx((0.08 + 0.322) / (0.08 + 0.181 - 0.04), rel=0.002)
    assert times(seen(0.3, compressed=True)) == {}


def test_what_sends_needs_a_core_as_well() -> None:
    """A rank that waits for a core of its own while much is sent does not when little is."""
    sending = 0.352 + 0.0002
    found = times(seen(sending, hierarchical=True, run_delay_s=0.02))
    total = 0.08 + sending
    assert found["bf16"] == pytest.approx(total / (0.07 + 0.176), rel=0.002)
    assert found["diloco every=50"] == pytest.approx(total / (0.06 + 0.372 / 50), rel=0.002)


@in_gloo_group
def on_one_core() -> float:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    dist.barrier()
    before, computed = run_delay_s(), time.thread_time()
    while time.thread_time() < computed + 0.3:
        pass
    return run_delay_s() - before


def test_a_thread_that_has_no_core_is_seen() -> None:
    assert max(run_ranks(on_one_core, 2)) > 0.01


def test_what_would_help_is_said_where_a_fifth_of_a_step_is_waiting() -> None:
    assert describe_network(seen(0.019), GIGABIT, COMPRESSIONS) == (
        "a step computes for 80 ms and waits for other machines for 19 ms (19%)"
    )
    assert describe_network(seen(0.528), GIGABIT, COMPRESSIONS).startswith(
        "a step computes for 80 ms and waits for other machines for 528 ms (87%); "
        "hierarchical: same numbers, about 1.4 times as fast; "
        "bf16: other numbers, about 2.4 times as fast; int8: "
    )


def test_the_machine_that_the_others_wait_for_is_named() -> None:
    assert describe_slow_machine(0.3, {"a": 0.22, "b": 0.06, "c": 0.2}) == (
        "b is slower than the others: a step computes there for 240 ms, elsewhere for 100 ms at "
        "most; look at what else runs there, or give it less to do by shares"
    )
    assert describe_slow_machine(0.3, {"a": 0.25, "b": 0.2}) == "", "all wait for the network"
    assert describe_slow_machine(0.3, {"a": 0.2, "b": 0.01, "c": 0.02}) == "", (
        "two are slow, and one fast"
    )


def trained(measured: bool, slow: int | None = None) -> str:
    rank = int(os.environ["RANK"])
    os.environ.update({"GROUP_RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        lockstep.init(device="cpu", measure_link=measured) as world,
    ):
        model = mlp()
        model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = world.loader(tensors(), 10)
        for _ in world.epochs(3):
            for batch in loader:
                begin = time.thread_time()
                while rank == slow and time.thread_time() < begin + 0.1:
                    pass
                world.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    return out.getvalue()


@pytest.mark.thorough
def test_a_run_on_several_machines_tells_what_the_network_takes() -> None:
    first, *others = run_ranks(trained, 3, True)
    assert others == ["", ""]
    [choice] = [line.split() for line in first.splitlines() if line.startswith("  link ")]
    assert choice[2] == "Mb/s", choice
    # On a busy machine one rank is slower than the others, which has a line of its own.
    [told] = [line for line in first.splitlines() if "a step computes for" in line]
    assert told.startswith("  network  ")
    slow, _ = run_ranks(trained, 2, True, 1)
    assert "machine 1 (" in slow
    assert "is slower than the others" in slow
    without, _ = run_ranks(trained, 2, False)
    assert "Mb/s" not in without
    assert "a step computes for" not in without
