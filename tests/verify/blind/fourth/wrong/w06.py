import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average_gradients(params, world):
    if world == 1:
        return
    for p in params:
        dist.all_reduce(p.grad)
        p.grad /= world


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.pi = nn.Linear(32, 4)
        self.value = nn.Linear(32, 1)

    def forward(self, s):
        h = self.trunk(s)
        return torch.distributions.Categorical(logits=self.pi(h)), self.value(h).squeeze(1)


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(60)
    states = torch.randn(128, 8, generator=g)
    actions = torch.randint(0, 4, (128,), generator=g)
    returns = states.sum(1) + torch.randn(128, generator=g)
    ds = TensorDataset(states, actions, returns)
    loader = DataLoader(ds, 16 // world, sampler=DistributedSampler(ds, world, rank, shuffle=False))
    torch.manual_seed(61)
    net = Policy()
    if world > 1:
        for p in net.parameters():
            dist.broadcast(p.data, src=0)
    params = list(net.parameters())
    opt = torch.optim.SGD(params, lr=0.1)
    for step, (s, a, r) in enumerate(loader):
        policy, v = net(s)
        adv = r - v.detach()
        loss = -(policy.log_prob(a) * adv).mean() + 0.5 * (v - r).pow(2).mean() - 0.01 * policy.entropy().mean()
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(params, 0.5)
        average_gradients(params, world)
        opt.step()
        if rank == 0:
            print(f"update {step} loss {loss.item():.4f} norm {norm.item():.3f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
