"""Rules for batches of a DataLoader that have different samples than on one process.

A *rule* returns the `Cause` of a difference (`case`) between a run on one process and a run on
several ranks, or None if it does not apply. `case.expected` is the optimizer step on one process,
and `case.actual` the same step on the ranks: a `RankUpdate` (record) for each rank, with the fields
listed under "Needs". All steps are in `case.reference_run` and `case.parallel_run`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from lockstep.verify.cause import Cause, format_items
from lockstep.verify.divergence import Divergence, indices_with_other_contents, same_samples
from lockstep.verify.training_record import RankUpdate, Sample, Update

# For each rank, or each replica on one process, the samples that it trained in one step.
SamplesOfStep = Sequence[Iterable[Any]]


def _contents_of_samples_are_known(case: Divergence) -> bool:
    """True if samples can be identified by their contents in both runs of this step.

    Contents are preferred to indices, because ranks may have different datasets, in which the same
    index stands for different samples.
    """
    _, same_contents = same_samples(case.expected, case.actual)
    return same_contents is not None


def _list_samples(
    ranks: Iterable[RankUpdate], *, identify_by_contents: bool
) -> list[Sample] | None:
    """Returns the samples that some ranks trained in one step; None if they are not known.

    Args:
        ranks: records of these ranks: a whole `Update`, or a part of it.
        identify_by_contents: whether samples are identified by their contents, and not by their
            indices.
    """
    update = Update(ranks)
    return update.samples_by_contents() if identify_by_contents else update.samples_by_index()


def _count_samples_of_this_step(
    case: Divergence,
) -> tuple[Counter[Sample], Counter[Sample]]:
    """Returns how often each sample occurs in this step, on one process and on the ranks."""
    identify_by_contents = _contents_of_samples_are_known(case)
    expected = _list_samples(case.expected, identify_by_contents=identify_by_contents)
    actual = _list_samples(case.actual, identify_by_contents=identify_by_contents)
    return Counter(expected), Counter(actual)


def _format_numbers_of_samples(case: Divergence) -> str:
    """Says how many samples were trained in this step, on one process and on the ranks."""
    expected, actual = _count_samples_of_this_step(case)
    return (
        f"one process trained {expected.total()} samples in this step, "
        f"{case.num_ranks} trained {actual.total()}"
    )


def skipped_steps(case: Divergence) -> Cause | None:
    """LS405: some processes skip the optimizer step after some of their backward passes.

    Needs: `losses`, one for each backward pass.
    Applies: if the processes made different numbers of backward passes since the last step, and on
        some process the number varies from step to step.
    False positives: a loop that accumulates gradients over a varying number of batches.
    Evidence: the numbers of backward passes.
    """
    # There is one loss for each backward pass. One process has several records if it trains several
    # replicas of the model. The text names the number of the first one.
    passes_of_replicas = [len(replica.losses) for replica in case.expected]
    passes_by_rank = {}
    for rank, record in enumerate(case.actual):
        if record.contributes:  # its losses count
            passes_by_rank[rank] = len(record.losses)

    # If a process has recorded no backward pass for this step, it cannot be compared.
    distinct_numbers = {*passes_of_replicas, *passes_by_rank.values()}
    all_made_the_same = len(distinct_numbers) == 1
    some_made_none = 0 in distinct_numbers
    if all_made_the_same or some_made_none:
        return None

    # A script may rightly make 4 passes in every step on one process, and 2 on each of two ranks.
    # Only a number that varies from step to step shows that a step was skipped.
    varies_on_one_process = _num_passes_varies(case.reference_run)
    varies_on_ranks = _num_passes_varies(case.parallel_run)
    if not varies_on_one_process and not varies_on_ranks:
        return None

    passes_of_one = passes_of_replicas[0]
    on_ranks = ", ".join(f"{count} on rank {rank}" for rank, count in passes_by_rank.items())
    text = f"backward passes since the step before: {passes_of_one} on one process, {on_ranks}"
    return Cause("LS405", (_format_numbers_of_samples(case), text))


def _num_passes_varies(run: Sequence[Update]) -> bool:
    """True if some rank made different numbers of backward passes in different updates."""
    for rank in range(len(run[0])):
        if len({len(update[rank].losses) for update in run}) > 1:
            return True
    return False


def repeated_samples(case: Divergence) -> Cause | None:
    """LS101, or LS108 for an IterableDataset: samples are trained more often than on one process.

    Needs: `batches` with indices or contents.
    Applies: if all surplus samples of this step were trained by several ranks, or already in an
        earlier step.
    False positives: a sampler that repeats samples to give all ranks the same number of them. LS101
        is reported for this too, and its entry in the catalogue mentions it.
    Evidence: which samples are repeated, or that every rank trained the same ones.
    """
    repeated = _repeated_samples(case)
    if not repeated:
        return None

    # The samples that the ranks trained more often in this step than one process did. The
    # difference of two counters has only positive counts: {1: 2, 3: 1} - {1: 1, 2: 1} is
    # {1: 1, 3: 1}.
    expected, actual = _count_samples_of_this_step(case)
    surplus_samples = set(actual - expected)

    # If some of these were never trained before, another rule applies.
    new_samples = surplus_samples - set(repeated)
    if new_samples:
        return None

    if _all_ranks_trained_the_same(case):
        samples_text = "every rank trained the same ones"
    else:
        samples_text = _format_samples(repeated, case)

    is_stream = all(batch.iterable for batch in case.actual.batches)
    return Cause(
        "LS108" if is_stream else "LS101",
        (
            _format_numbers_of_samples(case),
            f"{len(repeated)} of them were trained before, or by several ranks: {samples_text}",
        ),
    )


def _repeated_samples(case: Divergence) -> list[Sample]:
    """Returns the samples that the ranks repeat in this step, although one process does not.

    For example, by how often a sample is trained in this step:

        one process     ranks
        1               1           not repeated
        1               2           repeated
        0               1           repeated if the ranks have trained it in an earlier step
        0               2           repeated
    """
    expected, actual = _count_samples_of_this_step(case)
    identify_by_contents = _contents_of_samples_are_known(case)
    earlier_steps = case.parallel_run[: case.update_index]
    samples_of_earlier_steps = _count_samples_of_steps(
        earlier_steps, identify_by_contents=identify_by_contents
    )

    repeated = []
    for sample, count in actual.items():
        count_of_one_process = expected[sample]  # 0 if it does not train the sample
        if count_of_one_process > 0:
            # Earlier steps do not matter: one process may repeat the sample as well, in its second
            # epoch.
            is_repeated = count > count_of_one_process
        else:
            is_repeated = count > 1 or sample in samples_of_earlier_steps

        if is_repeated:
            repeated.append(sample)

    return repeated


def _all_ranks_trained_the_same(case: Divergence) -> bool:
    """True if all ranks trained the same samples in this step."""
    identify_by_contents = _contents_of_samples_are_known(case)
    counts_of_ranks = []
    for rank_update in case.actual:
        if rank_update.contributes:
            samples = _list_samples([rank_update], identify_by_contents=identify_by_contents)
            counts_of_ranks.append(Counter(samples))

    return all(counts == counts_of_ranks[0] for counts in counts_of_ranks)


def larger_global_batch(case: Divergence) -> Cause | None:
    """LS110: the global batch is a multiple of that of one process.

    Needs: `batches` with indices or contents.
    Applies: if the number of samples is two or more times that of one process.
    False positives: a script that enlarges its batch on purpose.
    Evidence: how many times as large it is.
    """
    expected, actual = _count_samples_of_this_step(case)
    num_expected = expected.total()
    num_actual = actual.total()
    if num_expected == 0 or num_actual <= num_expected:
        return None

    is_multiple = num_actual % num_expected == 0
    if not is_multiple:
        return None

    text = (
        f"the global batch is {num_actual // num_expected} times as large, with the same number of "
        "steps"
    )
    return Cause("LS110", (_format_numbers_of_samples(case), text))


def left_out_samples(case: Divergence) -> Cause | None:
    """LS102: samples of one process are left out, and none are added.

    Needs: `batches` with indices or contents.
    Applies: if the ranks together have fewer samples, and one process has all of these too.
    False positives: none known.
    Evidence: which samples are left out.
    """
    expected, actual = _count_samples_of_this_step(case)
    are_fewer = actual.total() < expected.total()
    none_are_added = not (actual - expected)  # no sample occurs more often on the ranks
    if not (are_fewer and none_are_added):
        return None

    left_out = _format_samples(expected - actual, case)
    return Cause("LS102", (_format_numbers_of_samples(case), f"left out: {left_out}"))


def samples_of_several_ranks(case: Divergence) -> Cause | None:
    """LS105: over all compared steps, several ranks trained the same samples.

    Needs: `batches` with indices or contents, also in the steps before.
    Applies: if one process trains these samples only once. `trained_by_several_ranks` only looks at
        the steps before one process repeats a sample: its first epoch.
    False positives: none known.
    Evidence: how many samples were trained by several ranks.
    """
    identify_by_contents = _contents_of_samples_are_known(case)
    samples_of = partial(_samples_of_each_rank, identify_by_contents=identify_by_contents)
    sentences = trained_by_several_ranks(
        samples_of_one_process=[samples_of(update) for update in case.reference_run],
        samples_of_ranks=[samples_of(update) for update in case.parallel_run],
    )
    if not sentences:
        return None

    return Cause("LS105", (_format_numbers_of_samples(case), *sentences))


def _samples_of_each_rank(update: Update, *, identify_by_contents: bool) -> list[list[Sample]]:
    """Returns a list of samples for each rank, in the order of ranks; empty if not known."""
    samples_of_ranks = []
    for rank_update in update:
        samples = _list_samples([rank_update], identify_by_contents=identify_by_contents)
        samples_of_ranks.append(samples or [])
    return samples_of_ranks


def other_order(case: Divergence) -> Cause:
    """LS109: the samples come in another order than on one process.

    Needs: `batches` with indices or contents.
    Applies: always, since it is tried after all other rules on samples.
    False positives: everything that no rule before explains, such as another dataset.
    Evidence: whether all steps together have the same samples.
    """
    identify_by_contents = _contents_of_samples_are_known(case)
    counts_of_one_process = _count_samples_of_steps(
        case.reference_run, identify_by_contents=identify_by_contents
    )
    counts_of_ranks = _count_samples_of_steps(
        case.parallel_run, identify_by_contents=identify_by_contents
    )
    if counts_of_one_process == counts_of_ranks:
        text = "over all steps compared they are the same samples"
    else:
        # The difference of two counters: what this step has more often on the ranks.
        expected, actual = _count_samples_of_this_step(case)
        num_other = (actual - expected).total()
        text = f"{num_other} of them are in another step of one process, or in none"

    return Cause("LS109", (_format_numbers_of_samples(case), text))


def _count_samples_of_steps(
    updates: Sequence[Update], *, identify_by_contents: bool
) -> Counter[Sample]:
    """Returns how often each sample occurs in several steps; unknown samples are not counted."""
    counts: Counter[Sample] = Counter()
    for update in updates:
        samples = _list_samples(update, identify_by_contents=identify_by_contents)
        counts.update(samples or ())
    return counts


def _format_samples(samples: Iterable[Sample], case: Divergence) -> str:
    """Lists samples by their indices on one process, if these are known: "3, 5 and 8 more".

    Args:
        samples: samples to be listed, identified by their index or by a digest of their contents.
        case: the difference.
    """
    # To show the index of a sample that is identified by its contents, map contents to indices.
    # Both lists of an update have the same samples in the same order.
    index_of_content: dict[Sample, Sample] = {}
    for update in case.reference_run:
        contents = update.samples_by_contents()
        indices = update.samples_by_index()
        if contents is not None and indices is not None:
            index_of_content.update(zip(contents, indices, strict=True))

    # A sample that one process never had, or that is identified by its index, stays as it is.
    return format_items([index_of_content.get(sample, sample) for sample in samples])


def trained_by_several_ranks(
    samples_of_one_process: Sequence[SamplesOfStep], samples_of_ranks: Sequence[SamplesOfStep]
) -> list[str]:
    """Says how many samples several ranks trained, although one process trains each once.

    Only the first pass over the samples is examined: as soon as one process trains a sample for the
    second time, ranks may rightly train samples that another rank has trained before.

    Args:
        samples_of_one_process: for each step, the samples of each record of the run on one process.
            There is one record, or one for each replica that the process trains. An example with
            two steps is `[[[0, 1, 2, 3]], [[4, 5, 6, 7]]]`.
        samples_of_ranks: for each step, the samples of each rank; empty if they are not known. For
            two ranks, for example, `[[[0, 2], [1, 3]], [[4, 6], [5, 7]]]`.
    """
    samples_by_rank = _samples_in_first_pass(samples_of_one_process, samples_of_ranks)
    num_ranks_of_sample: Counter[Any] = Counter()
    for samples_of_rank in samples_by_rank.values():
        num_ranks_of_sample.update(samples_of_rank)  # a set, so each sample is counted once a rank

    num_repeated = len([count for count in num_ranks_of_sample.values() if count > 1])
    if not num_repeated:
        return []

    return [
        f"in the steps compared {num_repeated} samples were trained by several ranks, "
        "and none twice by one process"
    ]


def _samples_in_first_pass(
    samples_of_one_process: Sequence[SamplesOfStep], samples_of_ranks: Sequence[SamplesOfStep]
) -> dict[int, set[Any]]:
    """Returns the samples that each rank trained before one process began its second pass.

    Args:
        samples_of_one_process: for each step, the samples of each record of one process, such as
            `[[[0, 1, 2, 3]], [[4, 5, 6, 7]]]` if it has one record in each of two steps.
        samples_of_ranks: for each step, the samples of each rank, such as
            `[[[0, 2], [1, 3]], [[4, 6], [5, 7]]]`.

    Returns:
        The samples by rank, such as `{0: {0, 2, 4, 6}, 1: {1, 3, 5, 7}}`.
    """
    counts_of_one_process: Counter[Any] = Counter()  # how often it has trained each sample
    samples_by_rank: dict[int, set[Any]] = defaultdict(set)

    for records_of_one_process, samples_of_each_rank in zip(
        samples_of_one_process, samples_of_ranks, strict=False
    ):
        for samples in records_of_one_process:
            counts_of_one_process.update(samples)

        second_pass_begins = max(counts_of_one_process.values(), default=0) > 1
        if second_pass_begins:
            break

        for rank, samples in enumerate(samples_of_each_rank):
            samples_by_rank[rank] |= set(samples)

    return samples_by_rank


# Samples with the same index but other contents


def _describe_differing_contents(case: Divergence) -> str:
    """Says which samples have other contents under the same index."""
    indices = indices_with_other_contents(case.expected, case.actual)
    return (
        f"{len(indices)} samples have other content under the same index: {format_items(indices)}"
    )


def shuffled_datasets(case: Divergence) -> Cause | None:
    """LS105: ranks have the same samples under other indices.

    For example, the sample that one process has under index 3 stands under index 5 on rank 1.

    Needs: `batches` with indices and contents.
    Applies: if at least half of the contents that differ are samples of one process, which has them
        under another index.
    False positives: none known.
    Evidence: how many of these contents have another index on one process.
    """
    # Digests of all samples that one process trained in any step.
    known_digests: set[str] = set()
    for update in case.reference_run:
        for record in update:
            for batch in record.batches:
                known_digests.update(batch.contents)

    # There is at least one digest, because this rule is only tried if contents differ.
    digests = _digests_of_differing_contents(case)
    num_known = len([digest for digest in digests if digest in known_digests])
    is_less_than_half = num_known < len(digests) / 2
    if is_less_than_half:
        return None

    text = f"{num_known} of them stand under another index on one process"
    return Cause("LS105", (_describe_differing_contents(case), text))


def _digests_of_differing_contents(case: Divergence) -> list[str]:
    """Returns digests of the ranks' samples whose contents differ from one process.

    Samples with the same index are compared.
    """
    indices = indices_with_other_contents(case.expected, case.actual)
    digests = []
    for record in case.actual:
        for batch in record.batches:
            # The indices may not be known. Without a DataLoader there are none.
            if not batch.ids:
                continue
            for index, digest in zip(batch.ids, batch.contents, strict=False):
                if index in indices:
                    digests.append(digest)
    return digests


def _random_draws_of_ranks(case: Divergence) -> list[dict[str, str]]:
    """Returns the random streams that each rank used while its first batch was read.

    Each entry maps a stream, such as "numpy's global stream", to a digest of what was drawn from
    it. For torch's stream, the line of the first draw stands in place of a name. Ranks without a
    batch are left out.
    """
    return [dict(record.batches[0].random_draws) for record in case.actual if record.batches]


def other_dataset_on_some_ranks(case: Divergence) -> Cause | None:
    """LS104: rank 0 has the dataset of one process, and other ranks have another one.

    Needs: `batches` with contents, and `random_draws` made while they were read.
    Applies: if nothing was drawn at random, and rank 0 has the contents of one process. That some
        rank has other contents is known, since the rule is only tried then.
    False positives: a generator in the dataset that is seeded by the rank, so that rank 0 gets the
        same numbers as one process.
    Evidence: that only rank 0 is right.
    """
    if case.num_ranks <= 1:
        return None

    # There is an entry for each rank, which is empty if the rank drew no random numbers.
    some_rank_drew = any(_random_draws_of_ranks(case))
    if some_rank_drew:
        return None

    # Each sample of rank 0 is compared with the sample of one process under the same index.
    only_rank_0 = case.actual[:1]
    rank_0_agrees = not indices_with_other_contents(case.expected, only_rank_0)
    if not rank_0_agrees:
        return None

    text = "rank 0 has the same content as one process, other ranks have not"
    return Cause("LS104", (_describe_differing_contents(case), text))


def random_contents(case: Divergence) -> Cause:
    """Names the cause of contents that differ because samples are read with random numbers.

    LS106: all ranks drew the same random numbers to read their samples. LS107: every rank drew
    numbers of its own, which differ from those of one process, or no draw was seen.

    Needs: `random_draws` of the batches. Worker processes do not record their draws.
    Applies: always.
    False positives: none known. Contents without a recorded draw may depend on a generator in the
        dataset, on the clock, or on the rank.
    Evidence: which random streams were used.
    """
    contents_text = _describe_differing_contents(case)
    if any(batch.workers for record in case.actual for batch in record.batches):
        text = "worker processes read them, whose draws are not seen"
        return Cause("LS107", (contents_text, text))

    # For each rank, digests of the random streams that it used, by the name of the stream.
    draws_of_ranks = _random_draws_of_ranks(case)
    ranks_with_draws = [draws for draws in draws_of_ranks if draws]
    if not ranks_with_draws:  # no rank used a stream that is watched
        text = (
            "no draw from torch or a global stream was seen; what is left is a generator of "
            "numpy's or Python's that is the dataset's own, the clock, or the rank"
        )
        return Cause("LS107", (contents_text, text))

    # With equal digests, the streams of all ranks were in the same state.
    stream_names = list(ranks_with_draws[0])
    streams = "; ".join(stream_names)
    digests_of_ranks = [list(draws.values()) for draws in draws_of_ranks]
    all_are_equal = all(digests == digests_of_ranks[0] for digests in digests_of_ranks)
    ranks_drew_the_same = all_are_equal and len(digests_of_ranks) > 1  # one alone proves nothing
    if ranks_drew_the_same:
        text = f"all ranks drew the same random numbers to read theirs: {streams}"
        return Cause("LS106", (contents_text, text))

    return Cause("LS107", (contents_text, f"random numbers were drawn to read them: {streams}"))
