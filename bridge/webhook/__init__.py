"""The webhook receiver: publishes the webhooks of the SMS service to an exchange.

The path of a webhook, as `Receiver.answer` in `receiver.py` shows:

1. receive: `bridge.http` reads a request after `Receiver.judge` has accepted its header;
2. verify: `signatures/verify.py` checks signature and age, with the secrets of `endpoint.py`;
3. name: `event.py` finds type, id and routing key in the body, `receipts.py` delivery receipts;
4. publish: `publishing.py` publishes each event once, and outcome events for receipts;
5. answer: when the broker has confirmed the event; `recorder.py` counts, logs and traces it.
"""
