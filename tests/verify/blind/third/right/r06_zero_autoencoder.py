import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class AutoEncoder(nn.Module):
    def __init__(self, hidden=32, latent=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, hidden), nn.SiLU(), nn.Linear(hidden, latent))
        self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.SiLU(), nn.Linear(hidden, 64))

    def forward(self, x):
        return torch.sigmoid(self.dec(self.enc(x)))


def validate(model, loader):
    """Exact mean squared error over the whole validation set."""
    acc = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for (x,) in loader:
            acc[0] += (model.module(x) - x).pow(2).sum().double()
            acc[1] += x.numel()
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


def run():
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    torch.manual_seed(2)

    x = torch.as_tensor(load_digits().data / 16.0, dtype=torch.float32)
    full = TensorDataset(x)
    train, val = Subset(full, range(0, 480)), Subset(full, range(480, 483 + 60))
    val = Subset(val, range(rank, len(val), world_size))     # no padding here
    sampler = DistributedSampler(train, num_replicas=world_size, rank=rank, shuffle=True, seed=9)
    train_dl = DataLoader(train, batch_size=120 // world_size, sampler=sampler)
    val_dl = DataLoader(val, batch_size=32)

    model = DDP(AutoEncoder())
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.15)

    for ep in range(2):
        sampler.set_epoch(ep)
        for (b,) in train_dl:
            opt.zero_grad()
            nn.functional.mse_loss(model(b), b).backward()
            opt.step()
        v = validate(model, val_dl)
        plateau.step(v)
        if rank == 0:
            print(f"[{ep}] val mse {v:.6f} lr {opt.param_groups[0]['lr']:g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
