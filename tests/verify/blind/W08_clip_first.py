"""RNN forecaster without DDP: gradients averaged by a helper."""
import os
import torch
import torch.distributed as dist
import torch.nn as nn


class Forecaster(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.rnn = nn.GRU(2, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.out(h[:, -1])


def series(i, length=20):
    g = torch.Generator().manual_seed(int(i))
    f, ph, amp = torch.rand(3, generator=g).tolist()
    t = torch.arange(length + 1) * (0.2 + 0.3 * f) + 6.28 * ph
    s = (0.5 + 2 * amp) * torch.sin(t)
    return torch.stack([s[:-1], torch.cos(t[:-1])], 1), s[-1:]


def average_gradients(model):
    size = float(dist.get_world_size())
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad /= size


def train_step(model, opt, x, y, max_norm):
    opt.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    average_gradients(model)
    opt.step()
    return loss.item()


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    total = 48
    torch.manual_seed(5)
    model = Forecaster()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(24):
        ids = range(step * total + rank, (step + 1) * total, world)
        xs, ys = zip(*[series(i) for i in ids])
        loss = train_step(model, opt, torch.stack(xs), torch.stack(ys), max_norm=0.25)
        if rank == 0 and step % 6 == 0:
            print(f"step {step}: mse {loss:.4f}")
    to_disk(model, rank)
    dist.destroy_process_group()


def to_disk(model, rank):
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in model.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")


if __name__ == "__main__":
    main()
