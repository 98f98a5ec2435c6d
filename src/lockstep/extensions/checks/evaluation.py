"""Do all ranks evaluate alike, and is what they sum counted once?

Four mistakes give a wrong number and no error, and each is seen where the ranks are together:

- One rank alone goes through a prepared loader, which gives it no more than its part. How often
  each rank has gone through each loader is compared in every collective of Lockstep's, as a part of
  the digest that the ranks exchange anyway, and at the end of the run.
- Every rank goes through all samples of a loader that was not prepared, and what they have counted
  is summed: every sample counts once per rank. That the ranks have read the same samples is known
  by a checksum, which is a part of that digest too.
- Every rank trains on all samples of a dataset that a prepared loader would divide.
- Means of batches are added up, summed over the ranks and divided by the number of batches of one
  rank: see `mean_of_batches`.

Each of them may also be meant, so nothing here is an error.
"""

from __future__ import annotations

import json
import linecache
import math
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.batch.unprepared import ReadPass, UnpreparedLoaders
from lockstep.distributed.process_group import Run, store_at_end
from lockstep.errors import warn
from lockstep.extensions.checks.base import Check
from lockstep.extensions.checks.mean_of_batches import divides_sum_by_length
from lockstep.optim.precision import Precision
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import PreparedModule
from lockstep.user_code import Location, format_source_line, user_call, user_location
from lockstep.wording import format_ranks

MAX_NUMBERS_IN_TENSOR = 64
"""Of a larger tensor that is summed over the ranks, only its own sum is looked at."""


NUMBER_OF_RANKS = re.compile(r"\.size\b(?!\s*\()|world_size")
"""`world.size` in a script, but not `x.size(0)`."""
LINES_AFTER_SUM = 6
"""How far the script is read from a sum on, to see if it divides that by the number of ranks."""


class LoaderPasses(NamedTuple):
    """What one rank has done with a prepared loader since the run began."""

    begun: int
    evaluated: int
    """Passes without training that came to their end."""
    evaluated_at: Location | None
    """The line that began the latest of these."""


def _has_evaluated_more(one: LoaderPasses, others: Sequence[LoaderPasses]) -> bool:
    """Whether a rank has made a pass to the end that another rank has not even begun.

    Passes that are left early are no sign by themselves: a rank may look at the first batch, or
    leave an evaluation before the others do.
    """
    return any(one.evaluated > each.evaluated and one.begun > each.begun for each in others)


class DoubtfulSum(NamedTuple):
    """A sum over the ranks that seems to count every sample once per rank."""

    samples: int
    brought: float
    """By this rank."""
    total: float
    place: Location | None


class EvaluationCheck(Check):
    """Compares passes over loaders, and looks at sums of what unprepared loaders gave."""

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._compared: list[LoaderPasses] = []
        """This rank's passes at the latest comparison that went into details."""
        self._said_alone = False
        self._read: ReadPass | None = None
        """The latest pass over an unprepared loader, until something else is trained or read."""
        self._begun_at_read = 0
        """How many passes over prepared loaders had begun when it ended."""
        self._counts_samples_too = False
        """The number of its samples was summed too: the result is a quotient of two sums."""
        self._doubtful: DoubtfulSum | None = None
        self._said_sum = False
        self._said_training = False
        self._said_mean = False
        self._evaluated_before = 0
        """Evaluations of prepared loaders up to the latest sum of numbers that are no counts."""
        self._sum_of_means: Location | None = None
        """The line of that sum, where an evaluation came before it."""
        self._unprepared: UnpreparedLoaders | None = None
        if run.collectives.single_process:
            return
        run.collectives.get_history = self._history
        run.collectives.get_full_history = self._whole_history
        run.collectives.compare_histories = self._compare
        run.collectives.on_sum = self._look_at_sum
        self._unprepared = UnpreparedLoaders(self._ended_unprepared_pass)

    def before_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Warns where an evaluation before this step, or the samples of this step, are in doubt."""
        if self._read is not None:
            self._forget_read_pass()
        if self._sum_of_means is not None:
            self._look_at_mean()
        if self._unprepared is not None and not self._said_training:
            self._look_at_training(self._unprepared.dataset_in_use)

    # Passes over prepared loaders

    def _passes(self) -> list[LoaderPasses]:
        return [
            LoaderPasses(loader.passes_begun, loader.evaluated, loader.evaluated_at)
            for loader in self.run.loaders
        ]

    def _history(self) -> list[Any]:
        """What is equal on all ranks that evaluate alike."""
        since: list[tuple[int, int]] = []
        if not self._said_alone:
            for number, passes in enumerate(self._passes()):
                begun, evaluated = passes.begun, passes.evaluated
                if number < len(self._compared):
                    begun -= self._compared[number].begun
                    evaluated -= self._compared[number].evaluated
                since.append((begun, evaluated))
        return [since, self._present_read_pass()]

    def _whole_history(self) -> list[Any]:
        """What `_compare` needs of each rank."""
        return [self._passes(), self._present_read_pass()]

    def _compare(self, histories: Sequence[Any]) -> None:
        """Called in a collective before which the ranks did not go on alike, on all of them."""
        self._compared = self._passes()
        reads = [read for _, read in histories]
        if any(read != reads[0] for read in reads):
            # Every rank reads its own, or one rank reads alone: no sample is counted twice.
            self._read = None
        self._compare_passes([passes for passes, _ in histories])

    def _compare_passes(self, ranks: Sequence[Any], *, on_this_rank: bool = False) -> None:
        """Warns where some ranks have evaluated on a loader that others have not iterated."""
        if self._said_alone:
            return
        for of_loader in zip(*ranks, strict=False):
            passes = [LoaderPasses(*each) for each in of_loader]
            alone = [rank for rank, each in enumerate(passes) if _has_evaluated_more(each, passes)]
            if alone:
                self._said_alone = True
                self._warn_of_part(alone, passes[alone[0]].evaluated_at, on_this_rank)
                return

    def _warn_of_part(self, ranks: list[int], place: Any, on_this_rank: bool) -> None:
        at = None if place is None else (str(place[0]), int(place[1]))
        line = "" if at is None else f" ({format_source_line(*at)})"
        warn(
            "evaluating over a prepared loader on some ranks only",
            f"only {format_ranks(ranks)} iterated it{line}; a rank gets no more than its part of "
            "the samples, so the result covers a part",
            "evaluate on all ranks with world.sum, or on one rank with an unprepared DataLoader",
            code="LS501",
            at=at,
            on_this_rank=on_this_rank,
        )

    def close(self, failed: bool) -> None:
        """Compares once more: what came after the last collective. The last rank to come does it.

        Nobody waits: a rank may evaluate for an hour while the others have ended.
        """
        if self._unprepared is None:
            return
        self._unprepared.release()
        if failed or self.run.joined is None:
            return
        self._forget_read_pass()
        self._look_at_mean()
        topology = self.run.topology
        texts: list[bytes] = []
        with store_at_end(self.run.joined) as store:
            store.set(f"passes/{topology.rank}", json.dumps(self._passes()))
            if store.add("passes", 1) == topology.size:
                texts += [store.get(f"passes/{rank}") for rank in range(topology.size)]
        if texts:
            self._compare_passes([json.loads(text) for text in texts], on_this_rank=True)

    # Passes over loaders that were not prepared

    def _ended_unprepared_pass(self, read: ReadPass) -> None:
        self._forget_read_pass()
        self._read = read
        self._begun_at_read = self._passes_begun()

    def _forget_read_pass(self) -> None:
        """Another thing is done now; warns of a sum that nothing has explained meanwhile."""
        doubtful = self._doubtful
        self._read = None
        self._doubtful = None
        self._counts_samples_too = False
        if doubtful is None or self._said_sum:
            return
        self._said_sum = True
        size = self.run.collectives.data_parallel.size
        warn(
            "world.sum of what every rank computed over an unprepared DataLoader",
            f"every rank went through the same {doubtful.samples} samples; this rank brought "
            f"{doubtful.brought:g}, and the sum {doubtful.total:g} counts each sample {size} times",
            "prepare the loader (test = world.prepare(test)), so that each rank gets its part; or "
            "leave world.sum out where every rank evaluates them all",
            code="LS501",
            at=doubtful.place,
        )

    def _passes_begun(self) -> int:
        return sum(loader.passes_begun for loader in self.run.loaders)

    def _present_read_pass(self) -> ReadPass | None:
        """The latest pass over an unprepared loader, where no other loader was read after it."""
        if self._read is not None and self._begun_at_read != self._passes_begun():
            self._forget_read_pass()
        return self._read

    def _look_at_sum(self, brought: Sequence[Any], totals: Sequence[Any]) -> None:
        """A sum over the ranks, which have all read the same samples if `_read` is set."""
        self._look_for_means(brought)
        read = self._read
        size = self.run.collectives.data_parallel.size
        if read is None or size == 1 or self._said_sum or user_call() != "world.sum()":
            return
        for mine, total in zip(_numbers(brought), _numbers(totals), strict=True):
            if read.samples in (mine, total):
                self._counts_samples_too = True
                self._doubtful = None
            if self._counts_samples_too or self._doubtful is not None:
                continue
            place = user_location()
            if counts_repeatedly(mine, total, size, read.samples) and not _sees_size(place):
                self._doubtful = DoubtfulSum(read.samples, mine, total, place)

    # Means of batches

    def _look_for_means(self, brought: Sequence[Any]) -> None:
        """Remembers the line of a sum that may be one of means, after an evaluation."""
        evaluated = sum(loader.evaluated for loader in self.run.loaders)
        if self._said_mean or evaluated == self._evaluated_before:
            return
        if all(number == int(number) for number in _numbers(brought)):
            return
        if user_call() == "world.sum()":
            self._look_at_mean()
            self._evaluated_before = evaluated
            self._sum_of_means = user_location()

    def _look_at_mean(self) -> None:
        """Reads in the script if the latest such sum was divided by the length of a loader."""
        place, self._sum_of_means = self._sum_of_means, None
        size = self.run.collectives.data_parallel.size
        if place is None or self._said_mean or size == 1 or not self.run.topology.is_main:
            return
        file, line = place
        for loader in self.run.loaders:
            asked_at = loader.length_asked_at
            if asked_at is None or asked_at[0] != file:
                continue
            source = "".join(linecache.getlines(file))
            if not divides_sum_by_length(source, line, asked_at[1]):
                continue
            self._said_mean = True
            warn(
                "world.sum over all ranks, divided by len(loader)",
                f"len(loader) is {len(loader)}, the number of batches that one rank gets, and "
                f"{size} ranks have added theirs: a mean over batches comes out {size} times too "
                "large",
                "add up what counts for each sample, total += loss.item() * len(x), and divide "
                "world.sum(total) by the number of samples",
                code="LS501",
                at=place,
            )
            return

    def _look_at_training(self, dataset: Any) -> None:
        """A loss is trained on while an unprepared loader is being read."""
        if dataset is None or self.run.step.in_training_loop:
            return
        if self.run.collectives.data_parallel.size == 1:  # all ranks compute the same samples
            return
        if not any(loader.dataset is dataset for loader in self.run.loaders):
            return
        self._said_training = True
        warn(
            "training over an unprepared DataLoader",
            "its dataset is that of a prepared loader, but here every rank goes through all of it, "
            "and does not get its part of each global batch",
            "iterate what world.prepare returned: model, optimizer, train = "
            "world.prepare(model, optimizer, train)",
            code="LS110",
        )


def counts_repeatedly(brought: float, total: float, size: int, samples: int) -> bool:
    """Whether a sum over ranks that have read the same samples seems to repeat each rank's result.

    Args:
        brought: by this rank; 0 and 1 may be a vote.
        total: over the ranks.
        size: the number of ranks.
        samples: that every rank has read.
    """
    if brought in (0, 1):
        return False
    if math.isclose(total, size * brought, rel_tol=1e-6):
        return True
    is_count = brought == int(brought) and brought > 1
    return is_count and total > samples


def _sees_size(place: Location | None) -> bool:
    """Whether a line of the script, or one near it, seems to divide by the number of ranks."""
    if place is None:
        return True  # it is not known
    file, line = place
    return any(
        NUMBER_OF_RANKS.search(linecache.getline(file, number))
        for number in range(line, line + LINES_AFTER_SUM)
    )


def _numbers(leaves: Sequence[Any]) -> list[float]:
    """The finite numbers in the leaves of a nest; of a large tensor its sum."""
    found: list[float] = []
    for leaf in leaves:
        values = [leaf]
        if isinstance(leaf, Tensor):
            if leaf.is_complex():
                continue
            small = leaf.numel() <= MAX_NUMBERS_IN_TENSOR
            values = leaf.flatten().tolist() if small else [leaf.sum().item()]
        found += [value if math.isfinite(value) else 0.0 for value in values]
    return found
