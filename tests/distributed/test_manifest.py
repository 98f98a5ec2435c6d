from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist

from lockstep.distributed.manifest import (
    collect,
    cuda_version,
    describe_mismatches,
    nccl_version,
    without_harmless_differences,
)
from lockstep.machine.topology import SET_BY_SCRIPT, Topology
from lockstep.wording import format_ranks

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([5, 0, 2, 1], "ranks 0-2, 5"),
        ([4, 2], "ranks 2, 4"),
        ([1, 1], "rank 1"),
    ],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert format_ranks(ranks) == words


def test_equal_manifests_have_no_mismatches() -> None:
    records = [{"a": "1"} for _ in range(3)]
    assert describe_mismatches(records) == []
    assert describe_mismatches(records[:1]) == []


def test_a_difference_names_the_field_both_values_and_the_ranks() -> None:
    lines = describe_mismatches(
        [{"arguments": "--lr 0.1", "x": "1"}, {"arguments": "--lr 0.2", "x": "1"}]
    )
    assert lines == ["arguments: rank 0 has '--lr 0.1', rank 1 has '--lr 0.2'"]


def test_arguments_that_number_the_process_are_not_compared() -> None:
    manifests = [{"arguments": f"'a b.py' -rn {rank} -s 'x y'", "seed": "0"} for rank in range(3)]
    topologies = [Topology(rank=rank, size=3, source=SET_BY_SCRIPT) for rank in range(3)]
    compared = without_harmless_differences(manifests, topologies)
    assert compared == [{"arguments": "'a b.py' -rn ... -s 'x y'", "seed": "0"}] * 3
    assert manifests[1]["arguments"] == "'a b.py' -rn 1 -s 'x y'"


def test_ranks_that_agree_are_grouped_and_a_missing_field_is_said() -> None:
    lines = describe_mismatches(
        [{"seed": "0", "a": "1"}, {"seed": "0"}, {"seed": "0"}, {"seed": "7"}]
    )
    assert lines == [
        "seed: ranks 0-2 have '0', rank 3 has '7'",
        "a: rank 0 has '1', ranks 1-3 have none",
    ]


def test_many_values_are_cut_short() -> None:
    (line,) = describe_mismatches([{"seed": str(rank)} for rank in range(10)])
    assert line.endswith("rank 3 has '3', and 6 more values")


def test_the_manifest_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/a/train.py", "--local_rank", "1", "--lr", "0.1"])
    record = collect({"seed": 3, "s": None})
    assert record["arguments"] == "train.py --local_rank 1 --lr 0.1"
    assert record["torch"] == torch.__version__
    assert (record["seed"], record["s"]) == ("3", "None")
    assert all(isinstance(value, str) for value in record.values())
    assert describe_mismatches([record, dict(record)]) == []


def test_another_script_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    records = []
    for text in ("a", "b"):
        path = f"{tmp_path}/train.py"
        with open(path, "w") as file:
            file.write(text)
        monkeypatch.setattr(sys.modules["__main__"], "__file__", path, raising=False)
        records.append(collect({}))
    (line,) = describe_mismatches(records)
    assert line.startswith("script: rank 0 has 'sha256 ca978112")


def test_rocm_has_versions_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4.2")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 22, 3))
    manifest = collect({})
    assert manifest["CUDA"] == "ROCm 6.4.2"
    assert manifest["NCCL"] == "2.22.3"
    monkeypatch.setattr(torch.version, "hip", None)
    assert cuda_version() == "none"
    assert nccl_version() == "none"
