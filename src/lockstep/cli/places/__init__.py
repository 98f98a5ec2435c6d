"""The places where `lockstep run` starts a run: a file for each."""
