import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--global-batch", type=int, default=128)
    p.add_argument("--accum", type=int, default=2)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--epochs", type=int, default=2)
    return p.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(20)
    d = load_digits()
    ds = TensorDataset(torch.tensor(d.data[:512] / 16).float(), torch.tensor(d.target[:512]))
    sampler = DistributedSampler(ds, seed=20)
    loader = DataLoader(ds, batch_size=args.global_batch // (args.accum * world), sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 10)))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            sync = i % args.accum == 0
            with nullcontext() if sync else model.no_sync():
                loss = nn.functional.cross_entropy(model(x), y)
                (loss / args.accum).backward()
            if (i + 1) % args.accum == 0:
                opt.step()
                opt.zero_grad()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
