"""What is switched off while a script is verified, because it would hide a difference or fake one.

Dropout draws other masks on other numbers of processes; rounding differs with the order of sums,
so what a script computes in float32 or less is computed in float64, from the same random numbers;
a checkpoint would be resumed by one run and overwritten by the other. All of it is mentioned.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.batch.pytree import tensors
from lockstep.distributed.torch_compat import DropoutNd, own_part, pytree
from lockstep.optim.precision import in_double
from lockstep.user_code import is_user_file, user_line, user_stack
from lockstep.verify.files import FilesBefore
from lockstep.verify.models import is_traced, storage_of, sums_of

_DROPOUTS = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout),
    *(F.alpha_dropout, F.feature_alpha_dropout),
}
_DRAWS = {
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("rand_like", "randn_like", "randint_like", "dropout", "rrelu", "gumbel_softmax"),
    *("uniform_", "normal_", "bernoulli_", "random_", "exponential_", "cauchy_", "geometric_"),
    *("log_normal_", "kaiming_uniform_", "dropout_", "native_dropout"),
}
IGNORED = -100
"""torch's `ignore_index`: labels that count for nothing."""
_OF_INPUTS = {"dropout", "dropout_", "native_dropout", "rrelu", "gumbel_softmax"}
"""Draws through which gradients flow."""
_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_OVER_ROWS = {
    *("mean", "sum", "std", "var", "norm", "max", "min", "amax", "amin", "median", "logsumexp"),
    *("softmax", "log_softmax", "cumsum", "bincount", "normalize", "vector_norm", "nanmean"),
}
_LIMITS = {"max", "min", "amax", "amin"}
_CHOICES = {"topk", "sort", "argsort", "kthvalue", "quantile", "median"}
"""Which samples are taken, or a limit for them, follows from all of them."""
_SECOND = {"topk", "kthvalue", "norm", "normalize", "quantile", "vector_norm"}
"""Functions with another argument before that of their dimension."""
STATISTIC, MADE, NORM = "statistic ", "made ", "norm "
"""How kinds of marks begin: see `mark`."""
_NARROWING = {Tensor.float, Tensor.half, Tensor.bfloat16}
_OPERATORS = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__"),
    *("__ipow__", "__iand__", "__ior__", "__ixor__", "__ifloordiv__", "__imod__"),
}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_TO_NUMBER = {"item", "__float__", "__int__", "tolist"}
_NO_WRITES = {"requires_grad_", "detach_", "share_memory_", "rename_"}
_CONVERSIONS = "conversions to a lower precision"


_LOSSES = {
    *(F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div, F.soft_margin_loss),
    *(F.gaussian_nll_loss, F.poisson_nll_loss, F.multi_margin_loss, F.hinge_embedding_loss),
}


@dataclass(frozen=True)
class LossCall:
    """A call of one of torch's loss functions with what it is to train."""

    line: str
    targets: Tensor
    options: Mapping[str, Any]
    """By name or place, what it was given besides."""

    @property
    def count(self) -> float:
        """How much counts in it: targets that are not ignored, by the weights of their classes."""
        given, targets = self.options, self.targets
        if targets.is_floating_point():
            return float(targets.numel())
        kept = targets[targets != given.get("ignore_index", IGNORED)]
        weight = given.get("weight", given.get("argument 3"))
        classes = isinstance(weight, Tensor) and weight.dim() == 1
        return float(weight[kept].sum()) if classes else float(kept.numel())


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
        self.lowest = torch.float64 if double else torch.float32
        """Of the dtypes that anything with a gradient has had."""
        self.loss_calls: list[LossCall] = []
        """Since the last backward pass; whoever reads them takes them away."""
        self.draw_line = ""
        """The user's line of the first draw of a random number; empty: there was none."""
        self.count = 0
        """Draws so far."""
        self.watched: frozenset[int] = frozenset()
        """Where the values lie whose changes are looked at."""
        self.writes: dict[int, tuple[tuple[str, int], ...]] = {}
        """Of these, the user's frames in which they were last written to."""
        self.numbers: dict[str, float] = {}
        """Statistics over samples that became numbers, by the user's line; whoever reads them
        takes them away."""
        self.drawn: set[str] = set()
        """Digests of random numbers; whoever reads them takes them away."""
        self.on_write: Callable[[int], object] = lambda storage: None
        """Called where the script has written to something that is watched."""
        self._own = torch.get_default_dtype()
        """What the script computes in where it says nothing else."""
        self._set_default = torch.set_default_dtype
        self._numbers = hashlib.blake2b(digest_size=8)
        self._quieted: set[int] = set()
        self._in_backward = False
        """A mode that handles a call does not see what runs in it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Sees every call of torch's functions."""
        kwargs = kwargs or {}
        if is_traced():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func in _DROPOUTS:
            return self._undropped(func, args, kwargs)
        if name in _DRAWS:
            own = kwargs.get("generator") not in (None, torch.default_generator)
            line = (user_line() or "somewhere") + own * ", a torch.Generator of its own"
            self.draw_line, self.count = self.draw_line or line, self.count + 1
            drawn = self._drawn(func, args, kwargs) if self.double else func(*args, **kwargs)
            if isinstance(drawn, Tensor) and drawn.device.type != "meta":
                numbers = digest(drawn)
                self._numbers.update(numbers.encode())
                self.drawn.add(numbers)
                mark(drawn, draw=(self.count, line, numbers))
            return drawn
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            self.off["dropout of attention"] += 1
            kwargs["dropout_p"] = 0.0
        terms: list[float] = []
        marks: dict[str, Any] = {}
        # What is looked at here is evidence. An odd argument leaves none; the call goes on.
        with suppress(Exception):
            marks = marks_of((args, kwargs))
            if func in _LOSSES:
                self._see_loss(name, *args, **kwargs)
            terms = _terms_made(name, *args) if len(args) == 2 else []
        if self.double:
            func, args, kwargs = self._widened(func, name, args, kwargs)
        if name in {"backward", "grad"}:
            with self._backward():
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        with suppress(Exception):
            self._see_result(func, name, result, marks, terms, args, kwargs)
        return result

    def _see_result(
        self,
        func: Any,
        name: str,
        result: Any,
        marks: dict[str, Any],
        terms: list[float],
        args: Any,
        kwargs: Mapping[str, Any],
    ) -> None:
        """Looks at what a call has made, or has written to."""
        self._see_write(func, name, args, kwargs)
        self._see_number(name, result, marks)
        if isinstance(result, Tensor) and result.requires_grad and not result.dim():
            marks |= _divided(name, *args)
            result.__dict__["_line"] = _line_of(name, args)
            if terms:
                result.__dict__["_terms"] = terms
        _mark_made(result, marks, name, args, kwargs)
        if isinstance(result, Tensor) and result.dtype is not self.lowest and result.requires_grad:
            self.went_through(result)

    def _see_number(self, name: str, result: Any, marks: Mapping[str, Any]) -> None:
        statistic = name in _TO_NUMBER and any(kind.startswith(STATISTIC) for kind in marks)
        if statistic and isinstance(result, int | float):
            self.numbers[user_line() or ""] = float(result)

    def _see_write(self, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        data = name == "__set__" and func == _SET_DATA
        if data:
            self.watched |= {storage_of(args[0])}
        method = name[-1:] == "_" and name[-2:] != "__" and name not in _NO_WRITES
        if data or method or name in _OPERATORS or "out" in kwargs:
            for tensor in tensors((args[:1], kwargs.get("out"))):
                self.wrote(tensor)

    def wrote(self, tensor: Tensor, *, by_hand: bool = True) -> None:
        """Values are written to where those of a tensor lie; by the script, or by a collective."""
        if self.watched and (storage := storage_of(tensor)) in self.watched:
            self.writes[storage] = user_stack() or self.writes.get(storage, ())
            if by_hand:
                self.on_write(storage)

    def _see_loss(self, name: str, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(("input", "target"), args, strict=False)) | kwargs
        outputs, targets = given.pop("input", None), given.pop("target", None)
        if _needs_gradient(outputs) and isinstance(targets, Tensor) and len(self.loss_calls) < 64:
            rest = {f"argument {n}": value for n, value in enumerate(args[2:], 3)}
            line = f"{name}: {user_line() or ''}"
            self.loss_calls.append(LossCall(line, targets.detach().clone(), given | rest))

    def went_through(self, tensor: Tensor) -> None:
        """The loss or gradients have been in the dtype of a tensor."""
        dtype = tensor.dtype
        if dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(self.lowest).eps:
            self.lowest = dtype

    def _widened(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, Any, dict[str, Any]]:
        """A call that converts to a lower precision, as one that does not."""
        lowers = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if func in _NARROWING:
            self.off[_CONVERSIONS] += lowers
            return Tensor.double, args, kwargs
        values = (*args, *kwargs.values())
        narrow = any(isinstance(value, torch.dtype) and value in _WIDE for value in values)
        if narrow and name != "view" and any(isinstance(value, Tensor) for value in values):
            self.off[_CONVERSIONS] += lowers
            args = tuple(map(_wide, args))
            kwargs = {key: _wide(value) for key, value in kwargs.items()}
        return func, args, kwargs

    def _drawn(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What the script draws without us, in float64: draws of float64 are other numbers."""
        if func.__name__ in _OF_INPUTS or {"out", "dtype"} & kwargs.keys():
            return func(*args, **kwargs)
        if func.__name__.endswith("_"):
            first, *rest = args or (kwargs.pop("tensor"),)  # those of nn.init give names
            if first.dtype != torch.float64:
                return func(first, *rest, **kwargs)
            own = torch.empty_like(first, dtype=self._own)
            with torch.no_grad():
                return first.copy_(func(own, *rest, **kwargs))
        self._set_default(self._own)
        try:
            drawn = func(*map(self._narrowed, args), **kwargs)
        finally:
            self._set_default(torch.float64)
        if not isinstance(drawn, Tensor) or not drawn.is_floating_point():
            return drawn
        return drawn.detach().double().requires_grad_(drawn.requires_grad)

    def _narrowed(self, value: Any) -> Any:
        wide = isinstance(value, Tensor) and value.dtype == torch.float64
        return value.to(self._own) if wide else value

    def keep_double(self) -> None:
        """From here on new tensors are float64, whatever the script sets."""
        self._set_default(torch.float64)

        def own_default(dtype: torch.dtype) -> None:
            self._own = torch.float32 if dtype == torch.float64 else dtype

        torch.set_default_dtype = own_default
        self._no_autocast()
        self._see_what_is_recomputed()

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
        if self.double:
            held = list(tensors)
            if any(t.is_floating_point() and t.dtype != torch.float64 for t in held):
                module.double()
            for tensor in held:
                if tensor.dtype == torch.complex64:
                    tensor.data = tensor.data.to(torch.complex128)

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

    def draws(self) -> dict[str, str]:
        """The line of the first draw, and a digest of all numbers drawn; empty: none were."""
        return {self.draw_line: self._numbers.hexdigest()} if self.draw_line else {}

    @contextmanager
    def _backward(self, inside: bool = True) -> Iterator[None]:
        before, self._in_backward = self._in_backward, inside
        try:
            yield
        finally:
            self._in_backward = before

    def _see_what_is_recomputed(self) -> None:
        """Checkpointed activations are computed again in the dtypes that they had."""
        module: Any = torch.utils.checkpoint
        plain = module.checkpoint

        @wraps(plain)
        def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
            def seen(*inputs: Any, **named: Any) -> Any:
                if not self._in_backward:
                    return function(*inputs, **named)
                with self._backward(False), self:
                    return function(*inputs, **named)

            return plain(seen, *args, **kwargs)

        module.checkpoint = checkpoint

    def no_compile(self) -> None:
        """`torch.compile` does nothing from here on: its tracer would follow our hooks."""
        plain: Any = torch.compile

        @wraps(plain)
        def disabled(model: Any = None, **options: Any) -> Any:
            self.off["torch.compile"] += model is not None
            return plain(model, **{**options, "disable": True})

        torch.compile = disabled

    def _no_autocast(self) -> None:
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
        folder.mkdir(exist_ok=True)
        saved = _Saved(folder)
        plain_save = torch.save

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            named = isinstance(f, str | os.PathLike)
            self.off["saved files (written elsewhere)"] += named
            plain_save(obj, saved.elsewhere(f) if named else f, *args, **kwargs)

        for owner, names in (
            (os, ("rename", "replace", "link", "stat", "unlink", "remove")),
            (shutil, ("copyfile", "copy", "copy2")),
            (io, ("open",)),
            (torch, ("load",)),
            (safetensors, ("safe_open",)),
            (safetensors.torch, ("safe_open",)),
        ):
            for name in names:
                saved.follow(owner, name)
        builtins.open = io.open
        FilesBefore(folder.parent).watch()

        plain_weights = lockstep.save_weights

        @wraps(plain_weights)
        def save_weights(model: nn.Module, path: Any, **options: Any) -> None:
            self.off["saved weights (written elsewhere)"] += 1
            plain_weights(model, saved.elsewhere(path), **options)

        torch.save, lockstep.save_weights = save, save_weights

    def _no_checkpoints(self) -> None:
        from lockstep.checkpoint.session import Checkpoint

        own: Any = Checkpoint
        build = own.__init__

        def built(checkpoint: Checkpoint, *args: Any, **kwargs: Any) -> None:
            self.off["checkpoints (neither resumed nor saved)"] += 1
            build(checkpoint, *args, **kwargs)
            checkpoint.last_resume_note = "nothing is resumed while the script is verified"

        own.__init__ = built
        own.save = lambda checkpoint, metric=None: checkpoint.folder
        own.resume = lambda checkpoint: False
        own.step = own.wait = lambda checkpoint: None

    def notes(self) -> list[str]:
        """What was switched off."""
        return [
            f"{count} {what}" if count > 1 else what for what, count in self.off.items() if count
        ]

    def _undropped(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        training = kwargs.get("training", args[2] if len(args) > 2 else True)
        rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        if training and rate:
            self.off["dropout functions"] += 1
        return kwargs["input"] if "input" in kwargs else args[0]


def terms_of(loss: torch.Tensor) -> list[float]:
    """What a loss was added up from, as far as that was seen."""
    return loss.__dict__.get("_terms") or [float(loss.detach())]


def _terms_made(name: str, one: Any, other: Any) -> list[float]:
    """The terms of a sum, or of a multiple, of numbers with a gradient; empty: it is neither."""
    if name not in {"add", "add_", "sub", "mul", "div"}:
        return []
    parts = [
        terms_of(v) if isinstance(v, torch.Tensor) and v.requires_grad and not v.dim() else []
        for v in (one, other)
    ]
    if name in {"mul", "div"}:
        single = not isinstance(other, torch.Tensor) or other.numel() == 1
        factor = float(other) if parts[0] and not parts[1] and single else 0.0
        return [term / factor if name == "div" else term * factor for term in parts[0] if factor]
    return parts[0] + [-term if name == "sub" else term for term in parts[1]]


def _line_of(name: str, args: Any) -> str | None:
    """The user's line that made a loss; one that a library only scales is made where it was."""
    if name in {"mul", "div"} and len(args) == 2 and not _is_called_by_user():
        made, factor = args if _needs_gradient(args[0]) else args[::-1]
        if _needs_gradient(made) and not made.dim() and not _needs_gradient(factor):
            return made.__dict__.get("_line") or user_line()
    return user_line()


def _is_called_by_user() -> bool:
    """Whether the user's code has called torch here, and no library."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file):
            return True
        if f"{os.sep}torch{os.sep}" not in file and not file.startswith(_OWN):
            return False
        frame = frame.f_back
    return False


_OWN = os.path.dirname(os.path.dirname(__file__))
"""Where Lockstep's files lie."""


def _divided(name: str, *args: Any) -> dict[str, Any]:
    """The mark of a loss that is divided by a number."""
    single = len(args) == 2 and (not isinstance(args[1], Tensor) or args[1].numel() == 1)
    if name != "div" or not single or _needs_gradient(args[1]):
        return {}
    return {"divisor": (float(args[1]), user_line() or "")}


def _over_samples(name: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether something is taken over the rows of what carries no gradient, or rows are chosen."""
    given = args[0] if args else kwargs.get("input")
    if name not in _OVER_ROWS | _CHOICES or not isinstance(given, Tensor) or not given.dim():
        return False
    if len(given) < 2 or (given.requires_grad and name not in _CHOICES):
        return False
    if name in _LIMITS and not given.is_floating_point():  # of lengths or numbers: does no harm
        return False
    place = 1 + (name in _SECOND)
    last = name in _CHOICES - {"median", "quantile"}
    usual = 1 if name == "normalize" else -1 if last else None
    dims = kwargs.get("dim", args[place] if len(args) > place else usual)
    dims = dims if isinstance(dims, tuple | list) else [dims]
    return any(d is None or (type(d) is int and d % given.dim() == 0) for d in dims)


def _number(result: Any) -> float | None:
    """A number that changes with any of a result's; None: it cannot be told."""
    first = next(iter(tensors(result)), None)
    if type(first) is not Tensor or first.is_meta or first.is_complex():
        return None
    with suppress(RuntimeError):  # as torch says of a function that it transforms
        return float(sums_of(first)[0])
    return None


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class ParameterGroup(dict[str, Any]):
    """One of an optimizer's, which knows the script's line that has set its learning rate."""

    def __init__(self, group: dict[str, Any]) -> None:
        super().__init__(group)
        self.line = user_line() or ""

    def __setitem__(self, key: str, value: Any) -> None:
        """As a dict does."""
        super().__setitem__(key, value)
        if key == "lr":
            self.line = user_line() or ""


def mark(values: Any, **marks: Any) -> None:
    """Tensors, and all that is made of them, have a mark of a kind.

    `gather`: the line of an all-gather that carries no gradient; `batch`: the number of a batch;
    `draw`: the number and line of a draw; `divisor`: by what a loss was divided, and the line;
    `statistic` and a line: a number of what was taken over the samples there; `made` and the number
    of an update: the line of a model that was called before it; `norm` and a number: the id of a
    BatchNorm layer that took statistics there. Of several of a kind the last counts, which of
    divisors is the largest.
    """
    for tensor in tensors(values) if marks else ():
        known = tensor.__dict__.setdefault("_marks", {})
        known |= {kind: max(known.get(kind, value), value) for kind, value in marks.items()}


def marks_of(values: Any) -> dict[str, Any]:
    """The marks of what a nest of values is made of, by kind."""
    found: dict[str, Any] = {}
    for leaf in filter(lambda leaf: isinstance(leaf, Tensor), pytree.tree_leaves(values)):
        for kind, value in leaf.__dict__.get("_marks", {}).items():
            found[kind] = max(found.get(kind, value), value)
    return found


def _mark_made(
    result: Any, marks: dict[str, Any], name: str, args: Any, kwargs: Mapping[str, Any]
) -> None:
    """What a function has made, or has written into, has the marks of what it was given."""
    if _over_samples(name, args, kwargs) and (number := _number(result)) is not None:
        marks[f"{STATISTIC}{user_line() or ''}"] = number
    mark(result, **marks)
    if name == "__setitem__":
        mark(args[0], **marks_of(args[2]))


def unmark(tensor: Tensor) -> None:
    """What is in a tensor is of all ranks from here on."""
    known = tensor.__dict__.get("_marks", {})
    for kind in [kind for kind in known if kind.startswith((STATISTIC, MADE, NORM))]:
        del known[kind]


_MOVE = {"rename", "replace", "link", "copyfile", "copy", "copy2"}
"""Functions that make what the first path names there under the second."""


class _Saved:
    """Files that the script has saved: they lie in a folder, and it finds them where it put them.

    Args:
        folder: where they lie; all ranks have the same.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stat = os.stat

    def elsewhere(self, path: Any) -> str:
        """Where a file lies that was saved under a path."""
        name = hashlib.blake2b(os.path.abspath(path).encode(), digest_size=8).hexdigest()
        return f"{self._folder}/{name}"

    def follow(self, owner: Any, name: str) -> None:
        """Has a function that begins with a path take the saved file, if it is one."""
        function = getattr(owner, name)

        def followed(*args: Any, **kwargs: Any) -> Any:
            if args and self._has(args[0]):
                path, *rest = args
                if name in _MOVE and rest:
                    inside = os.path.join(rest[0], os.path.basename(path))
                    rest[0] = self.elsewhere(inside if os.path.isdir(rest[0]) else rest[0])
                args = self.elsewhere(path), *rest
            return function(*args, **kwargs)

        setattr(owner, name, wraps(function)(followed))
        for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if function in able:
                able.add(followed)

    def _has(self, path: Any) -> bool:
        if isinstance(path, str | os.PathLike):
            with suppress(FileNotFoundError):
                return bool(self._stat(self.elsewhere(path)))
        return False


def _wide(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def digest(tensor: Tensor) -> str:
    """Of all values of a dense tensor, bit for bit; of a sharded one this rank's."""
    # A copy: storage that numpy looks at cannot be freed, as FSDP does with what it has gathered.
    plain = own_part(tensor).cpu().clone().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(plain.numpy().data, digest_size=8).hexdigest()
