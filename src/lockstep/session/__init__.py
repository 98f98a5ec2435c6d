"""What happens in a training step: the micro-batch, the state of the step, who takes part in it."""
