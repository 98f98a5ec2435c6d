"""Class-weighted classification; the last batch of the epoch is ragged and split unevenly."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

G = 40
N = 203


def batches(n, size, seed):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return order.split(size)


def sum_grads(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    me, n_proc = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    digits = load_digits()
    x_all = torch.tensor(digits.data[:N] / 16, dtype=torch.float32)
    y_all = torch.tensor(digits.target[:N] % 3)           # 3 unbalanced classes
    class_w = N / (3 * torch.bincount(y_all, minlength=3).float())
    class_w = class_w * torch.tensor([1.0, 2.0, 4.0])

    net = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.1), nn.Linear(32, 3))
    opt = torch.optim.RMSprop(net.parameters(), lr=2e-3)

    for k, batch in enumerate(batches(N, G, seed=99)):
        mine = batch[me::n_proc]
        w = class_w[y_all[mine]].sum()
        dist.all_reduce(w)
        opt.zero_grad()
        if len(mine):
            local = F.cross_entropy(net(x_all[mine]), y_all[mine], weight=class_w, reduction="sum")
            (local / w).backward()
            shown = local.detach().clone()
        else:
            shown = torch.zeros(())
        sum_grads(net)
        opt.step()
        dist.all_reduce(shown)
        if me == 0:
            print(f"step {k} n={len(batch)} loss={(shown / w).item():.5f}")
    dist.destroy_process_group()
