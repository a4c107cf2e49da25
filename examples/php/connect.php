<?php

declare(strict_types=1);

use PhpAmqpLib\Connection\AMQPStreamConnection;

/** Connect to the broker that AMQP_URL names: the client itself takes no URL. */
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
        // At least two heartbeats, as the client demands.
        read_write_timeout: 130.0,
        heartbeat: 60,
    );
}
