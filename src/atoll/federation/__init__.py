"""What a round is: read `loop` first; then the settings, who is asked, the exchange, and what a run reports."""
