"""The strategy `diloco`: copies of the model train apart, and are merged at regular intervals."""
