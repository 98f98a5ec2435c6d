"""ResNet-50 with a large batch, on one device in plain PyTorch.

LARS, the scaling rule and the warm-up are taken from Lockstep: torch has no LARS. They stand on
their own and need nothing else of it.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from imagenet import BASE_BATCH, describe, load_imagenet, options
from resnet50 import ResNet50
from torch.optim.lr_scheduler import PolynomialLR
from torch.utils.data import DataLoader

from lockstep.optim import LARS, scale_learning_rate, warmup


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_set, test_set = load_imagenet(args)
    print(describe(args, train_set))
    train = DataLoader(
        train_set, args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers
    )
    test = DataLoader(test_set, args.batch_size, num_workers=args.workers)
    model = ResNet50(len(train_set.classes)).to(device)

    optimizer = LARS(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-5)
    scale_learning_rate(
        optimizer, batch_size=args.batch_size, base_batch_size=BASE_BATCH, rule="sqrt"
    )
    first, all_steps = args.warmup_epochs * len(train), args.epochs * len(train)
    schedule = warmup(PolynomialLR(optimizer, all_steps - first, power=2.0), first)

    for epoch in range(args.epochs):
        model.train()
        for images, labels in train:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in test:
                images, labels = images.to(device), labels.to(device)
                correct += (model(images).argmax(1) == labels).sum()
        print(f"epoch {epoch}: {correct / len(test_set):.2%} of {len(test_set)} images right")

    Path(args.folder).mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), f"{args.folder}/weights.pt")


if __name__ == "__main__":
    main(options())
