"""Compares the bits that processes compute, to find devices that compute wrongly.

Some devices compute wrongly now and then without any error: a bit flips in memory that nobody
protects, or a core gives wrong products. With virtual ranks every result has the same bits on every
process, so such an error can be seen: another process computes the same again. Every so many
optimizer steps there is a *checked* global batch:

1. Before its first forward pass the *state* of all processes is compared: the parameters, and the
   state of the optimizers. Every process has them under `ddp`, and those with the same shard under
   `hsdp`. Whatever has flipped a bit of them, at any step since the last check, shows here. The
   majority is right; with two processes one of the two is wrong.
2. Each process *repeats* a virtual rank of another process, its *owner* (`batch.repeats`), and the
   bits of the two gradients are compared. That covers data, forward pass, loss and backward pass.
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
processes differ; one in the addition of gradients over processes, or under `fsdp` in the
optimizer's update of a shard that no other process has: all processes then go on with the same
wrong numbers; one that all processes make.
"""

from __future__ import annotations

import hashlib
import json
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
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch, VirtualRank
from lockstep.session.step import CHECK_EVERY, Dispute, check_due
from lockstep.strategies.base import ModuleWrapper, PreparedModule
from lockstep.strategies.bit_sums import bit_sums, gradient_bit_sums

BitSums = dict[str, int]
"""Sums of the bits of tensors, by name."""


class Computed(NamedTuple):
    """What a process has computed for a virtual rank that is compared."""

    virtual_rank: int
    gradient: BitSums

    @property
    def entry(self) -> tuple[int, str]:
        """The virtual rank, and a digest of its gradient."""
        return self.virtual_rank, digest(self.gradient)


class _DisputeOfRanks(NamedTuple):
    """A virtual rank for which its owner and another rank have computed different gradients."""

    virtual_rank: int
    owner: int
    checker: int


class DeviceCheck(Extension):
    """Compares what the processes of a run compute, in the global batches that are checked.

    Args:
        run: of this process; it has at least two.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._step = run.step
        self._modules: list[PreparedModule] = []
        self._optimizers: list[Any] = []
        self._owned: Computed | None = None
        """What this process has computed for its own virtual rank that is compared."""
        self._repeated: Computed | None = None
        """What it has computed for that of another process."""
        self._again: Computed | None = None
        """What it has computed for the virtual rank of which there is a dispute."""
        self._scales: list[float] = []
        """The factors of the loss in the micro-batches of the latest repeated virtual rank."""
        self._dispute: _DisputeOfRanks | None = None
        self._is_compared = True
        """True if the results of the present global batch have been compared."""
        self._last_good_step: int | None = None
        """Optimizer steps before the last global batch in which no difference was found."""
        self._step.find_dispute = self.find_dispute

    # Events

    def module_prepared(self, wrapped: PreparedModule) -> None:
        """Remembers a module."""
        self._modules.append(wrapped)

    def optimizer_prepared(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """Remembers an optimizer."""
        self._optimizers.append(optimizer)

    def begin(self, micro_batch: MicroBatch) -> None:
        """Compares the state of the processes when a checked global batch begins.

        Raises:
            WrongDeviceError: on all ranks, if some rank has other bits.
            UsageError: the loop has left out what was to be compared in the one before.
        """
        if micro_batch.first and self._owned is not None and not self._is_compared:
            raise self._skipped_error()
        if not micro_batch.checks_devices:
            return
        if micro_batch.first:
            self._forget()
            self._is_compared = False
            self._compare_states()
        virtual_rank = micro_batch.virtual_rank
        if virtual_rank is not None and virtual_rank.is_compared and virtual_rank.is_repeat:
            if virtual_rank.begins:
                self._scales = []
            self._scales.append(micro_batch.scale)

    def backward_ended(self, micro_batch: MicroBatch) -> None:
        """Sums up the bits of the gradient of a virtual rank that is compared."""
        virtual_rank = self._step.micro_batch.virtual_rank
        if virtual_rank is None or not virtual_rank.is_compared or not virtual_rank.ends:
            return
        self._remember(virtual_rank, Computed(virtual_rank.number, self._gradient_bits()))

    def before_step(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """Raises WrongDeviceError, on all ranks, if two of them have computed different bits."""
        if not self._step.micro_batch.checks_devices:
            return
        if not self._is_compared:  # the loop had got all micro-batches before it computed any
            self.find_dispute()
        if self._dispute is not None:
            self._raise_dispute(self._dispute)
        self._last_good_step = self._step.number

    def global_batch_trained(self) -> None:
        """Compares the state of the processes where the check of replicas is about to do it.

        That check finds fewer tensors and does not name a rank.

        Raises:
            WrongDeviceError: on all ranks, if some rank has other bits.
        """
        number = self._step.number
        if any(check_due(number, wrapped.check_every or CHECK_EVERY) for wrapped in self._modules):
            self._compare_states()

    def pass_ended(self) -> None:
        """Forgets a global batch that the loop has left before its end."""
        self._forget()
        self._is_compared = True

    def release(self) -> None:
        """Leaves the run's step alone."""
        self._step.find_dispute = lambda: None

    def _forget(self) -> None:
        """Forgets what was computed in the checked global batch before."""
        self._owned = None
        self._repeated = None
        self._again = None
        self._dispute = None

    def _remember(self, virtual_rank: VirtualRank, computed: Computed) -> None:
        """Remembers what was computed for a virtual rank that is compared."""
        if self._dispute is not None:
            self._again = computed
        elif virtual_rank.is_repeat:
            self._repeated = computed
        else:
            self._owned = computed

    # Gradients

    def find_dispute(self) -> Dispute | None:
        """Compares the gradients of the virtual ranks that two processes have computed.

        All ranks call it together.

        Returns:
            The virtual rank that all of them are to compute again; None: nobody disagrees.

        Raises:
            UsageError: on all ranks, if the loop has left out what was to be compared.
        """
        self._is_compared = True
        owned = None if self._owned is None else self._owned.entry
        repeated = None if self._repeated is None else self._repeated.entry
        entries = self._run.collectives.exchange((owned, repeated))
        owner_of_number: dict[int, int] = {}
        digest_of_number: dict[int, str] = {}
        for rank, (entry_of_owner, _) in enumerate(entries):
            if entry_of_owner is not None:
                number, digest_of_gradient = entry_of_owner
                owner_of_number[number] = rank
                digest_of_number[number] = digest_of_gradient
        repeated_numbers = {entry[0] for _, entry in entries if entry is not None}
        if repeated_numbers != set(owner_of_number):
            raise self._skipped_error()
        for rank, (_, entry_of_repeat) in enumerate(entries):
            if entry_of_repeat is None:
                continue
            number, digest_of_gradient = entry_of_repeat
            if digest_of_number[number] == digest_of_gradient:
                continue
            self._dispute = _DisputeOfRanks(number, owner_of_number[number], rank)
            # All micro-batches of that virtual rank weigh what they weigh on the rank that has
            # repeated it.
            scales_of_rank = self._run.collectives.exchange(self._scales)
            return Dispute(number, scales_of_rank[rank])
        return None

    def _gradient_bits(self) -> BitSums:
        """Returns the sums of the bits of all gradients of the present virtual rank."""
        sums: dict[str, Tensor] = {}
        for prefix, wrapped in self._named_modules():
            if wrapped.gradient_bits is not None:
                for name, sum_of_bits in wrapped.gradient_bits().items():
                    sums[prefix + name] = sum_of_bits
                continue
            gradients = {}
            for name, parameter in users_module(wrapped).named_parameters():
                if parameter.grad is not None:
                    gradients[prefix + name] = parameter.grad
            sums.update(zip(gradients, gradient_bit_sums(gradients.values()), strict=True))
        return as_numbers(sums)

    def _skipped_error(self) -> UsageError:
        """Returns the error for a loop that has left out what was to be compared."""
        return UsageError(
            f"check_devices={self._run.settings.check_devices} in a loop that skips micro-batches",
            "a micro-batch that is computed again to check a device was not trained on, so nothing "
            "was compared, and the optimizer may not have stepped",
            "call world.backward and optimizer.step as for every other micro-batch; leave it out "
            "of sums of your own only: if not world.is_repeated_micro_batch",
        )

    def _raise_dispute(self, dispute: _DisputeOfRanks) -> None:
        """Raises WrongDeviceError, on all ranks, for a virtual rank with different gradients."""
        owned = None if self._owned is None else self._owned.gradient
        repeated = None if self._repeated is None else self._repeated.gradient
        again = None if self._again is None else self._again.gradient
        bits_of_rank = self._run.collectives.exchange((owned, repeated, again))
        first_of_rank: dict[int, BitSums] = {
            dispute.owner: bits_of_rank[dispute.owner][0],
            dispute.checker: bits_of_rank[dispute.checker][1],
        }
        again_of_rank: dict[int, BitSums] = {}
        for rank, (_, _, bits_again) in enumerate(bits_of_rank):
            if bits_again is not None:
                again_of_rank[rank] = bits_again
        if len(again_of_rank) < len(bits_of_rank):  # some rank could not compute it again
            again_of_rank = {}
        verdict = judge_repeats(
            Results(
                first_of_rank={rank: digest(bits) for rank, bits in first_of_rank.items()},
                again_of_rank={rank: digest(bits) for rank, bits in again_of_rank.items()},
            )
        )
        differing = []
        of_owner = first_of_rank[dispute.owner]
        of_checker = first_of_rank[dispute.checker]
        for name in dict.fromkeys([*of_owner, *of_checker]):
            if of_owner.get(name) != of_checker.get(name):
                differing.append(name)
        self._raise(
            verdict,
            message.Computation(dispute.virtual_rank, dispute.owner, dispute.checker),
            differing,
        )

    # States

    def _compare_states(self) -> None:
        """Compares parameters and the states of optimizers over the ranks that have the same.

        Raises:
            WrongDeviceError: on all ranks, if some rank has other bits.
        """
        states = self._states()
        entries = []
        for (kind, first_rank), bits in states.items():
            entries.append((kind, first_rank, digest(list(bits)), digest(bits)))
        entries_of_rank = self._run.collectives.exchange(entries)
        # For each kind, and each set of ranks that have the same: digests of names and bits.
        digests: dict[tuple[str, int], dict[int, tuple[str, str]]] = {}
        for rank, entries_here in enumerate(entries_of_rank):
            for kind, first_rank, names, bits_digest in entries_here:
                digests.setdefault((kind, first_rank), {})[rank] = (names, bits_digest)
        for key, digests_of_rank in digests.items():
            num_different_names = len({names for names, _ in digests_of_rank.values()})
            num_different_bits = len({bits for _, bits in digests_of_rank.values()})
            # An optimizer that spreads its state over the ranks has other tensors on each of them.
            if num_different_names == 1 and num_different_bits > 1:
                self._raise_difference(key[0], list(digests_of_rank), states.get(key, {}))

    def _states(self) -> dict[tuple[str, int], BitSums]:
        """Returns the sums of the bits of what has the same bits on some ranks.

        Returns:
            By the kind of tensors, and the smallest of the ranks that have the same tensors.
        """
        tensors: dict[tuple[str, int], dict[str, Tensor]] = {}
        for prefix, wrapped in self._named_modules():
            parameters = dict(users_module(wrapped).named_parameters())
            for equal_tensors in wrapped.equal_tensors():
                group = equal_tensors.group
                first_rank = 0 if group is None else min(dist.get_process_group_ranks(group))
                for name, tensor in equal_tensors.parameters.items():
                    key = (message.PARAMETERS, first_rank)
                    tensors.setdefault(key, {})[prefix + name] = tensor
                    for optimizer in self._optimizers:
                        state = optimizer.inner.state.get(parameters.get(name), {})
                        for state_name, value in state.items():
                            if isinstance(value, Tensor):
                                key = (message.OPTIMIZER_STATE, first_rank)
                                full_name = f"{state_name} of {prefix}{name}"
                                tensors.setdefault(key, {})[full_name] = value
        bits: dict[tuple[str, int], BitSums] = {}
        for key, tensors_of_kind in tensors.items():
            local = {}
            for name, tensor in tensors_of_kind.items():
                shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if shard.numel() and not shard.is_meta:
                    local[name] = shard
            bits[key] = as_numbers(dict(zip(local, bit_sums(local.values()), strict=True)))
        return bits

    def _raise_difference(self, kind: str, ranks: Sequence[int], bits: BitSums) -> None:
        """Raises WrongDeviceError, on all ranks, for tensors that some rank holds otherwise.

        Args:
            kind: of the tensors.
            ranks: that hold them.
            bits: of this rank, if it is one of them.
        """
        bits_of_all = self._run.collectives.exchange(bits)
        differing = []
        verdicts = []
        for name in bits_of_all[ranks[0]]:
            bits_of_rank = {rank: bits_of_all[rank][name] for rank in ranks}
            if len(set(bits_of_rank.values())) > 1:
                differing.append(name)
                verdicts.append(judge_states(bits_of_rank))
        # If several ranks are wrong, each may hold other tensors that are.
        if all(verdict.kind is Kind.WRONG for verdict in verdicts):
            wrong = {rank for verdict in verdicts for rank in verdict.ranks}
            verdict = Verdict(Kind.WRONG, sorted(wrong))
        else:
            verdict = next(v for v in verdicts if v.kind is not Kind.WRONG)
        self._raise(verdict, message.Holding(kind, ranks), differing)

    # What both need

    def _named_modules(self) -> list[tuple[str, PreparedModule]]:
        """Returns the modules, each with what comes before the names of its parameters."""
        if len(self._modules) == 1:
            return [("", self._modules[0])]
        named = []
        for number, wrapped in enumerate(self._modules):
            named.append((f"{type(users_module(wrapped)).__name__} {number}: ", wrapped))
        return named

    def _raise(
        self,
        verdict: Verdict,
        difference: message.Computation | message.Holding,
        differing: Sequence[str],
    ) -> None:
        """Raises WrongDeviceError, on all ranks.

        Args:
            verdict: who is wrong.
            difference: what differs.
            differing: the names of the tensors that do.
        """
        checkpoint = ""  # all ranks say what rank 0 sees
        if self._run.topology.is_main:
            checkpoint = message.describe_checkpoint(
                self._run.checkpoint_folders, self._last_good_step
            )
        joined = self._run.joined
        assert joined is not None  # there are several processes
        numerics = read_numerics(self._run.device)
        answers = self._run.collectives.exchange((str(self._run.device), numerics, checkpoint))
        devices = []
        for host, (name, numerics_of_rank, _) in zip(joined.hosts, answers, strict=True):
            devices.append(message.Device(name, host, numerics_of_rank))
        raise message.wrong_device_error(
            verdict,
            difference,
            differing,
            devices,
            every=self._run.settings.check_devices,
            step=self._step.number + 1,
            checkpoint=answers[0][2],
        )


def users_module(wrapped: PreparedModule) -> nn.Module:
    """Returns the module of the user that a strategy has wrapped."""
    module = wrapped.module
    inner = getattr(module, "module", module) if isinstance(module, ModuleWrapper) else module
    assert isinstance(inner, nn.Module)
    return inner


def as_numbers(sums: Mapping[str, Tensor]) -> BitSums:
    """Returns sums of bits as numbers, by name."""
    if not sums:
        return {}
    tensors = list(sums.values())
    device = tensors[0].device
    # They are read from the device together, since every reading waits for it.
    numbers = torch.stack([sum_of_bits.to(device) for sum_of_bits in tensors]).tolist()
    return dict(zip(sums, numbers, strict=True))


def digest(value: Any) -> str:
    """Returns a short text that is the same for equal values that JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
