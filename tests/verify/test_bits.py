"""`lockstep verify` of scripts that use Lockstep: bit by bit, with dropout, in bf16.

Other than within a tolerance, a difference of one bit on one rank is found, and its place is named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemas
import warm
from launched import launch

from lockstep.batch.plan import part_sizes
from lockstep.errors import SettingError
from lockstep.run.start.worker import Script
from lockstep.verify.bit_verdict import (
    KINDS,
    BitDifference,
    BitVerdict,
    compare_bits,
    judge_bits,
    reason_bits_not_comparable,
)
from lockstep.verify.cause import Cause
from lockstep.verify.comparison import Comparison, Result, least_virtual_ranks
from lockstep.verify.comparison_plan import ComparisonPlan
from lockstep.verify.finding import Finding
from lockstep.verify.reference_check import check_reference
from lockstep.verify.rounding_noise import find_rounding_noise
from lockstep.verify.run_config import RunConfig
from lockstep.verify.run_record import RunRecord, record_run
from lockstep.verify.training_record import RankUpdate, Update
from lockstep.verify.verdict import Verdict

pytestmark = pytest.mark.launcher

SCRIPT = Path(__file__).with_name("bits") / "train.py"
NUM_VIRTUAL_RANKS = 3
THOROUGH = pytest.mark.thorough


def config_of(*arguments: str, nproc: int = 2, strategy: str | None = None) -> RunConfig:
    return RunConfig(
        name=f"{nproc} processes",
        nproc=nproc,
        script=Script(path=str(SCRIPT), arguments=arguments),
        steps=6,  # the fifth has three samples, and the sixth is of the next epoch
        virtual_ranks=NUM_VIRTUAL_RANKS,
        overrides={} if strategy is None else {"strategy": strategy},
    )


Runs = Callable[..., RunRecord]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs the script with some arguments; runs on one process are kept for other tests."""
    records: dict[tuple[str, ...], RunRecord] = {}

    def record(*arguments: str, nproc: int, strategy: str | None = None) -> RunRecord:
        if nproc == 1 and arguments in records:
            return records[arguments]
        config = config_of(*arguments, nproc=nproc, strategy=strategy)
        config = config.reference_config() if nproc == 1 else config
        record = record_run(config, tmp_path_factory.mktemp("run") / "run", warm.start)
        assert not record.error, record
        if nproc == 1:
            records[arguments] = record
        return record

    return record


def test_every_bit_is_equal_with_dropout_in_bf16(run: Runs) -> None:
    verdict = judge_bits(run("convolution", nproc=1), run("convolution", nproc=2))
    first, second, third, *others = verdict.lines()
    assert first == (
        "EQUAL      2 processes, in every bit: the first 6 optimizer steps, 8 samples each, "
        "losses, 18 gradients, 18 parameters, 54 tensors of the optimizer's state, 3 buffers, "
        "learning rates"
    )
    assert second == (
        "  with    virtual_ranks=3, set by verify; `lockstep run --virtual-ranks 3` trains with "
        "these bits"
    )
    assert third.startswith("  until   step 6, global batch 1 of epoch 2; ")
    assert others == []
    assert verdict.parallel.switched_off == ()


@pytest.mark.parametrize(
    ("arguments", "nproc", "strategy"),
    [
        (["convolution"], 3, None),
        (["convolution"], 3, "fsdp"),
        (["convolution"], 1, "dp"),
        (["language"], 2, "fsdp"),
        (["language"], 3, None),
        (["augmented"], 2, None),
        (["augmented"], 3, "fsdp"),
        (["pieces"], 2, None),
        (["pieces"], 3, None),
        (["own"], 2, None),
        (["own"], 3, "fsdp"),
    ],
)
@THOROUGH
def test_scripts_of_each_kind_are_equal_in_every_bit(
    arguments: list[str], nproc: int, strategy: str | None, run: Runs, tmp_path: Path
) -> None:
    reference = run(*arguments, nproc=1)
    config = config_of(*arguments, nproc=nproc, strategy=strategy)
    verdict = judge_bits(reference, record_run(config, tmp_path / "run", warm.start))
    assert verdict.word == "EQUAL", verdict.lines()
    assert reference.virtual_ranks == (6 if arguments == ["own"] else NUM_VIRTUAL_RANKS)
    assert reference.script_sets_virtual_ranks == (arguments == ["own"])
    # Dropout was on: the loss with other draws is another one.
    assert len({update.loss for update in reference.updates}) == 6


@pytest.mark.parametrize(
    ("changed", "place", "where"),
    [
        ("gradients", "gradients (1 of 18), step 2", "head.weight"),
        pytest.param(
            "part",
            "gradients of virtual ranks (1 of 54), step 2",
            "head.weight of virtual rank 2",
            marks=THOROUGH,
        ),
        pytest.param("loss", "the loss (1 of 3), step 2", "virtual rank 2", marks=THOROUGH),
        pytest.param(
            "state",
            "the optimizer's state after the step (1 of 54), step 3",
            "head.bias/exp_avg",
            marks=THOROUGH,
        ),
    ],
)
def test_one_bit_on_one_rank_is_found(changed: str, place: str, where: str, run: Runs) -> None:
    reference = run("convolution", nproc=1)
    verdict = judge_bits(reference, run("convolution", changed, nproc=2))
    first, second, *_ = verdict.lines()
    assert first == f"DIFFERENT  2 processes, bits differ first in {place}"
    assert second == f"  where   {where}, on rank 1"
    finding = verdict.as_json()["findings"][0]
    assert f"step {finding['step']}" in place
    assert (finding["names"], finding["ranks"]) == ([where], [1])


# Which runs are made, and what is said where bits cannot be compared


def plan_of(*ways: RunConfig, **options: Any) -> ComparisonPlan:
    ways = tuple(replace(way, virtual_ranks=None) for way in ways)
    return ComparisonPlan(
        reference=ways[0].reference_config(),
        ways=ways,
        **{"by_bits": True, "source_uses_lockstep": True, **options},
    )


def compare(plan: ComparisonPlan, folder: Path) -> list[Result]:
    def check(reference: RunRecord) -> None:
        check_reference(reference, "lockstep verify train.py", [], "lockstep run", "script")

    return list(Comparison(plan, folder, warm.start, check).results())


def fake_runs(
    monkeypatch: pytest.MonkeyPatch,
    *,
    own: int | None = None,
    uses_lockstep: bool = True,
    other_bits: bool = False,
    error: Callable[[RunConfig], str] = lambda config: "",
) -> list[str]:
    """Replaces the runs by ones without processes, which make one step.

    Args:
        monkeypatch: of the test.
        own: the virtual ranks that the script itself sets.
        uses_lockstep: the script does.
        other_bits: on rank 1 a gradient has different bits.
        error: with which a run that is compared by bits ends.

    Returns:
        A list to which each run is added: "2 processes", or "2 processes by bits".
    """
    made: list[str] = []

    def record(config: RunConfig, folder: Path, start: object) -> RunRecord:
        by_bits = config.compares_bits
        made.append(f"{config.name} by bits" if by_bits else config.name)
        ranks = []
        for rank in range(config.nproc):
            bits = "other" if other_bits and by_bits and rank == 1 else "same"
            gradients = {"Net/w": np.ones(1)}
            hashes = bits_of(gradients={"Net/w": bits})
            ranks.append(RankUpdate(losses=[1.0], gradients=gradients, bits=hashes))
        return RunRecord(
            config,
            [Update(ranks)],
            error=error(config) if by_bits else "",
            uses_lockstep=uses_lockstep,
            virtual_ranks=(own or config.virtual_ranks) if by_bits else None,
            script_sets_virtual_ranks=own is not None and by_bits,
        )

    monkeypatch.setattr("lockstep.verify.run_record.record_run", record)
    return made


def bits_of(**hashes: dict[str, str]) -> dict[str, dict[str, str]]:
    return {**{kind: {} for kind in KINDS}, **hashes}


BOTH = ["1 process by bits", "2 processes by bits", "1 process", "2 processes, in float64"]


def test_whole_batches_are_compared_after_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_runs(monkeypatch)
    results = compare(plan_of(config_of()), Path())
    assert made == BOTH
    assert [type(result.verdict) for result in results] == [BitVerdict, Verdict]
    assert [result.verdict.word for result in results] == ["EQUAL", "EQUAL"]


def test_parts_are_enough_where_the_script_itself_asks_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = fake_runs(monkeypatch, own=4)
    (result,) = compare(plan_of(config_of()), Path())
    assert made == BOTH[:2]
    assert result.verdict.lines()[1] == "  with    virtual_ranks=4, as set for the script"


@pytest.mark.parametrize("own", [None, 4])
def test_the_cause_of_other_bits_is_looked_for(
    own: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fake_runs(monkeypatch, own=own, other_bits=True)
    results = compare(plan_of(config_of()), Path())
    assert made == BOTH
    assert [result.verdict.word for result in results] == ["DIFFERENT", "EQUAL"]
    ways = [result.verdict.as_json() for result in results]
    schemas.check("verify", {**ways[0], "ways": ways, "bits_not_compared": ""})
    assert results[0].verdict.lines()[:2] == [
        "DIFFERENT  2 processes, bits differ first in gradients (1 of 1), step 1",
        "  where   w, on rank 1",
    ]


def test_bits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_runs(monkeypatch, other_bits=True)
    (result,) = compare(plan_of(config_of(), only_bits=True), Path())
    assert (made, result.verdict.word) == (BOTH[:2], "DIFFERENT")


@pytest.mark.parametrize("in_source", [True, False])
def test_other_scripts_are_compared_as_ever(
    in_source: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fake_runs(monkeypatch, uses_lockstep=False, error=lambda config: "no step")
    (result,) = compare(plan_of(config_of(), source_uses_lockstep=in_source), Path())
    assert made == ["1 process by bits"] * in_source + ["1 process", "2 processes"]
    assert (result.verdict.word, result.notes) == ("EQUAL", [])


def test_a_script_that_imports_lockstep_in_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_runs(monkeypatch)
    compare(plan_of(config_of(), source_uses_lockstep=False), Path())
    assert made == ["1 process", *BOTH[:2], "2 processes, in float64"]


REFUSAL = "SettingError: virtual_ranks=2 with strategy='pipeline'\n  found: stages\n  do:    x"


def test_why_bits_are_not_compared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_runs(monkeypatch, error=lambda config: REFUSAL)
    (result,) = compare(plan_of(config_of()), Path())
    assert made == ["1 process by bits", "1 process", "2 processes"]
    assert result.notes == [
        "  bits    not compared: 1 process with virtual ranks: stages (SettingError: "
        "virtual_ranks=2 with strategy='pipeline')"
    ]
    made = fake_runs(monkeypatch)
    (result,) = compare(plan_of(config_of(), by_bits=False, reason_without_bits="why"), Path())
    assert (made, result.notes) == (BOTH[2:3] + ["2 processes"], ["  bits    not compared: why"])


def test_bits_that_differ_before_an_error_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_runs(
        monkeypatch, other_bits=True, error=lambda config: "" if config.nproc == 1 else REFUSAL
    )
    results = compare(plan_of(config_of()), Path())
    assert made == BOTH
    assert [result.verdict.word for result in results] == ["DIFFERENT", "EQUAL"]


def test_one_way_of_several_cannot_be_compared_by_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_runs(
        monkeypatch, error=lambda config: REFUSAL if config.name == "strategy pipeline" else ""
    )
    pipeline = replace(config_of(strategy="pipeline"), name="strategy pipeline")
    results = compare(plan_of(config_of(), pipeline), Path())
    assert made == [*BOTH, "strategy pipeline by bits", "strategy pipeline"]
    assert [len(result.notes) for result in results] == [0, 0, 1]


def test_more_processes_than_virtual_ranks_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch, own=2)
    with pytest.raises(SettingError, match="give --nproc 2 or less"):
        compare(plan_of(config_of(nproc=3)), Path())


def test_every_process_gets_a_virtual_rank() -> None:
    assert least_virtual_ranks(config_of(nproc=3)) == 3
    shares = replace(config_of(nproc=2), overrides={"shares": "1:9"})
    number = least_virtual_ranks(shares)
    assert 0 not in part_sizes(number, (1, 9))
    assert all(0 in part_sizes(fewer, (1, 9)) for fewer in range(2, number))
    assert least_virtual_ranks(replace(shares, overrides={"shares": "no"})) == 2


def test_what_a_rank_lacks_differs() -> None:
    def update(*ranks: dict[str, str], kind: str = "gradients") -> Update:
        return Update([RankUpdate(bits=bits_of(**{kind: rank})) for rank in ranks])

    both = {"a": "1", "b": "2"}
    assert compare_bits("gradients", update(both), update(both, both)) is None
    lacks = compare_bits("gradients", update(both), update(both, {"a": "1"}))
    assert lacks == BitDifference("gradients", ["b"], 2, [1])
    more = compare_bits("gradients", update({"a": "1"}), update({"a": "1"}, both))
    assert more == BitDifference("gradients", ["b"], 2, [1])
    # Losses are those of virtual ranks, of which each process has some.
    parts = ({"a": "1"}, {"b": "2"})
    assert compare_bits("loss", update(both, kind="loss"), update(*parts, kind="loss")) is None
    lacks = compare_bits("loss", update(both, kind="loss"), update(parts[0], {}, kind="loss"))
    assert lacks == BitDifference("loss", ["b"], 2, [0, 1])


# Real refusals


@THOROUGH
@pytest.mark.parametrize(
    ("arguments", "strategy", "reason"),
    [
        (["convolution"], "diloco", "virtual_ranks=2 with strategy='diloco'"),
        (["own"], "pipeline", "virtual_ranks=6 with strategy='pipeline'"),
        (["synchronised"], None, "virtual_ranks=2 with sync_batchnorm=True)"),
        (["convolution"], "ddp:compress=bf16", "virtual_ranks=2 with strategy='ddp:compress=bf16'"),
        (["closure"], None, "optimizer.step(closure) with virtual_ranks"),
        (["twice"], None, "several backward passes of a batch with virtual_ranks"),
    ],
)
def test_what_cannot_have_virtual_ranks_is_compared_in_float64(
    arguments: list[str], strategy: str | None, reason: str, tmp_path: Path
) -> None:
    way = replace(config_of(*arguments, strategy=strategy), steps=3)
    result = compare(plan_of(way), tmp_path)[-1]
    (note,) = result.notes
    assert reason in note
    assert isinstance(result.verdict, Verdict)


@THOROUGH
def test_one_bit_of_a_parameter_is_found_before_lockstep_finds_other_replicas(
    tmp_path: Path,
) -> None:
    by_bits, in_float64 = compare(plan_of(config_of("convolution", "parameters")), tmp_path)
    assert by_bits.verdict.lines()[0] == (
        "DIFFERENT  2 processes, bits differ first in the parameters before the step (1 of 18), "
        "step 3"
    )
    assert isinstance(in_float64.verdict, Verdict)
    assert in_float64.verdict.findings[0].cause.code == "LS304"


# Gradients that are only rounding


NOISE = SCRIPT.with_name("noise.py")


def noise_of(optimizer: str, precision: str, folder: Path) -> list[Finding]:
    script = Script(path=str(NOISE), arguments=(optimizer, precision))
    config = RunConfig(name="1 process", nproc=1, script=script).reference_config()
    by_bits = record_run(replace(config, virtual_ranks=2), folder / "bits", warm.start)
    in_float64 = record_run(config, folder / "float64", warm.start)
    return find_rounding_noise(by_bits.updates, in_float64.updates)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=THOROUGH), "bf16"])
def test_steps_by_rounding_are_found_and_no_others(precision: str, tmp_path: Path) -> None:
    (finding,) = noise_of("AdamW", precision, tmp_path)
    assert finding.cause.code == "LS408"
    assert finding.names == [
        "noise_before_batchnorm.bias",
        "noise_before_instancenorm.bias",
        "noise_of_keys_in.in_proj_bias",
        "noise_of_keys.bias",
    ]
    assert re.match(
        r"noise_before_batchnorm.bias: gradients up to \d.\de-\d\d in the script's precision and "
        r"\d.\de-1[678] in float64; the step moves it \d+% as far",
        finding.cause.evidence[0],
    )
    assert "in_proj_bias (" in finding.cause.evidence[2]


@THOROUGH
def test_an_optimizer_that_does_not_enlarge_rounding_is_no_finding(tmp_path: Path) -> None:
    assert noise_of("SGD", "fp32", tmp_path) == []


def test_a_small_gradient_is_not_rounding() -> None:
    def update(small: float) -> Update:
        arrays = {
            "gradients": {"Net/large": np.array([1.0]), "Net/small": np.array([small, -small])},
            "parameters_before": {"Net/large": np.zeros(1), "Net/small": np.zeros(2)},
            "parameters": {"Net/large": np.ones(1), "Net/small": np.array([1.0, -1.0])},
        }
        return Update([RankUpdate(dtype="torch.float32", **arrays)])

    assert find_rounding_noise([update(1e-12)], [update(1e-12)]) == []
    assert find_rounding_noise([update(1e-9)], [update(1e-10)]) == []
    (finding,) = find_rounding_noise([update(1e-9)], [update(1e-18)])
    assert finding.names == ["small"]
    # In float64 itself nothing is known.
    in_float64 = Update([replace(update(1e-9)[0], dtype="torch.float64")])
    assert find_rounding_noise([in_float64], [update(1e-18)]) == []


def test_a_note_does_not_change_the_verdict() -> None:
    note = Finding(Cause("LS408", ("w: gradients",), names=("Net/w",)))
    config = config_of()
    run = RunRecord(config, [Update([RankUpdate(bits=bits_of())])], virtual_ranks=2)
    verdict = BitVerdict(run, run, notes=[note])
    assert verdict.word == "EQUAL"
    assert "  note    LS408: an optimizer steps by a gradient that is only rounding error" in (
        verdict.lines()
    )
    assert verdict.as_json()["findings"][0]["code"] == "LS408"


# The command


@THOROUGH
def test_a_loss_that_is_a_sum_is_found_although_all_bits_are_equal(tmp_path: Path) -> None:
    ended = launch(
        ["verify", "--steps", "3", "--json", "verdict.json", str(SCRIPT), "sum"], cwd=tmp_path
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.startswith(f"at most 4 runs of {SCRIPT}, first by bits: 1 process; 2 proc")
    headlines = re.findall(r"^[A-Z][^:(]*", ended.stdout, re.MULTILINE)
    assert headlines == [
        "EQUAL      2 processes, in every bit",
        "DIFFERENT  2 processes, in float64, first in gradients before they were clipped ",
    ]
    assert "\n  note    LS408" in ended.stdout
    assert "\n  cause   LS202" in ended.stdout
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert [way["comparison"] for way in verdict["ways"]] == ["bits", "tolerance"]
    assert (verdict["verdict"], verdict["bits_not_compared"]) == ("DIFFERENT", "")


def test_options_that_have_other_bits(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    ended = launch(["verify", "--bits", "--accumulate", "2", "train.py"], cwd=tmp_path)
    assert ended.returncode == 2
    assert "lockstep: lockstep verify --bits --accumulate\n  found: " in ended.stderr


# Within a tolerance, and other scripts


@THOROUGH
def test_virtual_ranks_of_the_script_are_kept_within_a_tolerance() -> None:
    verdict = warm.verify(SCRIPT, "own", nproc=3)
    assert verdict.word == "EQUAL", verdict.lines()
    assert len(verdict.reference.updates) == 3


WITHOUT_LOCKSTEP = """
import torch, lockstep
weight = torch.nn.Parameter(torch.ones(1))
optimizer = lockstep.optim.LARS([weight], lr=0.1)
for _ in range(9):
    weight.sum().backward()
    optimizer.step()
raise AssertionError("the script was to be ended before")
"""


@THOROUGH
def test_a_script_that_trains_without_lockstep_is_ended_at_its_first_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_LOCKSTEP)
    config = replace(config_of(nproc=1), script=Script(path=str(script)))
    record = record_run(config, tmp_path / "run", warm.start)
    assert (record.error, record.updates, record.uses_lockstep) == ("", [], False)
    assert reason_bits_not_comparable(record).endswith(
        "made no step of an optimizer that Lockstep has prepared"
    )
