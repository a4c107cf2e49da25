"""A stand-in for the SMS service, for trials and tests of the bridge.

- `service`, `webhooks`: the imitated service: its requests, answers and signed webhooks.
- `store`, `records`: everything received and sent, in memory; `orders`: the input of its users.
- `api`, `page_api`, `page/`, `guard`, `server`: its HTTP interface and its web page.
- `broker`, `processes`: a private RabbitMQ, also for the tests; `demo`: the whole flow with it.
"""
