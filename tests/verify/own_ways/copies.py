"""A teacher that follows a student of the same class, called in another order on some processes.

With `lone`, only several processes wrap the student with DDP, so that it is known before the
teacher, which is called first. With `looks`, rank 1 calls the teacher for a look at its output
before the training; the gradients are averaged by hand.
"""

from __future__ import annotations

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def main(way: str) -> None:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    torch.manual_seed(0)
    student = Net()
    teacher = copy.deepcopy(student)
    model: nn.Module = student
    if way == "lone" and size > 1:
        model = DistributedDataParallel(student)
    if way == "looks" and os.environ["RANK"] == "1":
        print(teacher(torch.zeros(1, 6)).shape)

    x = torch.randn(48, 6)
    data = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(data)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for x, y in DataLoader(data, batch_size=12 // size, sampler=sampler):
        if way == "lone":
            aims = teacher(x).detach().softmax(1)
            outputs = model(x)
        else:
            outputs = model(x)
            aims = teacher(x).detach().softmax(1)
        loss = F.cross_entropy(outputs, y) + F.mse_loss(outputs.softmax(1), aims)
        optimizer.zero_grad()
        loss.backward()
        if way == "looks":
            for parameter in student.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(teacher.parameters(), student.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)


main(sys.argv[1])
