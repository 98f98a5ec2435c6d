"""Transformer LM on padded sequences: token-weighted loss, evaluation between the epochs."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, T, PAD = 36, 20, 0


class LM(nn.Module):
    def __init__(self, d=32, dropout=0.0):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, d, padding_idx=PAD)
        self.pos = nn.Parameter(0.02 * torch.randn(T, d))
        layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=dropout, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 1)
        self.drop = nn.Dropout(dropout)

    def forward(self, ids):
        mask = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
        h = self.enc(self.drop(self.tok(ids) + self.pos), mask=mask)
        return h @ self.tok.weight.t()  # tied


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    rows = (torch.randint(0, VOCAB - 1, (n, 1), generator=g) + 2 * torch.arange(T + 1)) % (VOCAB - 1) + 1
    rows[torch.arange(T + 1) > torch.randint(3, T + 1, (n, 1), generator=g)] = PAD
    return TensorDataset(rows)


def nll(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PAD, reduction="sum")


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, val = make(240, 1), make(45, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16 // world, sampler=sampler)
    net = LM()
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        model.train()
        sampler.set_epoch(epoch)
        for (ids,) in loader:
            tokens = (ids[:, 1:] != PAD).sum()
            dist.all_reduce(tokens)
            loss = nll(model, ids) * world / tokens
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        if rank == 0:
            with torch.no_grad():
                total = sum(nll(net, ids).item() for (ids,) in DataLoader(val, batch_size=15))
            print(f"epoch {epoch} loss {loss.item():.4f} validation sum {total:.3f}")
        dist.barrier()
    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in net.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
