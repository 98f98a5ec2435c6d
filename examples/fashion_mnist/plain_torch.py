"""ResNet-18 on FashionMNIST, in plain PyTorch on one device."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from fashion import describe, images_to_make, load_fashion, options
from resnet import ResNet18
from torch.utils.data import DataLoader


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = images_to_make(args.made)
    print(describe(args.made, made))
    train_set, test_set = load_fashion(made, args.limit)
    train = DataLoader(train_set, args.batch_size, shuffle=True, num_workers=args.workers)
    test = DataLoader(test_set, args.batch_size, num_workers=args.workers)
    model = ResNet18(classes=10).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        model.train()
        for batch in train:
            images, labels = batch["image"].to(device), batch["label"].to(device)
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        correct = 0
        with torch.no_grad():
            for batch in test:
                images, labels = batch["image"].to(device), batch["label"].to(device)
                correct += (model(images).argmax(1) == labels).sum()
        print(f"epoch {epoch}: {correct / len(test_set):.2%} of {len(test_set)} images right")

    Path(args.folder).mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), f"{args.folder}/weights.pt")


if __name__ == "__main__":
    main(options())
