"""What the state of a run means: values in, findings out; no torch, no files, no processes."""
