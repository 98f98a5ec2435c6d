"""How `pipeline` runs a model in stages: where it is cut, in which order, and what is sent."""
