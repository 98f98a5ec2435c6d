"""Minimal trainer: the model brings its own `training_step`."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class DigitModule(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizer(self, lr):
        return torch.optim.Adam(self.parameters(), lr=lr)


class Trainer:
    def __init__(self, module, loader, sampler, args):
        self.rank = int(os.environ["RANK"])
        self.model = DDP(module)
        self.loader, self.sampler, self.args = loader, sampler, args
        self.opt = module.configure_optimizer(args.lr)

    def fit(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            for batch in self.loader:
                self.opt.zero_grad()
                loss = self.model.module.training_step(batch)
                loss.backward()
                self.opt.step()
            if self.rank == 0:
                print(f"epoch {epoch}: {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--global-batch", type=int, default=128)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    X, y = load_digits(return_X_y=True)
    ds = TensorDataset(torch.tensor(X[:512] / 16).float(), torch.tensor(y[:512]))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=args.global_batch // dist.get_world_size(), sampler=sampler)
    Trainer(DigitModule(args.hidden), loader, sampler, args).fit()
    dist.destroy_process_group()
