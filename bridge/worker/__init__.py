"""The worker: consumes send requests from a queue and posts them to the SMS service.

The path of a message. `pipeline.py` calls each step; `worker.py` builds, runs and drains them:

1. consume: `consumer.py` registers at the broker, `dispatcher.py` starts a task for each delivery;
2. identify: `identification.py` and `deduplicator.py` separate new messages from repeats;
3. wait until allowed: `service/account.py` waits for the circuit breaker, the rate limits and a
   slot;
4. send: `service/sender.py` posts, `fates.py` and `outcomes.py` interpret the answer;
5. settle: `settle.py` publishes the replacement, if any, and acks; `announcer.py` publishes the
   outcome.
"""
