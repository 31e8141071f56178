"""Studies over several runs: comparison, results, tracking."""
