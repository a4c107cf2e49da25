"""How fast to send, and how much at once: rate limits and requests in flight."""
