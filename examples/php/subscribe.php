<?php

// Append each text message that comes in to a file, with php-amqplib.
//
// php subscribe.php FILE
//
// AMQP_URL names the broker. Runs until it is ended; what was not acked by then comes again.

declare(strict_types=1);

require __DIR__ . '/vendor/autoload.php';

use PhpAmqpLib\Message\AMQPMessage;
use PhpAmqpLib\Wire\AMQPTable;

require __DIR__ . '/connect.php';

// A queue of your team's own: what is bound to the exchange gets a copy of each event.
const QUEUE = 'my-team.sms';

/** Read an event: JSON, or the form that some services send. */
function read(string $type, string $body): mixed
{
    if (strtolower(trim(explode(';', $type)[0])) !== 'application/x-www-form-urlencoded') {
        // Objects stay objects: as arrays, {} would become [].
        return json_decode($body, false, 512, JSON_THROW_ON_ERROR);
    }
    $event = [];
    foreach (explode('&', $body) as $pair) {
        [$name, $value] = explode('=', $pair, 2) + [1 => ''];
        $event[urldecode($name)] = urldecode($value);
    }
    return (object) $event;
}

/** Do what is to be done with an event; whatever this throws, the event is not lost. */
function handle(string $file, AMQPMessage $message): void
{
    $properties = $message->get_properties();
    $headers = ($properties['application_headers'] ?? new AMQPTable())->getNativeData();
    // The same event can come twice. The service's id of it tells, where it gives one.
    $record = ['id' => $headers['sms-bridge-event-id'] ?? null, 'type' => $properties['type'] ?? null];
    try {
        $event = read($properties['content_type'] ?? '', $message->getBody());
        $line = json_encode($record + ['event' => $event], JSON_THROW_ON_ERROR);
    } catch (JsonException) {
        // Nobody can read it, now or later: it is kept as it came, and does not stop the rest.
        $record['body'] = base64_encode($message->getBody());
        $line = json_encode($record, JSON_THROW_ON_ERROR);
    }
    // It returns false, and throws nothing.
    if (file_put_contents($file, "$line\n", FILE_APPEND) !== strlen($line) + 1) {
        throw new RuntimeException("$file: cannot be written");
    }
}

if ($argc < 2) {
    fwrite(STDERR, "usage: php subscribe.php FILE\n");
    exit(1);
}
$channel = connect()->channel();
$channel->queue_declare(
    QUEUE,
    durable: true,
    auto_delete: false,
    arguments: new AMQPTable(['x-queue-type' => 'quorum']),
);
$channel->queue_bind(QUEUE, 'sms.inbound', 'message.received');
// Without a bound the broker sends the whole queue at once.
$channel->basic_qos(0, 20, false);
$channel->basic_consume(QUEUE, callback: function (AMQPMessage $message) use ($argv) {
    handle($argv[1], $message);
    $message->ack();
});
while ($channel->is_consuming()) {
    $channel->wait();
}
fwrite(STDERR, "the consumer was cancelled\n");
exit(1);
