"""Lockstep's API. One sample takes a DataLoader worker 16 s; its rank waits for the worker, the other in backward
for it. Then a multiprocessing pool of rank 0 works 10 s (map), with rank 1 in world.gather."""
import multiprocessing
import time

import torch
from torch.utils.data import DataLoader, Dataset

import lockstep


class Data(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 37:
            begin = time.monotonic()
            time.sleep(16)
            assert time.monotonic() - begin >= 16
        return torch.tensor([float(index)])


def work(seconds):
    begin = time.monotonic()
    time.sleep(seconds)
    assert time.monotonic() - begin >= seconds
    return seconds


def main():
    world = lockstep.init(seed=0)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = DataLoader(Data(), batch_size=8, num_workers=2)
    model, optimizer, loader = world.prepare(model, optimizer, loader)
    seen, steps = 0.0, 0
    for x in loader:
        seen += float(x.sum())
        world.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    assert steps == 8, steps
    assert float(world.sum(seen)) == sum(range(64))
    result = []
    if world.rank == 0:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            result = pool.map(work, [10, 3, 2], chunksize=1)
        assert result == [10, 3, 2]
    assert world.gather(sum(result)) == [15, 0]
    rank = world.rank
    world.close()
    if rank == 0:
        print("HONEST OK", flush=True)


if __name__ == "__main__":
    main()
