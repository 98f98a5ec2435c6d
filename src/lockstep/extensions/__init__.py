"""What takes part in a training besides the strategy. The core imports none of it.

`add_extensions` names what a run has; each extension can be read, removed or written by itself.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lockstep.session.extension import Place

if TYPE_CHECKING:  # `lockstep ledger`, `journal` and `report` read files without torch
    from lockstep.distributed.process_group import Run
    from lockstep.strategies.base import Strategy, StrategyPlan


def add_extensions(
    run: Run, strategy: Strategy, plan: StrategyPlan, preparer: Any, version: str
) -> None:
    """Adds to a run everything that its settings ask for, and the checks, which are always on.

    What a run does not need is not imported.

    Args:
        run: the run of this process.
        strategy: the strategy of the run.
        plan: the plan of the strategy.
        preparer: the `training.prepare.Preparer` of the run.
        version: the version of Lockstep, for the record of the run.

    Raises:
        SettingError: on all ranks, if a folder cannot be written to.
    """
    from lockstep.extensions.autotune import Autotune
    from lockstep.extensions.checks import CHECKS

    autotune = Autotune(run, strategy, plan, preparer.wrapped.keys(), preparer.optimizers)
    preparer.sizes = autotune  # loaders that it prepares ask this for what is "auto"
    run.extensions.add(autotune, Place.CHECK)  # before the checks: its trial steps are not checked

    settings = run.settings
    if settings.check_devices is not None and not run.collectives.single_process:
        from lockstep.extensions.device_check.check import DeviceCheck

        # Before the checks: it says more than the comparison of replicas.
        run.extensions.add(DeviceCheck(run), Place.CHECK)

    for check in CHECKS:
        run.extensions.add(check(run, preparer.precision, preparer.wrapped.values()), Place.CHECK)

    # The link between machines was measured; None on one machine.
    if run.link is not None and strategy.averages_whole_gradient:
        from lockstep.extensions.report.network_advice import NetworkAdvice

        run.extensions.add(NetworkAdvice(run, run.link), Place.OBSERVER)

    if settings.ledger is not None:
        from lockstep.extensions.ledger.writer import Ledger

        ledger = Ledger(settings.ledger, run.collectives, run.loaders)
        run.extensions.add(ledger, Place.OBSERVER)

    if settings.journal is not None:
        from lockstep.extensions.journal.writer import Journal, check_strategy

        check_strategy(strategy)
        journal = Journal(settings.journal, settings.journal_every, run, strategy.name)
        run.extensions.add(journal, Place.OBSERVER)

    if settings.report is not None:
        _add_report(run, strategy, preparer, version, settings.report)


def _add_report(
    run: Run, strategy: Strategy, preparer: Any, version: str, report_folder: str
) -> None:
    """Adds what writes the record of a run, for `lockstep report`; see `add_extensions`."""
    from lockstep.extensions.report.phase_times import PhaseTimes
    from lockstep.extensions.report.record import Recorder

    settings = run.settings
    ledger_path = None if settings.ledger is None else os.path.abspath(settings.ledger)
    phase_times = PhaseTimes()
    run.extensions.add(phase_times, Place.OBSERVER)
    recorder = Recorder(
        report_folder,
        run,
        preparer.optimizers,
        phase_times,
        lockstep=version,
        strategy=strategy.name,
        ledger=ledger_path,
    )
    if settings.trace_step is not None:
        from lockstep.extensions.report.step_trace import StepTrace

        # Extensions are closed in the order in which they were added. The trace comes first, so
        # that it is written when the recorder notes where it is.
        run.extensions.add(StepTrace(run, recorder, settings.trace_step), Place.OBSERVER)
    run.extensions.add(recorder, Place.OBSERVER)
