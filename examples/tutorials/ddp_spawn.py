"""DDP, with processes started by mp.spawn on each of several machines."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from images import Net, make_images
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main(local_rank, args):
    rank = args.nr * args.gpus + local_rank
    os.environ["RANK"] = str(rank)
    has_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpus else "gloo", init_method="env://")
    device = torch.device("cuda", local_rank) if has_gpus else torch.device("cpu")

    torch.manual_seed(0)
    train_set = make_images(96, seed=1)
    sampler = DistributedSampler(train_set)
    train = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    model = Net().to(device)
    model = DistributedDataParallel(model, device_ids=[local_rank] if has_gpus else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in train:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "ddp_spawn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", "--nodes", type=int, default=1)
    parser.add_argument("-g", "--gpus", type=int, default=2, help="processes on each machine")
    parser.add_argument("-nr", type=int, default=0, help="the number of this machine")
    parser.add_argument("-b", "--batch-size", type=int, default=12, help="of each process")
    parser.add_argument("-e", "--epochs", type=int, default=2)
    args = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    os.environ["WORLD_SIZE"] = str(args.nodes * args.gpus)
    mp.spawn(main, args=(args,), nprocs=args.gpus)
