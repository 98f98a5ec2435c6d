"""Small causal transformer on variable-length sequences."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB, T, PAD = 40, 24, 0


class Sequences(Dataset):
    def __init__(self, n=192):
        g = torch.Generator().manual_seed(3)
        self.rows = []
        for _ in range(n):
            length = int(torch.randint(4, T + 1, (1,), generator=g))
            start = int(torch.randint(1, VOCAB, (1,), generator=g))
            row = (start + torch.arange(length + 1) * 3) % (VOCAB - 1) + 1
            self.rows.append(F.pad(row, (0, T - length), value=PAD))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class GPT(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, d)
        self.pos = nn.Parameter(torch.randn(T, d) * 0.02)
        layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, VOCAB)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1))
        h = self.tok(ids) + self.pos[: ids.size(1)]
        return self.head(self.blocks(h, mask=mask, is_causal=True))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    data = Sequences()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=16 // world, sampler=sampler)
    model = DDP(GPT())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for row in loader:
            logits = model(row[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten(), ignore_index=PAD)
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        if rank == 0:
            print("epoch", epoch, "loss", round(loss.item(), 4))
    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
