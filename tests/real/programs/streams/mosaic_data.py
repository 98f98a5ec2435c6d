import torch
from streaming import StreamingDataset
from torch.utils.data import Dataset


class Samples(Dataset):
    """Reads a StreamingDataset by index; Lockstep shuffles and divides."""

    def __init__(self, folder):
        self.data = StreamingDataset(local=folder, batch_size=1)

    def __len__(self):
        return self.data.num_samples  # len(self.data) counts the samples of one rank

    def __getitem__(self, index):
        number = self.data[index]["number"]
        return torch.tensor([float(number)]), number
