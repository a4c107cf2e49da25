"""Move what waits for the workers of a queue to its dead letters."""
