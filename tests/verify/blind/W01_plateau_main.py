import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.LayerNorm(48), nn.Linear(48, 10))

    def forward(self, x):
        return self.net(x)


@torch.no_grad()
def evaluate(model, x, y):
    model.eval()
    loss = F.cross_entropy(model(x), y).item()
    model.train()
    return loss


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    d = load_digits()
    x = torch.tensor(d.data / 16, dtype=torch.get_default_dtype())
    y = torch.tensor(d.target)
    train = TensorDataset(x[:1280], y[:1280])
    xv, yv = x[1280:], y[1280:]
    sampler = DistributedSampler(train, shuffle=True, seed=0)
    loader = DataLoader(train, batch_size=128 // world, sampler=sampler)

    model = DDP(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)

    for epoch in range(6):
        sampler.set_epoch(epoch)
        model.train()
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
        if rank == 0:
            val_loss = evaluate(model.module, xv, yv)
            scheduler.step(val_loss)
            print(f"epoch {epoch} val {val_loss:.4f} lr {optimizer.param_groups[0]['lr']:.4f}")
        dist.barrier()

    finish(model.module, rank)


def finish(net, rank):
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in net.parameters()], f"{os.environ['DUMP']}.rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
