"""Watches the ranks of a run: makes them visible, finds what hangs, and says what failed first.

In each rank a `probe` writes to the rank's `evidence` files. In the launcher, `supervisor` takes
snapshots of the ranks and hands them to pure functions that know the verdicts (`hang`,
`straggler`). When ranks have ended, `first_failure` finds the cause in their `exit_status`.
"""
