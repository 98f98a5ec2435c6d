import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
GLOBAL_BATCH = 96
STEPS = 8


def log(*a):
    if RANK == 0:
        print(*a, flush=True)


def average_gradients(params):
    """One bucket: flatten, sum over the ranks, divide, copy back."""
    grads = [p.grad for p in params if p.requires_grad]
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat /= WORLD
    for g, synced in zip(grads, _unflatten_dense_tensors(flat, grads)):
        g.copy_(synced)


def init_params(gen):
    w1 = torch.randn(64, 40, generator=gen) / 8
    b1 = torch.zeros(40)
    w2 = torch.randn(40, 10, generator=gen) / 40 ** 0.5
    b2 = torch.zeros(10)
    return [p.requires_grad_() for p in (w1, b1, w2, b2)]


def net(params, x):
    w1, b1, w2, b2 = params
    return torch.tanh(x @ w1 + b1) @ w2 + b2


def main():
    dist.init_process_group("gloo")
    data = load_digits()
    X = torch.from_numpy((data.data / 16.0).astype(np.float32))
    Y = torch.from_numpy(data.target)

    params = init_params(torch.Generator().manual_seed(1234))
    opt = torch.optim.SGD(params, lr=0.3, momentum=0.9, nesterov=True, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=3, gamma=0.5)
    rng = np.random.RandomState(7)          # identical on every rank

    for step in range(STEPS):
        idx = rng.choice(len(X), GLOBAL_BATCH, replace=False)
        mine = np.array_split(idx, WORLD)[RANK]
        loss = F.cross_entropy(net(params, X[mine]), Y[mine])
        opt.zero_grad()
        loss.backward()
        average_gradients(params)
        gnorm = torch.nn.utils.clip_grad_norm_(params, 0.5)
        opt.step()
        sched.step()
        with torch.no_grad():
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            shown /= WORLD
        log(f"{step} loss={shown.item():.5f} gnorm={gnorm.item():.4f} lr={sched.get_last_lr()[0]:.4f}")

    log("checksum", sum(p.double().abs().sum().item() for p in params))
    dist.destroy_process_group()


main()
