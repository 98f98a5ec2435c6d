"""Two heads trained in turn (find_unused_parameters) over a checkpointed trunk."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        return x + self.ff(self.norm(x))


class MultiTask(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.stem = nn.Linear(10, d)
        self.trunk = nn.ModuleList(Residual(d) for _ in range(3))
        self.heads = nn.ModuleDict({"class": nn.Linear(d, 4), "value": nn.Linear(d, 1)})

    def forward(self, x, task):
        h = self.stem(x)
        for block in self.trunk:
            h = checkpoint(block, h, use_reentrant=False)
        return self.heads[task](h)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(9)
    x = torch.randn(480, 10, generator=g)
    data = TensorDataset(x, x[:, :4].argmax(1), x.square().mean(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=48 // world, sampler=sampler)
    model = DDP(MultiTask(), find_unused_parameters=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for step, (xb, label, value) in enumerate(loader):
            opt.zero_grad(set_to_none=True)
            if (step + epoch) % 2 == 0:
                loss = F.cross_entropy(model(xb, "class"), label)
            else:
                loss = F.mse_loss(model(xb, "value"), value)
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
