"""Several GPUs in one process: nn.DataParallel."""

import argparse
import os

import torch
import torch.nn.functional as F
from images import Net, accuracy_on, make_images
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--gpu", default="0,1")
parser.add_argument("-b", "--batch-size", type=int, default=24)
parser.add_argument("-e", "--epochs", type=int, default=2)
args = parser.parse_args()
os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu
device_ids = list(range(len(args.gpu.split(","))))

torch.manual_seed(0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
train = DataLoader(make_images(100, seed=1), batch_size=args.batch_size, shuffle=True)
test = DataLoader(make_images(50, seed=2), batch_size=args.batch_size)
model = Net().to(device)
model = nn.DataParallel(model, device_ids=device_ids, output_device=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for epoch in range(args.epochs):
    for images, labels in train:
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {accuracy_on(model, test, device):.2%} of the test images right")

torch.save(model.module.state_dict(), "data_parallel.pt")
