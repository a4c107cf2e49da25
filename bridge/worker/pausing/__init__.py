"""Whether to send at all: pauses, what begins and ends them, and the probes between."""
