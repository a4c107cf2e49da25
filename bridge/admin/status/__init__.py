"""What `sms-bridge status` finds out: of the broker, and of every role that it is told to ask."""
