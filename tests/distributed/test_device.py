"""Which GPU a process takes, where torch sees some; none of them is touched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks

import lockstep
from lockstep.distributed.device import choose_device
from lockstep.distributed.process_group import _exchange_on_this_machine
from lockstep.distributed.topology import Topology
from lockstep.errors import SettingError

pytestmark = pytest.mark.ranks


def choose(
    monkeypatch: pytest.MonkeyPatch,
    local_rank: int,
    shown: list[list[str]],
    wanted: str | None = None,
    may_share: bool = False,
    **environ: str,
) -> tuple[str, str]:
    """The choice of one of the processes, each of which is shown some GPUs."""
    own = shown[local_rank]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(own))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(own))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=own[index])
    )
    size = len(shown)
    topology = Topology(rank=local_rank, size=size, local_rank=local_rank, local_size=size)

    def on_this_machine(text: str) -> list[str]:
        told = [gpus[rank % len(gpus)] for rank, gpus in enumerate(shown)]
        assert told[local_rank] == text
        return told

    device, reason = choose_device(
        wanted, topology, environ, may_share=may_share, on_this_machine=on_this_machine
    )
    return str(device), reason


def test_local_rank_r_takes_visible_gpu_r(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [["a", "b"]] * 2
    assert choose(monkeypatch, 0, both) == ("cuda:0", "local rank 0")
    visible = {"CUDA_VISIBLE_DEVICES": "3, GPU-5f"}
    assert choose(monkeypatch, 0, both, **visible)[1] == "local rank 0 (physical GPU 3)"
    assert choose(monkeypatch, 1, both, **visible) == (
        "cuda:1", "local rank 1 (physical GPU GPU-5f)",
    )  # fmt: skip


def test_a_scheduler_may_show_each_process_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `srun --gpus-per-task=1` each process sees one GPU, number 0."""
    for rank in range(3):
        device, reason = choose(monkeypatch, rank, [["a"], ["b"], ["c"]])
        assert (device, reason) == ("cuda:0", "the one that this process is shown")


def test_processes_cannot_share_a_gpu_but_with_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, shown in [(0, [["a"], ["a"]]), (2, [["a", "b"]] * 3), (1, [["a"], ["b"], ["a"]])]:
        with pytest.raises(SettingError) as caught:
            choose(monkeypatch, rank, shown)
        assert "NCCL needs one for each" in str(caught.value)
        device = f"cuda:{rank % len(shown[rank])}"
        assert choose(monkeypatch, rank, shown, may_share=True)[0] == device


def test_there_may_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, 0, [[]]) == ("cpu", "no CUDA device is visible")
    with pytest.raises(SettingError, match="CUDA_VISIBLE_DEVICES=-1"):
        choose(monkeypatch, 0, [[]], "cuda", CUDA_VISIBLE_DEVICES="-1")


def tell() -> list[list[str]]:
    with lockstep.init() as world:
        joined = world._run.joined
        late = []
        if world.is_main:  # the other one says nothing
            late = _exchange_on_this_machine(joined, 0.05, "mine")
            joined.store.delete_key("here/0")
        world.barrier()
        return [_exchange_on_this_machine(joined, 20.0, f"GPU {world.rank}"), late]


def test_processes_of_a_machine_tell_each_other() -> None:
    [first, late], [second, _] = run_ranks(tell, 2)
    assert second == ["GPU 0", "GPU 1"]
    assert first[1] == "GPU 1"
    assert late == ["mine", "mine"]
