"""Stage `syncs`: how often a training step waits for the device, and from which lines.

On a GPU torch itself warns at each call that synchronizes the host with the device
(`torch.cuda.set_sync_debug_mode`); what autograd's own threads do is told of the line that called
`backward`. Torch does not warn where Python waits for an event or for the whole device: these calls
are counted here, unless what they wait for was done before. The thread that copies kept steps waits
beside the training; its waits are listed, and not counted.

On the CPU, where nothing is to be waited for, the rehearsal counts reads of a tensor's value by
Python, which would synchronize on a GPU if the tensor were there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.gpu.aims import COUNTED_STEPS
from benchmarks.gpu.commands import at_once
from benchmarks.gpu.one_gpu import backend_for_several_ranks, init_options, on_ranks
from benchmarks.gpu.results import ROOT, NotRun, Stage
from lockstep.checkpoint.background_copy import THREAD_NAME as COPYING_THREAD_NAME

SYNC_WARNING = "called a synchronizing CUDA operation"
"""What torch warns of. Switching the mode on warns of something else: that it is a prototype."""
BESIDE_THE_TRAINING = "beside the training: "
"""Stands before the place of a wait in the thread that copies kept steps."""
WARM_UP_STEPS = 10
"""Ranks compare their parameters in the 10th step, and then seldom."""
BATCH = 32


def ddp(**options: Any) -> Callable[[], Any]:
    """The strategy of these options, made in the rank."""

    def make() -> Any:
        from lockstep.strategies import DDP

        return DDP(**options)

    return make


def fsdp(**options: Any) -> Callable[[], Any]:
    """The strategy of these options, made in the rank."""

    def make() -> Any:
        from lockstep.strategies import FSDP

        return FSDP(**options)

    return make


CASES: dict[str, tuple[int, dict[str, Any], str]] = {
    "single, fp32": (1, {}, "plain"),
    "single, bf16": (1, {"precision": "bf16"}, "plain"),
    "single, fp16": (1, {"precision": "fp16"}, "plain"),
    "single, clipping": (1, {}, "clip"),
    "single, progress and log": (1, {}, "progress"),
    "single, report": (1, {"report": "report"}, "plain"),
    "single, journal": (1, {"journal": "journal"}, "plain"),
    "single, kept steps": (1, {}, "kept"),
    "dp, BatchNorm": (1, {"strategy": "dp"}, "batchnorm"),
    "ddp, fp32": (2, {"strategy": "ddp"}, "plain"),
    "ddp, bf16": (2, {"strategy": "ddp", "precision": "bf16"}, "plain"),
    "ddp, fp16": (2, {"strategy": "ddp", "precision": "fp16"}, "clip"),
    "ddp, SyncBatchNorm": (2, {"strategy": "ddp"}, "batchnorm"),
    "ddp, accumulation": (2, {"strategy": "ddp", "micro_batch_size": 4}, "plain"),
    "ddp, unused parameters": (2, {"strategy": ddp(find_unused_parameters=True)}, "unused"),
    "ddp, gradients as bf16": (2, {"strategy": ddp(compress="bf16")}, "plain"),
    "ddp, PowerSGD": (2, {"strategy": ddp(compress="powersgd", powersgd_start=1)}, "plain"),
    "fsdp, fp32": (2, {"strategy": "fsdp"}, "plain"),
    "fsdp, bf16": (2, {"strategy": "fsdp", "precision": "bf16"}, "plain"),
    "fsdp, fp16": (2, {"strategy": "fsdp", "precision": "fp16"}, "clip"),
    "fsdp, a scalar and clipping": (2, {"strategy": "fsdp"}, "scalar"),
    "fsdp, accumulation": (2, {"strategy": "fsdp", "micro_batch_size": 4}, "plain"),
    "fsdp, unused parameters": (2, {"strategy": fsdp(find_unused_parameters=True)}, "unused"),
    # Of the last rank, which has the first stage and receives gradients. With one micro-batch a
    # turn of the loop is a step.
    "pipeline, fp32": (2, {"strategy": "pipeline", "num_micro_batches": 1}, "plain"),
}
"""Name: ranks, arguments of `lockstep.init`, what the loop does."""


@contextlib.contextmanager
def counted(on_gpu: bool) -> Iterator[Counter[str]]:
    """Counts synchronizations by the lines, of Lockstep and of the loop, that led to them."""
    found: Counter[str] = Counter()

    def note() -> None:
        in_copying_thread = threading.current_thread().name == COPYING_THREAD_NAME
        where = place(traceback.extract_stack())
        found[f"{BESIDE_THE_TRAINING}{where}" if in_copying_thread else where] += 1

    def note_warning(message: Any, *_: Any, **__: Any) -> None:
        if SYNC_WARNING in str(message):
            note()

    with contextlib.ExitStack() as stack:
        if on_gpu:
            import torch

            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always")
            warnings.showwarning = note_warning
            stack.enter_context(waits_for_events(note))
            torch.cuda.set_sync_debug_mode("warn")
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
        else:
            stack.enter_context(reads_of_values(note))
        yield found


@contextlib.contextmanager
def waits_for_events(note: Callable[[], None]) -> Iterator[None]:
    """Calls `note` whenever Python waits for an event that is not reached, or for the device."""
    import torch

    wait_for_event = torch.cuda.Event.synchronize
    wait_for_device = torch.cuda.synchronize

    def wait_for_event_and_note(event: Any) -> None:
        if not event.query():
            note()
        wait_for_event(event)

    def wait_for_device_and_note(*args: Any, **kwargs: Any) -> None:
        note()
        wait_for_device(*args, **kwargs)

    with (
        mock.patch.object(torch.cuda.Event, "synchronize", wait_for_event_and_note),
        mock.patch.object(torch.cuda, "synchronize", wait_for_device_and_note),
    ):
        yield


@contextlib.contextmanager
def reads_of_values(note: Callable[[], None]) -> Iterator[None]:
    """Calls `note` whenever Python reads a tensor's value."""
    import torch

    names = ("item", "tolist", "__bool__", "__float__", "__int__")
    originals = {name: getattr(torch.Tensor, name) for name in names}

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any) -> Any:
            note()
            return original(tensor, *args)

        return read

    for name, original in originals.items():
        setattr(torch.Tensor, name, noting(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)


def place(stack: traceback.StackSummary) -> str:
    """The innermost lines of Lockstep's own files, or of the loop where none is on the stack."""
    own = []
    for frame in stack:
        path = Path(frame.filename)
        if path.is_relative_to(ROOT / "src" / "lockstep"):
            own.append(f"{'/'.join(path.parts[-2:])}:{frame.lineno}")
    if own:
        return " < ".join(reversed(own[-2:]))
    callers = [frame for frame in stack if Path(frame.filename).name == "synchronizations.py"]
    return f"the loop: {callers[-2].line}" if len(callers) > 1 else "not known"


def make_layers() -> dict[str, Callable[[], Any]]:
    """Layers that make some strategies do more, by the loop that uses them.

    Defined in the rank, where torch is imported.
    """
    import torch
    from torch import Tensor, nn

    class Scaled(nn.Module):
        """Multiplies by a parameter without dimensions, which is not sharded."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    class UsesHalf(nn.Module):
        """Has two layers, of which no forward pass uses the second."""

        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(64, 64)
            self.unused = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    return {"batchnorm": lambda: nn.BatchNorm1d(64), "scalar": Scaled, "unused": UsesHalf}


def count_of_case(name: str, device: str, backend: str) -> dict[str, int]:
    """Synchronizations in the counted steps, by place."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import lockstep
    from lockstep.run.start.step_memory import StepMemory

    size, options, loop = CASES[name]
    options = dict(options)
    if callable(options.get("strategy")):
        options["strategy"] = options["strategy"]()
    memory = StepMemory(1, keeps_every_step=True) if loop == "kept" else None
    if memory is not None:
        os.environ.update(memory.variables)
    for setting in ("report", "journal"):
        if setting in options:
            folder = f"syncs-{setting}-{os.getpid()}"
            options[setting] = os.path.join(os.environ["TMPDIR"], folder)
    over = init_options(device, backend) if size > 1 else {"device": device}
    with lockstep.init(**options, **over) as world:
        torch.manual_seed(0)
        layers = make_layers()
        middle = [layers[loop]()] if loop in layers else []
        model: Any = nn.Sequential(
            nn.Linear(32, 64), *middle, nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)
        )
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False)
        samples = BATCH * (WARM_UP_STEPS + COUNTED_STEPS)
        data = TensorDataset(torch.randn(samples, 32), torch.randint(0, 8, (samples,)))
        loader: Any = DataLoader(data, batch_size=BATCH)
        model, optimizer, loader = world.prepare(model, optimizer, loader)
        if loop == "kept":
            folder = os.path.join(os.environ["TMPDIR"], f"syncs-kept-{os.getpid()}")
            checkpoint = world.checkpoint(folder, model=model, optimizer=optimizer, memory=True)
            checkpoint.resume()
        batches = world.progress(loader) if loop == "progress" else loader
        found: Counter[str] = Counter()
        found_in_steps: dict[str, int] = {}
        with contextlib.ExitStack() as counting:
            is_counting = False
            for x, y in batches:
                if world.step == WARM_UP_STEPS and not is_counting:
                    is_counting = True  # with micro-batches, more turns of the loop have this step
                    found = counting.enter_context(counted(device == "cuda"))
                loss = F.cross_entropy(model(x), y)
                world.backward(loss)
                if loop in ("clip", "scalar"):
                    world.clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if loop == "progress":
                    world.log(loss=loss)
                found_in_steps = dict(found)  # without what the end of the pass waits for
        return found_in_steps


def check_case(stage: Stage, name: str, backend: str) -> None:
    """Counts the synchronizations of one case, on its last rank."""
    size, _, _ = CASES[name]
    with stage.check(name) as values:
        found = on_ranks(count_of_case, size, name, stage.device, backend)[-1]
        values["backend"] = backend if size > 1 else "none, one process"
        values["steps"] = COUNTED_STEPS
        values["by_place"] = found
        num_waits = sum(
            count for where, count in found.items() if not where.startswith(BESIDE_THE_TRAINING)
        )
        if stage.on_gpu and size > 1 and backend != "nccl":
            values["synchronizations_over_gloo"] = num_waits
            raise NotRun("over Gloo every collective waits for the GPU; NCCL did not connect")
        values["synchronizations"] = num_waits


def main() -> None:
    stage = Stage("syncs")
    backend = backend_for_several_ranks(stage)
    checks_of_one_process = []
    checks_of_ranks = []
    for name, (size, _, _) in CASES.items():
        check = partial(check_case, stage, name, backend)
        (checks_of_one_process if size == 1 else checks_of_ranks).append(check)
    at_once(checks_of_one_process)
    # Not side by side: the GPU would turn to all of their processes in every collective.
    for check in checks_of_ranks:
        check()
