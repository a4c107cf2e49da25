"""The worker: consumes send requests from a queue and posts them to the SMS service.

docs/architecture.md walks through the steps of a message, 1 to 9, and names the code of each.
`pipeline.py` has steps 4 to 9; `worker.py` builds, runs and drains the objects of all.
"""
