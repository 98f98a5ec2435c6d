"""What takes part in a training besides the strategy: the checks, and the record of the run."""
