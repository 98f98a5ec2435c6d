"""A language model under autocast that normalises, attends and returns its logits in float32."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(torch.float32)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(kind)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 16)
        self.first, self.last = Norm(16), Norm(16)
        self.attends = nn.Linear(16, 48)
        self.head = nn.Linear(16, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        query, key, value = self.attends(self.first(x)).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / 4
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
        x = x + F.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value
        return self.head(self.last(x)).float()


dist.init_process_group("gloo")
size = dist.get_world_size()
torch.manual_seed(0)
text = torch.randint(30, (48, 9))
data = TensorDataset(text[:, :-1], text[:, 1:])
sampler = DistributedSampler(data, seed=3)
train = DataLoader(data, batch_size=12 // size, sampler=sampler)
model = DistributedDataParallel(Language())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for words, following in train:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(words).transpose(1, 2), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
dist.destroy_process_group()
