"""How `dp` computes on several devices of one process: replicas that meet and are joined."""
