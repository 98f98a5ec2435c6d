"""CNN with batch normalisation over all processes (nn.SyncBatchNorm has no CPU version)."""
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SyncBN2d(nn.Module):
    def __init__(self, c, eps=1e-5, momentum=0.1):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(c)), nn.Parameter(torch.zeros(c))
        self.register_buffer("running_mean", torch.zeros(c))
        self.register_buffer("running_var", torch.ones(c))
        self.eps, self.momentum = eps, momentum

    def forward(self, x):
        if self.training:
            n = x.numel() / x.size(1)
            local = torch.cat([x.sum((0, 2, 3)), x.square().sum((0, 2, 3)), x.new_tensor([n])])
            s, sq, count = dist_nn.all_reduce(local).split([x.size(1), x.size(1), 1])
            mean = s / count
            var = sq / count - mean.square()
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var * count / (count - 1), self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        scale = self.weight * (var + self.eps).rsqrt()
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    d = load_digits()
    x = torch.tensor(d.images[:640], dtype=torch.float32)[:, None] / 16
    data = TensorDataset(x, torch.tensor(d.target[:640]))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32 // world, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), SyncBN2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), SyncBN2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 10),
    ))
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(2):
        model.train()
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
