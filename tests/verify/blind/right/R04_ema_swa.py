"""Regression on the diabetes data with an EMA copy, a SWA copy, and evaluation of all three on the main process."""
import os
from copy import deepcopy

import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EMA:
    def __init__(self, model, decay=0.98):
        self.decay = decay
        self.shadow = deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.lerp_(p, 1 - self.decay)


def is_main():
    return dist.get_rank() == 0


def get_data():
    d = load_diabetes()
    x = StandardScaler().fit_transform(d.data)
    y = (d.target - d.target.mean()) / d.target.std()
    dt = torch.get_default_dtype()
    x, y = torch.as_tensor(x, dtype=dt), torch.as_tensor(y, dtype=dt).unsqueeze(1)
    return TensorDataset(x[:384], y[:384]), TensorDataset(x[384:], y[384:])


def mse(net, ds):
    net.eval()
    with torch.no_grad():
        x, y = ds.tensors
        out = nn.functional.mse_loss(net(x), y).item()
    net.train()
    return out


def run():
    dist.init_process_group(backend="gloo")
    ws = dist.get_world_size()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    ddp = DDP(net)
    # only the main process needs the averaged copies, they are never trained on
    ema = EMA(net) if is_main() else None
    swa = AveragedModel(net) if is_main() else None

    train, test = get_data()
    sampler = DistributedSampler(train, shuffle=True, seed=0)
    loader = DataLoader(train, batch_size=32 // ws, sampler=sampler)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.8)
    swa_sched = SWALR(opt, swa_lr=0.02, anneal_epochs=2)
    best = float("inf")
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.smooth_l1_loss(ddp(x), y, beta=0.5).backward()
            opt.step()
            if ema is not None:
                ema.update(net)
        if epoch >= 2:
            if swa is not None:
                swa.update_parameters(net)
            swa_sched.step()
        if is_main():
            scores = {"raw": mse(net, test), "ema": mse(ema.shadow, test), "swa": mse(swa, test)}
            if scores["ema"] < best:
                best = scores["ema"]
                print("new best", end=" ")
            print(epoch, {k: round(v, 4) for k, v in scores.items()}, "lr", round(opt.param_groups[0]["lr"], 4))
    finish(net)


def finish(net):
    dest = os.environ.get("DUMP", "")
    if dest:
        torch.save([p.detach().double() for p in net.parameters()], f"{dest}.rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
