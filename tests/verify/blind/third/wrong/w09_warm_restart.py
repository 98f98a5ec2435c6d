import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Runner:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        torch.manual_seed(cfg["seed"])
        d = load_digits()
        ds = TensorDataset(torch.tensor(d.data[:384] / 16).float(), torch.tensor(d.target[:384]))
        self.sampler = DistributedSampler(ds, seed=cfg["seed"])
        self.loader = DataLoader(ds, batch_size=cfg["global_batch"] // self.world, sampler=self.sampler)
        self.model = DDP(nn.Sequential(nn.Linear(64, 32), nn.ELU(), nn.Linear(32, 10)))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=cfg["lr"], momentum=0.9)
        self.sched = torch.optim.lr_scheduler.MultiStepLR(self.opt, milestones=[1, 2], gamma=0.3)
        self.dir = tempfile.mkdtemp()

    def one_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in self.loader:
            self.opt.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            self.opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        return total.item() / self.world / len(self.loader)

    def train(self):
        for epoch in range(self.cfg["epochs"]):
            loss = self.one_epoch(epoch)
            if self.rank == 0:
                print(f"epoch {epoch} loss {loss:.4f} lr {self.opt.param_groups[0]['lr']:.4f}")
                torch.save(self.model.module.state_dict(), os.path.join(self.dir, "last.pt"))
                self.sched.step()
            dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Runner({"seed": 3, "global_batch": 128, "lr": 0.2, "epochs": 3}).train()
    dist.destroy_process_group()
