"""What a process finds on its machine: its place in the run, addresses, limits of memory."""
