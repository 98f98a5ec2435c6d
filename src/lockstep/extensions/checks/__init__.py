"""The checks that are always on: one file each, and one line in `CHECKS`."""

from __future__ import annotations

from lockstep.extensions.checks.base import Check
from lockstep.extensions.checks.coverage import CoverageCheck
from lockstep.extensions.checks.equal_models import EqualModelsCheck
from lockstep.extensions.checks.evaluation_passes import EvaluationPassesCheck
from lockstep.extensions.checks.gradients import GradientVersionCheck
from lockstep.extensions.checks.loss import LossCheck
from lockstep.extensions.checks.loss_scale import LossScaleCheck
from lockstep.extensions.checks.nothing_prepared import NothingPreparedCheck
from lockstep.extensions.checks.parameters import ParameterCheck
from lockstep.extensions.checks.preparation import PreparationCheck
from lockstep.extensions.checks.same_order import SameOrderCheck
from lockstep.extensions.checks.steps_without_gradients import StepsWithoutGradientsCheck
from lockstep.extensions.checks.sum_of_means import SumOfMeansCheck
from lockstep.extensions.checks.unit_order import UnitOrderCheck
from lockstep.extensions.checks.unprepared_sum import UnpreparedSumCheck
from lockstep.extensions.checks.unprepared_training import UnpreparedTrainingCheck
from lockstep.extensions.checks.zero_learning_rate import ZeroLearningRateCheck

CHECKS: tuple[type[Check], ...] = (
    LossCheck,
    LossScaleCheck,
    GradientVersionCheck,
    StepsWithoutGradientsCheck,
    ZeroLearningRateCheck,
    UnitOrderCheck,
    ParameterCheck,
    EqualModelsCheck,
    CoverageCheck,
    EvaluationPassesCheck,
    SameOrderCheck,
    UnpreparedSumCheck,
    SumOfMeansCheck,
    UnpreparedTrainingCheck,  # after UnpreparedSumCheck, whose watcher of loaders it uses
    PreparationCheck,
    NothingPreparedCheck,
)
"""The checks, in the order in which they are told of an event."""
