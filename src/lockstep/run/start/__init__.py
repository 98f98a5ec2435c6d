"""Starts the processes of a run and brings them to one exit code."""
