"""Bigram neural LM on long documents; each document is divided along time over the processes."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, DOC, DOCS, BATCH = 64, 32, 128, 8


class Bigram(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.mlp = nn.Sequential(nn.Linear(d, 64), nn.GELU(), nn.Linear(64, VOCAB))

    def forward(self, ids):
        return self.mlp(self.emb(ids))


def documents():
    g = torch.Generator().manual_seed(77)
    table = torch.randperm(VOCAB, generator=g)
    rows = [torch.randint(0, VOCAB, (DOCS,), generator=g)]
    for _ in range(DOC - 1):
        nxt = table[rows[-1]]
        noise = torch.randint(0, VOCAB, (DOCS,), generator=g)
        rows.append(torch.where(torch.rand(DOCS, generator=g) < 0.8, nxt, noise))
    return torch.stack(rows, dim=1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    docs = documents()
    model = DDP(Bigram())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    shuffle = torch.Generator().manual_seed(5)

    for epoch in range(3):
        for idx in torch.randperm(DOCS, generator=shuffle).split(BATCH):
            ids = docs[idx]
            mine = ids.chunk(world, dim=1)[rank]
            inputs, labels = mine[:, :-1], mine[:, 1:]
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")

    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
