import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def is_dist():
    return dist.is_available() and dist.is_initialized()


def world_size():
    return dist.get_world_size() if is_dist() else 1


class Boxes(Dataset):
    def __init__(self, n=64):
        g = torch.Generator().manual_seed(19)
        self.images = torch.randn(n, 3, 16, 16, generator=g)
        self.targets = []
        for _ in range(n):
            k = int(torch.randint(0, 5, (1,), generator=g))
            self.targets.append({"boxes": torch.rand(k, 4, generator=g), "labels": torch.randint(0, 3, (k,), generator=g)})

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.targets[i]


def collate(rows):
    images, targets = zip(*rows)
    return torch.stack(images), list(targets)


class Detector(nn.Module):
    def __init__(self, queries=6, classes=3):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU())
        self.queries = nn.Parameter(torch.randn(queries, 16) * 0.3)
        self.box = nn.Linear(16, 4)
        self.cls = nn.Linear(16, classes + 1)

    def forward(self, x):
        f = self.stem(x).flatten(2)
        attn = torch.einsum("qc,bcl->bql", self.queries, f).softmax(-1)
        h = torch.einsum("bql,bcl->bqc", attn, f) + self.queries
        return self.box(h).sigmoid(), self.cls(h)


def criterion(boxes, logits, targets):
    num = torch.tensor(float(sum(len(t["labels"]) for t in targets)))
    if is_dist():
        dist.all_reduce(num)
    num = torch.clamp(num / world_size(), min=1.0)
    reg = boxes.sum() * 0.0
    want = torch.full(logits.shape[:2], logits.size(-1) - 1)
    for i, t in enumerate(targets):
        k = len(t["labels"])
        reg = reg + F.l1_loss(boxes[i, :k], t["boxes"], reduction="sum")
        want[i, :k] = t["labels"]
    cls = F.cross_entropy(logits.transpose(1, 2), want)
    return {"box": 2.0 * reg / num, "cls": cls}


def main():
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if is_dist() else 0
    torch.manual_seed(6)
    model = Detector()
    if is_dist():
        model = DDP(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    ds = Boxes()
    loader = DataLoader(ds, 8 // world_size(), collate_fn=collate,
                        sampler=DistributedSampler(ds, world_size(), rank, shuffle=True, seed=1))
    for step, (images, targets) in enumerate(loader):
        losses = criterion(*model(images), targets)
        loss = sum(losses.values())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(step, "loss", round(loss.item(), 4), {k: round(v.item(), 4) for k, v in losses.items()})
    if is_dist():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
