"""The parts of the FashionMNIST example: the names of the network, the data, its stand-in."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parents[2] / "examples" / "fashion_mnist"


def load(name: str) -> ModuleType:
    """A module of the example, fresh, and not left in `sys.modules`."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fashion() -> ModuleType:
    return load("fashion")


def hub(monkeypatch: pytest.MonkeyPatch, load_dataset: Any) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


def test_resnet_has_the_names_that_known_weights_have() -> None:
    state = load("resnet").ResNet18().state_dict()
    assert len(state) == 122
    learned = [value for name, value in state.items() if "running" not in name and value.dim()]
    assert sum(value.numel() for value in learned) == 11_689_512
    shapes = {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_mean": (64,),
        "layer1.0.conv1.weight": (64, 64, 3, 3),
        "layer2.0.downsample.0.weight": (128, 64, 1, 1),
        "layer2.0.downsample.1.num_batches_tracked": (),
        "layer4.1.bn2.bias": (512,),
        "fc.weight": (1000, 512),
    }
    assert {name: tuple(state[name].shape) for name in shapes} == shapes


def test_resnet_takes_small_images_and_none() -> None:
    model = load("resnet").ResNet18(classes=10).eval()
    assert model(torch.zeros(2, 3, 28, 28)).shape == (2, 10)
    assert model(torch.zeros(0, 3, 28, 28)).shape == (0, 10)


def test_made_images_are_samples_that_can_be_learned(
    fashion: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it fails
    train, test = fashion.load_fashion(200, None)
    assert (len(train), len(test)) == (200, 50)
    [batch] = DataLoader(train, batch_size=200)
    images, labels = batch["image"], batch["label"]
    assert (images.shape, images.dtype, labels.dtype) == (
        (200, 3, 28, 28),
        torch.float32,
        torch.int64,
    )
    assert 0 <= images.min() < images.max() <= 1
    assert labels.bincount().tolist() == [20] * 10
    [seen] = DataLoader(test, batch_size=50)
    assert not torch.equal(seen["image"], images[:50]), "the test has images of its own"
    means = torch.stack([images[labels == c].mean(0) for c in range(10)]).flatten(1)
    nearest = torch.cdist(seen["image"].flatten(1), means).argmin(1)
    assert (nearest == seen["label"]).float().mean() > 0.9


def test_limit_takes_the_first_images(fashion: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    train, test = fashion.load_fashion(100, 30)
    assert (len(train), len(test)) == (30, 25)
    whole, _ = fashion.load_fashion(100, None)
    assert torch.equal(train[29]["image"], whole[29]["image"])


def test_real_images_are_taken_from_the_hub(
    fashion: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Splits(dict[str, Any]):
        """What stands for a `datasets.DatasetDict` of grey images."""

        def with_transform(self, transform: Any) -> Splits:
            rows = transform({"image": [np.full((28, 28), 51, np.uint8)], "label": [7]})
            sample = {name: column[0] for name, column in rows.items()}
            return Splits({name: [sample] * length for name, length in self.items()})

    asked = []
    hub(monkeypatch, lambda name: asked.append(name) or Splits(train=60, test=10))
    assert fashion.images_to_make(0) == 0
    train, test = fashion.load_fashion(0, 40)
    assert asked == ["zalando-datasets/fashion_mnist"], "loaded once"
    assert (len(train), len(test)) == (40, 10)
    assert train[0]["image"].shape == (3, 28, 28)
    torch.testing.assert_close(train[0]["image"].unique(), torch.tensor([0.2]))
    assert train[0]["label"] == 7
    assert fashion.describe(0, 0) == "data: zalando-datasets/fashion_mnist"


def test_made_images_take_the_place_of_the_real_ones_aloud(
    fashion: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(name: str) -> None:
        raise ConnectionError(f"Couldn't reach {name}")

    hub(monkeypatch, unreachable)
    made = fashion.images_to_make(0)
    assert made > 0
    assert fashion.describe(0, made) == (
        f"data: {made} MADE images, so the accuracy means nothing "
        "(ConnectionError: Couldn't reach zalando-datasets/fashion_mnist)"
    )


def test_without_datasets_it_says_how_to_install_it(
    fashion: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    text = fashion.describe(0, fashion.images_to_make(0))
    assert "MADE images" in text
    assert "pip install 'torch-lockstep[data]'" in text


def test_all_ranks_make_images_where_one_must(
    fashion: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Splits(dict[str, Any]):
        def with_transform(self, _: Any) -> Splits:
            return self

    hub(monkeypatch, lambda _: Splits())
    assert fashion.images_to_make(0) == 0
    assert "another rank cannot load" in fashion.describe(0, 2000)


def test_with_datasets_made_images_are_in_the_format_of_the_hub(fashion: ModuleType) -> None:
    datasets = pytest.importorskip("datasets")
    train, _ = fashion.load_fashion(20, None)
    assert isinstance(train.dataset, datasets.Dataset)
    assert isinstance(train.dataset.features["image"], datasets.Image)
    assert isinstance(train.dataset.features["label"], datasets.ClassLabel)
    sample = train[3]
    assert (sample["image"].shape, sample["label"]) == ((3, 28, 28), 3)
