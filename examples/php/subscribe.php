<?php

// Append each text message and opt-out that comes in to a file, with php-amqplib.
//
// php subscribe.php FILE
//
// AMQP_URL names the broker. Runs until it is ended; an event that was not acked comes again.

declare(strict_types=1);

require __DIR__ . '/vendor/autoload.php';

use PhpAmqpLib\Message\AMQPMessage;
use PhpAmqpLib\Wire\AMQPTable;

require __DIR__ . '/connect.php';

// Your team's own queue: each queue that is bound to the exchange gets a copy of each event.
const QUEUE = 'my-team.sms';
const DEAD_LETTERS = 'my-team.sms.dead';
const ARGUMENTS = [
    'x-queue-type' => 'quorum',
    // An event that fails again and again becomes a dead letter.
    'x-delivery-limit' => 5,
    'x-dead-letter-exchange' => '',
    'x-dead-letter-routing-key' => DEAD_LETTERS,
    // A dead letter leaves this queue only when it is stored in the other.
    'x-dead-letter-strategy' => 'at-least-once',
    'x-overflow' => 'reject-publish',
];
const REMEMBERED = 10_000;
const PAUSE_SECONDS = 1;

/** Read an event; null if it has another form. */
function read(string $body): ?object
{
    $event = json_decode($body);
    $is_event = is_string($event->type ?? null) && is_string($event->data->from ?? null);
    return $is_event ? $event : null;
}

/** The place for your code. If it throws, the event is tried again. */
function handle(string $file, ?string $id, object $event): void
{
    $record = ['id' => $id, 'type' => $event->type, 'from' => $event->data->from];
    if ($event->type === 'opt_out') {
        // The service has blocked this number: send it nothing more.
    } else {
        $record['text'] = $event->data->text ?? '';
    }
    $line = json_encode($record, JSON_THROW_ON_ERROR) . "\n";
    // It returns false, and throws nothing.
    if (file_put_contents($file, $line, FILE_APPEND) !== strlen($line)) {
        throw new RuntimeException("$file: cannot be written");
    }
}

/** Ack an event once it is handled; a failed one is rejected, never dropped. */
function process(string $file, AMQPMessage $message, array &$handled): void
{
    $event = read($message->getBody());
    if ($event === null) {
        // No further try would read it.
        fwrite(STDERR, 'an event cannot be read: see ' . DEAD_LETTERS . "\n");
        $message->reject(false);
        return;
    }
    // The same event can come twice; the header tells, if the service gives its events ids.
    $headers = $message->get_properties()['application_headers'] ?? new AMQPTable();
    $id = $headers->getNativeData()['sms-bridge-event-id'] ?? null;
    if ($id === null || !isset($handled[$id])) {
        try {
            handle($file, $id, $event);
        } catch (Throwable $error) {
            fwrite(STDERR, "an event was not handled, and is tried again: {$error->getMessage()}\n");
            // A short fault must not use up the tries. RabbitMQ 4.3 counts no nack as a try.
            sleep(PAUSE_SECONDS);
            $message->reject(true);
            return;
        }
    }
    if ($id !== null) {
        $handled[$id] = true;
        if (count($handled) > REMEMBERED) {
            unset($handled[array_key_first($handled)]);
        }
    }
    $message->ack();
}

if ($argc < 2) {
    fwrite(STDERR, "usage: php subscribe.php FILE\n");
    exit(1);
}
$channel = connect()->channel();
$channel->queue_declare(
    DEAD_LETTERS,
    durable: true,
    auto_delete: false,
    arguments: new AMQPTable(['x-queue-type' => 'quorum']),
);
$channel->queue_declare(QUEUE, durable: true, auto_delete: false, arguments: new AMQPTable(ARGUMENTS));
foreach (['message.received', 'opt_out'] as $type) {
    $channel->queue_bind(QUEUE, 'sms.inbound', $type);
}
// Without a bound the broker sends the whole queue at once.
$channel->basic_qos(0, 20, false);
$handled = [];
$channel->basic_consume(QUEUE, callback: function (AMQPMessage $message) use ($argv, &$handled) {
    process($argv[1], $message, $handled);
});
while ($channel->is_consuming()) {
    $channel->wait();
}
fwrite(STDERR, "the consumer was cancelled\n");
exit(1);
