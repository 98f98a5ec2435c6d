"""Watches the ranks of a run: makes them visible, finds out what hangs, and says what failed first.

In each rank, a `probe` writes to the rank's `evidence` files. In the launcher, a `supervisor` takes
snapshots of the ranks and passes them to pure functions that return verdicts (`hang`, `straggler`).
When ranks have ended, `first_failure` finds the cause from their `exit_status`.
"""
