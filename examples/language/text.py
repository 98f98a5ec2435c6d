"""The text: Lockstep's own guides, cut into paragraphs, one number a character."""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

CHARACTERS = 128
"""ASCII; 0 stands where a paragraph has ended and another in the batch has not."""
LONGEST = 128


def load_text() -> tuple[list[Tensor], list[Tensor]]:
    """Paragraphs to train on and to test with, each of shape `(characters,)`."""
    folder = Path(__file__).parents[2] / "docs"
    english = (path for path in sorted(folder.glob("*.md")) if ".zh" not in path.name)
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in english)
    pieces = [
        paragraph[begin : begin + LONGEST]
        for paragraph in text.encode("ascii", "replace").decode().split("\n\n")
        for begin in range(0, len(paragraph), LONGEST)
    ]
    samples = [torch.tensor([ord(c) for c in piece]) for piece in pieces if len(piece) > 8]
    return [s for i, s in enumerate(samples) if i % 10], samples[::10]


def join(paragraphs: list[Tensor]) -> Tensor:
    """A batch `(paragraphs, characters of the longest)`."""
    return pad_sequence(paragraphs, batch_first=True)


def count(batch: Tensor) -> Tensor:
    """The characters of a batch that are to be predicted."""
    return (batch[:, 1:] != 0).sum()


def options() -> argparse.Namespace:
    """Of both programs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="paragraphs of a step")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--limit", type=int, default=None, help="the first paragraphs alone")
    return parser.parse_args()
