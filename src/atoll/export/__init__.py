"""Models out: what a client deploys as an nn.Module, and as files that other programs load."""
