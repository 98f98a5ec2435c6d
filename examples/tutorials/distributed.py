"""DDP without a launcher: each machine starts the script, with its own rank.

python distributed.py -bk gloo -im tcp://10.10.10.1:12345 -rn 0 -ws 2    # on 10.10.10.1
python distributed.py -bk gloo -im tcp://10.10.10.1:12345 -rn 1 -ws 2    # on the other machine
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from images import Net, make_images
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("-bk", "--backend", default="nccl")
parser.add_argument("-im", "--init-method", default="tcp://127.0.0.1:12345")
parser.add_argument("-rn", "--rank-number", type=int, default=0)
parser.add_argument("-ws", "--world-size", type=int, default=1)
parser.add_argument("--lr", type=float, default=1e-2)
args = parser.parse_args()

dist.init_process_group(
    backend=args.backend,
    init_method=args.init_method,
    rank=args.rank_number,
    world_size=args.world_size,
)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
train_set = make_images(96, seed=1)
sampler = DistributedSampler(train_set)
train = DataLoader(train_set, batch_size=12, sampler=sampler)
model = DistributedDataParallel(Net().to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, labels in train:
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if args.rank_number == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
dist.destroy_process_group()
