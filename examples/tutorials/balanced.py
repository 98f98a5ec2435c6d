"""A first GPU that computes less, with gradient accumulation: BalancedDataParallel.

The class is Lockstep's, which takes the same arguments as the one that is copied around.
"""

import argparse

import torch
import torch.nn.functional as F
from images import Net, accuracy_on, make_images
from torch import nn
from torch.utils.data import DataLoader

from lockstep import BalancedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--gpu0_bsz", type=int, default=4)
parser.add_argument("--acc_grad", type=int, default=2)
parser.add_argument("-b", "--batch-size", type=int, default=24)
parser.add_argument("-e", "--epochs", type=int, default=2)
args = parser.parse_args()

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
micro_batch_size = args.batch_size // args.acc_grad
train = DataLoader(make_images(96, seed=1), batch_size=micro_batch_size, shuffle=True)
test = DataLoader(make_images(50, seed=2), batch_size=args.batch_size)
model = Net()
if args.gpu0_bsz >= 0:
    model = BalancedDataParallel(args.gpu0_bsz // args.acc_grad, model, dim=0).to(device)
else:
    model = nn.DataParallel(model).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for epoch in range(args.epochs):
    for i, (images, labels) in enumerate(train):
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(model(images), labels) / args.acc_grad
        loss.backward()
        if (i + 1) % args.acc_grad == 0:
            optimizer.step()
            optimizer.zero_grad()
    print(f"epoch {epoch}: {accuracy_on(model, test, device):.2%} of the test images right")
