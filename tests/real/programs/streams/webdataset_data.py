import random

import torch
import webdataset as wds


class GlobalRandom:
    """Draws from `random`, which Lockstep seeds alike on all ranks and in all workers."""

    def randint(self, first, last):
        return random.randint(first, last)


def to_tensors(sample):
    number = int(sample["cls"])
    return torch.tensor([float(number)]), number


def training_data(folder):
    return wds.DataPipeline(
        wds.SimpleShardList(folder + "/shard-{0000..0003}.tar"),
        wds.shuffle(100, rng=GlobalRandom()),
        wds.tarfile_to_samples(),
        wds.shuffle(1000, rng=GlobalRandom()),
        wds.decode(),
        wds.map(to_tensors),
    )
