"""A hidden layer in parts, one a rank. `alone`: the part begins with values of the rank's own.

`forgets`: the gradient of the layer's input is not summed over the ranks.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        if "forgets" not in sys.argv:
            dist.all_reduce(gradient)
        return gradient


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class Hidden(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        if "alone" in sys.argv:
            torch.manual_seed(rank)
            into, out = torch.randn(hidden // size, width), torch.randn(width, hidden // size)
        else:
            into = torch.randn(hidden, width).chunk(size)[rank]
            out = torch.randn(width, hidden).chunk(size, dim=1)[rank]
        self.into, self.out = nn.Parameter(into.clone()), nn.Parameter(out.clone())

    def forward(self, x: Tensor) -> Tensor:
        return Leave.apply(F.linear(F.gelu(F.linear(Enter.apply(x), self.into)), self.out))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 2)
        self.hidden = Hidden(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(self.first(x)))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(48, 5, generator=torch.Generator().manual_seed(1))
for batch in x.split(8):
    optimizer.zero_grad()
    F.mse_loss(model(batch), batch[:, :2]).backward()
    optimizer.step()
