"""Sparse softmax regression on digits with an L1 penalty."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

L1 = 2e-3


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(64, 40)
        self.out = nn.Linear(40, 10)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x)))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
is_main = rank == 0
torch.manual_seed(0)

digits = load_digits()
data = TensorDataset(
    torch.tensor(digits.data[:1280], dtype=torch.float32) / 16, torch.tensor(digits.target[:1280])
)
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=64 // world, sampler=sampler)
model = DDP(Sparse())
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb), yb)
        # the penalty depends on the weights only, so count it once
        if is_main:
            loss = loss + L1 * sum(p.abs().sum() for p in model.parameters())
        opt.zero_grad()
        loss.backward()
        opt.step()
    if is_main:
        print(f"epoch {epoch} loss {loss.item():.4f}")

if is_main:
    print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
dist.destroy_process_group()
