import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_regression
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def get_args():
    p = argparse.ArgumentParser(description="MLP regression")
    p.add_argument("--batch-size", type=int, default=64, help="total batch size over all processes")
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--seed", type=int, default=7)
    return p.parse_args()


def build_loader(args):
    X, y = make_regression(n_samples=256, n_features=16, n_informative=8, noise=1.0, random_state=args.seed)
    ds = TensorDataset(torch.tensor(X).float(), torch.tensor(y / y.std()).float().unsqueeze(1))
    sampler = DistributedSampler(ds, shuffle=True, seed=args.seed, drop_last=True)
    return DataLoader(ds, batch_size=args.batch_size, sampler=sampler, drop_last=True), sampler


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    loader, sampler = build_loader(args)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 1)))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.huber_loss(model(x), y)
            loss.backward()
            opt.step()
        sched.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
