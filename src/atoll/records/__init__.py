"""What a run was and showed: its folder, checkpoints, and the report."""
