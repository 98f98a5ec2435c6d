"""Fine-tuning recipe: train the new head for an epoch with a frozen trunk, then everything."""
import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group(backend="gloo")
rank = dist.get_rank()
world = dist.get_world_size()


class FineTune(nn.Module):
    def __init__(self, trunk, width, classes):
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.trunk(x))

    def freeze(self, flag=True):
        for p in self.trunk.parameters():
            p.requires_grad_(not flag)


def pretrained_trunk():
    torch.manual_seed(100)
    return nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU())


def loaders(total=32):
    w = load_wine()
    x = torch.tensor((w.data - w.data.mean(0)) / w.data.std(0), dtype=torch.get_default_dtype())[:160]
    y = torch.tensor(w.target)[:160]
    ds = TensorDataset(x, y)
    smp = DistributedSampler(ds, shuffle=True, seed=4)
    return smp, DataLoader(ds, batch_size=total // world, sampler=smp)


sampler, loader = loaders()
net = FineTune(pretrained_trunk(), 24, 3)
net.freeze()
model = DDP(net)
opt = torch.optim.SGD(net.head.parameters(), lr=0.1, momentum=0.9)
for epoch in range(6):
    if epoch == 1:
        net.freeze(False)
        opt.add_param_group({"params": net.trunk.parameters(), "lr": 0.03})
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print(f"epoch {epoch} loss {loss.item():.4f} ({'frozen' if epoch < 1 else 'full'})")

if os.environ.get("DUMP"):
    torch.save([p.detach().double() for p in net.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")
dist.destroy_process_group()
