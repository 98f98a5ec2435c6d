"""Trains on data of webdataset, litdata or MosaicML streaming, and prints the global batches.

The data are those of the documentation page. `--as` reads them as a stream of the library's own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

import lockstep

SAMPLES = 26


def stand_in_for_torchvision() -> None:
    """MosaicML's library imports names of torchvision's, whose wheels do not load beside every
    build of torch; the names are not used here.
    """
    parts = ("torchvision", "datasets", "transforms", "transforms.functional")
    modules = {}
    for part in parts:
        name = part if part == "torchvision" else f"torchvision.{part}"
        modules[name] = sys.modules[name] = ModuleType(name)
        modules[name].__spec__ = ModuleSpec(name, None)  # others ask whether it is there
    modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    modules["torchvision.datasets"].CIFAR10 = object  # type: ignore[attr-defined]
    modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]


class Numbers(IterableDataset[Any]):
    """The samples of a library's stream as this program trains them."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Any:
        for sample in self.stream:
            number = int(sample["number"])
            yield torch.tensor([float(number)]), number


def optimized(number: int) -> dict[str, int]:
    return {"number": number}


def write(library: str, folder: str) -> None:
    if library == "webdataset":
        import webdataset as wds

        Path(folder).mkdir()
        for shard in range(4):
            with wds.TarWriter(f"{folder}/shard-{shard:04}.tar") as writer:
                for number in range(shard, SAMPLES, 4):
                    writer.write({"__key__": f"{number:06}", "cls": number})
    elif library == "litdata":
        import litdata

        numbers = list(range(SAMPLES))
        litdata.optimize(optimized, numbers, folder, chunk_size=4, num_workers=1)
    else:
        from streaming import MDSWriter

        with MDSWriter(out=folder, columns={"number": "int"}, size_limit=200) as writer:
            for number in range(SAMPLES):
                writer.write({"number": number})


def data_of(library: str, kind: str, folder: str) -> Any:
    if library == "webdataset":
        import webdataset as wds
        import webdataset_data

        if kind == "indexed":
            return webdataset_data.training_data(folder)
        urls = folder + "/shard-{0000..0003}.tar"
        stream = wds.WebDataset(urls, shardshuffle=False, nodesplitter=None).shuffle(100)
        return stream.decode().map(webdataset_data.to_tensors)
    if library == "litdata":
        import litdata
        import litdata_data

        if kind == "indexed":
            return litdata_data.Samples(folder)
        return Numbers(litdata.StreamingDataset(folder, shuffle=True, drop_last=False))
    import mosaic_data

    if kind == "indexed":
        return mosaic_data.Samples(folder)
    return Numbers(mosaic_data.StreamingDataset(local=folder, shuffle=True, batch_size=4))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=["webdataset", "litdata", "mosaic"])
    parser.add_argument("folder")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--as", dest="kind", default="indexed", choices=["indexed", "whole", "own"])
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--stop", type=int, help="leave after so many steps")
    args = parser.parse_args()
    if args.library == "mosaic":
        stand_in_for_torchvision()
        tempfile.tempdir = os.getcwd()  # its lock files stay there when a run fails
    if args.write:
        write(args.library, args.folder)
        return
    with lockstep.init(seed=0) as world:
        data = data_of(args.library, args.kind, args.folder)
        options: dict[str, Any] = {"num_workers": args.workers}
        if args.workers:
            options["persistent_workers"] = True
        if args.workers and args.library == "mosaic":
            # Other workers would import the library again, without what stands in.
            options["multiprocessing_context"] = "fork"
        if args.kind == "own":
            train = world.loader(data, 4, shard=False, **options)
        else:
            shuffle = args.kind == "indexed" and args.library != "webdataset"
            train = world.prepare(DataLoader(data, batch_size=4, shuffle=shuffle, **options))
        model = torch.nn.Linear(1, SAMPLES)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model, optimizer = world.prepare(model, optimizer)
        checkpoint = world.checkpoint("runs", model=model, optimizer=optimizer, loader=train)
        checkpoint.resume()
        steps = 0
        for epoch in world.epochs(2):
            for inputs, labels in train:
                world.backward(F.cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
                parts = world._run.collectives.exchange(labels.tolist())
                world.print("batch", epoch, json.dumps(sum(parts, [])))
                steps += 1
                if steps == args.stop:
                    checkpoint.save()
                    return


if __name__ == "__main__":
    main()
