"""`noise.py OPTIMIZER PRECISION`: some parameters have a gradient that is 0, or nearly 0."""

import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


class Net(nn.Module):
    """Has gradients of all kinds; names say which."""

    def __init__(self) -> None:
        super().__init__()
        self.noise_before_batchnorm = nn.Conv2d(2, 8, 3)
        self.batchnorm = nn.BatchNorm2d(8)
        self.noise_before_instancenorm = nn.Conv2d(8, 8, 1)
        self.instancenorm = nn.InstanceNorm2d(8, affine=True)
        self.before_groupnorm = nn.Conv2d(8, 8, 1)
        self.groupnorm = nn.GroupNorm(2, 8)
        self.before_layernorm = nn.Linear(8, 8)
        self.layernorm = nn.LayerNorm(8)
        self.noise_of_keys_in = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.queries = nn.Linear(8, 8)
        self.noise_of_keys = nn.Linear(8, 8)
        self.values = nn.Linear(8, 8)
        self.small = nn.Parameter(torch.ones(8))
        self.tiny = nn.Parameter(torch.ones(8))
        self.unused_in_part = nn.Embedding(50, 8)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.batchnorm(self.noise_before_batchnorm(x)))
        x = F.relu(self.instancenorm(self.noise_before_instancenorm(x)))
        x = self.groupnorm(self.before_groupnorm(x)).flatten(2).transpose(1, 2)
        x = self.layernorm(self.before_layernorm(x))
        x = x + self.noise_of_keys_in(x, x, x)[0]
        attention = F.softmax(self.queries(x) @ self.noise_of_keys(x).transpose(1, 2), dim=-1)
        x = x + attention @ self.values(x)
        x = x + 1e-6 * self.small + 1e-13 * self.tiny.tanh()
        x = x + self.unused_in_part(torch.arange(x.shape[1], device=x.device))
        return self.head(self.dropout(x).mean(1))


# With such an eps AdamW makes a full step of any gradient, however small.
optimizers = {"AdamW": partial(torch.optim.AdamW, eps=1e-20), "SGD": torch.optim.SGD}
world = lockstep.init(seed=3, precision=sys.argv[2])
generator = torch.Generator().manual_seed(7)
data = TensorDataset(
    torch.randn(40, 2, 6, 6, generator=generator), torch.randint(0, 3, (40,), generator=generator)
)
model = Net()
optimizer = optimizers[sys.argv[1]](model.parameters(), lr=0.01)
# The first step of a warm-up changes nothing.
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 2))
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, scheduler, loader = world.prepare(model, optimizer, scheduler, loader)
for images, labels in loader:
    optimizer.zero_grad()
    world.backward(F.cross_entropy(model(images), labels))
    optimizer.step()
    scheduler.step()
