"""What clients minimise besides a loss: contrast, margins, balance, alignment, frames."""
