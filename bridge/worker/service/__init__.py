"""One SMS service: its account, circuit breaker, request format, transport and answers."""
