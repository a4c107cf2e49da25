"""Move what waits in the main queue to the queue from which it is sent."""
