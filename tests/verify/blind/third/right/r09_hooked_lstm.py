import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn


class OverlappedReducer:
    """Starts an all-reduce for each gradient as soon as it is complete."""

    def __init__(self, module):
        self.pending = []
        self.world = dist.get_world_size()
        for p in module.parameters():
            dist.broadcast(p.data, src=0)
            p.register_post_accumulate_grad_hook(self._hook)

    def _hook(self, p):
        p.grad.div_(self.world)
        self.pending.append(dist.all_reduce(p.grad, async_op=True))

    def wait(self):
        for h in self.pending:
            h.wait()
        self.pending.clear()


class RowLSTM(nn.Module):
    """Reads a digit row by row."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 24, num_layers=2, batch_first=True)
        self.fc = nn.Linear(24, 10)

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.fc(h[:, -1])


def shard(t, rank, world):
    n = t.shape[0] // world
    return t[rank * n:(rank + 1) * n]


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(100 + rank)      # the reducer broadcasts the weights of rank 0
    model = RowLSTM()
    reducer = OverlappedReducer(model)
    optimizer = torch.optim.NAdam(model.parameters(), lr=5e-3)

    d = load_digits()
    X = torch.tensor(d.images, dtype=torch.float32) / 16
    Y = torch.tensor(d.target)
    gen = torch.Generator().manual_seed(17)
    for step in range(6):
        idx = torch.randint(len(X), (80,), generator=gen)
        x, y = shard(X[idx], rank, world), shard(Y[idx], rank, world)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        reducer.wait()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        print(f"rank{rank} step{step} {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
