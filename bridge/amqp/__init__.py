"""RabbitMQ connections, confirmed publishing, and the encoding of AMQP frames and properties."""
