"""Fine-tuning: a frozen network, a new head, two rates, and weights that are averaged."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def pictures(count: int) -> TensorDataset:
    """Ten kinds of pictures of eight by eight points, with noise."""
    drawn = torch.Generator().manual_seed(10)
    kinds = torch.rand(10, 1, 8, 8, generator=drawn)
    kind = torch.randint(10, (count,), generator=drawn)
    noise = 0.3 * torch.randn(count, 1, 8, 8, generator=drawn)
    return TensorDataset(kinds[kind] + noise, kind)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
        )
        self.between = nn.Linear(128, 24)
        self.head = nn.Linear(24, 10)

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.body(images)
        return self.head(torch.tanh(self.between(x)))

    def train(self, mode: bool = True) -> "Net":
        super().train(mode)
        self.body.eval()
        return self


world = lockstep.init(seed=0)
train = DataLoader(pictures(96), batch_size=24, shuffle=True, num_workers=1)
net = Net()
net.body.requires_grad_(False)
optimizer = torch.optim.AdamW(
    [
        {"params": net.between.parameters(), "lr": 1e-3},
        {"params": net.head.parameters(), "lr": 1e-2, "weight_decay": 0.0},
    ]
)
averaged = torch.optim.swa_utils.AveragedModel(net.head)
model, optimizer, train = world.prepare(net, optimizer, train)
for epoch in world.epochs(2):
    model.train()
    for images, labels in train:
        loss = F.cross_entropy(model(images), labels)
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(net.head)
    world.print(f"epoch {epoch}: loss {loss.item():.3f}")
