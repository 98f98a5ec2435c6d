"""A language model on one device, in plain PyTorch."""

import argparse

import torch
from model import Language, loss_sum
from text import CHARACTERS, LONGEST, count, join, load_text, options
from torch.utils.data import DataLoader


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_set, test_set = (texts[: args.limit] for texts in load_text())
    train = DataLoader(train_set, args.batch_size, shuffle=True, collate_fn=join)
    test = DataLoader(test_set, args.batch_size, collate_fn=join)
    model = Language(CHARACTERS, LONGEST, args.width, args.blocks).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        trained = tested = torch.zeros(2, dtype=torch.float64)
        for text in train:
            text = text.to(device)
            characters = count(text)
            loss = loss_sum(model, text) / characters
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            trained = trained + torch.stack([loss.detach() * characters, characters]).cpu()
        with torch.no_grad():
            for text in test:
                text = text.to(device)
                tested = tested + torch.stack([loss_sum(model, text), count(text)]).cpu()
        print(
            f"epoch {epoch}: loss {trained[0] / trained[1]:.5f} a character in training, "
            f"{tested[0] / tested[1]:.5f} in the test"
        )


if __name__ == "__main__":
    main(options())
