"""Saves and restores the state of a training, and weights alone, without pickle."""
