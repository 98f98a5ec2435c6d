"""The thread that copies kept steps from a GPU."""

from __future__ import annotations

import pytest
import torch
from opened_gpus import OpenedGpus

from lockstep.checkpoint.background_copy import BackgroundCopy
from lockstep.distributed.streams import side_stream

pytestmark = pytest.mark.unit


def test_the_thread_opens_the_gpu_of_its_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = OpenedGpus()
    monkeypatch.setattr(torch, "cuda", cuda)
    side_stream.cache_clear()
    cuda.set_device("cuda:1")
    background = BackgroundCopy(torch.device("cuda", 1))
    copied = torch.zeros(3)
    sealed = []
    background.start([copied], [torch.ones(3)], lambda: sealed.append(copied.tolist()))
    assert background.wait()
    side_stream.cache_clear()
    assert sealed == [[1, 1, 1]]
    assert cuda.opened == {1}
