"""Runs a script in each requested configuration, and compares every run with a run on one process.

A *way* is one such configuration, for example "2 processes". A script that uses Lockstep is first
compared *by bits*: all runs use virtual ranks and the script's own precision, and not a single bit
may differ. Then it is compared *within a tolerance*, in float64 and without virtual ranks (unless
the script sets some). This shows whether the parts of a batch add up to the whole batch, and why
bits differ. Scripts without Lockstep are only compared within the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from lockstep.batch.plan import part_sizes
from lockstep.batch.shares import initial_shares
from lockstep.errors import LockstepError, SettingError, UsageError
from lockstep.language import translate
from lockstep.verify import run_record
from lockstep.verify.bit_verdict import BitVerdict, judge_bits, reason_bits_not_comparable
from lockstep.verify.comparison_plan import ComparisonPlan
from lockstep.verify.finding import Finding, labelled
from lockstep.verify.rounding_noise import find_rounding_noise, may_have_noise
from lockstep.verify.run_config import RunConfig
from lockstep.verify.run_record import RunRecord
from lockstep.verify.verdict import Verdict, judge

# With --same-samples, the run on several processes comes first and has no time limit.
DEFAULT_STEPS_WITH_SAME_SAMPLES = 10

Start = Callable[[Path, RunConfig], str]


@dataclass(frozen=True)
class Result:
    """The result of one comparison."""

    verdict: Verdict | BitVerdict
    # Lines that are printed after the verdict.
    notes: Sequence[str] = ()


class _BitComparison(NamedTuple):
    """The result of comparing one way by bits: either a verdict, or the reason for having none."""

    verdict: BitVerdict | None
    # Why the way cannot be compared by bits; empty if there is a verdict.
    reason_without_verdict: str


class Comparison:
    """Runs a script, or a function, and compares the runs.

    Args:
        plan: the runs to compare, and how.
        folder: folder for the records of the runs.
        start: function that starts the processes of a run and returns what they printed.
        check_reference: function that raises UsageError if a run on one process gives nothing to
            compare with.
        expect_runs: function that is called with the number of additional runs, if there will be
            more than expected.
    """

    def __init__(
        self,
        plan: ComparisonPlan,
        folder: Path,
        start: Start,
        check_reference: Callable[[RunRecord], None],
        expect_runs: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._start = start
        self._check_reference = check_reference
        self._expect_runs = expect_runs
        self._num_runs = 0
        self._reference: RunRecord | None = None
        """The run on one process for comparisons within the tolerance; None until it has run."""
        self._bit_reference: RunRecord | None = None
        """The run on one process for comparisons by bits; None if bits cannot be compared."""
        self._has_looked_for_noise = False
        self.reason_without_bits = ""
        """Why the script, or one way of running it, is not compared by bits; empty if it is."""

    def results(self) -> Iterator[Result]:
        """Runs all comparisons, and yields their results one by one.

        Raises:
            UsageError: There is nothing to compare with.
            SettingError: The script has fewer virtual ranks than there are processes.
        """
        plan = self._plan
        if plan.same_samples:
            # Only one way is compared: its batches are those that one process trains on.
            yield Result(self._compare_with_same_samples(plan.ways[0]))
            return

        if plan.by_bits and self._uses_lockstep():
            self._record_bit_reference()

        for way in plan.ways:
            bit_verdict = self._bit_verdict(way)
            if bit_verdict is None:  # bits are not compared
                yield self._result_within_tolerance(way)
            else:
                yield from self._results_with_bits(bit_verdict, way)

    def _bit_verdict(self, way: RunConfig) -> BitVerdict | None:
        """Compares one way by bits; None if that is not possible, or not wanted.

        If the script does not support virtual ranks in this way, or on one process,
        `reason_without_bits` says so.
        """
        if self._bit_reference is None:
            return None
        bit_verdict, self.reason_without_bits = self._compare_bits(self._bit_reference, way)
        return bit_verdict

    def _result_within_tolerance(self, way: RunConfig) -> Result:
        """Compares one way within the tolerance, and says why bits were not compared.

        This is a note for the user of a script with Lockstep. Other scripts are never compared by
        bits, so they get no note.
        """
        verdict = self._compare_within_tolerance(way)
        notes = []
        reason_of_script = self.reason_without_bits  # which the runs have shown
        reason_of_options = self._plan.reason_without_bits  # such as `--precision fp32`
        reason = reason_of_script or reason_of_options
        if reason and verdict.reference.uses_lockstep:
            notes.append(labelled("bits", translate(f"not compared: {reason}")))

        return Result(verdict, notes)

    def _record(self, config: RunConfig) -> RunRecord:
        """Runs the script in a folder of its own, and returns the record of the run."""
        folder = self._folder / str(self._num_runs)
        self._num_runs += 1
        return run_record.record_run(config, folder, self._start)

    # By bits

    def _uses_lockstep(self) -> bool:
        """True if the script uses Lockstep, according to its source or to a first run."""
        if self._plan.source_uses_lockstep:
            return True
        if not self._tolerance_reference().uses_lockstep:
            return False
        self._expect_runs(1 + len(self._plan.ways))
        return True

    def _record_bit_reference(self) -> None:
        """Runs the script on one process with virtual ranks, and keeps the record.

        For example, `--nproc 4` asks for 4 virtual ranks, so that each process has one. If the
        script itself sets `virtual_ranks=2`, 4 processes are too many, and this is an error.

        If the script does not support virtual ranks, only `reason_without_bits` is set.

        Raises:
            SettingError: The script has fewer virtual ranks than there are processes.
        """
        wanted_virtual_ranks = max(least_virtual_ranks(way) for way in self._plan.ways)
        reference = self._record(self._reference_with_virtual_ranks(wanted_virtual_ranks))
        self.reason_without_bits = reason_bits_not_comparable(reference)
        if self.reason_without_bits:
            return

        self._bit_reference = reference

        # The number that the script itself sets, if it sets one.
        num_virtual_ranks = reference.virtual_ranks or wanted_virtual_ranks
        most_processes = max(way.nproc for way in self._plan.ways)
        if most_processes > num_virtual_ranks:
            raise SettingError(
                f"lockstep verify --nproc {most_processes}, of a script with virtual_ranks="
                f"{num_virtual_ranks}",
                "every process computes at least one virtual rank, so there are more processes "
                "than can run it",
                f"give --nproc {num_virtual_ranks} or less, or train with more virtual ranks from "
                "the beginning",
            )

    def _reference_with_virtual_ranks(self, num_virtual_ranks: int) -> RunConfig:
        """Returns the configuration of the run on one process that is compared by bits.

        `reference_config` makes the settings anew, because those of `self._plan.reference` are for
        a run without virtual ranks. They would remove the script's own `micro_batch_size`.
        """
        config = replace(self._plan.reference, virtual_ranks=num_virtual_ranks)
        return config.reference_config()

    def _compare_bits(self, bit_reference: RunRecord, way: RunConfig) -> _BitComparison:
        """Runs the script in one way with virtual ranks, and compares the run by bits.

        Args:
            bit_reference: run on one process with virtual ranks.
            way: configuration of the run.

        Returns:
            The verdict, or the reason if the script does not support virtual ranks in this way.
        """
        config = replace(
            way,
            virtual_ranks=bit_reference.config.virtual_ranks,
            steps=self._num_steps_of(bit_reference),
        )
        parallel_run = self._record(config)
        verdict = judge_bits(bit_reference, parallel_run)

        # The run may have ended with an error, because it does not support virtual ranks. But a
        # difference in bits before the error is reported in any case.
        some_bits_differ = verdict.first_difference is not None
        reason = "" if some_bits_differ else reason_bits_not_comparable(parallel_run)
        if reason:
            return _BitComparison(verdict=None, reason_without_verdict=reason)
        return _BitComparison(verdict, reason_without_verdict="")

    def _results_with_bits(self, verdict: BitVerdict, way: RunConfig) -> Iterator[Result]:
        """Yields the result of a comparison by bits, followed by a comparison within the tolerance.

        The second one is left out if it could not say more: if all bits are equal, and the script
        itself sets virtual ranks, then the comparison by bits covers exactly what the script
        computes.

        Args:
            verdict: verdict of the comparison by bits.
            way: configuration of the run.
        """
        # An optimizer may step from mere rounding: Adam divides a gradient of 1e-17 by itself.
        findings_on_rounding = self._find_rounding_noise(bit_reference=verdict.reference)
        bit_verdict = replace(verdict, notes=findings_on_rounding)

        script_sets_virtual_ranks = verdict.reference.script_sets_virtual_ranks
        bits_say_all = verdict.word == "EQUAL" and script_sets_virtual_ranks
        if self._plan.only_bits or bits_say_all:
            yield Result(bit_verdict)
            return

        # The comparison within the tolerance needs another run on one process, usually in float64.
        # If the script cannot run like this, a line after the verdict by bits says why.
        reason = self._reason_without_tolerance_reference()
        if reason:
            text = translate(f"not compared: {reason}")
            yield Result(bit_verdict, [labelled("float64", text)])
            return

        yield Result(bit_verdict)
        name_in_verdict = f"{way.name}, in {_NAMES_OF_PRECISIONS[way.precision]}"
        yield Result(self._compare_within_tolerance(replace(way, name=name_in_verdict)))

    def _find_rounding_noise(self, bit_reference: RunRecord) -> list[Finding]:
        """Returns the finding LS408 in a list, if an optimizer takes steps from mere rounding.

        To find out, the run on one process that was compared by bits, in the script's own
        precision, is compared with the run on one process in float64.

        Args:
            bit_reference: the run on one process that was compared by bits.
        """
        # The user wants only bits to be compared, so there is no run in float64.
        if self._plan.only_bits:
            return []

        # The finding is about the runs on one process, so it is reported only once.
        if self._has_looked_for_noise:
            return []

        self._has_looked_for_noise = True
        if not may_have_noise(bit_reference.updates):
            return []

        if self._reason_without_tolerance_reference():  # the script cannot run in float64
            return []

        # If the user chose another precision than float64, noise does not shrink in it, and nothing
        # is found.
        tolerance_reference = self._tolerance_reference()
        return find_rounding_noise(bit_reference.updates, tolerance_reference.updates)

    # Within a tolerance

    def _tolerance_reference(self) -> RunRecord:
        """Returns the run on one process for comparisons within the tolerance, usually in float64.

        The script is run at the first call; later calls return the same run.

        Raises:
            UsageError: The run has failed, or gives nothing to compare with.
        """
        if self._reference is None:
            self._reference = self._record(self._plan.reference)
        self._check_reference(self._reference)
        return self._reference

    def _reason_without_tolerance_reference(self) -> str:
        """Returns why `_tolerance_reference` fails, in one line; empty if it does not fail."""
        try:
            self._tolerance_reference()
        except UsageError as error:
            return error.found.splitlines()[0]
        return ""

    def _compare_within_tolerance(self, way: RunConfig) -> Verdict:
        """Runs the script in one way, and compares the run within the tolerance."""
        reference_of_all_ways = self._tolerance_reference()
        config = replace(way, steps=self._num_steps_of(reference_of_all_ways))

        # If the strategy trains several replicas of the model, one process must train them too. So
        # the script is run on one process again, with this strategy, unless it was already.
        if config.trains_replicas and not self._plan.reference.trains_replicas:
            reference = self._record(config.reference_config())
            self._check_reference(reference)
        else:
            reference = reference_of_all_ways

        return judge(reference, self._record(config))

    def _num_steps_of(self, reference: RunRecord) -> int:
        """Returns the number of steps that a run makes to be compared with a reference.

        It is the number of steps that the reference made until it was stopped. If the reference has
        reached its end instead, the other run also runs to its end, and may make more steps.
        """
        was_stopped = bool(reference.stopped_at)
        if was_stopped:
            return reference.steps
        return self._plan.ways[0].steps

    def _compare_with_same_samples(self, way: RunConfig) -> Verdict:
        """Runs the script on several processes, and then on one process with the same batches.

        The first run writes its batches into `batches_folder`, from which the run on one process
        reads them. Both make the same number of steps.
        """
        config = replace(
            way,
            batches_folder=self._folder / "batches",
            steps=self._plan.steps or DEFAULT_STEPS_WITH_SAME_SAMPLES,
        )
        run_on_several = self._record(config)

        reference_config = replace(
            self._plan.reference,
            batches_folder=config.batches_folder,
            seconds=None,  # no time limit, since the number of steps is known
        )
        # A script that was stopped on several processes is stopped after the same number of steps.
        # A script that ended by itself ends again, at the end of the same batches.
        was_stopped = bool(run_on_several.stopped_at)
        if was_stopped:
            reference_config = replace(reference_config, steps=run_on_several.steps)

        reference = self._record(reference_config)
        self._check_reference(reference)
        return judge(reference, run_on_several)


_NAMES_OF_PRECISIONS = {"fp64": "float64", "fp32": "float32"}


def least_virtual_ranks(way: RunConfig) -> int:
    """Returns the smallest number of virtual ranks that gives every process at least one.

    This is the number of processes, or more if their shares are unequal: of 2 virtual ranks, a
    process with a tenth of the work would get none.
    """
    try:
        shares = initial_shares(way.overrides.get("shares"), way.nproc)
    except LockstepError:  # the run itself will report what is wrong with the shares
        return way.nproc

    num_virtual_ranks = way.nproc
    while 0 in part_sizes(num_virtual_ranks, shares):
        num_virtual_ranks += 1

    return num_virtual_ranks
