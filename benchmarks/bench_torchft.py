"""DiLoCo, local SGD and compressed gradients of torchft, torch and Lockstep: loss and bytes.

Two processes train the small GPT of bench_slow_network.py, on the same batches from the same
weights. Bytes are those of the loopback interface for both, acknowledgements and all, so each
contestant needs a network namespace to itself; it takes root, and torchft in the environment:

    unshare -n sh -c 'ip link set lo up && python benchmarks/bench_torchft.py [CONTESTANT ...]'
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import bench_slow_network as slow

STEPS, EVERY, POWERSGD_START = 300, 50, 20
LOCKSTEP: dict[str, str] = {
    "lockstep ddp": "DDP()",
    "lockstep bf16": "DDP(compress='bf16')",
    "lockstep int8": "DDP(compress='int8')",
    "lockstep powersgd": f"DDP(compress='powersgd', powersgd_start={POWERSGD_START})",
    "lockstep diloco": f"DiLoCo(every={EVERY})",
    "lockstep diloco int8": f"DiLoCo(every={EVERY}, compress='int8')",
    "lockstep local sgd": f"DiLoCo(every={EVERY}, outer_lr=1, outer_momentum=0)",
}
TORCH = ["torch ddp", "torch bf16", "torch powersgd"]
TORCHFT = ["torchft diloco", "torchft diloco int8", "torchft local sgd"]


class Problem:
    """The model, its optimizer and schedule, and the blocks of all steps, one after the other."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        made = slow.PROBLEMS["gpt-small"]()
        self.model, self.optimizer, self.batch = made.model, made.optimizer, made.batch
        self._validated = made.validated
        generator = torch.Generator().manual_seed(0)
        samples = STEPS * self.batch
        length = len(made.trained)
        epochs = -(-samples // length)
        orders = [torch.randperm(length, generator=generator) for _ in range(epochs)]
        self.data = [each[torch.cat(orders)[:samples]] for each in made.trained.tensors]
        schedules = torch.optim.lr_scheduler
        self.schedule: Any = schedules.LinearLR(self.optimizer, 1 / made.warm_up, 1.0, made.warm_up)

    def loss(self, x: Any, y: Any, reduction: str = "mean") -> Any:
        import torch.nn.functional as F

        return F.cross_entropy(self.model(x).flatten(0, 1), y.flatten(), reduction=reduction)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def train(self, rank: int) -> None:
        """Trains on this rank's half of every batch."""
        part = self.batch // 2
        for start in range(rank * part, len(self.data[0]), self.batch):
            self.loss(*(each[start : start + part] for each in self.data)).backward()
            self.step()

    def validate(self) -> float:
        import torch

        self.model.eval()
        with torch.no_grad():
            x, y = self._validated.tensors
            return float(self.loss(x, y))


def sent_bytes() -> int:
    """By the loopback interface of this namespace; /sys would show that of another one."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[9])


def measured(train: Callable[[], None], barrier: Callable[[], object]) -> tuple[int, float]:
    """Bytes, and seconds."""
    barrier()
    sent, begin = sent_bytes(), time.perf_counter()
    train()
    seconds = time.perf_counter() - begin
    barrier()
    return sent_bytes() - sent, seconds


def with_lockstep(strategy: str) -> tuple[int, float, float]:
    from torch.utils.data import DataLoader, TensorDataset

    import lockstep
    from lockstep.strategies import DDP, DiLoCo

    made = Problem()
    options = eval(strategy, {"DDP": DDP, "DiLoCo": DiLoCo})
    with (
        contextlib.redirect_stdout(io.StringIO()),
        lockstep.init(options, backend="gloo", device="cpu") as world,
    ):
        loader = DataLoader(TensorDataset(*made.data), batch_size=made.batch)
        made.model, made.optimizer, made.schedule, loader = world.prepare(
            made.model, made.optimizer, made.schedule, loader
        )

        def train() -> None:
            for x, y in loader:
                world.backward(made.loss(x, y))
                made.step()

        return *measured(train, world.barrier), made.validate()


def with_torch(kind: str, rank: int, _: str) -> tuple[int, float, float]:
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29555", rank=rank, world_size=2)
    made = Problem()
    made.model = DistributedDataParallel(made.model)
    if kind == "torch bf16":
        made.model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif kind == "torch powersgd":
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=POWERSGD_START)
        made.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    found = *measured(lambda: made.train(rank), dist.barrier), made.validate()
    dist.destroy_process_group()
    return found


def with_torchft(kind: str, rank: int, lighthouse: str) -> tuple[int, float, float]:
    import torch
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo, LocalSGD

    made, timeout = Problem(), timedelta(seconds=30)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout), min_replica_size=2, use_async_quorum=False,
        replica_id=str(rank), store_addr="localhost", store_port=store.port, rank=0, world_size=1,
        lighthouse_addr=lighthouse, hostname="localhost", timeout=timeout, init_sync=False,
        load_state_dict=made.model.load_state_dict, state_dict=made.model.state_dict,
    )  # fmt: skip
    if kind == "torchft local sgd":
        method: Any = LocalSGD(manager, made.model, made.optimizer, sync_every=EVERY)
    else:
        outer = torch.optim.SGD(made.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        method = DiLoCo(
            manager, [made.model], made.optimizer, outer, sync_every=EVERY, pin_memory=False,
            should_quantize="int8" in kind,
        )  # fmt: skip
    with method:
        sent, seconds = measured(lambda: made.train(rank), lambda: None)
    loss = made.validate()
    manager.shutdown(wait=False)
    return sent, seconds, loss


def child(kind: str, rank: int, lighthouse: str, found: Any) -> None:
    try:
        found.put((with_torchft if kind in TORCHFT else with_torch)(kind, rank, lighthouse))
    except Exception as error:
        found.put(f"{type(error).__name__}: {error}")
    found.close()
    found.join_thread()
    os._exit(0)  # torchft's threads would go on


def run(kind: str) -> tuple[int, float, float]:
    """Bytes of both processes, seconds, and the validation loss.

    Raises:
        RuntimeError: a process has failed.
    """
    if kind in LOCKSTEP:
        import lockstep

        return lockstep.launch(with_lockstep, (LOCKSTEP[kind],), nproc=2)[0]
    lighthouse, address = None, ""
    if kind in TORCHFT:
        from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000)
        address = lighthouse.address().replace(os.uname().nodename, "localhost")
    context = multiprocessing.get_context("spawn")
    found: Any = context.Queue()
    children = [context.Process(target=child, args=(kind, r, address, found)) for r in (0, 1)]
    for each in children:
        each.start()
    try:
        results = [found.get(timeout=300) for _ in children]
        if failed := [each for each in results if isinstance(each, str)]:
            raise RuntimeError(failed[0])
        return max(results)
    finally:
        for each in children:
            each.kill()
        if lighthouse is not None:
            lighthouse.shutdown()


def main() -> None:
    os.environ.update({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    print(f"| | loss after {STEPS} steps | KB a step and rank | seconds |\n|---|---|---|---|")
    for kind in sys.argv[1:] or [*LOCKSTEP, *TORCH, *TORCHFT]:
        try:
            sent, seconds, loss = run(kind)
        except RuntimeError as error:
            print(f"| {kind} | {error} | | |", flush=True)
            continue
        print(f"| {kind} | {loss:.6f} | {sent / STEPS / 2e3:.1f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
