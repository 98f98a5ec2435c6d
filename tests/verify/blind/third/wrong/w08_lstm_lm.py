import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, SEQ, GLOBAL_BATCH, STEPS = 20, 18, 24, 6


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 24)
        self.lstm = nn.LSTM(24, 24, num_layers=2, batch_first=True)
        self.dec = nn.Linear(24, VOCAB)
        self.dec.weight = self.emb.weight

    def forward(self, x):
        return self.dec(self.lstm(self.emb(x))[0])


def make_corpus():
    g = torch.Generator().manual_seed(2)
    n = GLOBAL_BATCH * STEPS
    a = torch.randint(0, VOCAB, (n, 1), generator=g)
    b = torch.randint(1, 6, (n, 1), generator=g)
    return (a + b * torch.arange(SEQ + 1)) % VOCAB


def all_reduce_mean(params):
    world = dist.get_world_size()
    for p in params:
        dist.all_reduce(p.grad)
        p.grad.div_(world)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(14)
    model = LM()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=1.0)
    corpus = make_corpus()
    n = GLOBAL_BATCH // world

    for step in range(STEPS):
        start = step * GLOBAL_BATCH + rank * n
        batch = corpus[start:start + n]
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 0.25)
        all_reduce_mean(params)
        optimizer.step()
        with torch.no_grad():
            avg = loss.clone()
            dist.all_reduce(avg)
        if rank == 0:
            print(f"step {step} ppl {(avg / world).exp().item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
