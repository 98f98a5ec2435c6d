import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, TensorDataset


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


class MoE(nn.Module):
    """Switch-style top-1 mixture; the load-balancing loss is over the global batch."""

    def __init__(self, d, n_experts):
        super().__init__()
        self.gate = nn.Linear(d, n_experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, 48), nn.ReLU(), nn.Linear(48, d)) for _ in range(n_experts))

    def forward(self, x):
        prob = self.gate(x).softmax(-1)
        top, which = prob.max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            sel = (which == e).nonzero().squeeze(1)
            if sel.numel():
                out = out.index_add(0, sel, expert(x[sel]) * top[sel, None])
        n = torch.tensor(float(len(x)))
        dist.all_reduce(n)
        frac = torch.bincount(which, minlength=len(self.experts)).float()
        dist.all_reduce(frac)
        mean_prob = SumOverRanks.apply(prob.sum(0)) / n
        aux = len(self.experts) * (frac / n * mean_prob).sum()
        return x + out, aux


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.moe, self.out = nn.Linear(64, 24), MoE(24, 6), nn.Linear(24, 10)

    def forward(self, x):
        h, aux = self.moe(F.gelu(self.inp(x)))
        return self.out(h), aux


class ShardedBatches:
    def __init__(self, n, global_batch, rank, world, seed):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
        self.batches = [b[rank::world] for b in BatchSampler(order, global_batch, drop_last=True)]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(15)
    X, y = load_digits(return_X_y=True)
    ds = TensorDataset(torch.tensor(X[:216] / 16).float(), torch.tensor(y[:216]))
    loader = DataLoader(ds, batch_sampler=ShardedBatches(216, 36, rank, world, seed=2))
    model = DDP(Net(), find_unused_parameters=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.2)
    for i, (x, t) in enumerate(loader):
        logits, aux = model(x)
        loss = F.cross_entropy(logits, t) + 0.05 * aux
        opt.zero_grad(set_to_none=False)
        loss.backward()
        opt.step()
        if rank == 0:
            print(i, f"{loss.item():.4f} aux {aux.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
