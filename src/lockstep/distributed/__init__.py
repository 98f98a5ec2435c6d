"""How processes find each other, and the process group that they then share."""
