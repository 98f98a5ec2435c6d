"""DDP, started by torchrun, with what tutorials put around it.

torchrun --standalone --nproc_per_node=2 ddp_torchrun.py --gpu 0,1 -b 12 -e 2
"""

import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from images import Net, make_images
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def reduce_to_rank_0(value, device):
    total = torch.tensor(float(value), device=device)
    dist.reduce(total, dst=0, op=dist.ReduceOp.SUM)
    return total.item()


def test_accuracy(model, loader, device):
    model.eval()
    size = correct = 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            size += len(labels)
            correct += (model(images).argmax(1) == labels).sum().item()
    model.train()
    size, correct = reduce_to_rank_0(size, device), reduce_to_rank_0(correct, device)
    return size, correct


def main(args):
    os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    has_gpus = torch.cuda.is_available()
    dist.init_process_group(backend="nccl" if has_gpus else "gloo")
    device = torch.device("cuda", local_rank) if has_gpus else torch.device("cpu")

    torch.manual_seed(0)
    train_set, test_set = make_images(96, seed=1), make_images(50, seed=2)
    train_sampler = DistributedSampler(train_set, shuffle=True)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    generator = torch.Generator()
    generator.manual_seed(rank)
    train = DataLoader(
        train_set,
        batch_size=args.batch_size,
        sampler=train_sampler,
        num_workers=1,
        pin_memory=has_gpus,
        worker_init_fn=seed_worker,
        generator=generator,
    )
    test = DataLoader(test_set, batch_size=args.batch_size, sampler=test_sampler)
    model = Net().to(device)
    if has_gpus:  # torch's has no implementation for the CPU
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DistributedDataParallel(model, device_ids=[local_rank] if has_gpus else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        for images, labels in train:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        size, correct = test_accuracy(model, test, device)
        if rank == 0:
            print(f"epoch {epoch}: {correct:.0f} of {size:.0f} test images right")
            torch.save(model.module.state_dict(), "ddp_torchrun.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # workers may import this file
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", default="0,1")
    parser.add_argument("-b", "--batch-size", type=int, default=12, help="of each process")
    parser.add_argument("-e", "--epochs", type=int, default=2)
    args = parser.parse_args()
    main(args)
