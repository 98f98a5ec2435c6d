"""The same without a launcher, with the same arguments.

python distributed_with_lockstep.py -bk gloo -im tcp://10.10.10.1:12345 -rn 0 -ws 2
python distributed_with_lockstep.py -bk gloo -im tcp://10.10.10.1:12345 -rn 1 -ws 2
"""

import argparse

import torch
import torch.nn.functional as F
from images import Net, make_images
from torch.utils.data import DataLoader

import lockstep

parser = argparse.ArgumentParser()
parser.add_argument("-bk", "--backend", default=None)
parser.add_argument("-im", "--init-method", default=None)
parser.add_argument("-rn", "--rank-number", type=int, default=None)
parser.add_argument("-ws", "--world-size", type=int, default=None)
parser.add_argument("--lr", type=float, default=1e-2)
args = parser.parse_args()

world = lockstep.init(
    seed=0,
    backend=args.backend,
    init_method=args.init_method,
    rank=args.rank_number,
    world_size=args.world_size,
)
train = DataLoader(make_images(96, seed=1), batch_size=24, shuffle=True)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
model, optimizer, train = world.prepare(model, optimizer, train)
for epoch in range(2):
    for images, labels in train:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        world.backward(loss)
        optimizer.step()
        loss_of_all = world.loss()
    world.print(f"epoch {epoch}: loss {loss_of_all:.4f}")
lockstep.save_weights(model, "distributed.safetensors")
world.close()
