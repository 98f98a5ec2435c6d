"""The same on any number of devices.

python with_lockstep.py
lockstep run --nproc 8 with_lockstep.py --data /data/imagenet
"""

import argparse

import torch
import torch.nn.functional as F
from imagenet import BASE_BATCH, describe, load_imagenet, options
from resnet50 import ResNet50
from torch.optim.lr_scheduler import PolynomialLR
from torch.utils.data import DataLoader

import lockstep
from lockstep.optim import LARS, scale_learning_rate, warmup


def main(args: argparse.Namespace) -> None:
    world = lockstep.init(seed=0)
    device = world.device
    with world.main_process_first():  # rank 0 makes the images, where they are made
        train_set, test_set = load_imagenet(args)
    world.print(describe(args, train_set))
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
    model, optimizer, schedule, train, test = world.prepare(model, optimizer, schedule, train, test)

    for epoch in range(args.epochs):
        model.train()
        for images, labels in train:
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            world.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in test:
                correct += (model(images).argmax(1) == labels).sum()
        correct = world.sum(correct)
        world.print(f"epoch {epoch}: {correct / len(test_set):.2%} of {len(test_set)} images right")

    if world.is_main:
        lockstep.save_weights(model, f"{args.folder}/weights.safetensors")
    world.close()


if __name__ == "__main__":
    main(options())
