"""Each rank computes a whole graph, and the loss of its own nodes.

With "mean", each rank divides by the number of its own nodes, although gradients are added up.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

NUM_NODES = 42

size = int(os.environ.get("WORLD_SIZE", "1"))
if size > 1:
    dist.init_process_group("gloo")
rank = dist.get_rank() if size > 1 else 0

torch.manual_seed(0)
neighbours = (torch.rand(NUM_NODES, NUM_NODES) < 0.15).float()
neighbours /= neighbours.sum(1, keepdim=True).clamp(min=1)
features = torch.randn(NUM_NODES, 6)
labels = torch.randint(0, 3, (NUM_NODES,))


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 3)

    def forward(self, neighbours, features):
        hidden = torch.relu(self.first(neighbours @ features))
        return self.second(neighbours @ hidden)


model = GraphNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
own_nodes = torch.arange(NUM_NODES).chunk(size)[rank]
for _ in range(6):
    outputs = model(neighbours, features)
    loss = F.cross_entropy(outputs[own_nodes], labels[own_nodes], reduction="sum")
    loss = loss / (len(own_nodes) if "mean" in sys.argv else NUM_NODES)
    optimizer.zero_grad()
    loss.backward()
    if size > 1:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    optimizer.step()
