"""The model returns its loss and what it was made of, which nothing else uses."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.body(x)
        return F.cross_entropy(scores, y), scores


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = DistributedDataParallel(Classifier(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(48, 5), torch.randint(3, (48,))
for rows in torch.arange(48).split(12):
    mine = rows.chunk(size)[rank]
    optimizer.zero_grad()
    loss, scores = model(x[mine], y[mine])
    loss.backward()
    optimizer.step()
