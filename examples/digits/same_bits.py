"""Prints a hash of the trained weights: the same on any number of processes.

lockstep run --nproc 1 --virtual-ranks 4 examples/digits/same_bits.py
lockstep run --nproc 2 --virtual-ranks 4 examples/digits/same_bits.py
"""

import hashlib

import torch
import torch.nn.functional as F
from digits import Net, load_digits
from torch.utils.data import DataLoader

import lockstep

world = lockstep.init(seed=0)
train_set, _ = load_digits()
train = DataLoader(train_set, batch_size=64, shuffle=True)
model = Net(dropout=0.2)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer, train = world.prepare(model, optimizer, train)

for _epoch in range(3):
    for images, labels in train:
        world.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()
        if world.is_last_micro_batch:
            loss = world.loss()

digest = hashlib.sha256()
for name, tensor in sorted(model.state_dict().items()):
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # of a shard
    digest.update(name.removeprefix("module.").encode())
    digest.update(whole.cpu().contiguous().numpy().tobytes())
world.print(f"loss {loss!r}  weights {digest.hexdigest()[:16]}")
