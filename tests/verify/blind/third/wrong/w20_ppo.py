"""PPO on a toy point-mass task; trajectories come from per-environment random streams."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Normal
from torch.nn.parallel import DistributedDataParallel as DDP

NUM_ENVS, HORIZON, UPDATES, EPOCHS = 16, 10, 3, 2


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
        self.critic = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.zeros(1) - 0.5)

    def forward(self, s):
        return self.actor(s).squeeze(-1), self.critic(s).squeeze(-1), self.log_std.exp()


class PointMass:
    def __init__(self, env_id, update):
        self.g = torch.Generator().manual_seed(update * 1000 + env_id)
        self.state = torch.randn(2, generator=self.g)
        self.t = 0

    def obs(self):
        return torch.cat([self.state, torch.tensor([self.t / HORIZON])])

    def noise(self):
        return torch.randn((), generator=self.g)

    def step(self, a):
        x, v = self.state
        v = v + 0.2 * a.clamp(-2, 2)
        self.state = torch.stack([x + 0.2 * v, v])
        self.t += 1
        return -(self.state[0] ** 2 + 0.1 * v ** 2)


@torch.no_grad()
def collect(net, env_ids, update, gamma=0.97):
    S, A, L, ADV, R = [], [], [], [], []
    for e in env_ids:
        env = PointMass(e, update)
        rew, vals = [], []
        for _ in range(HORIZON):
            s = env.obs()
            mu, v, std = net(s[None])
            a = mu[0] + std[0] * env.noise()
            S.append(s), A.append(a), L.append(Normal(mu[0], std[0]).log_prob(a))
            rew.append(env.step(a)), vals.append(v[0])
        ret = torch.zeros(())
        rets = []
        for r in reversed(rew):
            ret = r + gamma * ret
            rets.insert(0, ret)
        R += rets
        ADV += [q - v for q, v in zip(rets, vals)]
    return [torch.stack(z) for z in (S, A, L, ADV, R)]


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(3)
    model = DDP(ActorCritic())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
    per = NUM_ENVS // world
    my_envs = range(rank * per, (rank + 1) * per)
    for u in range(UPDATES):
        s, a, logp_old, adv, ret = collect(model.module, my_envs, u)
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        for _ in range(EPOCHS):
            mu, v, std = model(s)
            pi = Normal(mu, std)
            ratio = (pi.log_prob(a) - logp_old).exp()
            pg = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            loss = pg + 0.05 * (v - ret).pow(2).mean() - 0.001 * pi.entropy().mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
        score = ret.mean()
        dist.all_reduce(score)
        if rank == 0:
            print(f"update {u} return {score.item() / world:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
