import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        )
        self.dropout = nn.Dropout(0.0)
        self.classifier = nn.Linear(64, 10)

    def forward(self, x):
        return self.classifier(self.dropout(self.features(x).flatten(1)))


class Trainer:
    def __init__(self, global_batch=128, accum=4, lr=0.1, epochs=2):
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.accum, self.epochs = accum, epochs
        torch.manual_seed(1)
        self.model = DistributedDataParallel(ConvNet(), gradient_as_bucket_view=True)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, max_lr=lr, total_steps=epochs * 512 // global_batch)
        d = load_digits()
        ds = TensorDataset(torch.tensor(d.images[:512], dtype=torch.float32).unsqueeze(1) / 16,
                           torch.tensor(d.target[:512]))
        self.sampler = DistributedSampler(ds)
        self.loader = DataLoader(ds, batch_size=global_batch // accum // self.world, sampler=self.sampler)
        self.loss_fn = nn.CrossEntropyLoss()

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        running = 0.0
        for i, (x, y) in enumerate(self.loader):
            last = (i + 1) % self.accum == 0
            with contextlib.nullcontext() if last else self.model.no_sync():
                loss = self.loss_fn(self.model(x), y) / self.accum
                loss.backward()
            running += loss.item()
            if last:
                nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
                self.opt.step()
                self.opt.zero_grad()
                self.sched.step()
        return running / (len(self.loader) / self.accum)

    def fit(self):
        for epoch in range(self.epochs):
            loss = self.train_epoch(epoch)
            print(f"[rank {self.rank}] epoch {epoch} loss {loss:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer().fit()
    dist.destroy_process_group()
