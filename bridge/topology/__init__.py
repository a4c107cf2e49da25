"""Queues, exchanges and bindings: what is needed, what is there, what to do about it."""
