"""One POST to the SMS service: how it is written, sent, and its answer read."""
