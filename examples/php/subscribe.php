<?php

// Append each incoming text message and opt-out to a file, with php-amqplib.
//
// php subscribe.php FILE
//
// AMQP_URL is the address of RabbitMQ. Runs until you end it.

declare(strict_types=1);

require __DIR__ . '/vendor/autoload.php';

use PhpAmqpLib\Message\AMQPMessage;
use PhpAmqpLib\Wire\AMQPTable;

require __DIR__ . '/connect.php';

// Your team's own queue. Every queue that is bound to the exchange gets a copy of each event.
const QUEUE = 'my-team.sms';
const DEAD_LETTERS = 'my-team.sms.dead';
const ARGUMENTS = [
    'x-queue-type' => 'quorum',
    // An event that keeps failing becomes a dead letter.
    'x-delivery-limit' => 5,
    'x-dead-letter-exchange' => '',
    'x-dead-letter-routing-key' => DEAD_LETTERS,
    // A dead letter leaves this queue only after the other queue has stored it.
    'x-dead-letter-strategy' => 'at-least-once',
    'x-overflow' => 'reject-publish',
];
const REMEMBERED = 10_000;
const PAUSE_SECONDS = 1;

/** Read an event. Return null if it has another form. */
function read(string $body): ?object
{
    $event = json_decode($body);
    $is_event = is_string($event->type ?? null) && is_string($event->data->from ?? null);
    return $is_event ? $event : null;
}

/** Put your code here. If it throws, RabbitMQ delivers the event again. */
function handle(string $file, ?string $id, object $event): void
{
    $record = ['id' => $id, 'type' => $event->type, 'from' => $event->data->from];
    if ($event->type === 'opt_out') {
        // The service has blocked this number. Do not send to it.
    } else {
        $record['text'] = $event->data->text ?? '';
    }
    $line = json_encode($record, JSON_THROW_ON_ERROR) . "\n";
    // file_put_contents returns false instead of throwing.
    if (file_put_contents($file, $line, FILE_APPEND) !== strlen($line)) {
        throw new RuntimeException("$file: cannot be written");
    }
}

/** Handle an event, then ack it. If that fails, reject it. */
function process(string $file, AMQPMessage $message, array &$handled): void
{
    $event = read($message->getBody());
    if ($event === null) {
        // Another delivery would not help.
        fwrite(STDERR, 'unreadable event, see ' . DEAD_LETTERS . "\n");
        $message->reject(false);
        return;
    }
    // An event may arrive twice. The header contains its id, if the service sends one.
    $headers = $message->get_properties()['application_headers'] ?? new AMQPTable();
    $id = $headers->getNativeData()['sms-bridge-event-id'] ?? null;
    if ($id === null || !isset($handled[$id])) {
        try {
            handle($file, $id, $event);
        } catch (Throwable $error) {
            fwrite(STDERR, "event not handled, RabbitMQ delivers it again: {$error->getMessage()}\n");
            // A short fault must not use up the delivery limit. RabbitMQ 4.3 does not count a nack.
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
// Without a prefetch, RabbitMQ sends the whole queue at once.
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
