// Append each text message that comes in to a file, with amqplib.
//
// node subscribe.js FILE
//
// AMQP_URL names the broker. Runs until it is ended; what was not acked by then comes again.

import { appendFile } from 'node:fs/promises';
import amqp from 'amqplib';

const URL = process.env.AMQP_URL ?? 'amqp://guest:guest@localhost:5672/';
// A queue of your team's own: what is bound to the exchange gets a copy of each event.
const QUEUE = 'my-team.sms';

/** Read an event: JSON, or the form that some services send. */
function read(message) {
  const kind = (message.properties.contentType ?? '').split(';')[0].trim().toLowerCase();
  const text = message.content.toString();
  return kind === 'application/x-www-form-urlencoded'
    ? Object.fromEntries(new URLSearchParams(text))
    : JSON.parse(text);
}

/** Write an event as a line of JSON. */
function write(message) {
  // The same event can come twice. The service's id of it tells, where the service gives one.
  const id = message.properties.headers?.['sms-bridge-event-id'] ?? null;
  const { type } = message.properties;
  try {
    return JSON.stringify({ id, type, event: read(message) });
  } catch {
    // Nobody can read it, now or later: it is kept as it came, and does not stop the rest.
    return JSON.stringify({ id, type, body: message.content.toString('base64') });
  }
}

/** Do what is to be done with an event; when this rejects, the event is not lost. */
async function handle(file, message) {
  await appendFile(file, `${write(message)}\n`);
}

/** End, so that whoever supervises this program starts it anew. */
function fail(error) {
  console.error(error.message);
  process.exit(1);
}

const [file] = process.argv.slice(2);
if (file === undefined) {
  console.error('usage: node subscribe.js FILE');
  process.exit(1);
}
const connection = await amqp.connect(URL);
connection.on('error', fail);
connection.on('close', () => fail(new Error('the connection is closed')));
const channel = await connection.createChannel();
channel.on('error', fail);
await channel.assertQueue(QUEUE, { durable: true, arguments: { 'x-queue-type': 'quorum' } });
await channel.bindQueue(QUEUE, 'sms.inbound', 'message.received');
// Without a bound the broker sends the whole queue at once.
await channel.prefetch(20);
await channel.consume(QUEUE, async (message) => {
  // null: the queue was deleted.
  if (message === null) return fail(new Error('the consumer was cancelled'));
  try {
    await handle(file, message);
    channel.ack(message);
  } catch (error) {
    fail(error);
  }
});
