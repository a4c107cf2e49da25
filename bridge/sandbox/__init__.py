"""A stand-in for the SMS service, for trying the bridge out and for testing it.

- `service`, `webhooks`: the played service, its requests and answers, its signed webhooks.
- `store`, `records`: what it has received and sent; `orders`: what users order of it.
- `api`, `page_api`, `page/`, `guard`, `server`: its HTTP interface and its web page.
- `broker`, `processes`: a private RabbitMQ, also for the tests. `demo`: the whole flow with it.
"""
