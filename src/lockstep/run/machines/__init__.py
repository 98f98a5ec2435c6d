"""Several machines: how they are named, reached and started, and how their launchers meet."""
