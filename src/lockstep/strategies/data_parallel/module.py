"""One process, several devices: a module whose replicas compute parts of each batch.

The parameters are on the first device. Each forward pass cuts the inputs, copies the module to the
other devices, runs the replicas, and joins their outputs; autograd brings the gradients back. This
is `torch.nn.DataParallel`, with parts that may differ in size, exact for all of them.

What replicas do otherwise than one device is looked for in a forward pass (LS310). A module that
keeps statistics of its samples, or a term of the loss, keeps those of each replica's samples in
each replica, and those of the first one stay. A list beside the tensors of a batch is not cut.
Neither is an error, as both may be meant; both give other numbers in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import gather

from lockstep.batch.plan import parse_shares, parts
from lockstep.batch.pytree import is_opaque, joined, leaves, map_tensors, tensors
from lockstep.distributed.torch_compat import BatchNorm, never_compiled
from lockstep.errors import DataError, SettingError, UsageError, warn
from lockstep.settings import check_whole_number, is_auto
from lockstep.strategies.base import PLAIN
from lockstep.strategies.data_parallel.replicas import (
    BatchNormOverReplicas,
    attributes,
    copy_state_back,
    parallel_apply,
    replicate,
    synchronise_batchnorm,
)
from lockstep.strategies.sync_batchnorm import Names
from lockstep.wording import join_first


class DataParallel(nn.DataParallel[nn.Module]):
    """`torch.nn.DataParallel` with shares, and with the results of one device.

    Inputs: tensors, in lists, tuples, dictionaries and dataclasses too, are cut along `dim`, where
    all have one size; those without that dimension, those of size 1 there, and everything that is
    no tensor go to every replica. Replicas without samples do not run.

    Outputs: tensors are joined along `dim` on `output_device`, in containers of the first replica's
    types. A floating-point tensor without dimensions, such a number, or a tensor of shape (1,) made
    of several samples, is taken for a mean over the replica's samples, as a loss computed inside of
    the module; it becomes the mean over the batch: the replicas' values weighted by their samples.
    (torch returns a vector, the mean of which is another one where parts differ.) A parameter or
    buffer of the module is returned as it is. Anything else must be the same on all replicas.

    What forward passes leave in the first replica that runs, such as buffers and attributes, stays
    in the module. What they leave in the others is lost; a warning says so where it differs.

    Args:
        module: on the first device before it is called; its BatchNorm layers get another forward
            (`BatchNormOverReplicas`) where there are several devices and `sync_batchnorm` is True.
        device_ids: GPUs, the first of which holds the parameters; None: all that are visible.
        output_device: where the outputs are joined; None: on the first device.
        dim: of the samples.
        replicas: so many on the device that the module is on, which share its parameters; for
            trying it out without GPUs. None without GPUs: 1.
        shares: how a batch is divided, one whole number a device; None: equally.
        sync_batchnorm: BatchNorm takes its statistics over the samples of all replicas. False:
            each has its own, and the first one's running statistics stay.

    Raises:
        SettingError: settings that do not fit each other or the machine.
        UsageError: there are several replicas, and a part of the module is a DataParallel.
        DataError: at forward, for inputs that cannot be cut alike or outputs that are not alike.
        UsageError: at forward, for a module that is elsewhere, that cannot be copied, or outputs
            that cannot be joined.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        *,
        replicas: int | None = None,
        shares: str | Sequence[int] | None = None,
        sync_batchnorm: bool = True,
    ) -> None:
        nn.Module.__init__(self)  # torch's own constructor wants GPUs
        self._fixed, self.count = _devices(device_ids, replicas)
        self.device_ids = [device.index for device in self._fixed]
        self._output = _output(output_device)
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise SettingError(f"dim={dim!r}", "it is a whole number", "give that of the samples")
        self.dim = dim
        self.set_shares(shares)
        self.module = module
        self._looked_at_inputs = self._looked_at_state = False
        self.averaged = False
        """The last forward pass returned a mean with a gradient, joined of several replicas'."""
        self.batchnorms = Names([], [])
        """The layers that take their statistics over all replicas, and those that cannot."""
        inner = [found for found in module.named_modules() if isinstance(found[1], nn.DataParallel)]
        if inner and self.count > 1:
            raise UsageError(
                f"{type(self).__name__} over {self.count} replicas",
                f"{inner[0][0] or 'the module'} is a {type(inner[0][1]).__name__} already, which "
                "would divide each part of a batch once more",
                "wrap the whole model once",
            )
        if sync_batchnorm and self.count > 1:
            self.batchnorms = synchronise_batchnorm(module)

    @property
    def devices(self) -> list[torch.device]:
        """Where each replica runs."""
        return self._devices(_held(self.module), ())

    def _devices(self, held: Sequence[Tensor], batch: Any) -> list[torch.device]:
        if self._fixed:
            return self._fixed
        tensor = next(chain(held, tensors(batch)), None)
        return [torch.device("cpu") if tensor is None else tensor.device] * self.count

    def set_shares(self, shares: str | Sequence[int] | None) -> None:
        """Divides batches otherwise from the next forward pass on.

        Args:
            shares: one whole number a device, `"2:3:3"` or `(2, 3, 3)`; None: equal ones.

        Raises:
            SettingError: not that.
        """
        if is_auto(shares):
            raise SettingError(
                "shares='auto' of a module",
                "they are measured in a run, in the first global batch that is trained on",
                "give it to lockstep.init('dp', shares='auto') and prepare the bare module",
            )
        self.shares = parse_shares(shares, self.count, of="device")

    def sizes(self, count: int) -> list[int]:
        """How many of `count` samples each replica computes."""
        return parts(count, self.shares)

    @contextmanager
    def only_on(self, device: int) -> Iterator[None]:
        """Meanwhile the replica of this number computes all of each batch."""
        before = self.shares
        self.shares = tuple(int(n == device) for n in range(self.count))
        try:
            yield
        finally:
            self.shares = before

    # The copies are new in each pass: each would be compiled anew.
    @partial(never_compiled, recursive=True)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass over all replicas."""
        batch = inputs, kwargs
        held = _held(self.module)
        devices = self._devices(held, batch)
        self._check_home(held, devices[0])
        count = count_samples(batch, self.dim, self.count)
        sizes = self.sizes(count) if count else [0] * self.count
        running = [n for n, size in enumerate(sizes) if size] or [0]
        others = replicate(self.module, held, [devices[0], *(devices[n] for n in running if n)])
        modules = [self.module, *others] if running[0] == 0 else others
        ends = list(accumulate(sizes))
        calls = []
        for module, n in zip(modules, running, strict=True):
            begin = ends[n] - sizes[n]
            args, named = scatter(batch, self.dim, count, begin, ends[n], devices[n])
            where = f"in replica {n} on {devices[n]}, which has {sizes[n]} of {count} samples"
            told = where if count and self.count > 1 else ""
            calls.append(partial(_call, module, args, named, devices[n], told))
        several = len(modules) > 1
        if several and not self._looked_at_inputs:
            self._looked_at_inputs = True
            _warn_of_lists(len(modules), batch, count)
        looks = several and torch.is_grad_enabled() and not self._looked_at_state
        kept = _kept(modules[0]) if looks else {}
        before = attributes(modules[0]) if running[0] else {}
        outputs = self._run(calls, [devices[n] for n in running])
        if running[0]:
            copy_state_back(self.module, modules[0], before, devices[0])
        if looks:
            self._looked_at_state = True
            _warn_of_state(modules, kept)
        self.averaged = False
        to = devices[0] if self._output is None else self._output
        if len(outputs) == 1:
            return map_tensors(outputs[0], lambda tensor: tensor.to(to))
        own = [{id(t): place for place, t in enumerate(_held(module))} for module in modules]
        ran = [sizes[n] for n in running]
        output = joined(outputs, partial(gather_leaf, sizes=ran, dim=self.dim, device=to, own=own))
        self.averaged = any(is_term(t) and not t.is_leaf for t in tensors(output))
        return output

    def _run(
        self, calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device]
    ) -> list[Any]:
        """In this thread where that gives the same; threads do not carry all modes of torch."""
        forwards = [vars(part).get("forward") for part in self.module.modules()]
        meet = any(isinstance(f, BatchNormOverReplicas) and f.meets for f in forwards)
        if len(calls) > 1 and (meet or len(set(devices)) > 1):
            return parallel_apply(calls, devices)
        return [call() for call in calls]

    def _check_home(self, held: Sequence[Tensor], home: torch.device) -> None:
        for tensor in held:
            if tensor.device != home:
                where = ", ".join(map(str, dict.fromkeys(self.devices)))
                raise UsageError(
                    f"{type(self).__name__} over {where}",
                    f"the module has tensors on {tensor.device}; all belong on the first device",
                    f"call module.to('{home}') first",
                )


class BalancedDataParallel(DataParallel):
    """DataParallel in which the first device, where outputs and loss are kept, computes less.

    A drop-in for the class of that name in Link-Li's Balanced-DataParallel (on GitHub). See
    `DataParallel` for what is not said here.

    Args:
        gpu0_bsz: samples of each forward pass on the first device; the others share the rest
            evenly. 0 leaves it the parameters and the outputs alone. With accumulation this is of
            a micro-batch. A last batch that has no more is computed there as a whole.
        module: see `DataParallel`.
        device_ids: see `DataParallel`.
        output_device: see `DataParallel`.
        dim: see `DataParallel`.
        replicas: see `DataParallel`.
        sync_batchnorm: see `DataParallel`.

    Raises:
        SettingError: `gpu0_bsz` is no such number, or 0 with one device; or, at forward, the first
            batches that are trained on have fewer samples, two of one size.
    """

    def __init__(
        self,
        gpu0_bsz: int,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        *,
        replicas: int | None = None,
        sync_batchnorm: bool = True,
    ) -> None:
        whole = hasattr(gpu0_bsz, "__index__") and not isinstance(gpu0_bsz, bool)  # NumPy's too
        if not whole or gpu0_bsz < 0:
            shown = type(gpu0_bsz).__name__ if isinstance(gpu0_bsz, nn.Module) else repr(gpu0_bsz)
            raise SettingError(
                f"gpu0_bsz={shown}",
                "the first device computes a whole number of samples, at least 0",
                "give the samples of one forward pass on the first device",
            )
        super().__init__(
            module, device_ids, output_device, dim, replicas=replicas, sync_batchnorm=sync_batchnorm
        )
        if gpu0_bsz == 0 and self.count == 1:
            raise SettingError(
                "gpu0_bsz=0 with one device",
                "no device is left to compute anything",
                "give more device_ids, or a gpu0_bsz above 0",
            )
        self.gpu0_bsz: int | None = int(gpu0_bsz)
        self._short: int | None = 0

    def set_shares(self, shares: str | Sequence[int] | None) -> None:
        """Divides batches by shares instead of `gpu0_bsz` from the next forward pass on."""
        super().set_shares(shares)
        self.gpu0_bsz = None

    def sizes(self, count: int) -> list[int]:
        """How many of `count` samples each replica computes."""
        if self.gpu0_bsz is None or self.count == 1:
            return super().sizes(count)
        if self.training and torch.is_grad_enabled() and self._short is not None:
            # One that is short may be the last of an epoch, after a resume, or what `"auto"` tries.
            if count == self._short:
                raise SettingError(
                    f"gpu0_bsz={self.gpu0_bsz}",
                    f"the batches that are trained on have {count} samples",
                    "give fewer than a batch has; with accumulation, than a micro-batch has",
                )
            self._short = count if count < self.gpu0_bsz else None
        first = min(self.gpu0_bsz, count)
        return [first, *parts(count - first, (1,) * (self.count - 1))]


def _call(module: nn.Module, args: Any, kwargs: Any, device: torch.device, where: str) -> Any:
    """Runs one replica; `where`, if there is any, is added to what it raises."""
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return module(*args, **kwargs)
    except Exception as error:
        if where:
            error.add_note(f"lockstep: {where}")
        raise


def _devices(
    device_ids: Sequence[int | torch.device] | None, replicas: int | None
) -> tuple[list[torch.device], int]:
    """The GPUs, where they are known, and how many replicas there are."""
    if replicas is not None:
        if device_ids is not None:
            raise SettingError(
                f"device_ids={list(device_ids)}, replicas={replicas}",
                "replicas are several on one device, device_ids are several devices",
                "give one of them",
            )
        check_whole_number(f"replicas={replicas!r}", replicas)
        return [], replicas
    visible = torch.cuda.device_count()
    given: Any = range(visible) if device_ids is None else device_ids
    several = not isinstance(given, int | str | torch.device)
    devices = [_device(device) for device in given] if several else []
    # torch keeps the number in one byte, so that 900 becomes a negative one.
    wrong = [d for d in devices if d.type != "cuda" or d.index not in range(visible)]
    if not several or wrong or len(set(devices)) < len(devices):
        raise SettingError(
            f"device_ids={list(given) if several else given!r}",
            f"they name GPUs, each once, and {visible} are visible here",
            "give a list of numbers below that; replicas=N computes on one device of any kind",
        )
    return devices, max(1, len(devices))


def _output(device: int | torch.device | None) -> torch.device | None:
    if device is None:
        return None
    found = torch.device("cpu") if device == -1 else _device(device)  # -1: as for torch's gather
    if found.type == "cuda" and (found.index or 0) not in range(torch.cuda.device_count()):
        raise SettingError(
            f"output_device={device!r}",
            f"{torch.cuda.device_count()} GPUs are visible here",
            "give a number below that, or leave it out: the first of device_ids",
        )
    return found


def _device(device: int | str | torch.device) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _held(module: nn.Module) -> list[Tensor]:
    """Its parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def count_samples(batch: Any, dim: int, replicas: int) -> int:
    """How many samples a batch has: the size along `dim` of the tensors that are cut.

    0 where there are none to cut. Size 1 beside larger ones is for every sample.

    Raises:
        DataError: there are several replicas, and sizes that differ or a container of samples that
            is no tensor.
    """
    found: set[int] = set()
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            kind = f"{type(leaf).__name__} of layout {leaf.layout}"
            cut = not leaf.is_nested and leaf.layout in (torch.strided, torch.sparse_coo)
        else:
            kind, cut = type(leaf).__name__, isinstance(leaf, nn.Module) or not is_opaque(leaf)
        if not cut and replicas > 1:
            raise DataError(
                f"a {kind} as input of a module on {replicas} devices",
                "it holds samples, but is not a tensor that can be cut",
                "pass tensors, and pack them inside of the module's forward",
            )
        if cut and isinstance(leaf, Tensor) and _has(leaf, dim):
            found.add(leaf.shape[dim])
    counts = sorted(found - {1} or found)
    if len(counts) > 1 and replicas > 1:
        raise DataError(
            f"inputs of a module on {replicas} devices, cut along dimension {dim}",
            f"their sizes there are {', '.join(map(str, counts))}",
            "give all the same size, or size 1 where it is for every sample",
        )
    return counts[0] if counts else 0


def listed(batch: Any, count: int) -> list[str]:
    """Lists and arrays without tensors that have one entry a sample, each in words."""
    if isinstance(batch, np.ndarray):
        return [f"an array of shape {batch.shape}"] if batch.shape[:1] == (count,) else []
    if isinstance(batch, Mapping):
        return [words for value in batch.values() for words in listed(value, count)]
    if not isinstance(batch, list | tuple):
        return []
    if len(batch) == count and all(isinstance(value, str | bytes | int | float) for value in batch):
        return [f"a {type(batch).__name__} of {count}"]
    return [words for value in batch for words in listed(value, count)]


def _has(tensor: Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()


def scatter(batch: Any, dim: int, count: int, begin: int, end: int, device: torch.device) -> Any:
    """The batch of one replica, on its device: of `count` samples those from begin to end."""

    def cut(tensor: Tensor) -> Tensor:
        if end - begin < count and _has(tensor, dim) and tensor.shape[dim] == count:
            cut_at = torch.narrow_copy if tensor.is_sparse else torch.narrow
            tensor = cut_at(tensor, dim, begin, end - begin)
        # To the CPU the next reader would not wait for a copy that does not block.
        return tensor.to(device, non_blocking=device.type == "cuda")

    return map_tensors(batch, cut)


def gather_leaf(
    leaves: list[Any],
    *,
    sizes: Sequence[int],
    dim: int,
    device: torch.device,
    own: Sequence[Mapping[int, int]],
) -> Any:
    """What the replicas returned in one place of their outputs, as one; see `DataParallel`.

    Args:
        leaves: one a replica.
        sizes: how many samples each replica has computed.
        dim: of the samples.
        device: of the result.
        own: the place of each parameter and buffer, by its id, in each replica.

    Raises:
        UsageError: it differs between the replicas and is neither tensor nor mean.
    """
    first = leaves[0]
    mean = all(isinstance(leaf, float) for leaf in leaves) and len(set(leaves)) > 1
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        places = {places.get(id(leaf)) for places, leaf in zip(own, leaves, strict=True)}
        if len(places) == 1 and None not in places:  # one parameter or buffer of the module
            return first.to(device)
        mean = _is_mean(leaves, sizes)
        if not mean and any(_has(leaf, dim) for leaf in leaves):
            return _cat(leaves, dim, device)
        leaves = [leaf.to(device) for leaf in leaves]
    if mean:
        count = sum(sizes)
        return sum(size / count * leaf for size, leaf in zip(sizes, leaves, strict=True))
    if all(_equal(leaf, first) for leaf in leaves):
        return first
    shown = f" of shape {tuple(first.shape)}" if isinstance(first, Tensor) else ""
    raise UsageError(
        f"a {type(first).__name__}{shown} returned by a module on {len(leaves)} devices",
        "it differs between the replicas, and nothing says how to make one of it",
        f"return tensors with one row a sample (along dimension {dim}), or floating-point means",
    )


def _is_mean(leaves: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Each one number, but not one a sample: `loss.mean()`, or `loss.mean().unsqueeze(0)`."""
    shapes = {tuple(leaf.shape) for leaf in leaves}
    number = shapes == {()} or (shapes == {(1,)} and max(sizes) > 1)
    return number and (leaves[0].is_floating_point() or leaves[0].is_complex())


def _cat(leaves: list[Tensor], dim: int, device: torch.device) -> Tensor:
    filled = [leaf for leaf in leaves if leaf.shape != (0,)]  # torch joins these with everything
    beside = {leaf.movedim(dim, 0).shape[1:] if _has(leaf, dim) else None for leaf in filled}
    if len(beside) > 1:
        shown = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
        raise UsageError(
            f"tensors returned by a module on {len(leaves)} devices, joined along dimension {dim}",
            f"they have other shapes beside it: {shown}",
            "return the same shape whatever the samples are: squeeze named dimensions alone, as a "
            "part may be one sample, and pad to a length that does not depend on the part",
        )
    if device.type == "cuda" and all(leaf.is_cuda for leaf in leaves):
        # torch's own writes the parts to their places, without a second copy on the device.
        made: Tensor = gather(leaves, device, dim=dim)
        return made
    return torch.cat([leaf.to(device) for leaf in leaves], dim)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except (TypeError, ValueError, RuntimeError):  # such as an array, which compares item by item
        return False


def _warn_of_lists(replicas: int, batch: Any, count: int) -> None:
    found = listed(batch, count)
    if found:
        warn(
            f"inputs of a module on {replicas} replicas",
            f"{found[0]}, beside tensors of {count} samples: it would go whole to every replica",
            "give what belongs to the samples as tensors; nothing, where it does not",
            code="LS310",
        )


def _warn_of_state(modules: Sequence[nn.Module], before: _Kept) -> None:
    kept = [_kept(module) for module in modules]
    names: dict[str, None] = {}
    for key in dict.fromkeys(chain(*kept)):
        first, *others = [of_one.get(key) for of_one in kept]
        apart = not all(_equal_or_unknown(first, other) for other in others)
        # A list or dictionary that was there before is one for all replicas.
        shared = first is others[0]
        if apart or (shared and first is not before.get(key)):
            names[key[0]] = None
    if names:
        warn(
            f"a module on {len(modules)} replicas that keeps {join_first(list(names), 4)}",
            "each replica makes its own of its samples, and the first one's stays; a list grows "
            "by an entry a replica, and a dictionary keeps the last one's",
            "return what the loss needs from forward, so that it is joined",
            code="LS310",
        )


_Kept = dict[tuple[str, int], Tensor]
"""By the name of an attribute and the place in it."""


def _kept(module: nn.Module) -> _Kept:
    """Buffers, and the terms of a loss in attributes, lists and dictionaries."""
    found: _Kept = {}
    for path, part in module.named_modules():
        if isinstance(part, BatchNorm):  # which has a choice of its own, `sync_batchnorm`
            continue
        prefix = f"{path}." if path else ""
        found |= {(prefix + name, 0): b for name, b in part.named_buffers(recurse=False)}
        for name, value in vars(part).items():
            if name not in PLAIN:
                held = list(value.values()) if isinstance(value, dict) else value
                terms = filter(is_term, held if isinstance(held, list) else [held])
                found |= {(prefix + name, place): term for place, term in enumerate(terms)}
    return found


def is_term(value: Any) -> bool:
    """Whether this is one number with a gradient, as a loss is."""
    return isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad


def _equal_or_unknown(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    # Others cannot be compared, and no statistics are kept in them: a graph, packed weights.
    packed = one.is_quantized or (one.is_floating_point() and one.itemsize == 1)
    if one.layout is not torch.strided or packed:
        return True
    return torch.allclose(one.detach(), other.detach().to(one.device), equal_nan=True)
