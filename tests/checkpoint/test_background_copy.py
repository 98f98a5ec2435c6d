"""The thread that copies kept steps from the GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opened_gpus import OpenedGpus
from torch import Tensor

from lockstep.checkpoint import background_copy
from lockstep.checkpoint.background_copy import BackgroundCopy
from lockstep.distributed.streams import side_stream
from lockstep.torch_compat import copy_to_each

pytestmark = pytest.mark.unit


class OnGpu(Tensor):
    """A tensor on the CPU that says that it is on a GPU."""

    device: Any = None


def on_gpu(index: int, values: list[float]) -> Tensor:
    tensor = torch.tensor(values).as_subclass(OnGpu)
    tensor.device = torch.device("cuda", index)
    return tensor


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenedGpus]:
    made_up = OpenedGpus()
    monkeypatch.setattr(torch, "cuda", made_up)
    side_stream.cache_clear()
    yield made_up
    side_stream.cache_clear()


def test_the_thread_opens_the_gpu_of_its_rank_alone(cuda: OpenedGpus) -> None:
    cuda.set_device("cuda:1")
    background = BackgroundCopy()
    copied = torch.zeros(3)
    sealed = []
    source = on_gpu(1, [1, 1, 1])
    background.start([copied], [source], lambda: sealed.append(copied.tolist()))
    assert background.wait()
    assert sealed == [[1, 1, 1]]
    assert cuda.opened == {1}


def test_the_copies_from_each_gpu_run_on_a_stream_of_it(
    cuda: OpenedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_and_note(destinations: list[Tensor], sources: list[Tensor]) -> None:
        for gpu in sorted({str(source.device) for source in sources}):
            stream = cuda.current_stream(gpu)
            is_copy_stream = stream is side_stream(torch.device(gpu), "kept steps")
            cuda.done.append(f"copies on the {'copy' if is_copy_stream else 'training'} {stream}")
        copy_to_each(destinations, sources)

    monkeypatch.setattr(background_copy, "copy_to_each", copy_and_note)
    background = BackgroundCopy()
    copied = [torch.zeros(2) for _ in range(3)]
    sources = [on_gpu(0, [1, 1]), on_gpu(1, [2, 2]), on_gpu(0, [3, 3])]
    background.start(copied, sources, lambda: cuda.done.append("sealed"))
    assert background.wait()

    assert [tensor.tolist() for tensor in copied] == [[1, 1], [2, 2], [3, 3]]
    of_each_gpu = [
        [
            f"stream of {gpu} waits for the work of {gpu}",
            f"copies on the copy stream of {gpu}",
            f"the host waits for stream of {gpu}",
        ]
        for gpu in ("cuda:0", "cuda:1")
    ]
    assert cuda.done == [*of_each_gpu[0], *of_each_gpu[1], "sealed"]
