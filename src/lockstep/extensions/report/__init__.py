"""What a run shows: the choices it made, its progress, its means and how it ended."""
