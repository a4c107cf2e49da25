<?php

// Request one SMS with php-amqplib, and wait for its outcome.
//
// php publish.php TO TEXT [MESSAGE_ID]
//
// AMQP_URL is the address of RabbitMQ. Prints the outcome. The exit status is 0 if the SMS service has
// accepted the message, otherwise 1.

declare(strict_types=1);

require __DIR__ . '/vendor/autoload.php';

use PhpAmqpLib\Channel\AMQPChannel;
use PhpAmqpLib\Exception\AMQPTimeoutException;
use PhpAmqpLib\Message\AMQPMessage;
use PhpAmqpLib\Wire\AMQPTable;

require __DIR__ . '/connect.php';

const BROKER_SECONDS = 10;
const OUTCOME_SECONDS = 60;
// A one-time code is useless after this time, so the worker must not send it.
const EXPIRES_SECONDS = 300;

/** Publish a request. Returns after RabbitMQ has stored it, otherwise throws. */
function publish(AMQPChannel $channel, AMQPMessage $message): void
{
    $refusal = null;
    // RabbitMQ returns an unroutable message, and then confirms it too.
    $channel->set_return_listener(function ($code, $text) use (&$refusal) {
        $refusal = $text;
    });
    $channel->set_nack_handler(function () use (&$refusal) {
        $refusal = 'the broker refused the message';
    });
    $channel->basic_publish($message, '', 'sms.outbound', true);
    $channel->wait_for_pending_acks_returns(BROKER_SECONDS);
    if ($refusal !== null) {
        throw new RuntimeException($refusal);
    }
}

/** Return the raw outcome of this request. */
function wait_for_outcome(AMQPChannel $channel, string $replies, string $correlation_id): string
{
    $outcome = null;
    $channel->basic_consume(
        $replies,
        no_ack: true,
        callback: function (AMQPMessage $reply) use (&$outcome, $correlation_id) {
            if ($reply->has('correlation_id') && $reply->get('correlation_id') === $correlation_id) {
                $outcome = $reply->getBody();
            }
        },
    );
    $deadline = microtime(true) + OUTCOME_SECONDS;
    while ($outcome === null) {
        // Zero would mean no timeout.
        $channel->wait(null, false, max(0.001, $deadline - microtime(true)));
    }
    return $outcome;
}

if ($argc < 3) {
    fwrite(STDERR, "usage: php publish.php TO TEXT [MESSAGE_ID]\n");
    exit(1);
}
[, $to, $text] = $argv;
// The id from your own records. Use the same id to publish again after a crash, so that
// the worker recognises the repeat.
$message_id = $argv[3] ?? bin2hex(random_bytes(16));
$correlation_id = bin2hex(random_bytes(16));
try {
    $connection = connect();
    $channel = $connection->channel();
    $channel->confirm_select();
    [$replies] = $channel->queue_declare('', exclusive: true);
    $request = ['to' => $to, 'from' => 'Acme', 'text' => $text];
    publish($channel, new AMQPMessage(json_encode($request, JSON_THROW_ON_ERROR), [
        'content_type' => 'application/json',
        'delivery_mode' => AMQPMessage::DELIVERY_MODE_PERSISTENT,
        'message_id' => $message_id,
        'timestamp' => time(),
        'reply_to' => $replies,
        'correlation_id' => $correlation_id,
        // Headers need an AMQPTable. time() returns whole seconds, and microtime(true) a float.
        'application_headers' => new AMQPTable(['sms-bridge-expires-at' => time() + EXPIRES_SECONDS]),
    ]));
    $outcome = wait_for_outcome($channel, $replies, $correlation_id);
    echo $outcome, "\n";
    $connection->close();
    exit(json_decode($outcome, true)['outcome'] === 'sent' ? 0 : 1);
} catch (AMQPTimeoutException) {
    fwrite(STDERR, "$message_id: not confirmed, or no outcome yet; it may still be sent\n");
    exit(1);
} catch (Exception $error) {
    fwrite(STDERR, "$message_id: {$error->getMessage()}\n");
    exit(1);
}
