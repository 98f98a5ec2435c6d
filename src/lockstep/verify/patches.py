"""What is switched off while a script is verified, because it would hide a difference or fake one.

Dropout draws other masks on other numbers of processes; rounding differs with the order of sums;
a checkpoint would be resumed by one run and overwritten by the other. All of it is mentioned.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from lockstep.distributed.torch_compat import DropoutNd, pytree
from lockstep.errors import user_line
from lockstep.optim.precision import in_double

_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
}
_DRAWS = {
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("rand_like", "randn_like", "randint_like", "dropout", "rrelu", "gumbel_softmax"),
    *("uniform_", "normal_", "bernoulli_", "random_", "exponential_", "cauchy_", "geometric_"),
    *("log_normal_", "dropout_", "native_dropout"),
}


class DeterminismPatches(TorchFunctionMode):
    """Makes two runs of a script comparable.

    Args:
        double: compute in float64.
    """

    def __init__(self, *, double: bool) -> None:
        super().__init__()
        self.double = double
        self.off: Counter[str] = Counter()
        """What was switched off, in words, and how often it was met."""
        self.draw_line = ""
        """The user's line of the first draw of a random number; empty: there was none."""
        self.follows_gathers = False
        """Some all-gather has taken in a tensor with a gradient; see `mark`."""
        self._numbers = hashlib.blake2b(digest_size=8)
        self._quieted: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Sees every call of torch's functions."""
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return self._undropped(func, args, kwargs)
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            self.off["dropout of attention"] += 1
            kwargs["dropout_p"] = 0.0
        elif getattr(func, "__name__", "") in _DRAWS:
            if not self.draw_line:
                own = kwargs.get("generator") not in (None, torch.default_generator)
                self.draw_line = (
                    user_line() or "somewhere"
                ) + own * ", a torch.Generator of its own"
            drawn = func(*args, **kwargs)
            if isinstance(drawn, torch.Tensor) and drawn.device.type != "meta":
                self._numbers.update(digest(drawn).encode())
            return drawn
        if not self.follows_gathers:
            return func(*args, **kwargs)
        line = next(filter(None, map(gathered_at, pytree.tree_leaves((args, kwargs)))), "")
        made = func(*args, **kwargs)
        mark(made, line)
        return made

    def quiet(self, module: nn.Module) -> None:
        """Takes the dropout and the other dtypes out of a module, once."""
        if id(module) in self._quieted:
            return
        for part in module.modules():
            self._quieted.add(id(part))
            if isinstance(part, DropoutNd) and part.p:
                part.p = 0.0
                self.off["dropout layers"] += 1
            elif isinstance(part, nn.RNNBase | nn.MultiheadAttention) and part.dropout:
                part.dropout = 0.0
                self.off["dropout of attention and recurrent layers"] += 1
        # DDP and its like hold the very tensors; they are given modules that are float64 already.
        tensors = chain(module.parameters(), module.buffers())
        if self.double and any(t.is_floating_point() and t.dtype != torch.float64 for t in tensors):
            module.double()

    def converted(self, values: Any) -> Any:
        """What a loader hands out, or a model is called with."""
        return in_double(values) if self.double else values

    def watch_draws(self) -> None:
        """From here on the next draw of a random number is the first."""
        self.draw_line = ""
        self._numbers = hashlib.blake2b(digest_size=8)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """What is drawn inside does not count."""
        before = self.draw_line, self._numbers.copy()
        try:
            yield
        finally:
            self.draw_line, self._numbers = before

    def draws(self) -> str:
        """A digest of the numbers that were drawn; empty: none were."""
        return self._numbers.hexdigest() if self.draw_line else ""

    def no_autocast(self) -> None:
        """`torch.autocast` does nothing from here on."""
        own: Any = torch.autocast
        build = own.__init__

        def disabled(
            context: Any, device_type: str, dtype: Any = None, enabled: bool = True, **rest: Any
        ) -> None:
            self.off["autocast"] += enabled
            build(context, device_type, dtype, enabled=False, **rest)

        own.__init__ = disabled

    def no_files(self, folder: Path) -> None:
        """Nothing is resumed or written over from here on.

        Args:
            folder: what is saved goes there, and is loaded from there.
        """
        import lockstep

        self._no_checkpoints()
        plain_save, plain_load = torch.save, torch.load

        def elsewhere(path: Any) -> Path:
            folder.mkdir(exist_ok=True)
            name = hashlib.blake2b(os.path.abspath(path).encode(), digest_size=8).hexdigest()
            return folder / name

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            named = isinstance(f, str | os.PathLike)
            self.off["saved files (written elsewhere)"] += named
            plain_save(obj, elsewhere(f) if named else f, *args, **kwargs)

        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(f, str | os.PathLike) and elsewhere(f).exists():
                f = elsewhere(f)
            return plain_load(f, *args, **kwargs)

        def save_weights(*_: Any, **__: Any) -> None:
            self.off["saved weights"] += 1

        torch.save, torch.load = save, load
        lockstep.save_weights = save_weights

    def _no_checkpoints(self) -> None:
        from lockstep.checkpoint.session import Checkpoint
        from lockstep.world import World

        make: Any = World.checkpoint

        def checkpoint(world: World, *args: Any, **kwargs: Any) -> Checkpoint:
            self.off["checkpoints (neither resumed nor saved)"] += 1
            made: Checkpoint = make(world, *args, **kwargs)
            made.last_resume_note = "nothing is resumed while the script is verified"
            return made

        own: Any = Checkpoint
        World.checkpoint = checkpoint  # type: ignore[method-assign, assignment]
        own.save = lambda checkpoint, metric=None: checkpoint.folder
        own.resume = lambda checkpoint: False
        own.step = own.wait = lambda checkpoint: None

    def notes(self) -> list[str]:
        """What was switched off."""
        return [f"{count} {what}" if count > 1 else what for what, count in self.off.items()]

    def _undropped(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        training = kwargs.get("training", args[2] if len(args) > 2 else True)
        rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        if training and rate:
            self.off["dropout functions"] += 1
        return kwargs["input"] if "input" in kwargs else args[0]


def mark(values: Any, line: str) -> None:
    """Tensors come from an all-gather that carries no gradient, in a line; empty: they do not."""
    for leaf in pytree.tree_leaves(values) if line else ():
        if isinstance(leaf, torch.Tensor):
            leaf.__dict__["_gathered_at"] = line


def gathered_at(value: Any) -> str:
    """The line of the all-gather without a gradient that a tensor was made of; empty: of none."""
    return str(value.__dict__.get("_gathered_at", "")) if isinstance(value, torch.Tensor) else ""


def digest(tensor: torch.Tensor) -> str:
    """Of all values of a dense tensor, bit for bit."""
    # A copy: storage that numpy looks at cannot be freed, as FSDP does with what it has gathered.
    plain = tensor.detach().cpu().clone().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(plain.numpy().data, digest_size=8).hexdigest()
