"""The same network on the same data, on any number of devices: `lockstep run --nproc 2` it."""

import torch
import torch.nn.functional as F
from digits import Net, load_digits
from torch.utils.data import DataLoader

import lockstep

world = lockstep.init(seed=0)
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
train_set, test_set = load_digits()
train = DataLoader(train_set, batch_size=64, shuffle=True)
test = DataLoader(test_set, batch_size=256)
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer, train, test = world.prepare(model, optimizer, train, test)

for epoch in range(5):
    model.train()
    for images, labels in train:
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        correct = sum((model(x.to(device)).argmax(1) == y.to(device)).sum() for x, y in test)
    world.print(f"epoch {epoch}: {world.sum(correct) / len(test_set):.2%} of the test images right")
