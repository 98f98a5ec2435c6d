"""Transfer learning: train the head first, then the whole network."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.backbone(x).flatten(1))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    d = load_digits()
    x = torch.tensor(d.images[:512], dtype=torch.float32)[:, None] / 16
    data = TensorDataset(x, torch.tensor(d.target[:512]))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32 // world, sampler=sampler)

    net = ConvNet()
    net.backbone.requires_grad_(False)
    model = DDP(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(4):
        if epoch == 2:
            net.backbone.requires_grad_(True)
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")

    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in net.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
