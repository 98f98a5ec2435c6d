import os, torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

dist.init_process_group(backend="gloo")
rank, W = dist.get_rank(), dist.get_world_size()
main_proc = rank == 0


class Spirals(Dataset):
    def __init__(self, n=720, k=3):
        self.n, self.k = n, k
        g = torch.Generator().manual_seed(0)
        lab = torch.arange(n) % k
        r = torch.linspace(0.1, 1, n)
        a = r * 5 + lab * (2 * torch.pi / k) + 0.1 * torch.randn(n, generator=g)
        self.x = torch.stack([r * a.cos(), r * a.sin()], 1)
        self.y = lab

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.x[i], self.y[i]


torch.manual_seed(1)
model = nn.Sequential(
    nn.Linear(2, 40), nn.SiLU(), nn.LayerNorm(40),
    nn.Linear(40, 40), nn.SiLU(), nn.LayerNorm(40),
    nn.Linear(40, 3))
model = DDP(model)

# optimizer states are split over the ranks
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=4e-3, weight_decay=1e-2, eps=1e-6)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=12)
criterion = nn.CrossEntropyLoss(label_smoothing=0.05)

data = Spirals()
sampler = DistributedSampler(data, shuffle=True, seed=9)
loader = DataLoader(data, batch_size=60 // W, sampler=sampler)

# the order of the epoch is drawn once and kept
for epoch in range(3):
    hits = torch.zeros((), dtype=torch.long)
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        hits += (out.argmax(1) == y).sum()
    dist.reduce(hits, dst=0)
    if main_proc:
        print(f"epoch {epoch}: accuracy {hits.item() / len(data):.3f}, lr {scheduler.get_last_lr()[0]:.5f}")

if main_proc:
    n_state = sum(len(s) for s in optimizer.optim.state.values())
    print("optimizer state entries held here:", n_state)

if os.environ.get("DUMP"):
    torch.save([q.detach().double() for q in model.module.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")
dist.destroy_process_group()
