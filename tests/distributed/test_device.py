"""Which GPU a process takes, where torch sees some; none of them is touched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import lockstep
from lockstep.distributed.device import choose_device
from lockstep.distributed.process_group import _exchange_on_this_machine
from lockstep.errors import SettingError
from lockstep.machine.topology import Topology

pytestmark = pytest.mark.ranks


def choose(
    monkeypatch: pytest.MonkeyPatch,
    local_rank: int,
    shown: list[list[str]],
    wanted: str | None = None,
    may_share: bool = False,
    name: str = "NVIDIA H100",
    **environ: str,
) -> tuple[str, str]:
    """The choice of one of the processes, each of which is shown some GPUs.

    Each GPU is named by the letters of its address on the PCI bus.
    """
    own = shown[local_rank]

    def properties(index: int) -> SimpleNamespace:
        bus = int(own[index], 16)
        return SimpleNamespace(name=name, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(own))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(own))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    if torch.cuda.init.__module__ == "torch.cuda":  # else a test has made up its own
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
    size = len(shown)
    topology = Topology(rank=local_rank, size=size, local_rank=local_rank, local_size=size)

    def exchange_on_machine(text: str) -> list[str]:
        told = [f"0000:0{gpus[rank % len(gpus)]}:00" for rank, gpus in enumerate(shown)]
        assert told[local_rank] == text
        return told

    device, reason = choose_device(
        wanted, topology, environ, may_share=may_share, exchange_on_machine=exchange_on_machine
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


def test_slices_of_one_gpu_are_refused_as_nccl_refuses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    # Each process is shown one slice; or, where CUDA counts several, all of them.
    for rank, shown in [(1, [["a"], ["a"]]), (0, [["a", "a"]] * 2)]:
        with pytest.raises(SettingError) as caught:
            choose(monkeypatch, rank, shown, name=name, CUDA_VISIBLE_DEVICES="MIG-1")
        assert "(CUDA_VISIBLE_DEVICES=MIG-1); MIG slices are among them" in str(caught.value)
        assert "backend='gloo' to share GPUs" in str(caught.value)
        assert "NCCL_MULTI_RANK_GPU_ENABLE" not in str(caught.value)  # an NCCL that has none
        assert choose(monkeypatch, rank, shown, may_share=True, name=name)[0] == "cuda:0"
    assert choose(monkeypatch, 0, [["a"], ["b"]], name=name)[0] == "cuda:0"
    assert choose(monkeypatch, 1, [["a", "b"]] * 2, name=name) == ("cuda:1", "local rank 1")


@pytest.mark.parametrize(
    ("version", "hip", "value", "shares"),
    [
        ((2, 30, 4), None, "1", True),
        ((2, 30, 4), None, "0", False),
        ((2, 28, 9), None, "1", False),
        ((2, 30, 4), "6.4", "1", False),
    ],
)
def test_a_newer_nccl_shares_gpus_if_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, ...],
    hip: str | None,
    value: str,
    shares: bool,
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.setattr(torch.version, "hip", hip)
    variables = {"NCCL_MULTI_RANK_GPU_ENABLE": value}
    if shares:
        assert choose(monkeypatch, 1, [["a"], ["a"]], **variables)[0] == "cuda:0"
        return
    with pytest.raises(SettingError) as caught:
        choose(monkeypatch, 1, [["a"], ["a"]], **variables)
    advises_it = "with NCCL_MULTI_RANK_GPU_ENABLE=1" in str(caught.value)
    assert advises_it is (version >= (2, 30) and hip is None)


def test_gpus_that_do_not_work_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\n")

    monkeypatch.setattr(torch.cuda, "init", fail)
    for wanted in (None, "cuda"):
        with pytest.raises(SettingError, match="CUDA does not work: The NVIDIA driver on your"):
            choose(monkeypatch, 0, [["a"]], wanted)
    assert choose(monkeypatch, 0, [["a"]], "cpu") == ("cpu", "as set")


@pytest.mark.parametrize("wanted", ["mps", "xpu"])
def test_other_devices_are_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    with pytest.raises(SettingError, match="computes on CPUs and on CUDA devices"):
        choose(monkeypatch, 0, [[]], wanted)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(wanted))
    assert choose(monkeypatch, 0, [[]]) == ("cpu", "no CUDA device is visible")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    device, reason = choose(monkeypatch, 0, [[]])
    assert device == "cpu"
    assert reason.endswith(f"which those of ROCm are too, not on {wanted}")


def test_rocm_lists_gpus_in_a_variable_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for visible in ({"HIP_VISIBLE_DEVICES": "5"}, {"CUDA_VISIBLE_DEVICES": "5"}):
        assert choose(monkeypatch, 0, [["a"]], **visible)[1] == "local rank 0 (physical GPU 5)"
    with pytest.raises(SettingError, match="HIP_VISIBLE_DEVICES=7"):
        choose(monkeypatch, 0, [[]], "cuda", HIP_VISIBLE_DEVICES="7", CUDA_VISIBLE_DEVICES="0")


def tell() -> list[list[str] | None]:
    with lockstep.init() as world:
        joined = world._run.joined
        late: list[str] | None = []
        if world.is_main:  # the other one says nothing
            late = _exchange_on_this_machine(joined, 0.05, "mine")
            joined.store.delete_key("here/0")
        world.barrier()
        return [_exchange_on_this_machine(joined, 20.0, f"GPU {world.rank}"), late]


def test_processes_of_a_machine_tell_each_other() -> None:
    [first, late], [second, _] = run_ranks(tell, 2)
    assert second == ["GPU 0", "GPU 1"]
    assert first[1] == "GPU 1"
    assert late is None
