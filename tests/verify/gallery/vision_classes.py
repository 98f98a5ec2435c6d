"""Tells pictures apart from a folder of files, one class after another."""

import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

GLOBAL_BATCH = 24


def write(folder: Path, count: int) -> None:
    """A folder a class, with one file an image, as data sets come."""
    drawn = np.random.default_rng(10)
    for number, kind in enumerate(drawn.integers(10, size=count)):
        place = folder / str(kind)
        place.mkdir(exist_ok=True)
        np.save(place / f"{number}.npy", kind + drawn.standard_normal((8, 8)))


class Folder(Dataset):
    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*/*.npy"))
        classes = {file.parent.name for file in files}
        self.files = [f for name in sorted(classes) for f in files if f.parent.name == name]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file = self.files[index]
        image = torch.tensor(np.load(file) / 10.0).float().unsqueeze(0)
        return image, int(file.parent.name)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as own:
    write(Path(own), 72)
    data = Folder(Path(own))
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
dist.destroy_process_group()
