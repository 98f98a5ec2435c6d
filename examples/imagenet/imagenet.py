"""The data and the options that the scripts share: a folder of images in the layout of ImageNet.

    <data>/train/<class>/<image>
    <data>/val/<class>/<image>

Every sample is an image `(3, size, size)` of float32, normalised, and the number of its class.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
ENDINGS = {".jpg", ".jpeg", ".png", ".ppm"}
BASE_BATCH = 256
"""What `--lr` is for."""


def options() -> argparse.Namespace:
    """The command line. Without `--data` the defaults are those of a short trial."""
    parser = argparse.ArgumentParser(description="ResNet-50 on images in the layout of ImageNet")
    parser.add_argument("--data", help="holds train/ and val/; left out: images are made")
    parser.add_argument("--batch-size", type=int, default=4096, help="of one step, all devices")
    parser.add_argument("--lr", type=float, default=2.5, help=f"at a batch of {BASE_BATCH}")
    parser.add_argument("--epochs", type=int, default=36)
    parser.add_argument("--warmup-epochs", type=int, default=3)
    parser.add_argument("--size", type=int, default=224, help="of the images, in pixels")
    parser.add_argument("--workers", type=int, default=8, help="loader processes of each device")
    parser.add_argument("--made", type=int, default=96, metavar="N", help="images to make")
    parser.add_argument("--folder", default="runs/imagenet", help="for the weights")
    if parser.parse_known_args()[0].data is None:
        parser.set_defaults(batch_size=16, lr=10.0, epochs=4, warmup_epochs=1, size=64, workers=0)
    return parser.parse_args()


def load_imagenet(args: argparse.Namespace) -> tuple[ImageFolder, ImageFolder]:
    """The images to train on and to test with."""
    data = Path(args.data) if args.data else make_images(Path(args.folder), args.made, args.size)
    train = ImageFolder(data / "train", args.size, augment=True)
    return train, ImageFolder(data / "val", args.size, augment=False)


def describe(args: argparse.Namespace, train: ImageFolder) -> str:
    """What is trained on."""
    text = f"{len(train)} images of {len(train.classes)} classes"
    if args.data:
        return f"data: {text} in {args.data}"
    return f"data: {text}, MADE, so the accuracy means nothing (--data gives real ones)"


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """One folder a class, in the order of their names.

    Args:
        folder: holds the folders.
        size: of the images that come out, in pixels.
        augment: draw a part of the image and a reflection, from torch's random stream (Szegedy et
            al., "Going Deeper with Convolutions", CVPR 2015); else take the middle.
    """

    def __init__(self, folder: Path, size: int, augment: bool) -> None:
        if not folder.is_dir():
            raise SystemExit(f"no folder {folder}: --data holds train/<class>/ and val/<class>/")
        self.classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in ENDINGS
        ]
        self.size = size
        self.augment = augment

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        image = _read(path)
        if self.augment:
            image = _any_part(image)
            if torch.rand(()) < 0.5:
                image = image.flip(2)
        else:
            image = _middle(image, 0.875)
        image = image.unsqueeze(0).to(torch.float32).div(255)
        image = F.interpolate(image, (self.size, self.size), mode="bilinear", antialias=True)
        return (image.squeeze(0) - MEAN) / STD, label


def _read(path: Path) -> Tensor:
    """The pixels, `(3, height, width)` of uint8."""
    if path.suffix == ".ppm":  # what `make_images` writes
        _, size, _, pixels = path.read_bytes().split(b"\n", 3)
        width, height = map(int, size.split())
        array = np.frombuffer(bytearray(pixels), np.uint8).reshape(height, width, 3)
    else:
        from PIL import Image

        with Image.open(path) as image:
            array = np.array(image.convert("RGB"))
    return torch.from_numpy(array).permute(2, 0, 1)


def _any_part(image: Tensor) -> Tensor:
    """A part of 8 to 100 % of the area, at most a third wider than high or higher than wide."""
    _, height, width = image.shape
    for _ in range(10):
        area = height * width * _between(0.08, 1)
        ratio = math.exp(_between(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(_between(0, height - h + 1)), int(_between(0, width - w + 1))
            return image[:, top : top + h, left : left + w]
    return _middle(image, 1.0)


def _middle(image: Tensor, part: float) -> Tensor:
    """The square in the middle, its side a part of the shorter side."""
    _, height, width = image.shape
    side = max(1, round(min(height, width) * part))
    top, left = (height - side) // 2, (width - side) // 2
    return image[:, top : top + side, left : left + side]


def _between(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), dtype=torch.float64))


def make_images(folder: Path, number: int, size: int, classes: int = 4) -> Path:
    """Makes `number` images to train on and a quarter of that to test with, in the same layout.

    Stripes, whose direction is the class, and noise. A folder is there in full or not at all, and
    is not made twice.
    """
    made = folder / f"made_{number}_{size}"
    if made.is_dir():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder))
    draw = np.random.default_rng(0)
    x, y = np.meshgrid(np.arange(size), np.arange(size))
    for split, count in (("train", number), ("val", max(classes, number // 4))):
        for i in range(count):
            angle = i % classes / (classes - 1) * math.pi / 2  # a reflection stays in its class
            wave = np.sin((x * math.cos(angle) + y * math.sin(angle)) * 16 * math.pi / size)
            noisy = wave[..., None] + draw.normal(scale=0.5, size=(size, size, 3))
            pixels = np.clip(127 + 60 * noisy, 0, 255).astype(np.uint8)
            path = unfinished / split / f"direction_{i % classes}" / f"{i:05d}.ppm"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"P6\n%d %d\n255\n" % (size, size) + pixels.tobytes())
    try:
        os.rename(unfinished, made)
    except OSError:  # another process was first
        shutil.rmtree(unfinished)
    return made
