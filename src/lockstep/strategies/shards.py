"""What a script cannot do with the parameters of a sharded model, said where it is tried.

The objects that were parameters before are of no use, gradients come to the shards around autograd,
and torch keeps the values of a shard apart from the object. All of it would go wrong in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.errors import UsageError, some


class Shards:
    """The parameters of a module after `fully_shard`, under their names."""

    def __init__(self, module: nn.Module) -> None:
        self.named = {n: p for n, p in module.named_parameters() if isinstance(p, DTensor)}
        # Torch keeps the object of a storage, so it is another one if this is not the same.
        self._storages = {name: p.untyped_storage() for name, p in self.named.items()}
        self._hooked: set[str] = set()
        self.guard()

    def guard(self) -> None:
        """Refuses gradients that autograd brings; to be called again as parameters unfreeze."""
        for name, shard in self.named.items():
            if shard.requires_grad and name not in self._hooked:
                self._hooked.add(name)
                shard.register_hook(_refusal(name))  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Raises UsageError where the user has changed them in a way that has no effect."""
        hooked = [n for n, p in self.named.items() if len(p._backward_hooks or ()) > 1]
        if hooked:
            raise _no_hooks(hooked)
        replaced = [
            n for n, p in self.named.items() if p.untyped_storage() is not self._storages[n]
        ]
        if replaced:
            raise UsageError(
                "parameter.data = ... of a sharded model",
                f"it has no effect on {some(replaced)}: the shards are elsewhere",
                "write into them, under torch.no_grad(): parameter.copy_(...), .clamp_(...)",
            )


def _refusal(name: str) -> Callable[[Tensor], None]:
    """A hook of a shard: autograd has nothing to bring there."""

    def refuse(gradient: Tensor) -> None:
        raise outside_of_forward(f"{name} was a shard there, or made whole from shards")

    return refuse


def outside_of_forward(found: str) -> UsageError:
    """The error of a loss that reaches shards around the forward pass."""
    return UsageError(
        "a loss computed from a parameter of a sharded model, outside of its forward pass",
        f"{found}: such a gradient is neither averaged over the ranks nor weighted",
        "compute it in the model's forward pass, where parameters are whole, and return it; "
        "for a penalty on weights there is weight_decay of the optimizer",
    )


def check_hooks(module: nn.Module) -> None:
    """Raises UsageError where gradients have hooks, which nothing would call."""
    hooked = [
        name
        for name, p in module.named_parameters()
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
    ]
    if hooked:
        raise _no_hooks(hooked)


def _no_hooks(names: Sequence[str]) -> UsageError:
    return UsageError(
        "hooks on the gradients of a sharded model's parameters",
        f"those of {some(names)} are not called: gradients of shards do not come from autograd",
        "read or change gradients between world.backward and optimizer.step",
    )


class Replaced(nn.Parameter):
    """A parameter whose place in the model a shard has taken; nothing can be done with it.

    It would pass for one without elements and without gradient: a norm of 0, a penalty of 0.
    """

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        """Refuses every operation and attribute."""
        raise UsageError(
            "a parameter that was taken from a model before world.prepare",
            "a shard has taken its place in the model",
            "take it from the prepared model: model.parameters(), model.head.weight",
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return "a parameter that was replaced in world.prepare"
