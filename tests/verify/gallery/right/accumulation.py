"""Group normalisation and dropout; at most five images at a time; clipped; in bf16."""

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
        self.conv = nn.Conv2d(1, 12, 3, padding=1)
        self.norm = nn.GroupNorm(3, 12)
        self.head = nn.Linear(12 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(images))), 2).flatten(1)
        return self.head(F.dropout(x, 0.3, training=self.training))


world = lockstep.init(seed=0, micro_batch_size=5, precision="bf16")
train = DataLoader(pictures(110), batch_size=24, shuffle=True)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=2 * len(train))
model, optimizer, schedule, train = world.prepare(model, optimizer, schedule, train)
for epoch in world.epochs(2):
    for images, labels in train:
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        world.backward(loss)
        world.clip_grad_norm_(model, 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    world.print(f"epoch {epoch}: loss {loss.item():.3f}")
