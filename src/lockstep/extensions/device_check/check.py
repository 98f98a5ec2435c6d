"""Compares the bits that processes compute, to find devices that compute wrongly.

Some devices compute wrongly now and then without any error: a bit flips in memory that nobody
protects, or a core gives wrong products. With virtual ranks every result has the same bits on every
process, so such an error can be seen: another process computes the same again. Every so many
optimizer steps there is a *checked* global batch:

1. Before its first forward pass the *state* of all processes is compared: the parameters, the state
   of the optimizers, and the buffers that are combined over virtual ranks, such as the running
   statistics of BatchNorm. Every process has them under `ddp`, and those with the same shard under
   `hsdp`. Whatever has flipped a bit of a parameter or of an optimizer's state, at any step since
   the last check, shows here. The majority is right; with two processes one of the two is wrong.
2. Each process *repeats* a virtual rank of another process, its *owner* (`batch.repeats`), and the
   bits of the two results are compared: the gradients, and the combined buffers as the virtual rank
   leaves them. That covers data, forward pass, loss and backward pass.
3. If they differ there is a *dispute*: all processes compute that virtual rank again, before the
   optimizer steps, and `votes` decides who was wrong. With the two results of before there are four
   even on two processes, so that what flips once is found there too.

Why it is done so:

- Recomputing by replaying what the model was called with would leave the loop alone, but it would
  neither know the loss nor anything that the loop computes beside the model. So the loop gets one
  micro-batch more, and everything that counts samples leaves it out (`VirtualRank.is_repeat`).
- The state is compared first: a process with a wrong weight computes another gradient, and would be
  taken for one that computes wrongly.
- A dispute has to be decided in the global batch in which it arose. After the optimizer's step the
  weights are others, and an error that comes once could not be found any more.
- The gradients are compared before they are summed up: afterwards all processes have the same
  wrong sum.
- Sums of bits are compared (`strategies.bit_sums`), 8 bytes for each parameter, and of these first
  a digest. So a check sends some hundred bytes.

It does not find: a flip in a global batch that is not checked, if it does not make the state of
processes differ, as one in a buffer that is combined at the end of the step; one in the addition of
gradients over processes, or under `fsdp` in the optimizer's update of a shard that no other process
has: all processes then go on with the same wrong numbers; one that all processes make.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.distributed.numerics import read_numerics
from lockstep.distributed.process_group import Run
from lockstep.errors import UsageError
from lockstep.extensions.device_check import message
from lockstep.extensions.device_check.votes import (
    Kind,
    Results,
    Verdict,
    judge_repeats,
    judge_states,
)
from lockstep.session.check_schedule import CHECK_EVERY, DueComparisons
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch, VirtualRank
from lockstep.session.step import Dispute
from lockstep.strategies.base import ModuleWrapper, PreparedModule
from lockstep.strategies.bit_sums import bit_sums, gradient_bit_sums
from lockstep.strategies.virtual_rank_buffers import VirtualRankBuffers

BitSums = dict[str, int]
"""Sums of the bits of tensors, by name."""


class GroupKey(NamedTuple):
    """Identifies tensors that must have the same bits on several ranks.

    For example, parameters that the ranks 1 and 3 both have are in the group `(PARAMETERS, 1, 2)`.
    """

    kind: str
    """The kind of the tensors (see `message`)."""
    first_rank: int
    """The smallest of these ranks."""
    num_ranks: int
    """The number of these ranks. Under HSDP, ranks 0 and 2 may have the same shards, and all ranks
    the same parameters without dimensions."""


class Computed(NamedTuple):
    """What a process has computed for a virtual rank that is compared."""

    virtual_rank: int
    bits: BitSums
    """The bits of its gradients, and of the combined buffers as it has left them."""


class _DigestOfRank(NamedTuple):
    """What a rank has computed for a virtual rank, as a digest."""

    rank: int
    virtual_rank: int
    digest: str


class _GroupDigests(NamedTuple):
    """What a rank sends of a group of tensors that must be equal on several ranks."""

    names: str
    """A digest of the tensors' names."""
    bits: str
    """A digest of their names and the sums of their bits."""


class _DisputeOfRanks(NamedTuple):
    """A virtual rank for which its owner and another rank have computed different results."""

    virtual_rank: int
    owner: int
    checker: int


class DeviceCheck(Extension):
    """Compares what the processes of a run compute, in the global batches that are checked.

    Args:
        run: the run of this process. It has at least two processes.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._step = run.step
        self._modules: list[PreparedModule] = []
        self._optimizers: list[Any] = []
        self._result_as_owner: Computed | None = None
        """What this process has computed for a virtual rank of its own, which another process
        repeats. This process is its *owner*."""
        self._result_as_checker: Computed | None = None
        """What this process has computed for the virtual rank of another process. This process is
        its *checker*."""
        self._disputed_result: Computed | None = None
        """What this process has computed for the virtual rank about which there is a dispute."""
        self._recorded_scales: list[float] = []
        """The factors of the loss in the micro-batches of the latest repeated virtual rank."""
        self._dispute: _DisputeOfRanks | None = None
        self._is_compared = True
        """True if the results of the present global batch have been compared."""
        self._last_good_step: int | None = None
        """The number of optimizer steps before the last global batch in which no difference was
        found."""
        self._due_comparisons = DueComparisons()
        """Tells after which steps the check that models are equal compares them, too."""
        self._step.find_dispute = self.find_dispute

    # Events

    def module_prepared(self, wrapped: PreparedModule) -> None:
        """Remembers a module."""
        self._modules.append(wrapped)

    def optimizer_prepared(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """Remembers an optimizer."""
        self._optimizers.append(optimizer)
        self._due_comparisons.optimizer_prepared(modules)

    def begin(self, micro_batch: MicroBatch) -> None:
        """Compares the state of the processes when a checked global batch begins.

        Raises:
            WrongDeviceError: on all ranks, if some rank has different bits.
            UsageError: in the previous checked global batch, the loop skipped micro-batches whose
                results were to be compared.
        """
        # `before_step` compares the results. If it has not compared those of the previous global
        # batch, the loop has left out that step.
        has_uncompared_result = self._result_as_owner is not None and not self._is_compared
        if micro_batch.first and has_uncompared_result:
            raise self._skipped_error()

        if not micro_batch.checks_devices:
            return

        if micro_batch.first:
            self._forget_results()
            self._is_compared = False
            # The buffers should be equal, too: the last step has combined them over all processes,
            # or, if it was left out, they were put back.
            self._compare_states()

        self._record_loss_scale_of_repeat(micro_batch)

    def _record_loss_scale_of_repeat(self, micro_batch: MicroBatch) -> None:
        """Records the factor of the loss if this process repeats a virtual rank of another process.

        If the results differ, all processes compute this virtual rank again, with these factors.
        """
        virtual_rank = micro_batch.virtual_rank
        if virtual_rank is None or not (virtual_rank.is_compared and virtual_rank.is_repeat):
            return
        if virtual_rank.begins:
            self._recorded_scales = []
        self._recorded_scales.append(micro_batch.scale)

    def backward_ended(self, micro_batch: MicroBatch) -> None:
        """Sums up the bits of the gradients and buffers of a virtual rank that is compared."""
        virtual_rank = self._step.micro_batch.virtual_rank
        if virtual_rank is None or not virtual_rank.is_compared or not virtual_rank.ends:
            return
        self._remember(virtual_rank, Computed(virtual_rank.number, self._result_bits()))

    def before_step(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """Raises WrongDeviceError, on all ranks, if two of them have computed different bits.

        A checked global batch usually goes like this:

        1. Before its last micro-batch the loader calls `find_dispute`, which compares results.
        2. If two ranks disagree, all ranks compute the disputed virtual rank again.
        3. This method judges from the results of all ranks which device is wrong.
        """
        if not self._step.micro_batch.checks_devices:
            return

        # If the loop fetches micro-batches ahead, it got the last one before there were results, so
        # step 1 was left out. It is made up for here; it is too late for step 2.
        if not self._is_compared:
            self.find_dispute()
        if self._dispute is not None:
            self._raise_dispute(self._dispute)
        self._last_good_step = self._step.number

    def global_batch_trained(self, modules: Sequence[nn.Module]) -> None:
        """Compares the state of the processes where `EqualModelsCheck` is about to compare models.

        That check finds fewer tensors and does not name a rank. By now the first optimizer step of
        the global batch has combined the buffers of all modules, also of those that rest.

        Args:
            modules: the prepared modules whose optimizer has stepped.

        Raises:
            WrongDeviceError: on all ranks, if some rank has different bits.
        """
        interval_of_module = {}
        for wrapped in self._modules:
            interval_of_module[wrapped.module] = wrapped.check_every or CHECK_EVERY
        if self._due_comparisons.take_due_modules(
            self._step.number, interval_of_module, stepped=modules
        ):
            self._compare_states()

    def pass_ended(self) -> None:
        """Forgets a global batch that the loop has left before its end."""
        self._forget_results()
        self._is_compared = True

    def release(self) -> None:
        """Removes `find_dispute` from the step of the run, when the run ends."""
        self._step.find_dispute = lambda: None

    def _forget_results(self) -> None:
        """Forgets what was computed in the previous checked global batch."""
        self._result_as_owner = None
        self._result_as_checker = None
        self._disputed_result = None
        self._dispute = None

    def _remember(self, virtual_rank: VirtualRank, computed: Computed) -> None:
        """Remembers what was computed for a virtual rank that is compared."""
        if self._dispute is not None:
            self._disputed_result = computed
        elif virtual_rank.is_repeat:
            self._result_as_checker = computed
        else:
            self._result_as_owner = computed

    # Results of virtual ranks

    def find_dispute(self) -> Dispute | None:
        """Compares what two processes have computed for the same virtual ranks.

        Each of these virtual ranks was computed by its owner, and repeated by a checker. Example: 4
        virtual ranks on 2 processes. Rank 0 owns the virtual ranks 0 and 1, and rank 1 owns 2 and
        3. Rank 0 repeats the virtual rank 2, and rank 1 repeats the virtual rank 0.

        All ranks call this together. The first difference that is found is kept in `_dispute`.

        Returns:
            The virtual rank of this difference, which all processes must compute again, with the
            factors (`scales`) of its losses; None if all results agree.

        Raises:
            UsageError: on all ranks, if the loop has skipped a micro-batch whose result was to be
                compared.
        """
        self._is_compared = True
        results_of_owners, results_of_checkers = self._exchange_digests()

        # Every virtual rank has to be computed by both. A loop that leaves out a micro-batch has
        # computed only one of the two.
        owned = {result.virtual_rank: result for result in results_of_owners}
        repeated = {result.virtual_rank: result for result in results_of_checkers}
        if owned.keys() != repeated.keys():
            raise self._skipped_error()

        for virtual_rank, repeat in repeated.items():
            original = owned[virtual_rank]
            if repeat.digest == original.digest:
                continue

            # All ranks have found the same first difference, so all of them take part in this
            # exchange. The checker of the virtual rank has recorded the factors of its loss.
            owner = original.rank
            checker = repeat.rank
            self._dispute = _DisputeOfRanks(virtual_rank, owner, checker)
            scales_of_ranks = self._run.collectives.exchange(self._recorded_scales)
            return Dispute(virtual_rank, scales_of_ranks[checker])

        return None

    def _exchange_digests(self) -> tuple[list[_DigestOfRank], list[_DigestOfRank]]:
        """Exchanges the results of all ranks, as digests.

        Returns:
            What the owners of the compared virtual ranks have computed, and what the checkers have,
            each in the order of the ranks.
        """
        own_entries = (_entry_of(self._result_as_owner), _entry_of(self._result_as_checker))
        entries_of_ranks = self._run.collectives.exchange(own_entries)

        of_owners: list[_DigestOfRank] = []
        of_checkers: list[_DigestOfRank] = []
        for rank, (entry_as_owner, entry_as_checker) in enumerate(entries_of_ranks):
            if entry_as_owner is not None:
                of_owners.append(_DigestOfRank(rank, *entry_as_owner))
            if entry_as_checker is not None:
                of_checkers.append(_DigestOfRank(rank, *entry_as_checker))
        return of_owners, of_checkers

    def _result_bits(self) -> BitSums:
        """Returns the sums of the bits of what the present virtual rank has computed, by name.

        These are its gradients, and the combined buffers as it leaves them. A module has no
        parameter and buffer of the same name.
        """
        sums: dict[str, Tensor] = {}
        for prefix, wrapped in self._named_modules():
            sums_of_module = {**_sums_of_gradients(wrapped), **_sums_of_buffers(wrapped)}
            for name, sum_of_bits in sums_of_module.items():
                sums[prefix + name] = sum_of_bits
        return as_numbers(sums)

    def _skipped_error(self) -> UsageError:
        """Returns the error for a loop that has skipped a micro-batch of a checked global batch.

        Such a loop may want to leave out the loss of a repeated micro-batch when it sums up losses.
        The advice says how to do that without skipping the micro-batch.
        """
        return UsageError(
            f"check_devices={self._run.settings.check_devices} in a loop that skips micro-batches",
            "a micro-batch that is computed again to check a device was not trained on, so nothing "
            "was compared, and the optimizer may not have stepped",
            "call world.backward and optimizer.step as for every other micro-batch; leave it out "
            "of sums of your own only: if not world.is_repeated_micro_batch",
        )

    def _raise_dispute(self, dispute: _DisputeOfRanks) -> None:
        """Raises WrongDeviceError, on all ranks, for a virtual rank with different results.

        Args:
            dispute: the virtual rank, and the two ranks that disagree about its results.
        """
        # The first results. Every rank sends what it has computed as the owner of a virtual rank,
        # and what it has computed as a checker. Only these two are of the disputed virtual rank.
        bits_of_owners = self._exchange_bits(self._result_as_owner)
        bits_of_checkers = self._exchange_bits(self._result_as_checker)
        bits_of_owner = bits_of_owners[dispute.owner]
        bits_of_checker = bits_of_checkers[dispute.checker]
        assert bits_of_owner is not None
        assert bits_of_checker is not None
        digests_before_dispute = {
            dispute.owner: digest(bits_of_owner),
            dispute.checker: digest(bits_of_checker),
        }

        digests_after_dispute = self._recomputed_digests()
        verdict = judge_repeats(Results(digests_before_dispute, digests_after_dispute))
        differing = _differing_names(bits_of_owner, bits_of_checker)
        buffer_names = self._names_of_combined_buffers()
        computation = message.Computation(
            dispute.virtual_rank,
            dispute.owner,
            dispute.checker,
            buffers=[name for name in differing if name in buffer_names],
        )
        self._raise_wrong_device(verdict, computation, differing)

    def _recomputed_digests(self) -> dict[int, str]:
        """Returns, by rank, digests of the results of the disputed virtual rank.

        All ranks have computed it again. The dictionary is empty if a rank could not compute it.
        """
        bits_of_ranks: list[BitSums | None] = self._exchange_bits(self._disputed_result)
        digest_of_rank: dict[int, str] = {}
        for rank, bits in enumerate(bits_of_ranks):
            if bits is None:
                return {}
            digest_of_rank[rank] = digest(bits)
        return digest_of_rank

    def _exchange_bits(self, computed: Computed | None) -> list[BitSums | None]:
        """Returns the sums of the bits of a result on each rank; None where there is none.

        Args:
            computed: the result of this rank.
        """
        bits = None if computed is None else computed.bits
        bits_of_ranks: list[BitSums | None] = self._run.collectives.exchange(bits)
        return bits_of_ranks

    # States

    def _compare_states(self) -> None:
        """Compares the groups of tensors that must be equal on several ranks, see `GroupKey`.

        Raises:
            WrongDeviceError: on all ranks, if some rank has different bits.
        """
        # Every rank gets the digests of all groups, also of those that it does not have. So all
        # ranks find the same differences, and raise the same error.
        own_bits_of_group = self._bits_of_groups()
        for key, digests_of_rank in self._exchange_group_digests(own_bits_of_group).items():
            # An optimizer that spreads its state over the ranks has other tensors on each of them.
            # These cannot be compared.
            digests_of_names = {digests.names for digests in digests_of_rank.values()}
            have_same_tensors = len(digests_of_names) == 1
            digests_of_bits = {digests.bits for digests in digests_of_rank.values()}
            have_same_bits = len(digests_of_bits) == 1
            if have_same_tensors and not have_same_bits:
                own_bits = own_bits_of_group.get(key, {})
                self._raise_difference(key.kind, list(digests_of_rank), own_bits)

    def _exchange_group_digests(
        self, own_bits_of_group: Mapping[GroupKey, BitSums]
    ) -> dict[GroupKey, dict[int, _GroupDigests]]:
        """Sends two digests of each group of tensors that this rank has, to all ranks.

        Args:
            own_bits_of_group: for each group of this rank, the sums of the bits by name.

        Returns:
            For each group that any rank has, the digests of the ranks that have it. For example, of
            parameters on the ranks 1 and 3: `{(PARAMETERS, 1, 2): {1: digests, 3: digests}}`.
        """
        own_entries = []
        for own_key, bits in own_bits_of_group.items():
            names = list(bits)
            digests = _GroupDigests(names=digest(names), bits=digest(bits))
            own_entries.append((own_key, digests))
        entries_of_ranks = self._run.collectives.exchange(own_entries)

        digests_of_group: defaultdict[GroupKey, dict[int, _GroupDigests]] = defaultdict(dict)
        for rank, entries in enumerate(entries_of_ranks):
            for key_fields, digest_fields in entries:  # tuples are received as lists
                digests_of_group[GroupKey(*key_fields)][rank] = _GroupDigests(*digest_fields)
        return digests_of_group

    def _bits_of_groups(self) -> dict[GroupKey, BitSums]:
        """Returns the sums of the bits of all tensors that must be equal on several ranks.

        They are grouped by the kind of the tensors, and by the ranks on which they must be equal.
        """
        bits_of_group: dict[GroupKey, BitSums] = {}
        for key, tensors in self._tensors_of_groups().items():
            # If a tensor is a DTensor, only this rank's shard is compared. A tensor on the meta
            # device is left out, because another rank has its values.
            local_tensors = {}
            for name, tensor in tensors.items():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if local.numel() > 0 and not local.is_meta:
                    local_tensors[name] = local

            sums = bit_sums(local_tensors.values())
            bits_of_group[key] = as_numbers(dict(zip(local_tensors, sums, strict=True)))
        return bits_of_group

    def _tensors_of_groups(self) -> dict[GroupKey, dict[str, Tensor]]:
        """Returns the tensors that must be equal on several ranks: for each group, by name.

        For example, on all of 2 ranks:

            {(PARAMETERS, 0, 2): {"fc.weight": tensor},
             (OPTIMIZER_STATE, 0, 2): {"exp_avg of fc.weight": tensor},
             (BUFFERS, 0, 2): {"norm.running_mean": tensor}}
        """
        tensors_of_group: defaultdict[GroupKey, dict[str, Tensor]] = defaultdict(dict)
        for prefix, wrapped in self._named_modules():
            # An optimizer knows its parameters as objects. `equal_tensors` may return copies.
            parameter_of_name = dict(users_module(wrapped).named_parameters())
            for equal_tensors in wrapped.equal_tensors():
                ranks = dist.get_process_group_ranks(equal_tensors.group)
                key_of_parameters = GroupKey(message.PARAMETERS, min(ranks), len(ranks))
                key_of_states = GroupKey(message.OPTIMIZER_STATE, min(ranks), len(ranks))
                for name, tensor in equal_tensors.parameters.items():
                    tensors_of_group[key_of_parameters][prefix + name] = tensor
                    state = self._optimizer_tensors(parameter_of_name.get(name))
                    for state_name, state_tensor in state.items():
                        full_name = f"{state_name} of {prefix}{name}"
                        tensors_of_group[key_of_states][full_name] = state_tensor

            for name, buffer in _combined_buffers(wrapped).items():
                tensors_of_group[self._key_of_buffers()][prefix + name] = buffer
        return tensors_of_group

    def _optimizer_tensors(self, parameter: nn.Parameter | None) -> dict[str, Tensor]:
        """Returns the tensors that the optimizers keep for a parameter: `{"exp_avg": tensor}`."""
        tensors: dict[str, Tensor] = {}
        for optimizer in self._optimizers:
            state = optimizer.inner.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor):
                    tensors[name] = value
        return tensors

    def _raise_difference(self, kind: str, ranks: Sequence[int], bits: BitSums) -> None:
        """Raises WrongDeviceError, on all ranks, for tensors that differ between some ranks.

        The caller knows from the digests that at least one of the tensors differs.

        Args:
            kind: the kind of the tensors: `message.PARAMETERS`, for example.
            ranks: the ranks that should have equal tensors.
            bits: the sums of the bits of these tensors on this rank, by name; empty if it is not
                one of `ranks`.
        """
        # All ranks take part in a collective, so those that are not in `ranks` do, too.
        bits_of_all = self._run.collectives.exchange(bits)
        differing = []
        verdicts = []
        for name in bits_of_all[ranks[0]]:
            bits_of_rank = {rank: bits_of_all[rank][name] for rank in ranks}
            if len(set(bits_of_rank.values())) > 1:
                differing.append(name)
                verdicts.append(judge_states(bits_of_rank))

        difference = message.HeldTensors(kind, ranks)
        self._raise_wrong_device(_merge_verdicts(verdicts), difference, differing)

    def _key_of_buffers(self) -> GroupKey:
        """Returns the key of the combined buffers, which every rank has under each strategy."""
        return GroupKey(message.BUFFERS, first_rank=0, num_ranks=self._run.topology.size)

    # What both need

    def _names_of_combined_buffers(self) -> set[str]:
        """Returns the names of all combined buffers, with the prefixes of their modules."""
        names: set[str] = set()
        for prefix, wrapped in self._named_modules():
            names.update(prefix + name for name in _combined_buffers(wrapped))
        return names

    def _named_modules(self) -> list[tuple[str, PreparedModule]]:
        """Returns the modules, each with a prefix for the names of its parameters.

        The prefix is empty for a single module. Several have prefixes like "GPT 0: ".
        """
        if len(self._modules) == 1:
            return [("", self._modules[0])]
        named = []
        for number, wrapped in enumerate(self._modules):
            named.append((f"{type(users_module(wrapped)).__name__} {number}: ", wrapped))
        return named

    def _raise_wrong_device(
        self,
        verdict: Verdict,
        difference: message.Computation | message.HeldTensors,
        tensor_names: Sequence[str],
    ) -> None:
        """Raises WrongDeviceError, on all ranks.

        Args:
            verdict: which ranks are wrong.
            difference: what two ranks have computed, or tensors that several ranks hold.
            tensor_names: the names of the tensors that differ.
        """
        devices, checkpoint = self._devices_and_checkpoint()
        num_steps_made = self._step.number
        raise message.wrong_device_error(
            verdict,
            difference,
            tensor_names,
            devices,
            every=self._run.settings.check_devices,  # for the text "check_devices=100"
            step=num_steps_made + 1,  # the one that is being computed
            checkpoint=checkpoint,
        )

    def _devices_and_checkpoint(self) -> tuple[list[message.Device], str]:
        """Returns the devices of all ranks, and a clause about the checkpoint to resume from.

        All ranks call this.
        """
        joined = self._run.joined
        assert joined is not None  # there are several processes

        # Rank 0 looks for checkpoints, and all ranks tell the user what it has found.
        checkpoint = ""
        if self._run.topology.is_main:
            checkpoint = message.describe_checkpoint(
                self._run.checkpoint_folders, self._last_good_step
            )

        own_answer = {
            "device": str(self._run.device),
            "numerics": read_numerics(self._run.device),
            "checkpoint": checkpoint,
        }
        answers = self._run.collectives.exchange(own_answer)
        devices = []
        for host, answer in zip(joined.hosts, answers, strict=True):
            devices.append(message.Device(answer["device"], host, answer["numerics"]))
        return devices, answers[0]["checkpoint"]


def users_module(wrapped: PreparedModule) -> nn.Module:
    """Returns the module of the user that a strategy has wrapped."""
    module = wrapped.module
    inner = getattr(module, "module", module) if isinstance(module, ModuleWrapper) else module
    assert isinstance(inner, nn.Module)
    return inner


def _combined_buffers(wrapped: PreparedModule) -> dict[str, Tensor]:
    """Returns the present buffers of a module that are combined over virtual ranks, by name."""
    buffers: dict[str, Tensor] = {}
    for extension in wrapped.extensions:
        if isinstance(extension, VirtualRankBuffers):
            buffers.update(extension.present_combined_buffers())
    return buffers


def _entry_of(result: Computed | None) -> tuple[int, str] | None:
    """Returns the number of the virtual rank and a digest of its results, or None without one."""
    return None if result is None else (result.virtual_rank, digest(result.bits))


def _sums_of_buffers(wrapped: PreparedModule) -> dict[str, Tensor]:
    """Returns the sum of the bits of each combined buffer of a module, by the buffer's name."""
    buffers = _combined_buffers(wrapped)
    return dict(zip(buffers, bit_sums(buffers.values()), strict=True))


def _sums_of_gradients(wrapped: PreparedModule) -> dict[str, Tensor]:
    """Returns the sum of the bits of each gradient of a module, by the parameter's name."""
    if wrapped.gradient_bits is not None:
        # Under FSDP this rank only keeps its shards of the gradients. The wrapper has computed the
        # sums from the full gradients, before they were sharded.
        return wrapped.gradient_bits()

    gradients = {}
    for name, parameter in users_module(wrapped).named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    return dict(zip(gradients, gradient_bit_sums(gradients.values()), strict=True))


def _differing_names(bits_a: BitSums, bits_b: BitSums) -> list[str]:
    """Returns the names of tensors of which two results have different bits, or one has none."""
    names = dict.fromkeys([*bits_a, *bits_b])
    return [name for name in names if bits_a.get(name) != bits_b.get(name)]


def _merge_verdicts(verdicts: Sequence[Verdict]) -> Verdict:
    """Returns one verdict for several tensors, each of which has a verdict of its own.

    A verdict is `Kind.WRONG` if a majority of ranks has the same bits. If all verdicts are
    `Kind.WRONG`, the result names every rank that is wrong in one of them. Otherwise the result is
    the first verdict without a majority.
    """
    wrong_ranks: set[int] = set()
    for verdict in verdicts:
        if verdict.kind is not Kind.WRONG:
            return verdict
        wrong_ranks.update(verdict.ranks)
    return Verdict(Kind.WRONG, sorted(wrong_ranks))


def as_numbers(sums: Mapping[str, Tensor]) -> BitSums:
    """Reads sums of bits from their devices, and returns them as numbers, by name."""
    if not sums:
        return {}
    tensors = list(sums.values())
    device = tensors[0].device
    # All sums are read at once, as every reading waits for the device.
    numbers = torch.stack([sum_of_bits.to(device) for sum_of_bits in tensors]).tolist()
    return dict(zip(sums, numbers, strict=True))


def digest(value: Any) -> str:
    """Returns a short text that is the same for equal values that JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
