"""The same on any number of devices.

python with_lockstep.py
lockstep run --nproc 2 with_lockstep.py
"""

import argparse

import torch
import torch.nn.functional as F
from fashion import describe, images_to_make, load_fashion, options
from resnet import ResNet18
from torch.utils.data import DataLoader

import lockstep


def main(args: argparse.Namespace) -> None:
    world = lockstep.init(seed=0)
    torch.manual_seed(0)
    device = world.device
    made = world.max(images_to_make(args.made))  # made ones for all where one rank has no others
    world.print(describe(args.made, made))
    train_set, test_set = load_fashion(made, args.limit)
    train = DataLoader(train_set, args.batch_size, shuffle=True, num_workers=args.workers)
    test = DataLoader(test_set, args.batch_size, num_workers=args.workers)
    model = ResNet18(classes=10).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train, test = world.prepare(model, optimizer, train, test)

    for epoch in range(args.epochs):
        model.train()
        for batch in train:
            images, labels = batch["image"].to(device), batch["label"].to(device)
            loss = F.cross_entropy(model(images), labels)
            world.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        correct = 0
        with torch.no_grad():
            for batch in test:
                images, labels = batch["image"].to(device), batch["label"].to(device)
                correct += (model(images).argmax(1) == labels).sum()
        correct = world.sum(correct)
        world.print(f"epoch {epoch}: {correct / len(test_set):.2%} of {len(test_set)} images right")

    if world.is_main:
        lockstep.save_weights(model, f"{args.folder}/weights.safetensors")
    world.close()


if __name__ == "__main__":
    main(options())
