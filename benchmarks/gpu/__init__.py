"""One prepared run on a machine with a GPU: `python -m benchmarks.gpu`, or `make gpu`."""
