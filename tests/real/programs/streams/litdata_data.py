import json
from pathlib import Path

import litdata
import torch
from torch.utils.data import Dataset


class Samples(Dataset):
    """Reads a StreamingDataset by index; Lockstep shuffles and divides."""

    def __init__(self, folder):
        self.data = litdata.StreamingDataset(folder)
        chunks = json.loads(Path(folder, "index.json").read_text())["chunks"]
        self.length = sum(chunk["chunk_size"] for chunk in chunks)

    def __len__(self):
        return self.length  # len(self.data) counts the samples of one rank

    def __getitem__(self, index):
        number = self.data[index]["number"]
        return torch.tensor([float(number)]), number
