"""What every method must pass, and how fast it is."""
