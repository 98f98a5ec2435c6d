"""What each device holds, and how long a step takes, under four ways to use several devices.

python compare.py                          # two devices; prints the tables, writes memory.svg
python compare.py --devices 4 --shares 1:3:3:3
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from bars import Bar, write_svg
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.extensions.memory import Memory
from lockstep.strategies import DP

WAYS = ("DP", "balanced DP", "DDP", "FSDP")


class Net(nn.Module):
    """A small language model: its outputs, a number for each word, are the largest tensors."""

    def __init__(self, words: int, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
                for _ in range(blocks)
            )
        )
        self.head = nn.Linear(width, words)

    def forward(self, text: Tensor) -> Tensor:
        """Words `(batch, length)` to numbers `(batch, length, words)`."""
        return self.head(self.blocks(self.embedding(text)))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean cross entropy of the next words."""
    text, following = batch
    return F.cross_entropy(model(text).flatten(0, 1), following.flatten())


def join(way: str, devices: int, shares: str) -> lockstep.World:
    """Joins a run that uses the devices in one of the four ways."""
    if "DP" in way.split():  # one process for all devices
        gpus = torch.cuda.device_count() >= devices
        options = DP(device_ids=range(devices)) if gpus else DP(replicas=devices)
        return lockstep.init(options, shares=shares if "balanced" in way else None)
    return lockstep.init(way.lower())


def train(way: str, args: argparse.Namespace) -> Memory:
    """Trains a few steps; returns what every device held, and how long a step took."""
    with join(way, args.devices, args.shares) as world:
        text = torch.randint(args.words, (4 * args.batch_size, args.length + 1))
        data = TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        model = Net(args.words, args.width, args.blocks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = world.prepare(model, optimizer)
        loader = world.loader(data, args.batch_size, sample_rng=False)
        memory = world.memory(model, optimizer, loader, loss_of)
        for batch in loader:
            world.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        return memory


def options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--shares", help="of balanced DP; left out, the first device does half")
    parser.add_argument("--batch-size", type=int, default=32, help="of all devices")
    parser.add_argument("--length", type=int, default=32, help="words of a sample")
    parser.add_argument("--words", type=int, default=2000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--picture", type=Path, default=Path("memory.svg"))
    args = parser.parse_args()
    args.shares = args.shares or ":".join(["1"] + ["2"] * (args.devices - 1))
    return args


def main() -> None:
    """Runs the four one after the other."""
    args = options()
    bars: list[Bar] = []
    for way in WAYS:
        one_process = "DP" in way.split()
        memory = lockstep.launch(train, (way, args), nproc=1 if one_process else args.devices)[0]
        print(f"\n{way}\n{memory}\n", flush=True)
        for number, device in enumerate(memory.devices):
            parts = {
                "parameters": device.parameters + device.copies + device.buffers,
                "gradients": device.gradients,
                "optimizer state": device.state or 0,
                "activations": device.activations or 0,
                "outputs and loss": device.loss or 0,
                "a block whole": device.gathered or 0,
            }
            step = f"{(device.step_s or 0) * 1e3:.0f} ms a step"
            bars.append(Bar(way, step, f"device {number}", parts))
    write_svg(args.picture, bars)
    print(f"{'':<14}{'device 0':>12}{'others':>12}   MiB, all that is counted")
    for way in WAYS:
        first, *others = [sum(bar.parts.values()) / 2**20 for bar in bars if bar.group == way]
        print(f"{way:<14}{first:>12.1f}{max(others, default=0.0):>12.1f}")
    print(f"the picture is in {args.picture}")


if __name__ == "__main__":
    main()
