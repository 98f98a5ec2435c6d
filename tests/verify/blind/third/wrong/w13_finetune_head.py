"""Fine-tune a (pretend) pretrained backbone on the digits, with a fresh classifier head."""
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Backbone(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.width = width
        self.stages = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Identity()

    def reset_classifier(self, num_classes):
        self.head = nn.Linear(self.width, num_classes)

    def forward(self, x):
        return self.head(self.stages(x))


def load_pretrained():
    torch.manual_seed(1000)
    net = Backbone()
    return net


def build_model(num_classes):
    model = DDP(load_pretrained())
    model.module.reset_classifier(num_classes)
    return model


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    ds = TensorDataset(torch.tensor(d.data[:480] / 16).float(), torch.tensor(d.target[:480]))
    sampler = DistributedSampler(ds, shuffle=True, seed=1)
    loader = DataLoader(ds, batch_size=96 // world, sampler=sampler)
    model = build_model(num_classes=10)
    opt = torch.optim.AdamW([
        {"params": model.module.stages.parameters(), "lr": 1e-3},
        {"params": model.module.head.parameters(), "lr": 1e-2},
    ])
    for step, (x, y) in enumerate(loader):
        opt.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        if rank == 0:
            print("step", step, "loss", f"{loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
