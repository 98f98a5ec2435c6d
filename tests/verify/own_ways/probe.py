"""A probe that one rank trains on what all ranks have encoded, and sends to the others.

`rank=N`: which rank; `every=K`: in each K-th step; `first`: before the encoder's step; `keeps`: it
is not sent; `alone`: and the others do not use it; `module`: all ranks call it as a module;
`pretrains`: rank 0 has trained the encoder before, which DDP sends to the others.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORDS = dict(word.partition("=")[::2] for word in sys.argv[1:])

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
trains = min(int(WORDS.get("rank", 0)), size - 1)
every = int(WORDS.get("every", 1))
torch.manual_seed(6)
encoder = nn.Sequential(nn.Linear(5, 6), nn.Tanh())
x = torch.randn(72, 5)
y = torch.randint(3, (72,))
if "pretrains" in WORDS and rank == 0:
    before = torch.optim.SGD(encoder.parameters(), lr=0.1)
    for part in x.split(36):
        before.zero_grad()
        (encoder(part) - part.mean()).square().mean().backward()
        before.step()
encoder = DistributedDataParallel(encoder)
probe = nn.Linear(6, 3)
optimizer = torch.optim.Adam(encoder.parameters(), lr=0.01)
probe_optimizer = torch.optim.Adam(probe.parameters(), lr=0.1)


def train_probe(codes, labels):
    every_code = [torch.empty_like(codes) for _ in range(size)]
    every_label = [torch.empty_like(labels) for _ in range(size)]
    dist.all_gather(every_code, codes)
    dist.all_gather(every_label, labels)
    if rank == trains:
        probe_optimizer.zero_grad()
        F.cross_entropy(probe(torch.cat(every_code)), torch.cat(every_label)).backward()
        probe_optimizer.step()
    for p in probe.parameters() if "keeps" not in WORDS else ():
        dist.broadcast(p.data, trains)


for step, batch in enumerate(torch.arange(72).split(12)):
    mine = batch.chunk(size)[rank]
    codes = encoder(x[mine])
    loss = codes.square().mean()
    if "module" in WORDS:
        loss = loss + F.cross_entropy(probe(codes), y[mine])
    elif "alone" not in WORDS:
        guess = F.linear(codes, probe.weight.detach(), probe.bias.detach())
        loss = loss + F.cross_entropy(guess, y[mine])
    optimizer.zero_grad()
    loss.backward()
    if "first" in WORDS and step % every == 0:
        train_probe(codes.detach(), y[mine])
    optimizer.step()
    if "first" not in WORDS and step % every == 0:
        train_probe(codes.detach(), y[mine])
