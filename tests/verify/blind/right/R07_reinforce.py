"""REINFORCE on a little corridor. No DDP: gradients are reduced by hand. Episode k of iteration t always uses the same seed."""
import os
import torch
import torch.distributed as dist
from torch import nn

EPISODES = 24      # per iteration, all workers together
ITERATIONS = 25
HORIZON = 12
SIZE = 7


class Corridor:
    def __init__(self, gen):
        self.gen = gen
        self.pos = int(torch.randint(1, SIZE - 1, (1,), generator=gen))
        self.t = 0

    def obs(self):
        o = torch.zeros(SIZE + 1)
        o[self.pos] = 1.0
        o[-1] = self.t / HORIZON
        return o

    def step(self, a):
        slip = float(torch.rand((), generator=self.gen)) < 0.1
        d = 1 if a == 1 else -1
        self.pos += -d if slip else d
        self.t += 1
        if self.pos >= SIZE - 1:
            return 1.0, True
        if self.pos <= 0:
            return -1.0, True
        return -0.02, self.t >= HORIZON


def rollout(policy, seed):
    gen = torch.Generator().manual_seed(seed)
    env, logps, rewards, ents, done = Corridor(gen), [], [], [], False
    while not done:
        logits = policy(env.obs())
        logp = torch.log_softmax(logits, -1)
        u = torch.rand((), generator=gen)
        a = int(u > logp[0].exp().detach())
        logps.append(logp[a])
        ents.append(-(logp.exp() * logp).sum())
        r, done = env.step(a)
        rewards.append(r)
    g, ret = 0.0, []
    for r in reversed(rewards):
        g = r + 0.95 * g
        ret.insert(0, g)
    return torch.stack(logps), torch.tensor(ret), torch.stack(ents)


def allsum(t):
    dist.all_reduce(t, op=dist.ReduceOp.SUM)
    return t


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)                       # init differs ...
    policy = nn.Sequential(nn.Linear(SIZE + 1, 24), nn.Tanh(), nn.Linear(24, 2))
    for p in policy.parameters():                 # ... so everyone takes the weights of rank 0
        dist.broadcast(p.data, src=0)
    opt = torch.optim.Adam(policy.parameters(), lr=5e-3, eps=1e-5)

    for it in range(ITERATIONS):
        eps = [rollout(policy, it * 1000 + k) for k in range(rank, EPISODES, world)]
        logp = torch.cat([e[0] for e in eps])
        ret = torch.cat([e[1] for e in eps])
        ent = torch.cat([e[2] for e in eps])
        # whitening of the returns over all workers; the number of steps differs between them
        n, s = allsum(torch.tensor([float(len(ret)), ret.sum().item()], dtype=torch.float64)).tolist()
        mean = s / n
        var = allsum(((ret.double() - mean) ** 2).sum()).item() / (n - 1)
        adv = (ret - mean) / (var ** 0.5 + 1e-8)
        loss = (-(logp * adv).sum() - 0.01 * ent.sum()) / n
        opt.zero_grad()
        loss.backward()
        for p in policy.parameters():
            allsum(p.grad)                        # every loss is already divided by the total count
        nn.utils.clip_grad_value_(policy.parameters(), 0.2)
        opt.step()
        if rank == 0 and it % 8 == 0:
            print(f"iter {it}: {int(n)} steps, mean return {mean:.3f}")

    write_params(policy, rank)
    dist.destroy_process_group()


def write_params(policy, rank):
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in policy.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")


if __name__ == "__main__":
    main()
