"""What happens in a training step: the micro-batch, the state of the step, who is told of it."""
