"""The options classes of the strategies, to be given as `strategy=`."""

from lockstep.strategies.ddp import DDP as DDP
from lockstep.strategies.single import Single as Single

__all__ = ["DDP", "Single"]
