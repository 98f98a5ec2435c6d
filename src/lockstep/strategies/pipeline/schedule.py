"""The order in which the ranks of a pipeline compute: pure functions of sizes.

A global batch is divided into *micro-batches* and a model into *stages*. An *action* is one forward
or backward pass of a micro-batch through a stage. A *position* is a rank's number in the pipeline;
stage k is at position k modulo the number of positions. `order` returns a rank's list of actions.

- `gpipe`: all forward passes, then all backward passes (Huang et al. 2019, arXiv 1811.06965).
- `1f1b`: as few forward passes ahead as keep all positions busy, then one backward pass for each
  forward pass (Narayanan et al. 2019, PipeDream, and 2021, arXiv 2104.04473). It takes the same
  time, and holds activations of at most as many micro-batches as there are positions.
- Several stages per rank are interleaved, as in the second paper, but each rank finishes the
  forward pass of a micro-batch before it begins the next one: the user's training loop computes
  the loss on the last position, and whatever the loop calls between two micro-batches (a
  collective, an evaluation) must find all ranks at the same one. From four ranks on, this costs
  more than interleaving saves.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple

EXTRA_MICRO_BATCHES = 2
"""With interleaved 1f1b, this many more micro-batches than positions may be under way on a rank."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    forward: bool
    stage: int
    micro_batch: int


@lru_cache(maxsize=64)
def order(
    schedule: str, position: int, positions: int, per_rank: int, micro_batches: int
) -> tuple[Action, ...]:
    """Returns what the rank at `position` computes for one global batch, in order.

    Args:
        schedule: `gpipe` or `1f1b`.
        position: of the rank in the pipeline, from 0.
        positions: number of ranks in the pipeline.
        per_rank: number of stages on each of them.
        micro_batches: number of micro-batches in the global batch.
    """
    if per_rank > 1:
        orders = _interleaved_orders(schedule, positions, per_rank, micro_batches)
        return tuple(orders[position])

    # The last position can do a backward pass right after the forward pass. Each position before it
    # has to do one more forward pass until the first gradient comes back to it.
    max_ahead = positions - 1 - position
    if schedule == "gpipe":  # all forward passes come first
        max_ahead = micro_batches

    return tuple(_order_of_one_stage(position, max_ahead, micro_batches))


def _order_of_one_stage(stage: int, max_ahead: int, num_micro_batches: int) -> list[Action]:
    """Returns the actions of a rank with one stage.

    For example, with `max_ahead` 1 and three micro-batches (F forward, B backward): F0 F1 B0 F2 B1
    B2.

    Args:
        stage: its number.
        max_ahead: the number of forward passes that the rank is ahead: the backward pass of
            micro-batch n comes after the forward pass of micro-batch n + max_ahead.
        num_micro_batches: of the global batch.
    """
    actions: list[Action] = []
    for turn in range(num_micro_batches + max_ahead):
        if turn < num_micro_batches:
            actions.append(Action(forward=True, stage=stage, micro_batch=turn))
        if turn >= max_ahead:
            actions.append(Action(forward=False, stage=stage, micro_batch=turn - max_ahead))
    return actions


class _Finished(NamedTuple):
    """When a simulated action was finished."""

    tick: int
    meeting_point: int
    """The next meeting point that its rank comes to (see `_interleaved_orders`)."""


class _SimulatedRank:
    """A rank with several stages, in the simulation of `_interleaved_orders`."""

    def __init__(self, position: int, positions: int, last_stage: int, num_micro_batches: int):
        stages = list(range(position, last_stage + 1, positions))
        self.highest_stage = stages[-1]
        self._last_stage_of_model = last_stage
        self.forward_passes: deque[Action] = deque()
        """Forward passes that are not done yet, in the order in which they must be done."""
        self.backward_passes: list[Action] = []
        """Backward passes that are not done yet, those to be preferred first."""

        for micro_batch in range(num_micro_batches):
            for stage in stages:
                self.forward_passes.append(
                    Action(forward=True, stage=stage, micro_batch=micro_batch)
                )
            for stage in reversed(stages):
                self.backward_passes.append(
                    Action(forward=False, stage=stage, micro_batch=micro_batch)
                )

        self.received_gradients: deque[Action] = deque()
        """The backward passes for which gradients were sent to this rank, in the order in which
        they were sent, and which are not done yet."""
        self.actions: list[Action] = []
        """What it has done, in order."""
        self.busy_until = 0
        """The tick at which its present action ends."""
        self.meeting_point = 0
        """The next meeting point that it comes to."""

    def candidates(self, schedule: str) -> list[Action]:
        """Returns the actions that it may do next, those to be preferred first.

        Forward passes come first, because the last position waits for them. Under `gpipe` backward
        passes begin when all forward passes are done.
        """
        candidates: list[Action] = []
        if self.forward_passes:
            candidates.append(self.forward_passes[0])
        if schedule == "1f1b" or not self.forward_passes:
            for action in self.backward_passes:
                if self._has_its_gradient_next(action):
                    candidates.append(action)
        return candidates

    def _has_its_gradient_next(self, action: Action) -> bool:
        """Returns True if the next gradient that this rank receives is that of a backward pass.

        Gradients of several cuts come from the same rank. NCCL gives them to this rank in the order
        in which they were sent, whatever it waits for. The last stage begins at the loss instead.
        """
        if action.stage == self._last_stage_of_model:
            return True
        return bool(self.received_gradients) and self.received_gradients[0] == action

    def meeting_point_of(self, action: Action) -> int:
        """Returns the next meeting point that this rank comes to after an action.

        A *meeting point* is a place in the training loop at which all ranks may meet in a
        collective: number 2n is after the call of the model for micro-batch n, and number 2n + 1
        after `world.backward` for it.
        """
        # A forward pass needs the inputs, so it is done in that call of the model or later. A
        # backward pass needs the loss, so it is done in that `world.backward` or later.
        earliest = 2 * action.micro_batch
        if not action.forward:
            earliest += 1
        return max(self.meeting_point, earliest)

    def do(self, action: Action, tick: int) -> _Finished:
        """Does an action that begins at a tick.

        A forward pass takes one tick, a backward pass two.

        Returns:
            The tick at which it ends, and the next meeting point that this rank comes to after it.
        """
        meeting_point = self.meeting_point_of(action)
        self.actions.append(action)
        if action.forward:
            self.forward_passes.popleft()
            self.busy_until = tick + 1
        else:
            self.backward_passes.remove(action)
            self.busy_until = tick + 2

        self.meeting_point = meeting_point
        if action.forward and action.stage == self.highest_stage:
            # The call of the model returns, so the rank passes the meeting point that is after it.
            self.meeting_point += 1

        return _Finished(self.busy_until, meeting_point)


def _interleaved_orders(
    schedule: str, positions: int, per_rank: int, micro_batches: int
) -> list[list[Action]]:
    """Returns the actions of every rank of a pipeline with several stages per rank.

    They are found by a simulation: in each tick of a clock, every rank that is not busy does the
    first of its candidates whose requirements are finished.

    A script may call a collective, for which all ranks wait, after the call of the model and after
    `world.backward`. These are the two *meeting points* of each micro-batch. Before a rank comes to
    one, it does all actions that it can. So no action may require what another rank does after a
    later meeting point: that rank would wait at the meeting point for this one.
    """
    last_stage = positions * per_rank - 1
    max_under_way = positions + EXTRA_MICRO_BATCHES
    if schedule == "gpipe":
        max_under_way = micro_batches

    ranks = [_SimulatedRank(p, positions, last_stage, micro_batches) for p in range(positions)]
    finished: dict[Action, _Finished] = {}
    tick = 0
    while any(rank.backward_passes for rank in ranks):
        for rank in ranks:
            if rank.busy_until > tick:
                continue

            for action in rank.candidates(schedule):
                required = _requirements(action, positions, last_stage, max_under_way)
                in_time = _Finished(tick, rank.meeting_point_of(action))
                if _are_finished(required, finished, in_time):
                    finished[action] = rank.do(action, tick)
                    if not action.forward and action.stage < last_stage:
                        rank.received_gradients.popleft()
                    if not action.forward and action.stage > 0:
                        next_pass = action._replace(stage=action.stage - 1)
                        ranks[next_pass.stage % positions].received_gradients.append(next_pass)
                    break

        tick += 1

    return [rank.actions for rank in ranks]


def _are_finished(
    required: list[Action], finished: dict[Action, _Finished], in_time: _Finished
) -> bool:
    """Returns True if all actions that an action requires are finished in time for it.

    Args:
        required: the actions.
        finished: when the actions that were done until now were finished.
        in_time: the latest tick and the latest meeting point at which they may be finished.
    """
    for action in required:
        if action not in finished:
            return False
        if finished[action].tick > in_time.tick:
            return False
        if finished[action].meeting_point > in_time.meeting_point:
            return False
    return True


def _requirements(
    action: Action, positions: int, last_stage: int, max_under_way: int
) -> list[Action]:
    """Returns the actions, of any rank, that must be finished before an action.

    Args:
        action: to be done.
        positions: number of ranks in the pipeline.
        last_stage: number of the model's last stage.
        max_under_way: how many micro-batches a rank may have begun and not finished.
    """
    stage = action.stage
    micro_batch = action.micro_batch
    if not action.forward:
        required = [action._replace(forward=True)]  # the forward pass of the same stage
        if stage < last_stage:  # the gradients come from the next stage
            required.append(action._replace(stage=stage + 1))
        return required

    required = []
    if stage > 0:  # the activations come from the stage before
        required.append(action._replace(stage=stage - 1))

    if micro_batch >= max_under_way:
        # A rank has finished an earlier micro-batch with the backward pass of its lowest stage.
        lowest_stage = stage % positions
        earlier = micro_batch - max_under_way
        required.append(Action(forward=False, stage=lowest_stage, micro_batch=earlier))

    return required
