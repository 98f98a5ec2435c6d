"""The whole of it: progress, checkpoints, a schedule, augmentation; what `make train` runs.

lockstep run --nproc 2 examples/digits/train.py
python examples/digits/train.py --epochs 5
"""

import argparse

import torch
import torch.nn.functional as F
from digits import Net, load_digits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lockstep


class Shifted(Dataset):
    """Moves each image by up to one pixel; the draw belongs to the sample, wherever it is read."""

    def __init__(self, images: Dataset) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.images[index]
        down, right = torch.randint(-1, 2, (2,)).tolist()
        return image.roll((down, right), (1, 2)), label


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--batch-size", type=int, default=64, help="of one step over all devices")
parser.add_argument("--lr", type=float, default=4e-3)
parser.add_argument("--folder", default="runs/digits", help="for checkpoints")
args = parser.parse_args()

world = lockstep.init(seed=0)
train_set, test_set = load_digits()
train = DataLoader(Shifted(train_set), batch_size=args.batch_size, shuffle=True)
test = DataLoader(test_set, batch_size=256)
model = Net(dropout=0.2)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
# Half the rate every 3 epochs, after a warm-up of one: a run may be resumed with more --epochs.
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3 * len(train), gamma=0.5)
scheduler = lockstep.optim.warmup(scheduler, steps=len(train))
model, optimizer, scheduler, train, test = world.prepare(model, optimizer, scheduler, train, test)
checkpoint = world.checkpoint(
    args.folder, model=model, optimizer=optimizer, scheduler=scheduler, loader=train
)
if checkpoint.resume():
    world.print(f"resumed from {args.folder} at epoch {world.epoch} of {args.epochs}")


def accuracy() -> float:
    """The part of the test images that is recognised, over all ranks."""
    model.eval()
    with torch.no_grad():
        correct = world.sum(sum((model(x).argmax(1) == y).sum() for x, y in test))
    return float(correct) / len(test_set)


for _epoch in world.epochs(args.epochs):
    model.train()
    for images, labels in world.progress(train):
        loss = F.cross_entropy(model(images), labels)
        world.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        world.log(loss=loss)
    checkpoint.save()

world.print(f"{accuracy():.2%} of the {len(test_set)} test images right")
world.close()
