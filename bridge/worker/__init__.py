"""The worker: consumes send requests from a queue and posts them to the SMS service.

The steps of a message, with the numbers of docs/architecture.md. `pipeline.py` calls 4 to 9;
`worker.py` builds, runs and drains the objects of all:

1. connect: `operator_pause.py` looks for an operator's pause before anything is consumed;
2. consume: `consumer.py` registers at the broker;
3. receive: `dispatcher.py` starts a task for each delivery;
4. identify: `identification.py` and `deduplicator.py` separate new messages from repeats;
5. read: `envelope.py` reads the headers, `request.py` the body;
6. wait until allowed: `pauses.py`, then `service/account.py` with the circuit breaker;
7. send: `service/account.py` takes a token and a slot, `service/sender.py` posts;
8. decide: `fates.py`, `service/breaker.py` and `outcomes.py` interpret the answer;
9. settle: `settle.py` publishes the replacement, if any, and acks; `announcer.py` publishes the
   outcome.
"""
