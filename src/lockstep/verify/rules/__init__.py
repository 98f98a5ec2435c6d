"""Rules that name the cause of a difference between two runs.

A *rule* is a function that is given a `Divergence` and returns a `Cause`, or None if it does not
apply. Its docstring begins with the codes that it may return, and then says:

- Needs: the fields that must have been recorded.
- Applies: when the rule returns a cause.
- False positives: what else the rule may mistake for its cause.
- Evidence: what the sentences of the cause tell the user.

`lockstep.verify.causes` lists the rules for each kind of difference, in the order in which they are
tried. Certain causes come before those that are only likely.
"""
