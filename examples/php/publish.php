<?php

// Ask for one SMS with php-amqplib, and wait for its outcome.
//
// php publish.php TO TEXT [MESSAGE_ID]
//
// AMQP_URL names the broker. Prints the outcome; ends with 0 when the SMS service has accepted the
// message, else with 1.

declare(strict_types=1);

require __DIR__ . '/vendor/autoload.php';

use PhpAmqpLib\Channel\AMQPChannel;
use PhpAmqpLib\Exception\AMQPTimeoutException;
use PhpAmqpLib\Message\AMQPMessage;
use PhpAmqpLib\Wire\AMQPTable;

require __DIR__ . '/connect.php';

const BROKER_SECONDS = 10;
const OUTCOME_SECONDS = 60;
// A one-time code is worth nothing later, so it is not sent later.
const EXPIRES_SECONDS = 300;

/** Publish a request; returns once the broker has it on disk, throws when it has not. */
function publish(AMQPChannel $channel, AMQPMessage $message): void
{
    $refusal = null;
    // A message that fits no queue is confirmed all the same; it is returned just before that.
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

/** Return the outcome of this request as it came. */
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
        // Zero would mean to wait for ever.
        $channel->wait(null, false, max(0.001, $deadline - microtime(true)));
    }
    return $outcome;
}

if ($argc < 3) {
    fwrite(STDERR, "usage: php publish.php TO TEXT [MESSAGE_ID]\n");
    exit(1);
}
[, $to, $text] = $argv;
// The id of the message in your own records: published again after a crash, with the
// same id, a request can be recognised.
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
        // Not an array: headers want a table. time() is whole seconds, microtime(true) is a float.
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
