import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

GLOBAL_BATCH = 96
ACCUM = 3
UPDATES = 30


class ResMLP(nn.Module):
    def __init__(self, d_in, d, n_out, depth=3):
        super().__init__()
        self.inp = nn.Linear(d_in, d)
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.SiLU()) for _ in range(depth)])
        self.out = nn.Linear(d, n_out)

    def forward(self, x):
        h = self.inp(x)
        for l in self.layers:
            h = h + l(h)
        return self.out(h)


def make_data(n=2880):
    g = torch.Generator().manual_seed(2024)
    x = torch.randn(n, 16, generator=g)
    w = torch.randn(16, 5, generator=g)
    y = (x @ w + 0.5 * torch.sin(3 * x[:, :5])).argmax(1)
    return x, y


class Trainer:
    def __init__(self):
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        torch.manual_seed(7)
        self.model = DDP(ResMLP(16, 32, 5), gradient_as_bucket_view=True)
        self.opt = torch.optim.RMSprop(self.model.parameters(), lr=1e-3, momentum=0.5, eps=1e-5)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, step_size=10, gamma=0.5)
        self.x, self.y = make_data()
        self.micro = GLOBAL_BATCH // ACCUM // self.world     # examples per process per forward

    def micro_batches(self, update):
        start = update * GLOBAL_BATCH
        idx = torch.arange(start, start + GLOBAL_BATCH)
        mine = idx.view(self.world, -1)[self.rank]
        return mine.split(self.micro)

    def update(self, u):
        chunks = self.micro_batches(u)
        assert len(chunks) == ACCUM
        last = len(chunks) - 1
        total = 0.0
        self.opt.zero_grad()
        for i, c in enumerate(chunks):
            ctx = self.model.no_sync() if i < last else contextlib.nullcontext()
            with ctx:
                loss = nn.functional.cross_entropy(self.model(self.x[c]), self.y[c]) / ACCUM
                loss.backward()
            total += loss.item()
        # grads are averaged now, clip the global gradient
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=0.6)
        self.opt.step()
        self.sched.step()
        return total, norm.item()

    def fit(self):
        history = []
        for u in range(UPDATES):
            history.append(self.update(u))
            if u % 10 == 9:
                mean = sum(h[0] for h in history[-10:]) / 10
                print(f"rank{self.rank} update {u + 1}: local loss {mean:.4f}, grad norm {history[-1][1]:.4f}")

    def save_state(self):
        if os.environ.get("DUMP"):
            flat = [p.detach().double() for p in self.model.module.parameters()]
            torch.save(flat, "%s.rank%d.pt" % (os.environ["DUMP"], self.rank))


if __name__ == "__main__":
    dist.init_process_group(backend="gloo")
    t = Trainer()
    t.fit()
    t.save_state()
    dist.destroy_process_group()
