"""What `lockstep checkpoint` does: inspect, diff, convert, repair."""
