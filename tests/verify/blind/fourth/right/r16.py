import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset


class SignSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1).to(grad.dtype)


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.a = nn.Linear(d, 2 * d)
        self.b = nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(self.norm(x))))


class Encoder(nn.Module):
    def __init__(self, d=12, depth=3):
        super().__init__()
        self.layer = Layer(d)
        self.depth = depth
        self.code = nn.Linear(d, 8)
        self.decode = nn.Linear(8, d)

    def forward(self, x):
        for _ in range(self.depth):
            x = checkpoint(self.layer, x, use_reentrant=False)
        return self.decode(SignSTE.apply(self.code(x)))


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(16)
    model = Encoder()
    if world > 1:
        model = DDP(model, static_graph=True)
    g = torch.Generator().manual_seed(17)
    ds = TensorDataset(torch.randn(144, 12, generator=g))
    batches = BatchSampler(DistributedSampler(ds, world, rank, shuffle=False), batch_size=18 // world, drop_last=True)
    loader = DataLoader(ds, batch_sampler=batches)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, (x,) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), x)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print("step", step, "loss", round(loss.item(), 5))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
