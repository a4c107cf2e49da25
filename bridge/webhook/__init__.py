"""From the SMS service's webhooks to the exchange.

The way of a webhook, which `Receiver.answer` in `receiver.py` shows:

1. receive: `bridge.http` reads a request, whose header `Receiver.judge` has accepted;
2. verify: `signatures/verify.py` checks signature and age, with the secrets of `endpoint.py`;
3. name: `event.py` finds type, id and routing key in the body, `receipts.py` delivery receipts;
4. publish: `publishing.py` publishes no event twice, and outcome events for receipts;
5. answer: when the broker has confirmed the event; `recorder.py` counts, logs and traces it.
"""
