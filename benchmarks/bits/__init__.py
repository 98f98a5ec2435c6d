"""Whether 8 programs have the same bits under 20 schedules; `python -m benchmarks.bits`."""
