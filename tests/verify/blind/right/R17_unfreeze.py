"""Gradual unfreezing: head only, then the last block, then everything. The wrapper is rebuilt at each stage."""
import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from sklearn.datasets import make_classification


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block1 = nn.Sequential(nn.Linear(20, 32), nn.ReLU())
        self.block2 = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.block2(self.block1(x)))


STAGES = [["head"], ["head", "block2"], ["head", "block2", "block1"]]


def set_trainable(net, names):
    for name, child in net.named_children():
        for p in child.parameters():
            p.requires_grad = name in names


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    X, Y = make_classification(640, 20, n_informative=10, n_classes=4, random_state=7)
    ds = TensorDataset(torch.tensor(X, dtype=torch.get_default_dtype()), torch.tensor(Y))
    sampler = DistributedSampler(ds, shuffle=True, seed=1)
    loader = DataLoader(ds, batch_size=64 // world, sampler=sampler)

    torch.manual_seed(0)
    net = Net()
    epoch = 0
    for stage, names in enumerate(STAGES):
        set_trainable(net, names)
        model = DDP(net)
        trainable = [p for p in net.parameters() if p.requires_grad]
        opt = torch.optim.SGD(trainable, lr=0.1 / (stage + 1), momentum=0.9)
        for _ in range(2):
            sampler.set_epoch(epoch)
            epoch += 1
            for x, y in loader:
                opt.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                opt.step()
        if rank == 0:
            print(f"stage {stage} ({'+'.join(names)}): {sum(p.numel() for p in trainable)} weights, loss {loss.item():.4f}")
        del model
    save(net, rank)
    dist.destroy_process_group()


def save(net, rank):
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in net.parameters()], os.environ["DUMP"] + ".rank" + str(rank) + ".pt")


if __name__ == "__main__":
    main()
