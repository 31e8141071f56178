"""What the author of a method imports, and what a runtime must offer, as protocols."""
