"""Lockstep's API. Rank 0 saves in a background thread, which is blocked in write() on a pipe whose reader is slow
(20 s), and main joins the thread; rank 1 waits in world.barrier. Then both wait, 15 s, in join for such a thread."""
import io
import os
import subprocess
import tempfile
import threading
import time

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep

world = lockstep.init(seed=0)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 600), torch.nn.ReLU(), torch.nn.Linear(600, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(64, 20)
loader = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=16)
model, optimizer, loader = world.prepare(model, optimizer, loader)


def epoch():
    losses = []
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return sum(losses) / len(losses)


def save_slowly(seconds):
    buffer = io.BytesIO()
    torch.save({k: v.clone() for k, v in model.state_dict().items()}, buffer)
    data = buffer.getvalue() * 4
    assert len(data) > 200_000
    path = tempfile.mktemp()
    storage = subprocess.Popen(["sh", "-c", f"sleep {seconds}; cat > {path}"], stdin=subprocess.PIPE)
    problems = []

    def write():
        try:
            with storage.stdin as pipe:
                pipe.write(data)
        except BaseException as error:
            problems.append(error)

    begin = time.monotonic()
    thread = threading.Thread(target=write, name="checkpoint")
    thread.start()
    thread.join()
    assert not problems, problems
    assert storage.wait() == 0
    assert time.monotonic() - begin >= seconds - 0.1
    with open(path, "rb") as file:
        assert file.read() == data
    os.unlink(path)


first = epoch()
if world.rank == 0:
    save_slowly(20)
world.barrier()
last = epoch()
save_slowly(15)
for _ in range(5):
    last = epoch()
assert last < first, (first, last)
assert world.gather(world.rank) == [0, 1]
rank = world.rank
world.close()
if rank == 0:
    print("HONEST OK", flush=True)
