<?php

declare(strict_types=1);

use PhpAmqpLib\Connection\AMQPStreamConnection;

/** Connect to AMQP_URL. The client does not accept a URL. */
function connect(): AMQPStreamConnection
{
    $url = parse_url(getenv('AMQP_URL') ?: 'amqp://guest:guest@localhost:5672/');
    $vhost = rawurldecode(substr($url['path'] ?? '/', 1));
    return new AMQPStreamConnection(
        $url['host'],
        $url['port'] ?? 5672,
        rawurldecode($url['user'] ?? 'guest'),
        rawurldecode($url['pass'] ?? 'guest'),
        $vhost === '' ? '/' : $vhost,
        connection_timeout: 10.0,
        // The client requires at least two heartbeats.
        read_write_timeout: 130.0,
        heartbeat: 60,
    );
}
