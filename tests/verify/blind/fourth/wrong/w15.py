import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class CharRNN(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.RNN(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, t):
        return self.out(self.rnn(self.emb(t))[0])


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(15)
    model = CharRNN()
    limit = 0.01
    for p in model.parameters():
        p.register_hook(lambda grad: grad.clamp(-limit, limit))
    if world > 1:
        model = DDP(model)
    g = torch.Generator().manual_seed(151)
    text = torch.randint(0, 20, (96, 11), generator=g)
    ds = TensorDataset(text[:, :-1], text[:, 1:])
    sampler = DistributedSampler(ds, world, rank, shuffle=True, seed=2)
    loader = DataLoader(ds, batch_size=12 // world, sampler=sampler)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
