"""Proof by comparison: a script on one process and on several, recorded and held side by side."""
