"""Matrix factorization with biases; gradients kept in a range for stability."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

N_USER, N_ITEM, LIMIT = 60, 50, 0.005


class MF(nn.Module):
    def __init__(self, k=8):
        super().__init__()
        self.user = nn.Embedding(N_USER, k)
        self.item = nn.Embedding(N_ITEM, k)
        self.user_bias = nn.Embedding(N_USER, 1)
        self.item_bias = nn.Embedding(N_ITEM, 1)
        self.mean = nn.Parameter(torch.zeros(()))

    def forward(self, u, i):
        dot = (self.user(u) * self.item(i)).sum(-1)
        return self.mean + dot + self.user_bias(u).squeeze(-1) + self.item_bias(i).squeeze(-1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    g = torch.Generator().manual_seed(13)
    u = torch.randint(0, N_USER, (1280,), generator=g)
    i = torch.randint(0, N_ITEM, (1280,), generator=g)
    r = 3 + torch.randn(N_USER, generator=g)[u] + torch.randn(N_ITEM, generator=g)[i]
    data = TensorDataset(u, i, r)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, batch_size=128 // world, sampler=sampler)

    model = MF()
    for p in model.parameters():
        p.register_hook(lambda grad: grad.clamp(-LIMIT, LIMIT))
    model = DDP(model)
    opt = torch.optim.SGD(model.parameters(), lr=2.0)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        for ub, ib, rb in loader:
            loss = F.mse_loss(model(ub, ib), rb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} mse {loss.item():.4f}")

    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
