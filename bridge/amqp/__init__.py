"""Connections to RabbitMQ, and what is read from them and written to them."""
