"""How the server of a one-shot method answers from what clients sent once: one small value, one file."""
