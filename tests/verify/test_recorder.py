"""What is recorded of programs that are built on libraries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from torch import Tensor

from lockstep.errors import RecordingFailedError
from lockstep.run.start.worker import Script
from lockstep.verify.rank_files import RankEnd, UpdateWriter
from lockstep.verify.recording.determinism import Determinism
from lockstep.verify.recording.forwards import ForwardRecorder
from lockstep.verify.recording.function_mode import FunctionMode
from lockstep.verify.recording.guard import ExitByRecorder
from lockstep.verify.recording.larger_batches import merge_batches
from lockstep.verify.recording.losses import LossRecorder
from lockstep.verify.recording.state import ForwardPass, RecorderState
from lockstep.verify.run_config import RunConfig
from lockstep.verify.run_record import record_run
from lockstep.verify.training_record import Forward
from lockstep.verify.verdict import Verdict

pytestmark = pytest.mark.launcher

RIGHT = Path(__file__).with_name("gallery") / "right"

REBUILT = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(4)
x = torch.randn(48, 6)
mine = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=6)
sampler = DistributedSampler(mine.dataset, shuffle=False)
loader = DataLoader(mine.dataset, batch_size=mine.batch_size, sampler=sampler)
model = DistributedDataParallel(torch.nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
"""

COMPILED = """
import torch, lockstep
import torch.nn.functional as F
from torch import nn

WAY = {way!r}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.block(x))


with lockstep.init(seed=1, precision="bf16") as world:
    model = Net()
    if WAY == "before":
        model = torch.compile(model)
    if WAY == "in place before":
        model.compile()
    if WAY == "block by block":
        model.block.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.prepare(model, optimizer)
    call = model
    if WAY == "after":
        call = torch.compile(model)
    if WAY == "in place after":
        model.compile()
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(2))
    data = torch.utils.data.TensorDataset(x, x.argmax(1) % 4)
    for images, labels in world.loader(data, 6, shuffle=True):
        world.backward(F.cross_entropy(call(images), labels))
        optimizer.step()
        optimizer.zero_grad()
"""


def samples(verdict: Verdict) -> list[int]:
    """Of each update of the reference and of the other, all of which are equal."""
    assert verdict.word == "EQUAL", verdict.lines()
    counts = {
        tuple(u.samples for u in run.updates) for run in (verdict.reference, verdict.parallel)
    }
    assert len(counts) == 1
    return list(counts.pop())


def test_a_loader_that_a_library_builds_anew_is_enlarged_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(REBUILT)
    assert samples(warm.verify(script, batch_times=2)) == [12, 12, 12]


def test_a_process_that_only_helps_is_no_rank(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    helper = "import multiprocessing\nmultiprocessing.Process(target=print).start()\n"
    script.write_text(helper + REBUILT)
    assert samples(warm.verify(script, batch_times=2)) == [12, 12, 12]


def test_what_is_compiled_is_compared_uncompiled(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    compiled = "torch.compile(torch.nn.Linear(6, 1), fullgraph=True)"
    script.write_text(REBUILT.replace("torch.nn.Linear(6, 1)", compiled))
    verdict = warm.verify(script, batch_times=2)
    assert samples(verdict) == [12, 12, 12]
    assert "torch.compile" in verdict.reference.switched_off


@pytest.mark.thorough
@pytest.mark.parametrize(
    "way", ["before", "after", "in place before", "in place after", "block by block"]
)
def test_each_way_of_compiling_a_prepared_model_is_compared(tmp_path: Path, way: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(COMPILED.format(way=way))
    verdict = warm.verify(script)
    assert verdict.word == "EQUAL", verdict.lines()


HOOKED = REBUILT.replace(
    "for x, y in loader:",
    """
def hook(value):
    {hook}
for parameter in model.parameters():
    parameter.{register}(hook)
for x, y in loader:""",
)


@pytest.mark.parametrize(
    ("register", "hook"),
    [
        ("register_hook", "return value.clamp(-0.01, 0.01)"),
        ("register_hook", "value.clamp_(-0.01, 0.01)"),
        ("register_post_accumulate_grad_hook", "value.grad.clamp_(-0.01, 0.01)"),
        ("register_post_accumulate_grad_hook", "value.grad = value.grad.clamp(-0.01, 0.01)"),
    ],
)
def test_a_hook_that_clamps_before_the_average_is_named(
    register: str, hook: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(HOOKED.format(register=register, hook=hook))
    (finding,) = warm.verify(script, batch_times=2).findings
    assert finding.cause.code == "LS406"
    assert any(f"parameter.{register}(hook)" in text for text in finding.cause.evidence)


def test_a_hook_that_leaves_nan_as_it_is_has_changed_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    hooked = HOOKED.format(register="register_hook", hook="value.norm()")
    on_ranks = "(F.mse_loss(model(x), y) * (1 if dist.get_world_size() == 1 else torch.nan))"
    script.write_text(hooked.replace("F.mse_loss(model(x), y)", on_ranks))
    verdict = warm.verify(script, batch_times=2)
    assert verdict.word == "DIFFERENT"
    assert "LS406" not in [finding.cause.code for finding in verdict.findings]


def test_an_optimizer_that_steps_in_a_hook_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    without_step = HOOKED.replace("    optimizer.step()\n", "")
    register = "register_post_accumulate_grad_hook"
    script.write_text(without_step.format(register=register, hook="optimizer.step()"))
    finding = warm.verify(script, batch_times=2).findings[0]
    assert finding.cause.code == "LS406"
    assert "train.py:19: optimizer.step()" in finding.cause.evidence[1]


def test_as_many_steps_are_compared_as_time_allows(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(REBUILT)
    whole = warm.verify(script, batch_times=2, steps=50, seconds=600.0).lines()
    assert (len(whole), "all 4 optimizer steps" in whole[0]) == (1, True)
    first, until, then = warm.verify(script, batch_times=2, steps=50, seconds=0.0).lines()
    assert "the first 3 optimizer steps" in first
    assert until == "  until   step 3, batch 3 of 4 of epoch 1; what comes later is not compared"
    assert then == "  then    3 steps took more than 0 seconds: `--steps 10` compares more of them"
    assert len(warm.verify(script, batch_times=2, steps=3).lines()) == 2  # as the user wanted


def test_what_was_only_fetched_ahead_is_not_trained() -> None:
    assert samples(warm.verify(RIGHT / "prefetched.py", steps=6)) == [12] * 6


PEEKED = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(4)
x = torch.randn(48, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // dist.get_world_size(), sampler=sampler)
model = DistributedDataParallel(torch.nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    print("batches of", len(next(iter(loader))[0]))
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
"""


def test_what_was_only_looked_at_is_not_trained(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PEEKED)
    assert samples(warm.verify(script, steps=12)) == [12] * 12


SPLIT = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
x = torch.arange(96.0).view(-1, 1)
data, _ = random_split(TensorDataset(x, x.cos()), [60, 36])
loader = DataLoader(data, batch_size=6, sampler=DistributedSampler(data), num_workers=1)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for x, y in loader:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
"""


def test_a_split_that_each_rank_draws_is_no_draw_of_workers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPLIT)
    [finding, *_] = warm.verify(script, batch_times=2).findings
    assert finding.cause.code == "LS104"


SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(4)
with torch.device("meta"):
    model = torch.nn.Linear(6, 2, bias=False)
fully_shard(model)
model.to_empty(device="cpu")
torch.nn.init.normal_(model.weight)
torch.nn.init.ones_(model.weight)
torch.manual_seed(5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.randn(3, 12, 6):
    mine = batch[dist.get_rank() :: dist.get_world_size()]
    optimizer.zero_grad()
    model(mine).square().mean().backward()
    optimizer.step()
"""


def test_a_sharded_parameter_is_drawn_at_random(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SHARDED)
    verdict = warm.verify(script)
    assert verdict.word == "EQUAL", verdict.lines()


def test_shards_that_are_clipped_by_their_own_norm(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    clip = "own = model.weight.grad.to_local(); own.mul_(0.1 / own.norm())"
    text = SHARDED.replace("square()", "square().mul(torch.tensor([1.0, 3.0]))")
    script.write_text(text.replace("    optimizer.step()", f"    {clip}\n    optimizer.step()"))
    first = warm.verify(script).findings[0].cause
    assert first.code == "LS404"
    assert "each rank multiplied its gradients by another number" in first.evidence[0]


LAZY = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
x, y = torch.arange(96.0).view(16, 6).cos(), torch.arange(16) % 3
torch.manual_seed(rank)
net = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(3))
net(x[:2])
torch.manual_seed(0)
for layer in net:
    layer.reset_parameters()
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    F.cross_entropy(model(x[rank::world]), y[rank::world]).backward()
    optimizer.step()
"""


def test_a_model_that_a_first_forward_pass_makes_begins_with_what_comes_then(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LAZY)
    verdict = warm.verify(script)
    assert verdict.word == "EQUAL", verdict.lines()


def test_an_optimizer_inside_of_another_one_makes_no_steps_of_its_own() -> None:
    verdict = warm.verify(RIGHT / "zero.py", steps=2)
    assert samples(verdict) == [12, 12]
    assert [update[0].step for update in verdict.reference.updates] == [0, 1]


FAILING_STEP = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


class Careful(torch.optim.SGD):
    # Refuses its second step, as optimizers do that check gradients.
    def step(self, closure=None):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 2:
            raise FloatingPointError("a gradient is too large")
        return super().step(closure)


torch.manual_seed(4)
x = torch.randn(48, 6)
model = DistributedDataParallel(torch.nn.Linear(6, 1))
optimizer = Careful(model.parameters(), lr=0.1)
for batch in x.split(8):
    mine = batch[rank::size]
    optimizer.zero_grad()
    F.mse_loss(model(mine), mine.sum(1, keepdim=True)).backward()
    try:
        optimizer.step()
    except FloatingPointError:
        pass
"""


def test_a_step_that_raises_an_error_does_not_hide_the_steps_after_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILING_STEP)
    verdict = warm.verify(script, steps=4)
    assert verdict.word == "EQUAL", verdict.lines()
    assert [update[0].step for update in verdict.reference.updates] == [0, 1, 2, 3]


CLOSURE = """
import torch
import torch.distributed as dist
import torch.nn.functional as F

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(4)
x = torch.randn(48, 6)
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in x.split(12):
    mine = batch[rank::size]

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(mine), mine.sum(1, keepdim=True))
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return loss

    optimizer.step(closure)
"""


def test_gradients_are_those_that_a_closure_has_computed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CLOSURE)
    found = warm.verify(script).findings[0]
    assert (found.cause.code, found.case and found.case.update_index) == ("LS201", 0), found
    script.write_text(CLOSURE.replace(".grad)", ".grad.div_(size))"))
    verdict = warm.verify(script)
    assert verdict.word == "EQUAL", verdict.lines()
    assert [len(update.merged("gradients")) for update in verdict.parallel.updates] == [2, 2, 2]
    scaled = CLOSURE.replace("loss = ", "loss = size * ").replace(".grad)", ".grad.div_(size**2))")
    script.write_text(scaled)
    verdict = warm.verify(script)
    assert (verdict.word, verdict.accepted_difference.split()[:3]) == (
        "EQUAL",
        ["the", "loss", "is"],
    )
    assert verdict.accepted_difference.endswith("with equal gradients and parameters")


WRAPPED = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6).eval(), nn.Linear(6, 6))

    def forward(self, x):
        return self.net(x)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(4)
x = torch.randn(48, 6)
trained = Trained()
model = DistributedDataParallel(trained) if size > 1 else trained.net
optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
for batch in x.split(12):
    optimizer.zero_grad()
    mine = batch[rank::size]
    F.mse_loss(model(mine), mine).backward()
    optimizer.step()
"""


def test_a_library_may_wrap_the_model_where_there_are_several_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WRAPPED)
    verdict = warm.verify(script)
    assert verdict.word == "EQUAL", verdict.lines()
    assert "Sequential/0.weight" in verdict.reference.updates[0][0].initial
    script.write_text(WRAPPED.replace("manual_seed(4)", "manual_seed(4 + rank + size)"))
    assert warm.verify(script).findings[0].cause.code == "LS305"


RECOMPUTED = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Normed(torch.nn.Linear):
    def forward(self, x):
        x = super().forward(x).to(torch.float32)
        return x * x.pow(2).mean(-1, keepdim=True).rsqrt()


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Normed(6, 6) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(lambda x: block(x).float(), x, use_reentrant=False)
        return x


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(4)
x = torch.randn(48, 6)
model = DistributedDataParallel(Blocks())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in x.split(12):
    optimizer.zero_grad()
    mine = batch[rank::size]
    torch.autograd.backward(F.mse_loss(model(mine), mine))
    optimizer.step()
"""


def test_what_a_backward_pass_computes_again_is_computed_in_the_same_precision(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(RECOMPUTED)
    verdict = warm.verify(script)
    assert verdict.word == "EQUAL", verdict.lines()


def test_layers_that_derivatives_compute_again_are_no_forward_passes() -> None:
    verdict = warm.verify(RIGHT / "checkpointed.py", steps=1)
    (first,) = verdict.reference.updates
    assert [forward.model for forward in first[0].forwards] == ["Net, forward pass 1"]


class Rounded(torch.autograd.Function):
    """Something of a library's that computes in float32, where nobody sees it."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy().astype("float32"))

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


@pytest.mark.parametrize("double", [True, False])
def test_the_lowest_precision_that_anything_with_a_gradient_has_had(double: bool) -> None:
    mode = FunctionMode(Determinism(double=double))
    plain = torch.float64 if double else torch.float32
    x = torch.ones(3, dtype=plain, requires_grad=True)
    with mode:
        (x.to(torch.bfloat16).float() * 2).sum().double()
        assert mode.lowest_dtype is (torch.float64 if double else torch.bfloat16)
        torch.ones(3, dtype=torch.float16) * 2  # of no gradient
        (Rounded.apply(x) * 2).sum()
    assert mode.lowest_dtype is (torch.float32 if double else torch.bfloat16)


OWN_BATCHES = """
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset


class Batches(Sampler):
    def __init__(self, order, size):
        self.order, self.size = order, size

    def set_epoch(self, epoch):
        self.order.set_epoch(epoch)

    def __iter__(self):
        indices = list(self.order)
        yield from (indices[n : n + self.size] for n in range(0, len(indices), self.size))

    def __len__(self):
        return -(-len(self.order) // self.size)


dist.init_process_group("gloo")
torch.manual_seed(4)
x = torch.randn(48, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
if "stream" in sys.argv:
    data = [tuple(t.clone() for t in data[n : n + 6]) for n in range(0, 48, 6)]
    loader = DataLoader(data, batch_size=None, sampler=DistributedSampler(data))
else:
    loader = DataLoader(data, batch_sampler=Batches(DistributedSampler(data), 6))
model = DistributedDataParallel(torch.nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    if "stream" not in sys.argv:
        loader.batch_sampler.set_epoch(epoch)
        assert len(loader) == 4
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
"""


@pytest.mark.thorough
def test_batches_of_a_sampler_of_the_users_own_are_enlarged(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(OWN_BATCHES)
    assert samples(warm.verify(script, batch_times=2, steps=6)) == [12] * 6
    script.write_text(OWN_BATCHES.replace("assert len(loader) == 4", "pass"))
    finding = warm.verify(script).as_json()["findings"][0]
    assert (finding["code"], finding["step"]) == ("LS110", 1)


@pytest.mark.thorough
def test_a_batch_that_the_script_divides_already_is_not_to_be_enlarged(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    divided = "Batches(DistributedSampler(data), 6 // dist.get_world_size())"
    text = OWN_BATCHES.replace("Batches(DistributedSampler(data), 6)", divided)
    script.write_text(text.replace("assert len(loader) == 4", "pass"))
    told = [
        "NOT KNOWN  2 processes: with --batch-per-process one process trains 12 samples in step 1, "
        "and 2 processes train 6 together",
        "  do      leave --batch-per-process out if the script divides its batch size by the "
        "number of processes itself",
    ]
    assert warm.verify(script, batch_times=2).lines() == told


@pytest.mark.thorough
def test_a_loader_that_cannot_be_enlarged_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(OWN_BATCHES)
    verdict = warm.verify(script, "stream", batch_times=2)
    assert verdict.lines()[-1] == (
        "  note    --batch-per-process: it could not enlarge a DataLoader that has no batch size: "
        "train.py:31: loader = DataLoader(data, batch_size=None, sampler=DistributedSampler(data))"
    )


def test_a_list_of_batches_is_joined_once() -> None:
    merged = merge_batches([[0, 1], [2], [3, 4]], 2)
    assert [*merged] == [[0, 1, 2], [3, 4]]
    assert merge_batches(merged, 2) is merged


def test_an_error_of_the_recorders_own_is_told_as_that(
    tmp_path: Path,
) -> None:
    losses = LossRecorder.__new__(LossRecorder)
    losses.state = RecorderState.__new__(RecorderState)
    with pytest.raises(ExitByRecorder) as caught:
        losses.begin_backward(torch.ones(()))  # the state has no attributes
    assert caught.value.code == 5
    assert "AttributeError" in losses.state.internal_error
    folder = tmp_path / "run"
    way = RunConfig(name="1 process", nproc=1, script=Script(path="train.py"))

    def start(folder: Path, way: RunConfig) -> str:
        end = RankEnd(internal_error=losses.state.internal_error)
        UpdateWriter(folder, 0).end(caught.value, end)
        return ""

    with pytest.raises(RecordingFailedError, match="this says nothing about the script") as told:
        record_run(way, folder, start)
    assert told.value.exit_code == 5


def test_an_error_of_a_connection_is_not_the_recorders() -> None:
    class BrokenState(RecorderState):
        def __init__(self) -> None:
            pass

        @property
        def loss_is_recorded_by_world(self) -> bool:
            raise RuntimeError("Connection closed by peer")

    losses = LossRecorder.__new__(LossRecorder)
    losses.state = BrokenState()
    with pytest.raises(RuntimeError, match="by peer"):
        losses.begin_backward(torch.ones(()))
    assert losses.state.internal_error == ""


def test_an_output_that_no_loss_came_back_to_has_no_slope() -> None:
    rows = np.ones((2, 2))
    forward_pass = ForwardPass(Forward(model="Net", shape="", inputs=rows, other_inputs=rows))
    forwards = ForwardRecorder.__new__(ForwardRecorder)
    forwards.record_output_gradient(forward_pass, 1, None)  # as DDP's sink has it
    assert not len(forward_pass.record.output_gradients)
