"""A convolutional network on the digits, in plain PyTorch on one device."""

import torch
import torch.nn.functional as F
from digits import Net, load_digits
from torch.utils.data import DataLoader

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
train_set, test_set = load_digits()
train = DataLoader(train_set, batch_size=64, shuffle=True)
test = DataLoader(test_set, batch_size=256)
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

for epoch in range(5):
    model.train()
    for images, labels in train:
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        correct = sum((model(x.to(device)).argmax(1) == y.to(device)).sum() for x, y in test)
    print(f"epoch {epoch}: {correct / len(test_set):.2%} of the test images right")
