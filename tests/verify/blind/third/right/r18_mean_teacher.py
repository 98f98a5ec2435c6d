"""Mean-teacher self-distillation. The teacher is an EMA copy that every rank keeps for itself."""
import copy
import logging
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

logging.basicConfig(level=logging.INFO, format="%(message)s")
log = logging.getLogger("mt")


class TwoViews(Dataset):
    """Weak and strong noise; the noise depends only on the index and the epoch."""

    def __init__(self, n):
        d = load_digits()
        self.x, self.y = torch.tensor(d.data[:n] / 16).float(), torch.tensor(d.target[:n])
        self.labelled = torch.arange(n) % 4 == 0
        self.epoch = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i + 100_003 * self.epoch)
        weak = self.x[i] + 0.02 * torch.randn(64, generator=g)
        strong = self.x[i] + 0.2 * torch.randn(64, generator=g)
        return weak, strong, self.y[i], self.labelled[i]


class EMA:
    def __init__(self, model, decay=0.8):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, src):
        for t, s in zip(self.model.parameters(), src.parameters()):
            t.lerp_(s, 1 - self.decay)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), dist.get_world_size()
    torch.manual_seed(77)
    student = DDP(nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.LayerNorm(40), nn.Linear(40, 10)))
    ema = EMA(student.module)
    opt = torch.optim.Adagrad(student.parameters(), lr=0.02)
    ds = TwoViews(256)
    sampler = DistributedSampler(ds, shuffle=True, seed=5)
    loader = DataLoader(ds, 64 // world, sampler=sampler)

    for epoch in range(2):
        ds.epoch = epoch
        sampler.set_epoch(epoch)
        for weak, strong, y, lab in loader:
            with torch.no_grad():
                soft = (ema.model(weak) / 0.5).softmax(-1)
            logits = student(strong)
            kl = F.kl_div(logits.log_softmax(-1), soft, reduction="batchmean")
            n_lab = lab.sum().float()
            dist.all_reduce(n_lab)
            ce = (F.cross_entropy(logits, y, reduction="none") * lab).sum() * world / n_lab.clamp(min=1)
            loss = ce + 0.5 * kl
            opt.zero_grad()
            loss.backward()
            opt.step()
            ema.update(student.module)
        if rank == 0:
            log.info("epoch %d loss %.4f", epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
