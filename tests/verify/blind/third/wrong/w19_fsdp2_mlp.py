import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


def clip_gradients(params, max_norm):
    grads = [p.grad.to_local() for p in params if p.grad is not None]
    total_norm = torch.sqrt(sum(g.pow(2).sum() for g in grads))
    scale = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return total_norm


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), Residual(32), Residual(32), nn.Linear(32, 10))
    mesh = init_device_mesh("cpu", (world,))
    for m in model:
        if isinstance(m, Residual):
            fully_shard(m, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    d = load_digits()
    ds = TensorDataset(torch.tensor(d.data[:576] / 16).float(), torch.tensor(d.target[:576]))
    sampler = DistributedSampler(ds, seed=0)
    loader = DataLoader(ds, batch_size=96 // world, sampler=sampler)
    for step, (x, y) in enumerate(loader):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        norm = clip_gradients(list(model.parameters()), 0.3)
        opt.step()
        avg = loss.detach().clone()
        dist.all_reduce(avg)
        if rank == 0:
            print(f"step {step} loss {avg.item() / world:.4f} norm {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
