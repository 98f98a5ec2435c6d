"""Which samples form a global batch, who computes which of them, and how they are read."""
