"""The journal of hashes: what every step computed, so that two runs can be compared by bits."""
