"""Rate limits, and the limit of concurrent requests."""
