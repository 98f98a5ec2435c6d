"""The strategy `dp`: one process that computes on several devices."""
