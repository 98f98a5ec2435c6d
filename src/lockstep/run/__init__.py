"""What starts the ranks of a run, on one machine or on several, and watches them."""
