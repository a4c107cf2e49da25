"""The demo: both directions for real, with faults, and an account of every message."""
