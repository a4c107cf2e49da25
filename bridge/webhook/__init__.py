"""The webhook receiver: publishes the webhooks of the SMS service to an exchange.

The steps of a webhook, with the numbers of docs/architecture.md. `Receiver.answer` in `receiver.py`
shows 3 to 7:

1. accept, 2. parse: `bridge.http` reads a request; `Receiver.judge` accepts or refuses its header;
3. verify: `signatures/verify.py` checks signature and age, with the secrets of `endpoint.py`;
4. name: `normalize.py` makes events of one form, `receipts.py` reads delivery receipts; with
   `webhook.body: raw`, `event.py` only finds type, id and routing key;
5. recognise: `publishing.py` recognises an event that was published before;
6. publish: `receiver.py` publishes each event, and outcome events for receipts;
7. answer: when the broker has confirmed the event; `recorder.py` counts, logs and traces it.
"""
