"""REINFORCE on a tiny corridor; episodes are numbered globally and each has its own random stream."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical

EPISODES = 16        # per update, over all ranks
UPDATES = 6
LENGTH = 7
GAMMA = 0.95


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(LENGTH + 1, 24), nn.Tanh())
        self.pi = nn.Linear(24, 2)

    def forward(self, s):
        return self.pi(self.body(s))


def obs(pos, t):
    v = torch.zeros(LENGTH + 1)
    v[pos] = 1.0
    v[-1] = t / 20
    return v


def play(policy, episode_id):
    g = torch.Generator().manual_seed(10_000 + episode_id)
    pos = int(torch.randint(1, LENGTH - 1, (1,), generator=g))
    states, actions, rewards = [], [], []
    for t in range(12):
        s = obs(pos, t)
        with torch.no_grad():
            p = policy(s).softmax(-1)
        a = int(torch.rand((), generator=g) < p[1])
        slip = torch.rand((), generator=g) < 0.1
        pos += 1 if (a == 1) != bool(slip) else -1
        done = pos in (0, LENGTH - 1)
        states.append(s), actions.append(a)
        rewards.append(1.0 if pos == LENGTH - 1 else (-0.5 if pos == 0 else -0.02))
        if done:
            break
    ret, returns = 0.0, []
    for r in reversed(rewards):
        ret = r + GAMMA * ret
        returns.insert(0, ret)
    return torch.stack(states), torch.tensor(actions), torch.tensor(returns)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(12)
    policy = Policy()
    opt = torch.optim.Adam(policy.parameters(), lr=2e-2)

    for u in range(UPDATES):
        ids = range(u * EPISODES + rank, (u + 1) * EPISODES, world)
        s, a, ret = (torch.cat(z) for z in zip(*[play(policy, i) for i in ids]))

        # baseline, spread and number of transitions of the whole update
        m = torch.stack([ret.sum(), ret.pow(2).sum(), torch.tensor(float(len(ret)))]).double()
        dist.all_reduce(m)
        mean = m[0] / m[2]
        std = (m[1] / m[2] - mean ** 2).clamp_min(0).sqrt()
        adv = ((ret - mean) / (std + 1e-6)).float()

        pi = Categorical(logits=policy(s))
        loss = -(pi.log_prob(a) * adv + 0.01 * pi.entropy()).sum() / m[2].float()
        opt.zero_grad()
        loss.backward()
        for p in policy.parameters():
            dist.all_reduce(p.grad)
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        opt.step()
        if rank == 0:
            print(f"update {u} mean return {mean.item():+.3f} steps {int(m[2])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
