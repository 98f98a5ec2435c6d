"""The order in which the ranks of a pipeline compute: pure functions of sizes.

A global batch is divided into *micro-batches*, and a model into *stages*. An *action* is a forward
or backward pass of one micro-batch through one stage. A *position* is a rank's number in the
pipeline; stage k is at position k modulo the number of positions. `order` returns the actions of
one rank. There are two schedules:

- `gpipe`: all forward passes, then all backward passes (Huang et al. 2019, arXiv 1811.06965).
- `1f1b`: only as many forward passes ahead as keep all positions busy, then one backward pass for
  each forward pass (Narayanan et al. 2019, PipeDream, and 2021, arXiv 2104.04473). It takes the
  same time, and keeps the activations of at most as many micro-batches as there are positions.

Several stages per rank are interleaved, as in the second paper, but each rank finishes the forward
pass of a micro-batch before it begins the next one. The reason is the user's training loop: it
computes the loss on the last position, and whatever it calls between two micro-batches (a
collective, an evaluation) must find all ranks at the same micro-batch. With four or more ranks this
costs more than interleaving saves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

EXTRA_MICRO_BATCHES = 2
"""With interleaved 1f1b, a rank may have begun this many micro-batches more than there are
positions, without having finished them."""


class Action(NamedTuple):
    """A forward or backward pass of one micro-batch through one stage."""

    forward: bool
    stage: int
    micro_batch: int


@lru_cache(maxsize=64)
def order(
    schedule: str,
    position: int,
    num_positions: int,
    stages_per_rank: int,
    num_micro_batches: int,
) -> tuple[Action, ...]:
    """Returns the actions of one rank for one global batch, in order.

    Args:
        schedule: `gpipe` or `1f1b`.
        position: the position of the rank in the pipeline, from 0.
        num_positions: the number of ranks in the pipeline.
        stages_per_rank: the number of stages on each rank.
        num_micro_batches: the number of micro-batches in the global batch.
    """
    if stages_per_rank > 1:
        orders = _interleaved_orders(schedule, num_positions, stages_per_rank, num_micro_batches)
        return tuple(orders[position])

    # `max_ahead` is how many micro-batches the forward passes are ahead of the backward passes.
    if schedule == "gpipe":  # all forward passes come first
        max_ahead = num_micro_batches
    else:
        # The last position is 0 ahead: it runs the backward pass of a micro-batch right after the
        # forward pass. Each earlier position has to wait longer for the first gradient, and is
        # ahead by one micro-batch more. With 3 positions: 2, 1 and 0.
        max_ahead = num_positions - 1 - position

    return tuple(_order_of_one_stage(position, max_ahead, num_micro_batches))


def _order_of_one_stage(stage: int, max_ahead: int, num_micro_batches: int) -> list[Action]:
    """Returns the actions of a rank that has a single stage.

    For example, with `max_ahead` 1 and three micro-batches (F forward, B backward): F0 F1 B0 F2 B1
    B2.

    Args:
        stage: the number of the stage.
        max_ahead: by how many micro-batches forward passes are ahead. The backward pass of
            micro-batch n comes after the forward pass of micro-batch n + max_ahead.
        num_micro_batches: the number of micro-batches in the global batch.
    """
    actions: list[Action] = []
    for turn in range(num_micro_batches + max_ahead):
        if turn < num_micro_batches:
            actions.append(Action(forward=True, stage=stage, micro_batch=turn))
        if turn >= max_ahead:
            actions.append(Action(forward=False, stage=stage, micro_batch=turn - max_ahead))
    return actions


class _Finished(NamedTuple):
    """The time at which a simulated action was finished."""

    tick: int
    meeting_point: int
    """The meeting point before which it is done (`_SimulatedRank.meeting_point_of`)."""


class _SimulatedRank:
    """A rank with several stages, in the simulation of `_interleaved_orders`.

    Args:
        position: the position of the rank.
        num_positions: the number of positions in the pipeline.
        last_stage: the number of the model's last stage.
        num_micro_batches: the number of micro-batches in the global batch.
    """

    def __init__(self, position: int, num_positions: int, last_stage: int, num_micro_batches: int):
        stages = list(range(position, last_stage + 1, num_positions))
        self.highest_stage = stages[-1]
        self._last_stage_of_model = last_stage
        self.forward_passes: deque[Action] = deque()
        """The remaining forward passes, in the order in which they must run."""
        self.backward_passes: list[Action] = []
        """The remaining backward passes, in order of preference."""

        for micro_batch in range(num_micro_batches):
            for stage in stages:
                self.forward_passes.append(
                    Action(forward=True, stage=stage, micro_batch=micro_batch)
                )
            for stage in reversed(stages):
                self.backward_passes.append(
                    Action(forward=False, stage=stage, micro_batch=micro_batch)
                )

        self.ready_backward_passes: deque[Action] = deque()
        """The remaining backward passes whose gradients were sent to this rank, in the order in
        which they were sent."""
        self.actions: list[Action] = []
        """The actions that the rank has done, in order."""
        self.busy_until = 0
        """The tick at which its present action ends."""
        self.next_meeting_point = 0
        """The next meeting point that the rank reaches (`meeting_point_of`)."""

    def candidates(self, schedule: str) -> list[Action]:
        """Returns the actions that the rank may do next, in order of preference.

        Forward passes are done in order, so only the next one is a candidate. They are preferred,
        because the last position waits for them. Under `gpipe`, backward passes begin when all
        forward passes are done.
        """
        candidates: list[Action] = []
        if self.forward_passes:
            candidates.append(self.forward_passes[0])
        may_run_backward = schedule == "1f1b" or not self.forward_passes
        if may_run_backward:
            for action in self.backward_passes:
                if self._can_start_backward(action):
                    candidates.append(action)
        return candidates

    def _can_start_backward(self, backward_pass: Action) -> bool:
        """Returns True if a backward pass can start from what the rank receives next.

        The last stage starts from the loss. Any other stage starts from a gradient that the rank at
        the next position sends. That rank sends the gradients of several stages, and NCCL delivers
        them in the order in which they were sent. So the first of them that was not used yet must
        be the one for this backward pass.
        """
        if backward_pass.stage == self._last_stage_of_model:
            return True
        if not self.ready_backward_passes:
            return False
        return self.ready_backward_passes[0] == backward_pass

    def meeting_point_of(self, action: Action) -> int:
        """Returns the meeting point before which the rank does an action, if it does it now.

        A *meeting point* is a place in the training loop at which all ranks may wait for each other
        in a collective. Number 2n is after the call of the model for micro-batch n, and number 2n +
        1 after `world.backward` for micro-batch n: 0 call(0), 1 backward(0), 2 call(1), and so on.
        """
        # A forward pass needs the inputs, so it runs in this micro-batch's call of the model or
        # later. A backward pass needs the loss, so it runs in its `world.backward` or later.
        earliest = 2 * action.micro_batch
        if not action.forward:
            earliest += 1
        return max(self.next_meeting_point, earliest)

    def do(self, action: Action, tick: int) -> _Finished:
        """Does an action that begins at the given tick, and moves the rank forward in its loop.

        A forward pass takes one tick, a backward pass two. A *meeting point* is a place in the
        training loop at which all ranks may wait for each other (`meeting_point_of`).

        Returns:
            The tick at which the action ends, and the meeting point before which it is done.
        """
        meeting_point = self.meeting_point_of(action)
        self.next_meeting_point = self._next_meeting_point_after(action)
        self.actions.append(action)
        if action.forward:
            self.forward_passes.popleft()  # this action: forward passes are done in order
            self.busy_until = tick + 1
        else:
            self.backward_passes.remove(action)  # not always the first of them
            self.busy_until = tick + 2
        return _Finished(self.busy_until, meeting_point)

    def _next_meeting_point_after(self, action: Action) -> int:
        """Returns the next meeting point that the rank reaches if it has just done an action.

        With the forward pass through the highest stage of this rank, the call of the model returns,
        and the rank goes past a meeting point. For micro-batch 3 this is point 6, so the next one
        is 7. After any other action the rank is still before the same meeting point.
        """
        done_before = self.meeting_point_of(action)
        call_of_model_returns = action.forward and action.stage == self.highest_stage
        return done_before + 1 if call_of_model_returns else done_before


def _interleaved_orders(
    schedule: str, num_positions: int, stages_per_rank: int, num_micro_batches: int
) -> list[list[Action]]:
    """Returns the actions of every rank, for a pipeline with several stages per rank.

    They are found by a simulation: in each tick of a clock, every rank that is not busy does the
    first of its candidates that can begin. These are its next forward pass, and the backward passes
    for which it has a gradient.

    A script may call a collective after the call of the model and after `world.backward`. There all
    ranks wait for each other; these are the two *meeting points* of each micro-batch. The orders
    must not deadlock with such a collective. For example, rank 0 does an action before meeting
    point 4, for which it needs a gradient that rank 1 sends after meeting point 4. Then rank 1
    waits at the meeting point for rank 0, and rank 0 waits for the gradient. So whatever an action
    requires must be done before the same meeting point, or an earlier one.
    """
    last_stage = num_positions * stages_per_rank - 1

    # How many micro-batches a rank may have begun and not finished.
    if schedule == "gpipe":
        max_under_way = num_micro_batches
    else:
        max_under_way = num_positions + EXTRA_MICRO_BATCHES

    ranks: list[_SimulatedRank] = []
    for position in range(num_positions):
        ranks.append(_SimulatedRank(position, num_positions, last_stage, num_micro_batches))
    finished: dict[Action, _Finished] = {}
    tick = 0
    while any(rank.backward_passes for rank in ranks):
        for rank in ranks:
            if rank.busy_until > tick:
                continue

            for action in rank.candidates(schedule):
                # Everything that the action requires must be finished now, and in a place of the
                # training loop before the next meeting point.
                required = _requirements(action, num_positions, last_stage, max_under_way)
                can_begin = _are_finished(
                    required,
                    finished,
                    by_tick=tick,
                    by_meeting_point=rank.meeting_point_of(action),
                )
                if not can_begin:
                    continue

                finished[action] = rank.do(action, tick)
                if not action.forward:
                    # Its gradient makes the backward pass of the previous stage a candidate.
                    _pass_gradient_on(action, ranks, last_stage)
                break

        tick += 1

    return [rank.actions for rank in ranks]


def _pass_gradient_on(
    backward_pass: Action, ranks: Sequence[_SimulatedRank], last_stage: int
) -> None:
    """Simulates the messages of a backward pass: it has used one gradient, and sends another.

    In `ready_backward_passes` each rank has the backward passes that it has received a gradient
    for. For example, after the backward pass of stage 2, the backward pass of stage 1 becomes ready
    on the rank that has stage 1.

    Args:
        backward_pass: the backward pass, which was done.
        ranks: the ranks of the pipeline, by position.
        last_stage: the number of the model's last stage, which starts from the loss instead.
    """
    stage = backward_pass.stage
    if stage < last_stage:
        # Gradients are used in the order in which they came, so it has used the first one.
        ranks[stage % len(ranks)].ready_backward_passes.popleft()

    if stage > 0:
        next_pass = backward_pass._replace(stage=stage - 1)
        ranks[next_pass.stage % len(ranks)].ready_backward_passes.append(next_pass)


def _are_finished(
    required: list[Action],
    finished: dict[Action, _Finished],
    *,
    by_tick: int,
    by_meeting_point: int,
) -> bool:
    """Returns True if all actions that some action A requires are finished in time.

    At a *meeting point* all ranks may wait for each other. For example, rank 0 would do A before
    point 3, and A requires the action R of rank 1:

        in time: rank 1 does R before point 3, too

            rank 0      gets what R sends, A    | point 3 |
            rank 1      R                       | point 3 |

        a deadlock: rank 1 does R between the points 3 and 4

            rank 0      waits for R
            rank 1                              | point 3, waits for rank 0 |  R  | point 4 |

    Args:
        required: the actions that A requires, done by any rank.
        finished: when each action that is done was finished.
        by_tick: the tick at which A would begin.
        by_meeting_point: the meeting point before which A would be done; 3 in the example.
    """
    for action in required:
        if action not in finished:
            return False
        done = finished[action]
        is_finished_when_a_begins = done.tick <= by_tick
        avoids_deadlock = done.meeting_point <= by_meeting_point
        if not is_finished_when_a_begins or not avoids_deadlock:
            return False
    return True


def _requirements(
    action: Action, num_positions: int, last_stage: int, max_under_way: int
) -> list[Action]:
    """Returns the actions, of any rank, that must be finished before an action.

    Args:
        action: the action.
        num_positions: the number of ranks in the pipeline.
        last_stage: the number of the model's last stage.
        max_under_way: how many micro-batches each rank may have begun and not finished.
    """
    if action.forward:
        return _requirements_of_forward(action, num_positions, max_under_way)

    required = [action._replace(forward=True)]  # the forward pass of the same stage
    if action.stage < last_stage:  # the gradients come from the next stage
        required.append(action._replace(stage=action.stage + 1))
    return required


def _requirements_of_forward(
    action: Action, num_positions: int, max_under_way: int
) -> list[Action]:
    """Returns the actions that must be finished before a forward pass; see `_requirements`."""
    required = []
    if action.stage > 0:  # the activations come from the stage before
        required.append(action._replace(stage=action.stage - 1))

    # Only `max_under_way` micro-batches may be under way at a time. For example, if these are 2,
    # the rank must have finished micro-batch 0 before it begins micro-batch 2. The last thing that
    # it does for micro-batch 0 is the backward pass of its lowest stage.
    if action.micro_batch >= max_under_way:
        earlier = action.micro_batch - max_under_way
        lowest_stage = _lowest_stage_of_rank(action.stage, num_positions)
        required.append(Action(forward=False, stage=lowest_stage, micro_batch=earlier))

    return required


def _lowest_stage_of_rank(stage: int, num_positions: int) -> int:
    """Returns the lowest stage of the rank that has a given stage.

    For example, on 2 positions the stages 1, 3 and 5 are on one rank, whose lowest stage is 1.
    """
    return stage % num_positions
