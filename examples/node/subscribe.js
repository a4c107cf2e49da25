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

/** Do what is to be done with an event; when this rejects, the event is not lost. */
async function handle(file, message) {
  // The same event can come twice. The service's id of it tells, where the service gives one.
  const id = message.properties.headers['sms-bridge-event-id'] ?? null;
  const event = JSON.parse(message.content);
  await appendFile(file, `${JSON.stringify({ id, type: message.properties.type, event })}\n`);
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
