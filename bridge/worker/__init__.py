"""The worker: takes send requests from the queue to the SMS service.

The way of a message, each step called by `pipeline.py`; `worker.py` makes, runs and drains them:

1. consume: `consumer.py` registers at the broker, `held.py` begins a task for each delivery;
2. identify: `identification.py` and `deduplicator.py` tell a new message from a repeat;
3. wait until allowed: `service/account.py`, for the circuit breaker, the rate limits and a slot;
4. send: `service/sender.py` posts, `fates.py` and `outcomes.py` say what the answer means;
5. settle: `settle.py` stores what replaces it and acks; `announcer.py` publishes its end.
"""
