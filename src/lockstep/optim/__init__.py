"""Optimizers, learning rates and activation checkpointing; each stands on its own."""
