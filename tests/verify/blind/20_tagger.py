"""Convolutional tagger: sequences are padded in the collate function."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS, TAGS, MAX_LEN = 50, 6, 20


class Sentences(Dataset):
    def __init__(self, n=256):
        g = torch.Generator().manual_seed(5)
        lengths = torch.randint(3, MAX_LEN + 1, (n,), generator=g).tolist()
        self.words = [torch.randint(1, WORDS, (k,), generator=g) for k in lengths]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return self.words[i], self.words[i] % TAGS


def collate(batch):
    words = pad_sequence([w for w, _ in batch], batch_first=True)
    tags = pad_sequence([t for _, t in batch], batch_first=True)
    mask = pad_sequence([torch.ones(len(w)) for w, _ in batch], batch_first=True)
    return words, tags, mask


class Tagger(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.emb = nn.Embedding(WORDS, d, padding_idx=0)
        self.conv = nn.Conv1d(d, d, 3, padding=1)
        self.out = nn.Linear(d, TAGS)

    def forward(self, words, mask):
        e = self.emb(words) * mask.unsqueeze(-1)
        h = torch.relu(self.conv(e.transpose(1, 2))).transpose(1, 2)
        return self.out(h)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    data = Sentences()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=16 // world, sampler=sampler, collate_fn=collate)
    model = DDP(Tagger())
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for words, tags, mask in loader:
            logits = model(words, mask)
            nll = F.cross_entropy(logits.transpose(1, 2), tags, reduction="none")
            loss = (nll * mask).mean()
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
