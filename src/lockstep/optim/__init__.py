"""Large-batch optimizers and learning rates; each works on its own, with or without `init`."""

from lockstep.optim.layerwise import LAMB, LARS
from lockstep.optim.learning_rate import scale_learning_rate, warmup

__all__ = ["LAMB", "LARS", "scale_learning_rate", "warmup"]
