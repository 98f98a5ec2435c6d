"""The ImageNet example: the network, the folder, and the scripts as a user would run them."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_examples import EXAMPLES, accuracies, load_weights, lockstep_run, run, statements

pytestmark = pytest.mark.unit

FOLDER = EXAMPLES / "imagenet"
SHORT = ["--batch-size", "8", "--epochs", "2", "--warmup-epochs", "1", "--lr", "2.5"]
SHORT += ["--size", "32", "--workers", "0"]


def load(name: str) -> ModuleType:
    """A module of the example, fresh, and not left in `sys.modules`."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def imagenet() -> ModuleType:
    return load("imagenet")


@pytest.fixture(scope="module")
def made(imagenet: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return imagenet.make_images(tmp_path_factory.mktemp("data"), 18, 32)


def test_resnet_has_the_names_that_known_weights_have() -> None:
    model = load("resnet50").ResNet50()
    state = model.state_dict()
    assert len(state) == 320
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    shapes = {
        "conv1.weight": (64, 3, 7, 7),
        "layer1.0.conv3.weight": (256, 64, 1, 1),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer2.0.conv2.weight": (128, 128, 3, 3),
        "layer3.5.bn3.running_mean": (1024,),
        "layer4.2.conv1.weight": (512, 2048, 1, 1),
        "fc.weight": (1000, 2048),
    }
    assert {name: tuple(state[name].shape) for name in shapes} == shapes


def test_blocks_begin_as_the_identity() -> None:
    block = load("resnet50").Bottleneck(16, 4, 1)
    torch.nn.init.zeros_(block.bn3.weight)
    x = torch.rand(2, 16, 4, 4)
    assert torch.equal(block(x), x)
    model = load("resnet50").ResNet50(classes=10)
    gammas = [value for name, value in model.state_dict().items() if name.endswith("bn3.weight")]
    assert len(gammas) == 16
    assert not any(gamma.any() for gamma in gammas)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_the_folder_is_read_in_order(imagenet: ModuleType, made: Path) -> None:
    data = imagenet.ImageFolder(made / "train", 24, augment=False)
    assert data.classes == [f"direction_{i}" for i in range(4)]
    assert [label for _, label in data.files] == sorted(i % 4 for i in range(18))
    image, label = data[7]
    assert (image.shape, image.dtype, label) == ((3, 24, 24), torch.float32, 1)
    assert torch.equal(image, data[7][0])
    assert abs(float(image.mean())) < 0.5
    assert len(imagenet.ImageFolder(made / "val", 24, augment=False)) == 4


def test_training_images_are_drawn_from_torchs_stream(imagenet: ModuleType, made: Path) -> None:
    data = imagenet.ImageFolder(made / "train", 24, augment=True)
    torch.manual_seed(1)
    one, other = data[0][0], data[0][0]
    assert not torch.equal(one, other)
    torch.manual_seed(1)
    assert torch.equal(data[0][0], one)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 50), (50, 3), (40, 60)])
def test_parts_lie_inside_of_the_image(imagenet: ModuleType, height: int, width: int) -> None:
    image = torch.arange(height * width).expand(3, -1).reshape(3, height, width)
    sizes = set()
    for _ in range(50):
        part = imagenet._any_part(image)
        _, h, w = part.shape
        sizes.add((h, w))
        rows, columns = part[0] // width, part[0] % width
        assert (rows.diff(dim=0) == 1).all()
        assert (columns.diff(dim=1) == 1).all()
    assert len(sizes) > 10 or min(height, width) < 10
    middle = imagenet._middle(image, 1.0)
    assert middle.shape[1:] == (min(height, width),) * 2


def test_other_formats_are_read_by_pillow(imagenet: ModuleType, tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    grey = np.full((20, 30), 51, np.uint8)
    pillow.fromarray(grey).save(tmp_path / "a" / "one.JPEG")
    (tmp_path / "a" / "notes.txt").touch()
    data = imagenet.ImageFolder(tmp_path, 8, augment=False)
    assert len(data) == 1
    expected = (0.2 - imagenet.MEAN) / imagenet.STD
    torch.testing.assert_close(data[0][0], expected.expand(3, 8, 8), atol=0.02, rtol=0)


def test_images_are_made_once_and_can_be_told_apart(imagenet: ModuleType, tmp_path: Path) -> None:
    folder = imagenet.make_images(tmp_path, 8, 32)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.ppm")}
    assert len(before) == 12
    assert imagenet.make_images(tmp_path, 8, 32) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.ppm")} == before
    assert list(tmp_path.iterdir()) == [folder], "nothing unfinished is left"
    train = imagenet.ImageFolder(folder / "train", 32, augment=False)
    seen = imagenet.ImageFolder(folder / "val", 32, augment=False)
    known = torch.stack([image.flatten() for image, _ in train])
    for image, label in seen:
        nearest = int(torch.cdist(image.flatten()[None], known).argmin())
        assert train[nearest][1] == label


def test_a_folder_that_is_not_there(imagenet: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--data holds train/"):
        imagenet.ImageFolder(tmp_path / "train", 8, augment=False)


def test_the_pair_differs_in_few_lines() -> None:
    pair = [statements(FOLDER / name) for name in ("plain_torch.py", "with_lockstep.py")]
    signs = [line[0] for line in difflib.ndiff(*pair)]
    assert (signs.count("+"), signs.count("-")) == (12, 10)


@pytest.mark.thorough
@pytest.mark.launcher
def test_on_one_and_on_two_processes(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two make their images themselves; they are the same ones."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other on busy cores
    given = ["--data", made]
    printed = {
        "plain": run(FOLDER / "plain_torch.py", *SHORT, *given, "--folder", tmp_path / "plain"),
        "one": run(FOLDER / "with_lockstep.py", *SHORT, *given, "--folder", tmp_path / "one"),
        "two": lockstep_run(
            FOLDER / "with_lockstep.py", *SHORT, "--made", 18, "--folder", tmp_path / "two"
        ),
    }
    for name, output in printed.items():
        where = ", MADE, so the accuracy means nothing" if name == "two" else f" in {made}"
        assert output.count(f"data: 18 images of 4 classes{where}") == 1
        assert len(accuracies(output)) == 2
    assert "53 synchronised" in printed["two"]
    assert {path.name for path in (tmp_path / "two").iterdir()} == {
        "made_18_32",
        "weights.safetensors",
    }
    one, two = (load_file(tmp_path / name / "weights.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() == load_weights(tmp_path / "plain" / "weights.pt").keys()
    for name in ("bn1", "layer1.0.bn1"):  # of the same samples, over both ranks
        for statistic in ("running_mean", "running_var"):
            pair = (state[f"{name}.{statistic}"] for state in (one, two))
            torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-4)
