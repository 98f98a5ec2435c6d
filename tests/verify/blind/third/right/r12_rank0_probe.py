"""Auto-encoder (DDP) with a linear probe that lives on rank 0 and is broadcast after every update."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class AE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 12))
        self.decoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x):
        z = self.encoder(x)
        return z, self.decoder(z)


def gather_to_main(t):
    if dist.get_rank() == 0:
        out = [torch.empty_like(t) for _ in range(dist.get_world_size())]
        dist.gather(t, out, dst=0)
        return torch.cat(out)
    dist.gather(t, dst=0)
    return None


def main():
    dist.init_process_group("gloo")
    is_main = dist.get_rank() == 0
    ws = dist.get_world_size()
    torch.manual_seed(8)
    d = load_digits()
    ds = TensorDataset(torch.tensor(d.data[:500] / 16).float(), torch.tensor(d.target[:500]))
    sampler = DistributedSampler(ds, shuffle=True, seed=1)
    loader = DataLoader(ds, batch_size=100 // ws, sampler=sampler)

    ae = DDP(AE())
    probe = nn.Linear(12, 10)
    ae_opt = torch.optim.Adam(ae.parameters(), lr=3e-3)
    probe_opt = torch.optim.SGD(probe.parameters(), lr=0.5, momentum=0.9)

    for i, (x, y) in enumerate(loader):
        z, rec = ae(x)
        guide = F.cross_entropy(F.linear(z, probe.weight.detach(), probe.bias.detach()), y)
        loss = F.mse_loss(rec, x) + 0.1 * guide
        ae_opt.zero_grad()
        loss.backward()
        ae_opt.step()

        all_z, all_y = gather_to_main(z.detach()), gather_to_main(y)
        if is_main:
            probe_opt.zero_grad()
            probe_loss = F.cross_entropy(probe(all_z), all_y)
            probe_loss.backward()
            probe_opt.step()
            print(f"{i}: ae {loss.item():.4f} probe {probe_loss.item():.4f}")
        for p in probe.parameters():
            dist.broadcast(p.data, src=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
