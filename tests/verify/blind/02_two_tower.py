"""Two-tower recommender with a pointwise logistic loss."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

USERS, ITEMS, DIM = 200, 120, 16


class Tower(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.emb = nn.Embedding(n, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM))

    def forward(self, ids):
        return F.normalize(self.mlp(self.emb(ids)), dim=-1)


def make_data(n=1024):
    g = torch.Generator().manual_seed(7)
    u = torch.randint(0, USERS, (n,), generator=g)
    i = torch.randint(0, ITEMS, (n,), generator=g)
    taste = torch.randn(USERS, 4, generator=g)
    topic = torch.randn(ITEMS, 4, generator=g)
    label = ((taste[u] * topic[i]).sum(-1) > 0).float()
    return TensorDataset(u, i, label)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(42)

data = make_data()
sampler = DistributedSampler(data, shuffle=True, seed=1)
loader = DataLoader(data, batch_size=128 // world, sampler=sampler)

user_tower = Tower(USERS)
item_tower = Tower(ITEMS)
user_tower = DDP(user_tower)

params = list(user_tower.parameters()) + list(item_tower.parameters())
opt = torch.optim.Adam(params, lr=3e-3)

for epoch in range(3):
    sampler.set_epoch(epoch)
    total = 0.0
    for u, i, label in loader:
        score = (user_tower(u) * item_tower(i)).sum(-1) * 5.0
        loss = F.binary_cross_entropy_with_logits(score, label)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        total += loss.item()
    if rank == 0:
        print(f"epoch {epoch}: {total / len(loader):.4f}")

if rank == 0:
    print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in params))
dist.destroy_process_group()
