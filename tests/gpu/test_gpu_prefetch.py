"""Batches come to the device whole, in order, one ahead, on a stream of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_devices import DEVICES, run_on, settings
from problems import tensors
from torch import Tensor, nn

import lockstep
from lockstep.batch.device_copy import to_device

pytestmark = pytest.mark.ranks

BATCHES, SIZE = 6, 2**22


def nests() -> list[dict[str, Any]]:
    """Of many kinds; every third one holds a sparse tensor, which is not copied ahead."""
    made = []
    for n in range(BATCHES):
        more = {"sparse": torch.eye(3).to_sparse() * n} if n % 3 == 2 else {}
        lists = [torch.full((5,), n), (torch.tensor(float(n)), f"text {n}"), None]
        made.append({"x": torch.full((4, 3), n + 0.5), "rest": lists, "n": n, **more})
    return made


def arrive(device: str) -> list[Any]:
    """What was asked of the source when each batch came; and whether all came as it was sent."""
    asked: list[int] = []

    def source() -> Any:
        for number, batch in enumerate(nests()):
            asked.append(number)
            yield batch

    found = []
    for number, batch in to_device(enumerate(source()), torch.device(device)):
        sent = nests()[number]
        assert batch["n"] == number
        assert [batch["rest"][1][1], batch["rest"][2]] == [f"text {number}", None]
        for one, other in (
            (batch["x"], sent["x"]),
            (batch["rest"][0], sent["rest"][0]),
            (batch["rest"][1][0], sent["rest"][1][0]),
        ):
            assert one.device.type == device
            assert torch.equal(one.cpu(), other)
        assert batch.keys() == sent.keys()
        if "sparse" in batch:
            assert batch["sparse"].device.type == device
            assert torch.equal(batch["sparse"].to_dense().cpu(), sent["sparse"].to_dense())
        found.append(len(asked))
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_everything_arrives_in_order_and_one_batch_early_on_a_gpu(device: str) -> None:
    [asked] = run_on(arrive, 1, device)
    ahead = int(device == "cuda")
    assert asked == [min(number + 1 + ahead, BATCHES) for number in range(BATCHES)]


class Busy:
    """Work for the present stream, of which the host is rid at once."""

    def __init__(self) -> None:
        self.x = torch.full((4096, 4096), 1e-3, device="cuda")
        self.y = torch.empty_like(self.x)
        torch.mm(self.x, self.x, out=self.y)
        torch.cuda.synchronize()

    def for_a_while(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self.x, self.x, out=self.y)


def read_late() -> list[float]:
    """The sum of every batch, taken long after the host has dropped the batch."""
    busy, sums = Busy(), []
    batches = (torch.full((SIZE,), float(n)) for n in range(4 * BATCHES))
    for _, batch in to_device(enumerate(batches), torch.device("cuda", 0)):
        busy.for_a_while(20)
        sums.append(batch.double().sum())
        del batch  # its memory could be taken for the next copy, which waits for nobody
    return [float(value) for value in sums]


@pytest.mark.gpu
def test_memory_of_a_batch_is_not_used_again_before_it_was_read() -> None:
    [sums] = run_on(read_late, 1)
    assert sums == [float(n) * SIZE for n in range(4 * BATCHES)]


def copied_while_busy() -> tuple[bool, bool]:
    """Whether the copy of the next batch was done while the present stream still worked."""
    streams: list[Any] = []
    plain = torch.cuda.Stream

    def stream(*args: Any, **kwargs: Any) -> Any:
        streams.append(plain(*args, **kwargs))
        return streams[-1]

    torch.cuda.Stream = stream  # type: ignore[assignment, misc]
    try:
        source = ((n, torch.ones(SIZE)) for n in range(8))
        batches = to_device(source, torch.device("cuda", 0))
        busy = Busy()
        # Memory that is there for the copies to come: to get some may mean to wait.
        kept = [next(batches) for _ in range(4)]
        torch.cuda.synchronize()
        del kept
        busy.for_a_while(600)  # a second or so
        next(batches)  # has the one after it copied, by a thread
        next(batches)  # waits until the thread has started that copy
        streams[0].synchronize()
        return len(streams) == 1, not torch.cuda.current_stream().query()
    finally:
        torch.cuda.Stream = plain  # type: ignore[misc]


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_the_work_before_it() -> None:
    assert run_on(copied_while_busy, 1) == [(True, True)]


class Seen(nn.Module):
    """Remembers its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.inputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        return x * self.weight


def through_the_loader(device: str, workers: int) -> list[Tensor]:
    """The inputs of every micro-batch of two epochs, on the CPU."""
    with lockstep.init(seed=3, micro_batch_size=4, **settings(device)) as world:
        model = Seen()
        model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        seen = getattr(model, "module", model)
        loader = world.loader(tensors(), 16, shuffle=True, num_workers=workers)
        for _ in world.epochs(2):
            for x, _y in loader:
                world.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
        assert {x.device.type for x in seen.inputs} == {device}
        return [x.detach().cpu() for x in seen.inputs]


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "workers"), [(1, 0), (1, 2), (2, 2)])
def test_a_loader_gives_the_samples_that_it_gives_on_the_cpu(size: int, workers: int) -> None:
    expected = run_on(through_the_loader, size, "cpu", 0)
    found = run_on(through_the_loader, size, "cuda", workers)
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
