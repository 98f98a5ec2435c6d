"""DDP, started by torch.distributed.launch, which gives each process its --local_rank.

python -m torch.distributed.launch --nproc_per_node=2 --nnodes=1 --node_rank=0 \
    --master_addr=127.0.0.1 --master_port=29500 ddp_launch.py
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
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()

has_gpus = torch.cuda.is_available()
dist.init_process_group(backend="nccl" if has_gpus else "gloo", init_method="env://")
device = torch.device("cuda", args.local_rank) if has_gpus else torch.device("cpu")
if has_gpus:
    torch.cuda.set_device(args.local_rank)

torch.manual_seed(0)
train_set = make_images(96, seed=1)
sampler = DistributedSampler(train_set)
train = DataLoader(train_set, batch_size=12, sampler=sampler)
model = DistributedDataParallel(
    Net().to(device),
    device_ids=[args.local_rank] if has_gpus else None,
    output_device=args.local_rank if has_gpus else None,
    find_unused_parameters=True,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, labels in train:
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: local rank {args.local_rank}, loss {loss.item():.4f}")
dist.destroy_process_group()
