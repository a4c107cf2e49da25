"""The webhook receiver: publishes the webhooks of the SMS service to an exchange.

docs/architecture.md walks through the steps of a webhook, 1 to 7, and names the code of each.
`Receiver.answer` in `receiver.py` has steps 3 to 7.
"""
