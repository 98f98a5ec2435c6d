"""Large-batch optimizers and learning rates; each stands on its own, with or without `init`."""

from lockstep.optim.large_batch import LAMB, LARS, scale_learning_rate, warmup

__all__ = ["LAMB", "LARS", "scale_learning_rate", "warmup"]
