"""One SMS service: account, circuit breaker, request format, transport and reading of answers."""
