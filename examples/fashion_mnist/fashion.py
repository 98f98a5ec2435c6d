"""The data and the options that the scripts share: FashionMNIST, or made images in its place.

Every sample is `{"image": (3, 28, 28) of float32 in 0..1, "label": int}`.
"""

from __future__ import annotations

import argparse
import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

NAME = "zalando-datasets/fashion_mnist"
CLASSES = 10
MADE_INSTEAD = 2000


def options(**defaults: Any) -> argparse.Namespace:
    """The command line; `defaults` are options of one script alone."""
    parser = argparse.ArgumentParser(description="ResNet-18 on FashionMNIST")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="of one step over all devices")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--made", type=int, default=0, metavar="N", help="train on N made images")
    parser.add_argument("--limit", type=int, metavar="N", help="use the first N images alone")
    parser.add_argument("--workers", type=int, default=2, help="loader processes of each device")
    parser.add_argument("--folder", default="runs/fashion_mnist", help="for the weights")
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def images_to_make(asked: int) -> int:
    """`asked`, or how many to make because the real images cannot be had; 0: they are there."""
    return asked or (MADE_INSTEAD if _real()[0] is None else 0)


def describe(asked: int, made: int) -> str:
    """What is trained on, and why."""
    if not made:
        return f"data: {NAME}"
    why = (
        f"as --made {asked} asks"
        if asked
        else _real()[1] or "another rank cannot load the real ones"
    )
    return f"data: {made} MADE images, so the accuracy means nothing ({why})"


def load_fashion(made: int, limit: int | None) -> tuple[Dataset, Dataset]:
    """The images to train on and to test with: real ones, or where `made` > 0 so many made ones."""
    splits = _made_splits(made) if made else _real()[0]
    train, test = splits["train"], splits["test"]
    return Subset(train, range(len(train))[:limit]), Subset(test, range(len(test))[:limit])


@cache
def _real() -> tuple[Any, str]:
    """The two splits, from the Hub or from its cache; or None and why they cannot be had."""
    try:
        from datasets import load_dataset

        return load_dataset(NAME).with_transform(_to_tensors), ""
    except ImportError as error:
        return None, f"{error}; pip install 'torch-lockstep[data]'"
    except Exception as error:  # whatever it is, it is printed
        return None, f"{type(error).__name__}: {error}"


def _made_splits(number: int) -> dict[str, Any]:
    """`number` images to train on and a quarter of that to test with, made in the same format."""
    drawn = {"train": _draw(number, seed=0), "test": _draw(max(1, number // 4), seed=1)}
    try:
        from datasets import ClassLabel, Dataset as HubDataset, Features, Image
        from PIL.Image import fromarray
    except ImportError:  # plain lists of samples are data sets too
        return {
            name: [
                {"image": _three_channels(image), "label": label}
                for image, label in zip(images, labels.tolist(), strict=True)
            ]
            for name, (images, labels) in drawn.items()
        }
    features = Features({"image": Image(), "label": ClassLabel(CLASSES)})
    return {
        name: HubDataset.from_dict(
            {"image": [fromarray(image) for image in images], "label": labels}, features
        ).with_transform(_to_tensors)
        for name, (images, labels) in drawn.items()
    }


def _to_tensors(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """What `datasets` does to the images that are read."""
    return {**rows, "image": [_three_channels(np.array(image)) for image in rows["image"]]}


def _three_channels(grey: np.ndarray) -> Tensor:
    return torch.from_numpy(grey).to(torch.float32).div(255).expand(3, -1, -1)


def _draw(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Grey images (number, 28, 28) of uint8 and labels: the stripes' direction is the class."""
    draw = np.random.default_rng(seed)
    labels = np.arange(number) % CLASSES
    angles = labels[:, None, None] * math.pi / CLASSES
    x, y = np.meshgrid(np.arange(28), np.arange(28))
    waves = np.sin((x * np.cos(angles) + y * np.sin(angles)) * 2 * math.pi / 7)
    noise = draw.normal(scale=0.5, size=waves.shape)
    return np.clip(127 + 60 * (waves + noise), 0, 255).astype(np.uint8), labels
