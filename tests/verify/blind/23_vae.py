"""Variational autoencoder on digits; the noise of a sample comes from its index."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LATENT, BETA = 4, 0.01


class Digits(Dataset):
    def __init__(self, n=768):
        self.x = torch.tensor(load_digits().data[:n], dtype=torch.float32) / 16
        self.epoch = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.epoch * len(self.x) + i)
        return self.x[i], torch.randn(LATENT, generator=g)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 2 * LATENT))
        self.dec = nn.Sequential(nn.Linear(LATENT, 48), nn.ReLU(), nn.Linear(48, 64))

    def forward(self, x, eps):
        mu, logvar = self.enc(x).chunk(2, dim=-1)
        return self.dec(mu + eps * (0.5 * logvar).exp()), mu, logvar


def vae_loss(recon, x, mu, logvar):
    rec = F.mse_loss(recon, x)
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return rec + BETA * kld, rec, kld


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = Digits()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=64 // world, sampler=sampler)
    model = DDP(VAE())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(3):
        data.epoch = epoch
        sampler.set_epoch(epoch)
        for x, eps in loader:
            recon, mu, logvar = model(x, eps)
            loss, rec, kld = vae_loss(recon, x, mu, logvar)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} rec {rec.item():.4f} kld {kld.item():.4f}")
    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
