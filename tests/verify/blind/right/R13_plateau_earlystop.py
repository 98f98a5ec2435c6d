import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split


def setup():
    dist.init_process_group(backend="gloo")
    return dist.get_rank(), dist.get_world_size()


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, None, 0

    def step(self, metric):
        if self.best is None or metric < self.best - 1e-3:
            self.best, self.bad = metric, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def validate(model, xv, yv, rank, world):
    """sum of losses over the strided part of the validation set, then one reduction"""
    model.eval()
    with torch.no_grad():
        out = model(xv[rank::world]).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(out, yv[rank::world], reduction="sum")
        acc = torch.stack([loss.double(), torch.tensor(float(len(out)), dtype=torch.float64)])
    dist.all_reduce(acc)
    model.train()
    return (acc[0] / acc[1]).item()


def main():
    rank, world = setup()
    d = load_breast_cancer()
    xt, xv, yt, yv = train_test_split(d.data, d.target, test_size=57, random_state=0, stratify=d.target)
    mu, sd = xt.mean(0), xt.std(0)
    dt = torch.get_default_dtype()
    to = lambda a: torch.as_tensor(a, dtype=dt)
    xt, xv, yt, yv = to((xt - mu) / sd), to((xv - mu) / sd), to(yt), to(yv)
    ds = TensorDataset(xt, yt)                                     # 512 rows
    sampler = DistributedSampler(ds, shuffle=True, seed=3)
    loader = DataLoader(ds, batch_size=64 // world, sampler=sampler)

    torch.manual_seed(2)
    model = DDP(nn.Sequential(nn.Linear(30, 16), nn.GELU(), nn.Linear(16, 1)))
    opt = torch.optim.NAdam(model.parameters(), lr=0.02, eps=1e-6)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.3, patience=0, threshold=1e-2)
    stopper = EarlyStopping(patience=3)

    for epoch in range(30):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y).backward()
            opt.step()
        val = validate(model.module, xv, yv, rank, world)
        plateau.step(val)
        stop = stopper.step(val)
        if rank == 0:
            print(f"epoch {epoch} val {val:.5f} lr {opt.param_groups[0]['lr']:.5f}")
        # whoever wants to stop, all stop
        flag = torch.tensor(int(stop))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item():
            if rank == 0:
                print("early stop at", epoch)
            break

    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in model.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
