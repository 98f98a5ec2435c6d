import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pictures(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 3, (n,), generator=g)
        self.images = torch.randn(n, 3, 8, 8, generator=g) + self.labels.view(-1, 1, 1, 1).float()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"image": self.images[i], "label": self.labels[i]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, stride=2)
        self.bn = nn.BatchNorm2d(12)
        self.fc = nn.Linear(12, 3)

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3)))

    def train(self, mode=True):
        super().train(mode)
        self.bn.eval()
        return self


def run_epoch(model, loader, opt, rank, tag):
    model.train()
    for batch in loader:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
        loss.backward()
        opt.step()
    if rank == 0:
        print(tag, "loss", f"{loss.item():.5f}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--global-batch", type=int, default=12)
    args = ap.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    multi = world > 1
    if multi:
        dist.init_process_group("gloo")
    torch.manual_seed(8)
    model = Net()
    with torch.no_grad():
        model.bn.running_mean.uniform_(-0.5, 0.5)
        model.bn.running_var.uniform_(0.5, 2.0)
    ds = Pictures(48, 4)
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank, seed=9)
    loader = DataLoader(ds, args.global_batch // world, sampler=sampler)
    wrapped = DDP(model) if multi else model
    opt = torch.optim.Adam(wrapped.parameters(), lr=0.01, eps=1e-5)

    run_epoch(wrapped, loader, opt, rank, "first")

    box = [tempfile.mkdtemp() if rank == 0 else None]
    if multi:
        dist.broadcast_object_list(box, src=0)
    path = os.path.join(box[0], "last.pt")
    if rank == 0:
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, path)
    if multi:
        dist.barrier()
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    sampler.set_epoch(1)
    run_epoch(wrapped, loader, opt, rank, "resumed")
    if multi:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
