"""How the clients of one-shot methods train, and what can be added to it: one small value, one file."""
