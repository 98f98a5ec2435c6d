"""Sharded tensors in a state become whole ones before it is saved, and shards when it is loaded.

So a checkpoint holds plain tensors under plain names, whatever strategy wrote it, and any strategy
on any number of ranks can read it.

What one rank has and another has not, as under a pipeline, stands on the other on the meta device
(in the state of a module) or is left out (in that of an optimizer).

Communication: `gathered` is one all-gather for each sharded tensor, so all ranks call it with the
same state; `completed` one broadcast from each rank that has something of its own; `spread`
communicates nothing, since every rank has the whole tensors that it cuts.

Work that each rank does on its own, and whose errors are raised on all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, strided
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.distributed.collectives import Collectives
from lockstep.errors import CheckpointError, LockstepError, UsageError


def full_state_dict(state: Any, *, keep: bool = True) -> Any:
    """The same nest with every DTensor in whole, on the CPU.

    Args:
        state: a nest of dictionaries, lists and tuples, the same on all ranks.
        keep: whether this rank wants the result; where not, it takes part and keeps its shards.
    """
    done: dict[object, Tensor] = {}

    def whole(leaf: Any) -> Any:
        if not _is_sharded(leaf):
            return leaf
        place = address(leaf), leaf.shape
        if place in done:  # tied to it: gathered once, and one tensor again
            return done[place]
        full = leaf.detach().full_tensor()
        kept: Tensor = full.cpu() if keep else leaf
        if place[0]:
            done[place] = kept
        return kept

    return _map(whole, state)


def completed(state: dict[Any, Any], collectives: Collectives) -> dict[Any, Any]:
    """All ranks' entries of one dictionary, on the CPU and on rank 0; the others keep their own.

    Args:
        state: by name; an entry on the meta device is on another rank.
        collectives: of the run.
    """
    names = list(state)
    held = [i for i, name in enumerate(names) if not _is_meta(state[name])]
    if all(isinstance(name, int) for name in names):  # of an optimizer: others have other names
        held = names
    taken: set[int] = set()
    result = dict(state)
    for rank, text in enumerate(collectives.exchange(json.dumps(held))):
        own = [i for i in json.loads(text) if i not in taken]
        taken.update(own)
        if not rank or not own:
            continue
        mine = collectives.topology.rank == rank
        keys = own if held is names else [names[i] for i in own]
        sent = collectives.broadcast([state[k] for k in keys] if mine else None, rank)
        if collectives.topology.is_main:
            result |= zip(keys, _map(_to_cpu, sent), strict=True)
    return {k: result[k] for k in sorted(result)} if held is names else result


def lacks(state: Mapping[str, Any]) -> bool:
    """Whether something of a module's state is on another rank."""
    return any(map(_is_meta, state.values()))


def spread(state: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a state by name, cut as those of the same name in `like` are."""
    return {name: _cut(value, like.get(name)) for name, value in state.items()}


def spread_optimizer(state: Any, optimizer: Optimizer) -> Any:
    """An optimizer's state, cut as its parameters are.

    What has another shape than its parameter, such as a count of steps, stays whole.
    """
    parameters = {
        index: parameter
        for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=False)
        for index, parameter in zip(saved["params"], group["params"], strict=False)
    }

    def cut(index: Any, of_one: Any) -> Any:
        return _map(lambda leaf: _cut(leaf, parameters.get(index)), of_one)

    return {
        **state,
        "state": {index: cut(index, of_one) for index, of_one in state["state"].items()},
    }


def _cut(value: Any, own: Any) -> Any:
    if _is_meta(own):
        return own
    if not _is_sharded(own) or not isinstance(value, Tensor) or value.shape != own.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # loaded already by who made `own`

    # Without a source rank every rank cuts its own part, and nothing is sent.
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _to_cpu(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf


def _is_sharded(value: object) -> bool:
    # Not by isinstance: who has no DTensor should not wait for its import.
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def memory_of(nest: Any) -> set[int]:
    """Where the storages of the tensors in a nest, or of this rank's shards, begin in memory."""
    found: set[int] = set()

    def note(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.layout is strided and not is_lazy(leaf):
            found.add(_local(leaf).untyped_storage().data_ptr())
        return leaf

    _map(note, nest)
    return found


def address(tensor: Any) -> int:
    """Where a tensor, or this rank's shard of it, begins in memory; 0: it has none.

    The padded memory of a sharded parameter is never empty, so tied ones are seen on every rank.
    """
    local = _local(tensor)
    begin = local.untyped_storage().data_ptr()
    return begin + int(local.storage_offset()) * local.element_size() if begin else 0


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if _is_sharded(tensor) else tensor
    return local


def _map(change: Callable[[Any], Any], nest: Any) -> Any:
    if isinstance(nest, dict):
        result: Any = nest.copy()  # of its own kind
        if hasattr(nest, "_metadata"):  # of a module's state; copies leave it out
            result._metadata = nest._metadata
        for key, value in nest.items():
            result[key] = _map(change, value)
        return result
    if type(nest) in (list, tuple):
        return type(nest)(_map(change, value) for value in nest)
    return change(nest)


T = TypeVar("T")


def run_on_all_ranks(
    collectives: Collectives, doing: str, work: Callable[[], tuple[T, str]]
) -> tuple[T, list[str]]:
    """Runs `work` on every rank: its own result, and all ranks' texts.

    Communication: one exchange of text.

    Args:
        collectives: of the run.
        doing: what this is, for messages.
        work: gives this rank's result, and a text for all ranks.

    Raises:
        CheckpointError: on all ranks, what `work` has raised on one of them; on that one as it is.
        UsageError: in the body of an evaluation loop.
    """
    if collectives.blocked is not None:
        raise UsageError(
            f"{doing} in the body of an evaluation loop",
            collectives.blocked,
            "do it after the loop",
        )
    failure: Exception | None = None
    try:
        result, text = work()
        answer: dict[str, Any] = {"text": text}
    except Exception as error:  # whatever it is, the others must not wait for this rank
        failure, answer = error, {"error": _in_parts(doing, error)}
    answers = [json.loads(a) for a in collectives.exchange(json.dumps(answer))]
    if failure is not None:
        raise failure
    for rank, heard in enumerate(answers):
        if "error" in heard:
            was_set, found, do = heard["error"]
            raise CheckpointError(was_set, f"rank {rank}: {found}", do)
    return result, [heard["text"] for heard in answers]


def _in_parts(doing: str, error: Exception) -> tuple[str, str, str]:
    if isinstance(error, LockstepError):
        return error.was_set, error.found, error.do
    return doing, f"{type(error).__name__}: {error}", "see the traceback of that rank"
