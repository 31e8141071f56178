"""Where methods run: engines, memory, channel and ledger, workbench, participation."""
