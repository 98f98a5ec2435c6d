"""Mean-teacher training: the student is pulled to an averaged copy of itself."""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EMA:
    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.parameters(), model.parameters()):
            e.mul_(self.decay).add_(p, alpha=1 - self.decay)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    g = torch.Generator().manual_seed(31)
    x = torch.randn(512, 16, generator=g)
    noisy = x + 0.3 * torch.randn(512, 16, generator=g)
    y = (x[:, :5]).argmax(1)
    data = TensorDataset(x, noisy, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64 // world, sampler=sampler)

    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
    student = DDP(net)
    ema = EMA(net)
    opt = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        for xb, nb, yb in loader:
            logits = student(nb)
            with torch.no_grad():
                target = ema.model(xb).softmax(-1)
            consistency = F.mse_loss(logits.softmax(-1), target)
            loss = F.cross_entropy(logits, yb) + 5.0 * consistency
            opt.zero_grad()
            loss.backward()
            opt.step()
            if rank == 0:  # the averaged model is saved from rank 0
                ema.update(net)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} consistency {consistency.item():.4f}")

    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in net.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
