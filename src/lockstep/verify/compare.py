"""What a training did, update by update on every rank, and where two trainings part first.

An update is one step of one optimizer. All values are plain: numbers, text and numpy arrays. The
first training is the reference, on one process. Values are compared per update, in the order in
which they follow from each other: initial parameters, samples, loss and gradients, learning rates,
parameters, buffers. Pure: values go in, a `Divergence` comes out.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
LARGEST, SIZE = 1, 2
"""Places of the largest absolute value and of the size in what is recorded of `state`."""
Place = tuple[str, int, int]
"""Of a test: its file, its line, and the last one of what it decides."""


@dataclass(kw_only=True)
class Taken:
    """A batch that a training loop was handed."""

    loader: int = 0
    """Which of the script's loaders, in the order of their first use."""
    epoch: int = 0
    ids: Sequence[int] | None = None
    """Indices in the dataset; None: nobody knows them, as of a stream."""
    contents: Sequence[str] = ()
    """Of each sample the digests of its tensors, with a dot between them; empty where the batch
    could not be taken apart."""
    shape: str = ""
    """Of the samples; digests are comparable where it is the same."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """What the batch may weigh: its samples, and what is not padding in each of its tensors."""
    drawn: Mapping[str, str] = field(default_factory=dict)
    """What was drawn from in this process while it was read, in words, and a digest of it."""
    workers: bool = False
    """Other processes read it, whose draws are not seen."""
    iterable: bool = False
    """It is of an IterableDataset."""
    order_fixed: bool = False
    """A DistributedSampler dealt it out that shuffles, and has not been told any epoch."""


@dataclass(kw_only=True)
class ScriptCall:
    """A call of the script's that matters for the gradients."""

    name: str
    line: str
    of_graph: bool = False
    """Its input carries a gradient."""
    of_model: bool = False
    """Its input is made of what a model returned to be trained, even if detached."""
    gradient_of: str = ""
    """The parameter whose gradient its input is."""
    changed: bool = False
    """That is no longer what the backward passes left."""
    passes: int = 0
    """How many backward passes of the update came before it."""
    acts: bool = False
    """It has clipped something."""
    in_function: bool = False
    """It was made in the forward pass of a function that has a backward pass of its own."""
    in_step: bool = False
    """An optimizer made it while it stepped."""
    value: float | None = None
    """What a scheduler was to follow."""


@dataclass(kw_only=True)
class Forward:
    """A training forward pass, sample by sample: two numbers that change with what each one has.

    Arrays have shape (samples, 2); empty: there is no row for each sample.
    """

    model: str
    """Its class, and which pass since the last backward pass it was."""
    shape: str
    """Of a sample; those of one shape can be compared."""
    inputs: Array
    """Of its first tensor."""
    beside: Array
    """Of its others, such as a hidden state."""
    outputs: Array = field(default_factory=lambda: np.zeros((0, 2)))
    slopes: Array = field(default_factory=lambda: np.zeros((0, 2)))
    """The loss by the outputs."""
    values: Array = field(default_factory=lambda: np.zeros((0, 0)))
    """The inputs themselves, one row a sample, where they are few."""
    targets: Array = field(default_factory=lambda: np.zeros((0, 2)))
    """What torch's loss functions were given for them."""
    fits: bool = True
    """The outputs, or all inputs, have as many rows, so that each row is a sample."""


@dataclass(kw_only=True)
class RankUpdate:
    """An update on one rank, which is filled in while it comes about."""

    optimizer: int = 0
    """Which of the script's optimizers, in the order of their first steps."""
    kind: str = ""
    """The optimizer's class."""
    step: int = 0
    """Which of its steps, from 0."""
    stepped: bool = True
    """False: no optimizer of this rank stepped. It had joined (`Join`), has no optimizer, or leaves
    the steps of this one to others; values of the step itself are not known then."""
    built: int = -1
    """Which of the optimizers of this rank, in the order in which they were built; -1: unknown."""
    holds: Sequence[str] = ()
    """Names of the parameters of the optimizer, in its order."""
    unstepped: Mapping[tuple[int, int], Array] = field(default_factory=dict)
    """Sums over parameters that no known model has, of optimizers that have not stepped on this
    rank, before the first forward pass; by the number of the optimizer (`built`), and the place of
    the parameter in it."""
    dtype: str = "torch.float64"
    """The one of the lowest precision that the loss and gradients have been in so far."""
    rates: Sequence[float] = ()
    """The learning rate of each parameter group."""
    rate_lines: Sequence[str] = ()
    """Where each of them was set last; empty where that is not known."""
    taken: list[Taken] = field(default_factory=list)
    """What was handed out since the update before."""
    losses: list[float] = field(default_factory=list)
    """What backward passes were made of, weighted, since the update before."""
    counts: bool = True
    """Whether this rank's losses count: under a pipeline those of the other ranks do not."""
    calls: list[ScriptCall] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    """Of what was taken over samples and turned into a number before the loss, by line."""
    streams: dict[str, str] = field(default_factory=dict)
    """What was drawn from for this step, before the loss, besides torch's stream: a digest."""
    draws: list[tuple[str, str]] = field(default_factory=list)
    """Random numbers that the loss is made of, drawn for this step: the line, and a digest. Of
    several draws that a loss is made of it is the last."""
    drawn: frozenset[str] = frozenset()
    """Digests of all random numbers that were drawn for this step, before the loss."""
    inputs: list[Taken] = field(default_factory=list)
    """What the first model of each backward pass was called with."""
    forwards: list[Forward] = field(default_factory=list)
    """Of all models, up to the last backward pass."""
    weighed: list[dict[str, float]] = field(default_factory=list)
    """Of each loss what it may have been divided by, in words."""
    loss_options: dict[str, Array] = field(default_factory=dict)
    """What torch's loss functions were given besides outputs and targets, with their line."""
    comm_hook: str = ""
    """The line of a communication hook that the script gave DDP."""
    couples: str = ""
    """A model in which the output of a sample follows from others of its batch."""
    options: Sequence[Mapping[str, Any]] = ()
    """The numbers of each parameter group but for its learning rate."""
    gradient_draw: str = ""
    """The line of random numbers that gradients are made of."""
    state: Mapping[str, Array] = field(default_factory=dict)
    """Of what the optimizer kept before the update: a sum, the largest value, and the size."""
    attributes: Mapping[str, Array] = field(default_factory=dict)
    """Sums over, and sizes of, tensors of modules that are neither parameters nor buffers."""
    entered: Mapping[str, Array] = field(default_factory=dict)
    """The same before the first forward pass."""
    terms: list[list[float]] = field(default_factory=list)
    """What each of the losses was added up from, as far as that was seen."""
    loss_line: str = ""
    """Of the last backward pass."""
    gathered: str = ""
    """The line of an all-gather whose result the loss was made of, without its gradient."""
    detached: str = ""
    """The same of what was detached before; the loss may be meant not to follow it."""
    compares: bool = False
    """The loss compares samples: what one's output should become depends on another's output."""
    averaged_over: Sequence[int] = ()
    """The ranks of a DDP's group, where these are not all."""
    bare: Sequence[str] = ()
    """Parameters to train of models that are neither wrapped nor prepared."""
    bare_line: str = ""
    """Of a training forward pass of such a model."""
    past_wrapper: str = ""
    """The line of a training forward pass around DDP; empty: there was none."""
    wrapped_passes: int = 0
    """Training forward passes through DDP."""
    hook_line: str = ""
    """Of a hook of the script that has changed a parameter's gradient in a backward pass."""
    unprepared: bool = False
    """Lockstep prepared the model, and not this optimizer of its parameters."""
    not_averaged: Sequence[str] = ()
    """Parameters to train that DDP does not know."""
    statistics: list[str] = field(default_factory=list)
    """BatchNorm layers that took statistics of what this rank alone has."""
    frozen: Sequence[str] = ()
    """Parameters that are not to be trained."""
    evaluating: Sequence[str] = ()
    """Parameters of modules that were trained in evaluation mode."""
    initial: Mapping[str, Array] = field(default_factory=dict)
    """Parameters before the first update; empty at later ones."""
    held: Mapping[str, Array] = field(default_factory=dict)
    """Sums over each parameter before the update, of those that are whole on this rank."""
    gradients: Mapping[str, Array] = field(default_factory=dict)
    """As the optimizer found them."""
    reduced: Mapping[str, Array] = field(default_factory=dict)
    """Gradients as the optimizer's own collectives left them, which it called while it stepped."""
    unclipped: Mapping[str, Array] = field(default_factory=dict)
    """The same before the script clipped them, once its backward passes were over."""
    local: list[dict[str, Any]] = field(default_factory=list)
    """As each backward pass of this rank left them, before they were averaged; may be empty."""
    parameters: Mapping[str, Array] = field(default_factory=dict)
    """After the update: those that the optimizer holds."""
    begun: bool = False
    """A training forward pass came before it, and after the update before."""
    batch_statistics: dict[str, float] = field(default_factory=dict)
    """What the loss is made of besides: by line, a number of what was taken over samples."""
    carried: str = ""
    """The line of an earlier step's forward pass of whose outputs the loss is made too."""
    own_passes: list[bool] = field(default_factory=list)
    """Of each backward pass, whether it left gradients that are this rank's own alone."""
    factor: float = 1.0
    """What all gradients were multiplied by after the last of them; NaN: by no one number."""
    shifted: Mapping[str, Array] = field(default_factory=dict)
    """Sums over parameters that were changed between these passes."""
    rewritten: Mapping[str, Array] = field(default_factory=dict)
    """Parameters that were no longer what the last update had left when that pass began."""
    buffers: Mapping[str, Array] = field(default_factory=dict)
    """After the update."""
    written: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    """The user's frames, file and line, in which a parameter or buffer was last written to since
    the update before."""
    ways: Mapping[Place, int] = field(default_factory=dict)
    """Outcomes of the tests in the user's files since then: 1 true, 2 false, 3 both."""
    seeds: dict[str, int] = field(default_factory=dict)
    """What torch was seeded with before the first update, by line."""


Sample = tuple[int, int, int | str]
"""Loader, epoch, and the index or a digest of the content."""


class Update(tuple[RankUpdate, ...]):
    """One update on all ranks."""

    __slots__ = ()

    def first(self, what: str) -> str:
        """A line that some rank knows; empty: none does."""
        return next(filter(None, (getattr(rank, what) for rank in self)), "")

    def merged(self, what: str) -> dict[str, Any]:
        """The arrays of all ranks, by name; of what several have, that of the lowest rank."""
        found: dict[str, Any] = {}
        for rank in reversed(self):
            found.update(getattr(rank, what))
        return found

    @property
    def calls(self) -> list[ScriptCall]:
        """Of all ranks."""
        return [call for rank in self for call in rank.calls]

    @property
    def clips(self) -> list[ScriptCall]:
        """Those that clip gradients."""
        return [call for call in self.calls if call.name == "clip"]

    @property
    def in_step(self) -> list[ScriptCall]:
        """Collectives that an optimizer called while it stepped."""
        return [call for call in self.calls if call.in_step]

    @property
    def losses(self) -> list[float]:
        """Of each rank that has any, the sum of its losses."""
        return [sum(rank.losses) for rank in self if rank.counts and rank.losses]

    @property
    def loss(self) -> float | None:
        """The mean over ranks of the sums of their losses; None: no rank had one."""
        sums = self.losses
        return sum(sums) / len(sums) if sums else None

    @property
    def backward_passes(self) -> int:
        """On the rank that made the most."""
        return max((len(rank.losses) for rank in self), default=0)

    @property
    def batches(self) -> list[Taken]:
        """All that were taken, in the order of ranks."""
        return [taken for rank in self if rank.counts for taken in rank.taken]

    @property
    def samples(self) -> int:
        """How many it is made of.

        Of batches that no loader gave, a rank may have computed each several times.
        """
        return sum(
            _count_of(rank.taken, of_models=rank.taken == rank.inputs)
            for rank in self
            if rank.counts
        )

    def indices(self) -> list[Sample] | None:
        """All samples in the order of ranks; None: some have no known index."""
        batches = self.batches
        if any(t.ids is None for t in batches):
            return None
        return [(t.loader, t.epoch, index) for t in batches for index in t.ids or ()]

    def contents(self) -> list[Sample] | None:
        """The same by their content; None: it cannot be told, or is drawn anew by every process."""
        batches = self.batches
        if any(t.drawn or (t.ids is not None and len(t.ids) != len(t.contents)) for t in batches):
            return None
        return [(t.loader, t.epoch, digest) for t in batches for digest in t.contents]

    def ranks_that_differ(self, what: str, tolerance: Tolerance) -> dict[str, list[int]]:
        """By name, the ranks whose array is not that of the first rank that has it."""
        first, scale = self.merged(what), max(scale_of(getattr(rank, what)) for rank in self)
        found: dict[str, list[int]] = defaultdict(list)
        for number, rank in enumerate(self):
            for name, array in getattr(rank, what).items():
                if tolerance.differ(first[name], array, scale):
                    found[name].append(number)
        return found

    def replicas_that_differ(self) -> dict[str, list[int]]:
        """By name, the ranks that held another parameter before the update than rank 0.

        Replicas are the same in any precision, so none of their bits is passed over.
        """
        return self.ranks_that_differ("held", FLOAT64)


def _count_of(batches: Sequence[Taken], *, of_models: bool) -> int:
    if of_models and all(batch.contents for batch in batches):
        counts = [Counter(batch.contents) for batch in batches]
        most: Counter[str] = Counter()
        for each in counts:
            most |= each  # the same samples in another pass are not counted again
        return most.total()
    return sum(len(batch.ids or batch.contents) for batch in batches)


def scale_of(arrays: Mapping[str, Array]) -> float:
    """The largest absolute value of all."""
    return max(map(largest, arrays.values()), default=0.0)


def largest(array: Array) -> float:
    """Its largest finite absolute value; 0 where it has none."""
    finite = array[np.isfinite(array)]
    return float(np.abs(finite).max()) if finite.size else 0.0


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What counts as equal: `|a - b| <= relative * max|tensor| + absolute * max|all tensors|`."""

    relative: float = 1e-9
    absolute: float = 1e-12
    dtype: str = "float64"
    """For what has been computed in this, or in one of higher precision."""

    def differ(self, a: Array, b: Array, scale: float) -> bool:
        """Whether two arrays are not equal.

        Args:
            a: one.
            b: the other.
            scale: the largest absolute value of all tensors of the kind.
        """
        return self.used(a, b, scale) > 1

    def used(self, a: Array, b: Array, scale: float) -> float:
        """The part of what is allowed that a difference takes up; above 1 it is one.

        What is infinite or NaN on both sides is no difference.
        """
        if a.shape != b.shape:
            return math.inf
        other = ~((a == b) | (np.isnan(a) & np.isnan(b)))
        with np.errstate(over="ignore"):
            rest = a[other].astype(np.complex128) - b[other]
        if not np.isfinite(rest).all():
            return math.inf
        most = self.relative * max(largest(a), largest(b)) + self.absolute * scale
        return largest(rest) / most if rest.size else 0.0


FLOAT64 = Tolerance()
FLOAT32 = Tolerance(relative=1e-3, absolute=1e-5, dtype="float32")
FLOAT16 = Tolerance(relative=1e-1, absolute=1e-2, dtype="16 bits or fewer")
_PRECISIONS = {"torch.float64": FLOAT64, "torch.float32": FLOAT32}
"""What is not here has 16 bits or fewer."""


def tolerance_of(*runs: Sequence[Update]) -> Tolerance:
    """What the lowest precision of several trainings allows."""
    dtypes = {rank.dtype for updates in runs for update in updates[-1:] for rank in update}
    found = (_PRECISIONS.get(dtype, FLOAT16) for dtype in dtypes)
    return max(found, key=lambda tolerance: tolerance.relative, default=FLOAT64)


@dataclass(frozen=True)
class Divergence:
    """A place where two trainings differ, with all that may explain it."""

    reference: Sequence[Update]
    other: Sequence[Update]
    tolerance: Tolerance
    update: int
    """Which update, from 0; what is compared before it counts as of update 0."""
    what: str
    """`initial`, `replicas`, `samples`, `contents`, `kept`, `unclipped`, `gradients`, `loss`,
    `rates`, `parameters`, `buffers` or `length`."""
    names: tuple[str, ...] = ()
    """Of the tensors that differ."""
    of: int = 0
    """How many were compared."""

    @property
    def one(self) -> Update:
        """The reference's update in which they part."""
        return self.reference[self.update]

    @property
    def many(self) -> Update:
        """The other's."""
        return self.other[self.update]

    @property
    def size(self) -> int:
        """Processes of the other; 0: none of them made a step together with the others."""
        return len(self.other[0]) if self.other else 0

    @property
    def exact(self) -> float:
        """The largest remainder, against a gradient itself, that counts as none."""
        return max(1e-7, 10 * self.tolerance.relative)


def comparable(reference: Sequence[Update], other: Sequence[Update], tolerance: Tolerance) -> int:
    """How many updates can be compared, before rounding has grown to more than is allowed.

    A fault shows at once; what was nearly as large in the step before has grown.
    """
    before, whole = 0.0, max(len(reference), len(other))
    for number, (one, many) in enumerate(zip(reference, other, strict=False)):
        most = 0.0
        for what in ("gradients", "parameters", "buffers"):
            expected, found = one.merged(what), many.merged(what)
            both = [(array, found[name]) for name, array in expected.items() if name in found]
            scale = scale_of(expected)
            most = max([most, *(tolerance.used(*pair, scale) for pair in both)])
        if not most <= 1:
            return number if before > _GROWING else whole
        before = most
    return whole


_GROWING = 1e-2
"""Of what is allowed: so large a difference comes from rounding that grows from step to step."""
_VALUES = {"replicas", "kept", "unclipped", "gradients", "loss", "parameters", "buffers"}
"""What follows from what was trained before."""
_FOLLOWS = {
    "initial": _VALUES,
    "replicas": _VALUES,
    "samples": _VALUES | {"contents", "length"},
    "contents": _VALUES,
    "kept": _VALUES,
    "unclipped": {"gradients", "loss", "parameters", "buffers"},
    "gradients": {"loss", "parameters", "buffers"},
    "loss": {"loss"},
    "rates": {"parameters"},
}
"""What is no finding of its own in the update in which this differs."""


def divergences(
    reference: Sequence[Update], other: Sequence[Update], tolerance: Tolerance
) -> list[Divergence]:
    """Where `other` is not what `reference` is, in order; no kind twice, and none that follows.

    Samples and learning rates do not depend on what was trained before, so they are compared
    further; values are not, once something that they follow from has differed.
    """
    found: dict[str, Divergence] = {}
    follow: set[str] = set()
    for number, (one, many) in enumerate(zip(reference, other, strict=False)):
        for what, names, of in _differences(one, many, tolerance):
            if what not in found and what not in follow:
                names = tuple(names)
                found[what] = Divergence(reference, other, tolerance, number, what, names, of)
                follow |= _FOLLOWS.get(what, set())
        if found.keys() - {"loss"}:
            follow |= _VALUES
    if len(reference) != len(other) and "length" not in follow:
        shorter = min(len(reference), len(other))
        found["length"] = Divergence(reference, other, tolerance, shorter, "length")
    return list(found.values())


def _differences(
    one: Update, many: Update, tolerance: Tolerance
) -> Iterator[tuple[str, Iterable[str], int]]:
    """What differs in an update, the names of it, and how many were compared: causes first."""
    yield from of_tensors("initial", one, many, tolerance)
    parted = many.replicas_that_differ()
    if parted:
        yield "replicas", parted, len(many.merged("held"))
    by_index, by_content = same_samples(one, many)
    same = by_index if by_content is None else by_content
    if same is False and by_index is not True:
        yield "samples", (), one.samples
    if by_index and by_content is not True and contents_that_differ(one, many):
        yield "contents", (), 0
    held, found = one.merged("held"), many.merged("held")
    scale = scale_of(held)
    kept = [n for n in held if n in found and tolerance.differ(held[n], found[n], scale)]
    if kept:
        yield "kept", kept, len(held)
    # What each rank clips alone is judged by what is made of it.
    if (one.clips or many.clips) and not many.ranks_that_differ("unclipped", tolerance):
        yield from of_tensors("unclipped", one, many, tolerance)
    yield from of_tensors("gradients", one, many, tolerance)
    if _losses_differ(one, many, tolerance):
        yield "loss", (), 0
    if rates_differ(one, many, tolerance):
        yield "rates", (), 0
    yield from of_tensors("parameters", one, many, tolerance)
    yield from of_tensors("buffers", one, many, tolerance)


def of_tensors(
    what: str, one: Update, many: Update, tolerance: Tolerance
) -> Iterator[tuple[str, Iterable[str], int]]:
    """The arrays of a kind that are not the reference's on some rank, if any."""
    expected, found = one.merged(what), many.merged(what)
    scale = scale_of(expected)
    wrong = expected.keys() ^ found.keys()
    for rank in many:
        for name, array in getattr(rank, what).items():
            if name in expected and tolerance.differ(expected[name], array, scale):
                wrong.add(name)
    names = [*expected, *sorted(found.keys() - expected.keys())]
    if wrong:
        yield what, [name for name in names if name in wrong], len(names)


def _losses_differ(one: Update, many: Update, tolerance: Tolerance) -> bool:
    a, each = one.loss, many.losses
    if a is None or not each:
        return False
    # A script that averages or adds up gradients itself has losses that mean the one or the other.
    return all(
        tolerance.differ(np.array(a), np.array(b), max(1.0, abs(a)))
        for b in (sum(each) / len(each), sum(each))
    )


def rates_differ(one: Update, many: Update, tolerance: Tolerance) -> bool:
    """Whether some rank's learning rates are not those of the reference."""
    rates, within = one[0].rates, tolerance.relative
    return not all(
        len(rank.rates) == len(rates) and np.allclose(rates, rank.rates, rtol=within, atol=0)
        for rank in many
        if rank.stepped
    )


def same_samples(one: Update, many: Update) -> tuple[bool | None, bool | None]:
    """Whether the indices are the same, and whether the contents are; None: it is not known.

    Contents are comparable where all samples have one shape: batches that are padded to their
    longest have several. Indices of datasets that are not the same on all ranks mean nothing where
    the contents are known.
    """
    shapes = {batch.shape for batch in Update((*one, *many)).batches if batch.contents}
    by_content = _same_counts(one.contents(), many.contents()) if len(shapes) == 1 else None
    return _same_counts(one.indices(), many.indices()), by_content


def _same_counts(one: list[Sample] | None, many: list[Sample] | None) -> bool | None:
    return None if one is None or many is None else Counter(one) == Counter(many)


def contents_that_differ(one: Update, many: Sequence[RankUpdate]) -> list[int]:
    """Samples that have an index, and other content than the reference's under it.

    Only where the samples have one shape: batches padded to their longest have several.
    """
    expected, found = _contents(one), _contents(many)
    return [key[-1] for key in found if key in expected and found[key] != expected[key]]


def _contents(update: Sequence[RankUpdate]) -> Mapping[tuple[int, int, str, int], set[str]]:
    """By loader, epoch, shape and index."""
    found: dict[tuple[int, int, str, int], set[str]] = defaultdict(set)
    for batch in (batch for rank in update for batch in rank.taken):
        if batch.ids is not None and len(batch.ids) == len(batch.contents):
            for sample, digest in zip(batch.ids, batch.contents, strict=True):
                found[batch.loader, batch.epoch, batch.shape, sample].add(digest)
    return found


def constant_ratio(
    reference: Mapping[str, Array], found: Mapping[str, Array], exact: float = 1e-7
) -> float | None:
    """`c` where all of `found` is `c` times the reference; None: there is no such number.

    Args:
        reference: tensors.
        found: others of these names.
        exact: the largest remainder, against `found` itself, that counts as none.
    """
    a, b = flat(reference), flat(found)
    square = float(a @ a) if a.shape == b.shape else 0.0
    if square == 0.0:
        return None
    ratio = float(a @ b) / square
    return ratio if norm(b - ratio * a) <= exact * norm(b) and ratio != 0.0 else None


def weights(
    target: Mapping[str, Array], parts: Sequence[Mapping[str, Array]], exact: float = 1e-7
) -> tuple[float, ...] | None:
    """The numbers by which `parts` are multiplied in a sum that is `target`.

    Args:
        target: a gradient.
        parts: what each backward pass left; a tensor that one lacks counts as zero.
        exact: the largest remainder.

    Returns:
        One number a part; None where there is no such sum, or it could be one by chance.
    """
    goal = flat(target)
    if not parts or goal.size < 4 * len(parts):
        return None
    zeros = {name: np.zeros_like(array) for name, array in target.items()}
    columns = np.stack([flat({n: part.get(n, zeros[n]) for n in target}) for part in parts], axis=1)
    scale = np.linalg.norm(columns, axis=0)
    used = scale > 0
    if not used.any():
        return None
    # Scaled: parts may be of very different sizes, and the rank is judged against the largest.
    scaled = columns[:, used] / scale[used]
    solution, _, rank, _ = np.linalg.lstsq(scaled, goal, rcond=1e-10)
    if rank < used.sum() or norm(goal - scaled @ solution) > exact * norm(goal):
        return None
    result = np.zeros(len(parts))
    result[used] = solution / scale[used]
    return tuple(result.tolist())


def proportional(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two lists of numbers are multiples of each other."""
    return constant_ratio({"": np.array(one)}, {"": np.array(other)}, 1e-5) is not None


def mean_of(ranks: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Of the arrays of several ranks, by name; what a rank lacks counts as zero."""
    names = dict.fromkeys(name for own in ranks for name in own)
    return {n: np.asarray(sum(own[n] for own in ranks if n in own)) / len(ranks) for n in names}


def near(one: float, other: float, exact: float = 1e-6) -> bool:
    """Equal but for rounding."""
    return math.isclose(one, other, rel_tol=exact)


def flat(arrays: Mapping[str, Array]) -> Array:
    """All values in one row."""
    return np.concatenate([np.zeros(0), *(a.ravel().astype(np.float64) for a in arrays.values())])


def norm(values: Array) -> float:
    """The Euclidean one."""
    return float(np.linalg.norm(values))
