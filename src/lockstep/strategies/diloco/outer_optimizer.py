"""DiLoCo's outer optimizer, which merges the weights of the virtual ranks into the shared weights.

It is SGD with Nesterov momentum. Its gradient is the *pseudo-gradient*: the mean over all virtual
ranks of (shared weights - weights of the virtual rank). The weights are exchanged in *fragments*,
which are lists of parameters, given by their indices. A fragment is *in flight* from the time it is
sent until it is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.communication.quantize import Method
from lockstep.errors import CheckpointError
from lockstep.strategies.diloco.exchange import Exchange
from lockstep.strategies.diloco.tensor_versions import SHARED, TensorVersions
from lockstep.wording import count_noun

WEIGHT_OF_OWN_VALUES = 0.5
"""If fragments are applied some steps after they are sent, a virtual rank continues from a mean of
its own weights, with this weight, and the shared ones (alpha in the paper)."""


class FragmentInFlight(NamedTuple):
    """A fragment that was sent and is not applied yet."""

    due_step: int
    """The number of the step in which it is applied."""
    pseudo_gradients: list[Tensor]
    """The pseudo-gradient of each parameter of the fragment, valid after a call of `wait`."""
    wait: Callable[[], None]


def _already_complete() -> None:
    """The `wait` of a fragment whose pseudo-gradients are complete already; does nothing."""


class OuterOptimizer:
    """Exchanges fragments of the weights, and applies them to the shared weights.

    Args:
        weights: the weights of the virtual ranks, and the shared ones.
        virtual_ranks: the numbers of the virtual ranks that this process computes.
        fragments: the indices of the parameters of each fragment.
        exchange: averages tensors over all virtual ranks.
        learning_rate: the learning rate of the outer optimizer.
        momentum: the momentum of the outer optimizer.
        compress: how pseudo-gradients are compressed; None for no compression.
        delays: True if fragments are applied some steps after they are sent.
    """

    def __init__(
        self,
        weights: TensorVersions,
        virtual_ranks: Sequence[int],
        fragments: list[list[int]],
        exchange: Exchange,
        *,
        learning_rate: float,
        momentum: float,
        compress: Method | None,
        delays: bool,
    ) -> None:
        self._weights = weights
        self._virtual_ranks = virtual_ranks
        self._fragments = fragments
        self._exchange = exchange
        self._learning_rate = learning_rate
        self._momentum = momentum
        self._compress = compress
        self._fragments_are_delayed = delays
        self._velocity: dict[int, Tensor] = {}
        """The momentum buffer of each parameter, by the index of the parameter."""
        self._in_flight: dict[int, FragmentInFlight] = {}
        """The fragments in flight, by their numbers."""
        self._quantization_errors: dict[int, dict[int, Tensor]] = {}
        """What quantization lost of each fragment when it was last sent, by virtual rank and
        fragment. It is added to what is sent next."""
        self.reset()

    def reset(self) -> None:
        """Drops momentum, quantization errors and fragments in flight, for new weights."""
        self._velocity = {}
        self._in_flight = {}
        self._quantization_errors = {number: {} for number in self._virtual_ranks}

    def send(self, fragment: int, due_step: int) -> None:
        """Starts the exchange of a fragment, which is in flight from then on.

        Args:
            fragment: the number of the fragment.
            due_step: the number of the step in which it is to be applied.
        """
        if self._compress is None:
            pseudo_gradients, wait = self._start_exact_means(fragment)
        else:
            pseudo_gradients, wait = self._start_quantized_means(fragment, self._compress)
        self._in_flight[fragment] = FragmentInFlight(due_step, pseudo_gradients, wait)

    def _start_exact_means(self, fragment: int) -> tuple[list[Tensor], Callable[[], None]]:
        """Starts averaging a fragment over the virtual ranks, without compression.

        Returns:
            The pseudo-gradient of each parameter, and a function that waits until all are complete.
        """
        shared = self._weights.values(SHARED)
        weights_of_virtual_ranks = [self._weights.values(n) for n in self._virtual_ranks]

        # These are sums over the virtual ranks of this process. The exchange replaces them by means
        # over all virtual ranks.
        pseudo_gradients: list[Tensor] = []
        for index in self._fragments[fragment]:
            total = torch.zeros_like(shared[index])
            for weights in weights_of_virtual_ranks:
                total += shared[index] - weights[index]
            pseudo_gradients.append(total)

        self._add_quantization_errors(pseudo_gradients, fragment)
        return pseudo_gradients, self._exchange.start_means(pseudo_gradients)

    def _add_quantization_errors(self, sums: Sequence[Tensor], fragment: int) -> None:
        """Adds the errors of the last quantized exchange of a fragment to its next, exact one.

        There are such errors only if the run was resumed without the compression that it had.

        Args:
            sums: for each parameter of the fragment, a sum over the virtual ranks of this process.
            fragment: the number of the fragment.
        """
        sizes = [total.numel() for total in sums]
        for error in self._take_quantization_errors(fragment):
            if error is not None:
                without_padding = error[: sum(sizes)]  # an error is one flat tensor with padding
                parts = torch.split(without_padding, sizes)
                for total, part in zip(sums, parts, strict=True):
                    total += part.view_as(total)

    def _start_quantized_means(
        self, fragment: int, method: Method
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """Starts averaging a quantized fragment over the virtual ranks.

        The quantization errors are kept, and added to what is sent next.

        Returns:
            The pseudo-gradient of each parameter, and a function that waits until all are complete.
        """
        indices = self._fragments[fragment]  # of the parameters of the fragment
        shared = self._weights.values(SHARED)

        # All differences of a virtual rank form one vector.
        vectors: list[Tensor] = []
        for number in self._virtual_ranks:
            weights = self._weights.values(number)  # of this virtual rank
            differences = [(shared[index] - weights[index]).reshape(-1) for index in indices]
            vectors.append(torch.cat(differences))

        previous_errors = self._take_quantization_errors(fragment)  # one for each virtual rank

        # The exchange goes on until `wait` is called, which writes the means into
        # `pseudo_gradients`.
        pseudo_gradients = [torch.empty_like(shared[index]) for index in indices]
        new_errors, wait = self._exchange.start_quantized_means(
            vectors, previous_errors, pseudo_gradients, method
        )
        for number, error in zip(self._virtual_ranks, new_errors, strict=True):
            if error is not None:
                self._quantization_errors[number][fragment] = error

        return pseudo_gradients, wait

    def _take_quantization_errors(self, fragment: int) -> list[Tensor | None]:
        """Returns what quantization lost of a fragment when it was last sent, and forgets it.

        The error is added to what is sent now, so it must not be added again: the run may have been
        resumed with another `compress`, which leaves no new error in place of the old one.

        Returns:
            The error of each virtual rank of this process; None if there is none.
        """
        return [self._quantization_errors[n].pop(fragment, None) for n in self._virtual_ranks]

    def due_fragments(self, step: int) -> list[int]:
        """Returns the fragments in flight that are due in this step or were due before."""
        due: list[int] = []
        for fragment, in_flight in self._in_flight.items():
            if in_flight.due_step <= step:
                due.append(fragment)
        return due

    def apply(self, fragment: int) -> None:
        """Takes the outer step for a fragment in flight, and updates the virtual ranks' weights.

        For each parameter with pseudo-gradient g, this is a step of SGD with Nesterov momentum:

            velocity = momentum * velocity + g
            shared = shared - learning_rate * (g + momentum * velocity)
        """
        in_flight = self._in_flight.pop(fragment)
        in_flight.wait()
        shared = self._weights.values(SHARED)
        indices = self._fragments[fragment]

        for index, gradient in zip(indices, in_flight.pseudo_gradients, strict=True):
            update = self._nesterov_update(index, gradient) if self._momentum else gradient
            shared[index].sub_(update, alpha=self._learning_rate)
            for number in self._virtual_ranks:
                weight = self._weights.values(number)[index]
                if self._fragments_are_delayed:
                    # The virtual rank has been trained since the fragment was sent, so it keeps a
                    # part of its own weights: alpha * own + (1 - alpha) * shared.
                    weight.lerp_(shared[index], 1.0 - WEIGHT_OF_OWN_VALUES)
                else:
                    weight.copy_(shared[index])

    def _nesterov_update(self, index: int, gradient: Tensor) -> Tensor:
        """Updates the velocity of a parameter, and returns `gradient + momentum * velocity`.

        Args:
            index: the index of the parameter.
            gradient: its pseudo-gradient.
        """
        if index not in self._velocity:
            self._velocity[index] = torch.zeros_like(gradient)
        velocity = self._velocity[index]
        velocity.mul_(self._momentum).add_(gradient)  # in place
        return gradient.add(velocity, alpha=self._momentum)

    def wait(self) -> None:
        """Waits until the pseudo-gradients of all fragments in flight are complete."""
        for fragment, in_flight in self._in_flight.items():
            in_flight.wait()
            self._in_flight[fragment] = in_flight._replace(wait=_already_complete)

    def drop_in_flight(self) -> None:
        """Drops the fragments in flight without waiting for them."""
        self._in_flight = {}

    def shared_state(self) -> dict[str, Any]:
        """Returns the part of the state that is equal on all ranks, for a checkpoint.

        Waits for the fragments in flight. For each of them, "sent" lists its number, the step in
        which it is due, and its pseudo-gradients.
        """
        self.wait()
        sent: list[list[Any]] = []
        for fragment, in_flight in self._in_flight.items():
            sent.append([fragment, in_flight.due_step, in_flight.pseudo_gradients])
        return {"fragments": len(self._fragments), "momentum": self._velocity, "sent": sent}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the shared state was saved with another number of fragments.

        The state has the momentum and the unfinished exchange of each fragment. With another number
        of fragments, each fragment would have different parameters than its saved momentum.
        """
        num_fragments = len(self._fragments)
        num_saved = saved["fragments"]
        if num_fragments != num_saved:
            raise CheckpointError(
                f"resuming with DiLoCo(fragments={num_fragments})",
                f"the checkpoint was saved with {count_noun(num_saved, 'fragment')}, and holds "
                "what is still to be exchanged of each fragment",
                f"continue with fragments={num_saved}; or begin anew from the shared weights: "
                "lockstep.load_weights(model, folder)",
            )

    def load_shared_state(self, saved: Mapping[str, Any], device: torch.device) -> None:
        """Loads a shared state, as returned by `shared_state`, and moves it to a device."""
        self._velocity = {index: value.to(device) for index, value in saved["momentum"].items()}
        for fragment, due_step, pseudo_gradients in saved["sent"]:
            on_device = [gradient.to(device) for gradient in pseudo_gradients]
            self._in_flight[fragment] = FragmentInFlight(due_step, on_device, _already_complete)

    def quantization_errors(self, virtual_rank: int) -> dict[int, Tensor]:
        """Returns the quantization errors of a virtual rank, by fragment."""
        return self._quantization_errors[virtual_rank]

    def load_quantization_errors(
        self, virtual_rank: int, errors: Mapping[int, Tensor], device: torch.device
    ) -> None:
        """Loads the quantization errors of a virtual rank, and moves them to a device."""
        self._quantization_errors[virtual_rank] = {
            fragment: error.to(device) for fragment, error in errors.items()
        }
