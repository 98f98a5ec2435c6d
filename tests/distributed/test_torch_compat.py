"""The private names of torch's that Lockstep uses are there, and mean what they meant."""

from __future__ import annotations

import inspect

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lockstep.distributed import torch_compat


def test_ddp_says_which_module_runs():
    assert torch_compat.enclosing_ddp() is None
    assert "_active_ddp_module = self" in inspect.getsource(DistributedDataParallel)


def test_ddp_awaits_a_backward_pass_as_after_a_forward_pass():
    assert hasattr(dist.Reducer, "_rebuild_buckets")
    assert "self.reducer._rebuild_buckets()" in inspect.getsource(
        DistributedDataParallel._pre_forward
    )
    assert "self.reducer.prepare_for_backward(" in inspect.getsource(
        DistributedDataParallel._post_forward
    )


def test_a_function_that_is_never_compiled_is_called_as_it_is():
    assert torch_compat.never_compiled(lambda x, *, y: x + y)(1, y=2) == 3
