"""LSTM character model; gradients averaged by hand, with clipping."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, T = 30, 16
MAX_NORM = 0.25


class CharLSTM(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.rnn = nn.LSTM(d, d, batch_first=True)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def average_gradients(model, world):
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad /= world


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    g = torch.Generator().manual_seed(21)
    start = torch.randint(0, VOCAB, (320, 1), generator=g)
    stride = torch.randint(1, 5, (320, 1), generator=g)
    text = (start + stride * torch.arange(T + 1)) % VOCAB
    data = TensorDataset(text)
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=32 // world, sampler=sampler)

    model = CharLSTM()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (row,) in loader:
            logits = model(row[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, VOCAB), row[:, 1:].reshape(-1))
            opt.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            average_gradients(model, world)
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} norm {norm:.3f}")

    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
