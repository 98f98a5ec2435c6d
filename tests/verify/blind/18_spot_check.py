"""MLP with its own shuffling: one permutation per epoch, each process takes its slice."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

N, B, EPOCHS = 768, 64, 4


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    return x, ((x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long())


def spot_check(model, x, y, k=100):
    """Accuracy on a random part of the validation data."""
    model.eval()
    pick = torch.randperm(len(x))[:k]
    with torch.no_grad():
        acc = (model(x[pick]).argmax(1) == y[pick]).float().mean().item()
    model.train()
    return acc


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(123)
    x, y = make(N, 1)
    vx, vy = make(300, 2)

    net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(EPOCHS):
        order = torch.randperm(N)
        for step in range(N // B):
            idx = order[step * B:(step + 1) * B][rank::world]
            loss = F.cross_entropy(model(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            acc = spot_check(net, vx, vy)
            print(f"epoch {epoch} loss {loss.item():.4f} accuracy {acc:.3f}")

    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in net.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
