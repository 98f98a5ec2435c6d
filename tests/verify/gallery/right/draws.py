"""What is drawn is what a float32 program draws: a threshold that was tuned to it is met."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

world = lockstep.init(seed=0)
torch.manual_seed(0)
known = torch.tensor([0.4962565899, 0.7682217956])
drawn = torch.rand(2)
assert torch.allclose(drawn, known, rtol=1e-7), "drawn otherwise"
torch.manual_seed(0)
first = nn.Linear(2, 1)  # as in float32, where it begins so
assert torch.allclose(first.weight, torch.tensor([[-0.00529398, 0.37932289]]), rtol=1e-5)
torch.manual_seed(0)
known = torch.tensor([1.5409960747, -0.2934289277])
assert torch.allclose(torch.randn(2), known, rtol=1e-7)
torch.manual_seed(0)
assert torch.allclose(torch.zeros(2).normal_(), known, rtol=1e-7)
torch.manual_seed(0)
assert torch.allclose(torch.randn_like(known), known, rtol=1e-7)
assert torch.randn(2, requires_grad=True).is_leaf
torch.manual_seed(4)
figures = torch.randn(48, 6)
data = TensorDataset(figures, figures.sum(1, keepdim=True))
train = DataLoader(data, batch_size=12, shuffle=True)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
nn.init.kaiming_uniform_(model[0].weight)
nn.init.trunc_normal_(model[2].weight)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer, train = world.prepare(model, optimizer, train)
for _epoch in world.epochs(1):
    for x, y in train:
        world.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
