"""What is said to a device that has run out of memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from ranks import HANG_S
from torch import nn

import lockstep
from lockstep.distributed.device import add_memory_advice, is_out_of_memory
from lockstep.errors import UsageError

pytestmark = pytest.mark.launcher

NOTE = "lockstep: out of memory with"


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ..."), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("CUDA out of memory"), False),
        (UsageError("CUDA out of memory", "a", "b"), False),
    ],
)
def test_it_is_known(error, is_one):
    assert is_out_of_memory(error) is is_one
    add_memory_advice(error, 8)
    assert hasattr(error, "__notes__") is is_one


def test_it_says_what_to_do_once():
    error = torch.OutOfMemoryError("CUDA out of memory")
    add_memory_advice(error, 9)
    add_memory_advice(error, 9)
    (note,) = error.__notes__
    assert note.startswith(f"{NOTE} 9 samples")
    for advice in (
        "micro_batch_size=4",
        "micro_batch_size='auto'",
        "bf16",
        "fsdp",
        "checkpoint_activations",
    ):
        assert advice in note
    smallest = torch.OutOfMemoryError("CUDA out of memory")
    add_memory_advice(smallest, 1)
    assert "micro_batch_size=" not in smallest.__notes__[0]
    add_memory_advice(None, 1)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, dy: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. (a test)")


def test_in_the_backward_pass():
    model = nn.Linear(3, 1)
    with lockstep.init() as world:
        model = world.prepare(model)
        data = torch.utils.data.TensorDataset(torch.randn(6, 3))
        for (x,) in world.loader(data, 6):
            with pytest.raises(torch.OutOfMemoryError) as caught:
                world.backward(Fails.apply(model(x)).mean())
            break
    assert [n[: len(NOTE) + 2] for n in caught.value.__notes__] == [f"{NOTE} 6"]


SCRIPT = """
import torch, lockstep
world = lockstep.init()
for (x,) in world.loader(torch.utils.data.TensorDataset(torch.zeros(8, 1)), 8):
    raise torch.OutOfMemoryError("CUDA out of memory. (a test)")
"""


def test_where_nobody_catches_it():
    hook = sys.excepthook
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 1
    assert f"{NOTE} 8 samples" in done.stderr
    with lockstep.init():
        assert sys.excepthook is not hook
    assert sys.excepthook is hook


def test_where_the_world_is_left():
    with pytest.raises(torch.OutOfMemoryError) as caught, lockstep.init() as world:
        for _ in world.loader(torch.utils.data.TensorDataset(torch.zeros(4, 1)), 4):
            raise torch.OutOfMemoryError("CUDA out of memory. (a test)")
    assert caught.value.__notes__[0].startswith(f"{NOTE} 4 samples")
