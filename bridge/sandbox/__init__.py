"""A stand-in for the SMS service, for trying the bridge out and for testing it."""
