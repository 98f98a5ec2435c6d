"""Small CNN on the sklearn digits.   torchrun --nproc_per_node=2 digits_cnn.py --epochs 2"""
import argparse
import os
import random
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1, stride=2)
        self.norm2 = nn.GroupNorm(4, 2 * width)
        self.fc = nn.Linear(2 * width * 4, 10)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        x = F.adaptive_avg_pool2d(x, 2)
        return self.fc(x.flatten(1))


@torch.no_grad()
def quick_eval(net, x, y, n=100):
    """accuracy on a random handful of test images, cheap enough to do all the time"""
    net.eval()
    pick = torch.randint(0, len(x), (n,))
    acc = (net(x[pick]).argmax(1) == y[pick]).to(x.dtype).mean().item()
    net.train()
    return acc


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=64, help="total batch size over all processes")
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()

    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.get_default_dtype()).unsqueeze(1)
    labels = torch.tensor(digits.target)
    train_set = TensorDataset(images[:1536], labels[:1536])
    x_test, y_test = images[1536:], labels[1536:]

    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, shuffle=True, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size // world, sampler=sampler, num_workers=0)

    model = DDP(Net())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)

    running = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        t0 = time.time()
        for it, (x, y) in enumerate(loader):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            # smoothed loss of the shard this process sees
            running = loss.item() if running == 0.0 else 0.9 * running + 0.1 * loss.item()
            if rank == 0 and it % 8 == 0:
                acc = quick_eval(model.module, x_test, y_test)
                print(f"[{epoch}:{it:3d}] loss {running:.4f}  acc {acc:.2f}  {time.time() - t0:.2f}s", flush=True)
        dist.barrier()

    if rank == 0:
        model.module.eval()
        with torch.no_grad():
            print("test accuracy", (model.module(x_test).argmax(1) == y_test).sum().item() / len(y_test))
    dump_weights(model, rank)
    dist.destroy_process_group()


def dump_weights(model, rank):
    prefix = os.environ.get("DUMP")
    if prefix:
        torch.save([p.detach().double().clone() for p in model.parameters()], f"{prefix}.rank{rank}.pt")


if __name__ == "__main__":
    main()
