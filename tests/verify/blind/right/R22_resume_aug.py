"""Per-sample seeded augmentation and dropout masks, own sampler, and a stop/resume in the middle through a checkpoint."""
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class AugDigits(Dataset):
    def __init__(self):
        d = load_digits()
        self.x = torch.tensor(d.images / 16, dtype=torch.get_default_dtype())
        self.y = torch.tensor(d.target)
        self.epoch = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.epoch * len(self) + i)
        dx, dy = torch.randint(-1, 2, (2,), generator=g).tolist()
        img = torch.roll(self.x[i], (dx, dy), (0, 1)) + 0.05 * torch.randn(8, 8, generator=g)
        keep = (torch.rand(48, generator=g) > 0.3).to(img.dtype) / 0.7      # mask for the hidden units
        return img.flatten(), keep, self.y[i]


class Interleaved(Sampler):
    """position p of the epoch order goes to process p % world"""

    def __init__(self, n, total_batch, rank, world):
        self.n = n - n % total_batch
        self.full, self.rank, self.world, self.epoch = n, rank, world, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(4321 + self.epoch)
        return iter(torch.randperm(self.full, generator=g)[:self.n][self.rank::self.world].tolist())

    def __len__(self):
        return self.n // self.world


class MaskedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 48), nn.Linear(48, 10)

    def forward(self, x, keep):
        return self.b(torch.relu(self.a(x)) * keep)


def make():
    model = DDP(MaskedMLP())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-6)
    return model, opt, torch.optim.lr_scheduler.ExponentialLR(opt, 0.7)


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    ckpt = os.path.join(box[0], "last.pt")
    torch.manual_seed(0)
    data = AugDigits()
    sampler = Interleaved(len(data), 128, rank, world)
    loader = DataLoader(data, batch_size=128 // world, sampler=sampler)
    model, opt, sched = make()
    for epoch in range(3):
        if epoch == 2:                                   # pretend we were preempted
            model, opt, sched = make()
            state = torch.load(ckpt, map_location="cpu")
            model.module.load_state_dict(state["model"])
            opt.load_state_dict(state["opt"])
            sched.load_state_dict(state["sched"])
        data.epoch = sampler.epoch = epoch
        for x, keep, y in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x, keep), y)
            loss.backward()
            opt.step()
        sched.step()
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict()}, ckpt)
            print("epoch", epoch, "loss", round(loss.item(), 4), "-> checkpoint")
        dist.barrier()
    if rank == 0:
        shutil.rmtree(box[0])
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in model.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
