"""The same on any number of devices, under any strategy.

python with_lockstep.py
lockstep run --nproc 2 with_lockstep.py
lockstep run --nproc 2 --strategy fsdp with_lockstep.py
lockstep run --nproc 2 --strategy pipeline with_lockstep.py
"""

import argparse

import torch
from model import Language, loss_sum
from text import CHARACTERS, LONGEST, count, join, load_text, options
from torch.utils.data import DataLoader

import lockstep


def main(args: argparse.Namespace) -> None:
    world = lockstep.init(seed=0)
    torch.manual_seed(0)
    device = world.device
    train_set, test_set = (texts[: args.limit] for texts in load_text())
    train = DataLoader(train_set, args.batch_size, shuffle=True, collate_fn=join)
    train = world.loader(train, weight=count)  # the loss is the mean over characters
    test = DataLoader(test_set, args.batch_size, collate_fn=join)
    model = Language(CHARACTERS, LONGEST, args.width, args.blocks).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, test = world.prepare(model, optimizer, test)

    for epoch in range(args.epochs):
        trained = tested = torch.zeros(2, dtype=torch.float64)
        for text in train:
            characters = count(text).clamp(min=1)
            loss = loss_sum(model, text) / characters
            world.backward(loss)
            world.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            trained = trained + torch.stack([loss.detach() * characters, count(text)]).cpu()
        with torch.no_grad():
            for text in test:
                tested = tested + torch.stack([loss_sum(model, text), count(text)]).cpu()
        trained, tested = world.sum((trained, tested))
        world.print(
            f"epoch {epoch}: loss {trained[0] / trained[1]:.5f} a character in training, "
            f"{tested[0] / tested[1]:.5f} in the test"
        )
    world.close()


if __name__ == "__main__":
    main(options())
