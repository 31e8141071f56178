"""Out of one process: sites on a network."""
