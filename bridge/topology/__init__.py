"""Declares the bridge's queues, exchanges and bindings, and compares them with the broker's."""
