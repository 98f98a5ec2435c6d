"""Optimizers that exchange gradients themselves, inside of `step`: by `whole`, `slices` or `owner`.

With `sum` they forget to divide; with `clips` each rank clips its own before.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
way, divides = sys.argv[1], "sum" not in sys.argv


class Averaging(torch.optim.Optimizer):
    """SGD with momentum that averages first, as Muon and ZeRO do."""

    def __init__(self, parameters, rate: float) -> None:
        super().__init__(list(parameters), {"lr": rate})

    def update(self, parameter: Tensor, kept: Tensor, gradient: Tensor) -> None:
        moving = self.state[kept].setdefault("moving", torch.zeros_like(gradient))
        moving.mul_(0.8).add_(gradient)
        parameter.sub_(moving, alpha=self.param_groups[0]["lr"])

    @torch.no_grad()
    def step(self) -> None:
        divisor = size if divides else 1
        gradients = [p.grad for p in self.param_groups[0]["params"]]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        for gradient in gradients if "clips" in sys.argv else ():
            gradient *= 0.001 / norm
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            if size == 1:
                self.update(parameter, parameter, parameter.grad)
            elif way == "whole":
                dist.all_reduce(parameter.grad)
                self.update(parameter, parameter, parameter.grad / divisor)
            elif way == "owner":
                dist.reduce(parameter.grad, number % size)
                if number % size == rank:
                    self.update(parameter, parameter, parameter.grad / divisor)
                dist.broadcast(parameter, number % size)
            else:
                rows = -(-len(parameter) // size)
                rest = (0, 0) * (parameter.dim() - 1) + (0, rows * size - len(parameter))
                gradient = torch.empty_like(F.pad(parameter, rest)[:rows])
                dist.reduce_scatter_tensor(gradient, F.pad(parameter.grad, rest))
                mine = F.pad(parameter, rest)[rank * rows : (rank + 1) * rows].clone()
                self.update(mine, parameter, gradient / divisor)
                every = torch.empty_like(F.pad(parameter, rest))
                dist.all_gather_into_tensor(every, mine)
                parameter.copy_(every[: len(parameter)])


torch.manual_seed(6)
model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 2))
optimizer = Averaging(model.parameters(), 0.05)
x = torch.randn(72, 5)
for batch in x.split(12):
    mine = batch.chunk(size)[rank]
    F.mse_loss(model(mine), mine[:, :2].sin()).backward()
    optimizer.step()
    optimizer.zero_grad()
