import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_moons
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation. Call first_step, run forward/backward again, call second_step."""

    def __init__(self, params, base_cls, rho=0.05, adaptive=False, **kw):
        super().__init__(params, dict(rho=rho, adaptive=adaptive, **kw))
        self.base = base_cls(self.param_groups, **kw)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = self._norm()
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                e = (p.pow(2) if group["adaptive"] else 1.0) * p.grad * scale
                p.add_(e)
                self.state[p]["e"] = e
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.state[p]["e"])
        self.base.step()
        self.zero_grad()

    def _norm(self):
        return torch.norm(torch.stack([
            ((p.abs() if g["adaptive"] else 1.0) * p.grad).norm(2)
            for g in self.param_groups for p in g["params"] if p.grad is not None]), 2)


def main():
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    world = dist.get_world_size()
    x, y = make_moons(640, noise=0.25, random_state=0)
    ds = TensorDataset(torch.tensor(x, dtype=torch.get_default_dtype()), torch.tensor(y))
    sampler = DistributedSampler(ds, shuffle=True, seed=321)
    dl = DataLoader(ds, batch_size=64 // world, sampler=sampler)

    torch.manual_seed(8)
    model = DDP(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)))
    opt = SAM(model.parameters(), torch.optim.SGD, rho=0.1, lr=0.1, momentum=0.9)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        for xb, yb in dl:
            # both passes synchronise, so the perturbation is the one of the whole batch
            F.cross_entropy(model(xb), yb).backward()
            opt.first_step()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            opt.second_step()
        if rank == 0:
            print(f"epoch {epoch}: last perturbed loss (rank 0) {loss.item():.4f}")

    keep(model.module.state_dict(), rank)
    dist.destroy_process_group()


def keep(state, rank):
    where = os.environ.get("DUMP")
    if not where:
        return
    torch.save([v.double() for v in state.values()], f"{where}.rank{rank}.pt")


if __name__ == "__main__":
    main()
