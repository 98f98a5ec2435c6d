"""GRU sequence classifier with an attention-pooling auxiliary output."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class GRUClassifier(nn.Module):
    def __init__(self, feat=6, hidden=32, classes=4):
        super().__init__()
        self.rnn = nn.GRU(feat, hidden, batch_first=True)
        self.attn = nn.Linear(hidden, 1, bias=False)
        self.out = nn.Linear(hidden, classes)

    def forward(self, x):
        h, _ = self.rnn(x)
        w = self.attn(h).softmax(dim=1)
        return self.out((w * h).sum(1))

    def loss(self, x, y):
        return F.cross_entropy(self(x), y, label_smoothing=0.1)


class Trainer:
    def __init__(self, model, loader, sampler, rank):
        self.model, self.loader, self.sampler, self.rank = model, loader, sampler, rank
        self.opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    def train_step(self, x, y):
        self.opt.zero_grad()
        loss = self.model.module.loss(x, y)
        loss.backward()
        self.opt.step()
        return loss.item()

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            losses = [self.train_step(x, y) for x, y in self.loader]
            if self.rank == 0:
                print(f"[{epoch}] {sum(losses) / len(losses):.4f}")


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(2)
    y = torch.randint(0, 4, (256,), generator=g)
    t = torch.linspace(0, 6, 20)[None, :, None]
    x = torch.sin(t * (1 + y[:, None, None])) + 0.3 * torch.randn(256, 20, 6, generator=g)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32 // world, sampler=sampler)
    model = DDP(GRUClassifier())
    Trainer(model, loader, sampler, rank).fit(3)
    if rank == 0:
        print("checksum %.10f" % sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
