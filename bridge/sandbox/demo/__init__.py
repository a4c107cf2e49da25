"""The demo: real traffic in both directions, with faults, and an account of every message."""
