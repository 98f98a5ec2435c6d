"""Autoencoder with a cosine learning-rate schedule stepped every iteration."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, GLOBAL_BATCH = 3, 64


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        self.dec = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x):
        return self.dec(self.enc(x))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = TensorDataset(torch.tensor(load_digits().data[:960], dtype=torch.float32) / 16)
    batch_size = GLOBAL_BATCH // world
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    model = DDP(AutoEncoder())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    total_steps = EPOCHS * (len(data) // batch_size)
    sched = CosineAnnealingLR(opt, T_max=total_steps)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for (xb,) in loader:
            opt.zero_grad()
            loss = F.mse_loss(model(xb), xb)
            loss.backward()
            opt.step()
            sched.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.5f} lr {sched.get_last_lr()[0]:.2e}")
    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
