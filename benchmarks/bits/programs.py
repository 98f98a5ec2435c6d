"""The nine programs: small, and each with something that could change the bits of a run."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep

BATCH_SIZE = 16
NUM_SAMPLES = 5 * BATCH_SIZE + 10  # the last global batch of an epoch is short
CLASSES = 5
VOCABULARY = 32
MAX_TOKENS = 12


class Program(NamedTuple):
    """A model, its data and how it is trained."""

    title: str
    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    loss: Callable[[nn.Module, Any], Tensor]
    loader: Mapping[str, Any] = MappingProxyType({})
    """More options of `World.loader`."""
    precision: str = "fp32"
    max_norm: float | None = None
    """Gradients are clipped to this norm; None: they are not clipped."""
    sync_batchnorm: bool = False
    """BatchNorm takes its statistics from the global batch, on as many processes as virtual
    ranks."""


def images() -> TensorDataset:
    """Images of 3 channels, 8 pixels square, and their classes."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(NUM_SAMPLES, 3, 8, 8, generator=generator)
    return TensorDataset(pixels, torch.randint(0, CLASSES, (NUM_SAMPLES,), generator=generator))


class AugmentedImages(Dataset[Any]):
    """Images that are flipped, shifted and made noisy at random, as they are read."""

    def __init__(self) -> None:
        self.images = images()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.images[index]
        if random.random() < 0.5:
            image = image.flip(-1)
        image = image.roll(int(torch.randint(-2, 3, ())), dims=-1)
        return image + 0.1 * torch.randn_like(image), label


def sequences() -> list[Tensor]:
    """Sequences of 3 to 12 tokens."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(3, MAX_TOKENS + 1, (NUM_SAMPLES,), generator=generator).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


def pad(batch: list[Tensor]) -> Tensor:
    """Joins sequences of different lengths, filled up with token 0."""
    return nn.utils.rnn.pad_sequence(batch, batch_first=True)


def num_targets(batch: Tensor) -> float:
    """Returns how many tokens of a batch are predicted."""
    return float((batch[:, 1:] != 0).sum())


def classify(model: nn.Module, batch: Any) -> Tensor:
    """The mean cross-entropy of the classes of images."""
    pixels, labels = batch
    return F.cross_entropy(model(pixels), labels)


def predict_tokens(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean cross-entropy of the next tokens."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)


class ImageTransformer(nn.Module):
    """Two layers with dropout over 8 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(24, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patches(pixels.flatten(1).view(len(pixels), 8, 24))
        output: Tensor = self.head(self.layers(patches).mean(1))
        return output


class LanguageModel(nn.Module):
    """A causal transformer of one layer, whose embedding is also its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.positions = nn.Parameter(torch.randn(MAX_TOKENS, 32) * 0.02)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        hidden = self.embedding(tokens) + self.positions[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.layer(hidden, src_mask=mask, is_causal=True)
        return F.linear(hidden, self.embedding.weight)


class LoRA(nn.Module):
    """A frozen linear layer, and an update of low rank that is trained (arXiv 2106.09685)."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.frozen(inputs) + self.up(self.down(self.dropout(inputs)))
        return output


class CausalLanguageModel(nn.Module):
    """Returns the logits of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def lora_model() -> nn.Module:
    """A Llama of transformers with LoRA, or without transformers the model of above with it."""
    model: nn.Module
    if has_transformers():
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=MAX_TOKENS,
        )
        model = CausalLanguageModel(LlamaForCausalLM(config))
        adapted = ("q_proj", "v_proj")
    else:
        model = LanguageModel()
        adapted = ("linear1", "linear2")
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in adapted and isinstance(child, nn.Linear):
                setattr(module, name, LoRA(child))
    return model


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def cnn_with_groupnorm() -> nn.Module:
    features = [nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU()]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(576, CLASSES))


def cnn_with_batchnorm() -> nn.Module:
    features = [nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(576, CLASSES))


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)


def lamb(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return lockstep.optim.LAMB(parameters, lr=0.01)


TOKENS: dict[str, Any] = {"collate_fn": pad, "weight": num_targets}
WORKERS: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}

PROGRAMS = {
    "mlp": Program("MLP", mlp, images, sgd, classify),
    "groupnorm": Program("CNN, GroupNorm", cnn_with_groupnorm, images, adamw, classify),
    "batchnorm": Program("CNN, BatchNorm", cnn_with_batchnorm, images, adamw, classify),
    "transformer": Program("transformer, dropout", ImageTransformer, images, adamw, classify),
    "language": Program(
        "language model, token weights", LanguageModel, sequences, adamw, predict_tokens, TOKENS
    ),
    "lora": Program("LoRA", lora_model, sequences, adamw, predict_tokens, TOKENS),
    "bf16": Program(
        "bf16, clipping",
        ImageTransformer,
        images,
        adamw,
        classify,
        precision="bf16",
        max_norm=0.5,
    ),
    "augmentation": Program(
        "augmentation, 2 workers", cnn_with_groupnorm, AugmentedImages, lamb, classify, WORKERS
    ),
    "global_batchnorm": Program(
        "CNN, BatchNorm over the global batch",
        cnn_with_batchnorm,
        images,
        adamw,
        classify,
        sync_batchnorm=True,
    ),
}
