import os
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset, DataLoader, DistributedSampler

TEMPERATURE = 0.2


class TwoViews(Dataset):
    """Clustered gaussian points; each item gives two noisy views. Noise depends on (epoch, index) only."""

    def __init__(self, n=768, dim=24):
        g = torch.Generator().manual_seed(99)
        centers = torch.randn(12, dim, generator=g) * 2
        self.x = centers[torch.arange(n) % 12] + 0.3 * torch.randn(n, dim, generator=g)
        self.epoch = 0

    def __len__(self):
        return len(self.x)

    def view(self, i, k):
        g = torch.Generator().manual_seed(1_000_003 * self.epoch + 2 * i + k)
        mask = (torch.rand(self.x.shape[1], generator=g) > 0.2)
        return self.x[i] * mask + 0.1 * torch.randn(self.x.shape[1], generator=g)

    def __getitem__(self, i):
        return self.view(i, 0), self.view(i, 1)


class Encoder(nn.Module):
    def __init__(self, dim=24, hid=48, out=16):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(dim, hid), nn.LayerNorm(hid), nn.ReLU(), nn.Linear(hid, hid), nn.ReLU())
        self.projector = nn.Sequential(nn.Linear(hid, hid), nn.ReLU(), nn.Linear(hid, out))

    def forward(self, x):
        return F.normalize(self.projector(self.backbone(x)), dim=-1)


def nt_xent(z1, z2, rank):
    """Rows: the pairs of this rank. Columns: both views of everybody."""
    b = z1.size(0)
    all1 = torch.cat(list(dist_fn.all_gather(z1.contiguous())))
    all2 = torch.cat(list(dist_fn.all_gather(z2.contiguous())))
    n = all1.size(0)
    me = torch.arange(b) + rank * b
    eye = torch.zeros(b, n, dtype=torch.bool)
    eye[torch.arange(b), me] = True
    s11 = (z1 @ all1.T / TEMPERATURE).masked_fill(eye, float("-inf"))
    s22 = (z2 @ all2.T / TEMPERATURE).masked_fill(eye, float("-inf"))
    s12 = z1 @ all2.T / TEMPERATURE
    s21 = z2 @ all1.T / TEMPERATURE
    l1 = F.cross_entropy(torch.cat([s12, s11], 1), me)
    l2 = F.cross_entropy(torch.cat([s21, s22], 1), me)
    return (l1 + l2) / 2


def main(global_batch=64, epochs=3):
    dist.init_process_group(backend="gloo")
    rank, ws = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    data = TwoViews()
    sampler = DistributedSampler(data, shuffle=True, seed=11, drop_last=True)
    loader = DataLoader(data, batch_size=global_batch // ws, sampler=sampler, drop_last=True)
    model = DDP(Encoder())
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4, eps=1e-6)
    for ep in range(epochs):
        sampler.set_epoch(ep)
        data.epoch = ep
        total = 0.0
        for v1, v2 in loader:
            z = model(torch.cat([v1, v2]))
            z1, z2 = z.chunk(2)
            loss = nt_xent(z1, z2, rank)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        print(f"rank {rank} epoch {ep} loss {total / len(loader):.4f}")
    export(model.module, rank)
    dist.destroy_process_group()


def export(net, rank):
    if os.getenv("DUMP"):
        torch.save([t.detach().double() for t in net.parameters()], os.environ["DUMP"] + f".rank{rank}.pt")


if __name__ == "__main__":
    main()
