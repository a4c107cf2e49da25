"""From the queue to the SMS service."""
