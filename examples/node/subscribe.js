// Append each text message and opt-out that comes in to a file, with amqplib.
//
// node subscribe.js FILE
//
// AMQP_URL names the broker. Runs until it is ended; an event that was not acked comes again.

import { appendFile } from 'node:fs/promises';
import { setTimeout } from 'node:timers/promises';
import amqp from 'amqplib';

const URL = process.env.AMQP_URL ?? 'amqp://guest:guest@localhost:5672/';
// Your team's own queue: each queue that is bound to the exchange gets a copy of each event.
const QUEUE = 'my-team.sms';
const DEAD_LETTERS = 'my-team.sms.dead';
const ARGUMENTS = {
  'x-queue-type': 'quorum',
  // An event that fails again and again becomes a dead letter.
  'x-delivery-limit': 5,
  'x-dead-letter-exchange': '',
  'x-dead-letter-routing-key': DEAD_LETTERS,
  // A dead letter leaves this queue only when it is stored in the other.
  'x-dead-letter-strategy': 'at-least-once',
  'x-overflow': 'reject-publish',
};
const REMEMBERED = 10_000;
const PAUSE_MILLISECONDS = 1000;

/** Read an event; null if it has another form. */
function read(body) {
  try {
    const event = JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(body));
    const isEvent = typeof event?.type === 'string' && typeof event.data?.from === 'string';
    return isEvent ? event : null;
  } catch {
    return null;
  }
}

/** Put your code here. If it rejects, the event is tried again. */
async function handle(file, id, { type, data }) {
  const record = { id: id ?? null, type, from: data.from };
  if (type === 'opt_out') {
    // The service has blocked this number: send it nothing more.
  } else {
    record.text = data.text ?? '';
  }
  await appendFile(file, `${JSON.stringify(record)}\n`);
}

const handled = new Set();

/** Ack an event once it is handled; a failed one is rejected, never dropped. */
async function settle(channel, file, message) {
  const event = read(message.content);
  if (event === null) {
    // No further try would read it.
    console.error(`an event cannot be read: see ${DEAD_LETTERS}`);
    channel.reject(message, false);
    return;
  }
  // The same event can come twice; the header tells, if the service gives its events ids.
  const id = message.properties.headers?.['sms-bridge-event-id'];
  if (!handled.has(id)) {
    try {
      await handle(file, id, event);
    } catch (error) {
      console.error('an event was not handled, and is tried again:', error);
      // A short fault must not use up the tries. RabbitMQ 4.3 counts no nack as a try.
      await setTimeout(PAUSE_MILLISECONDS);
      channel.reject(message, true);
      return;
    }
  }
  if (id !== undefined) {
    handled.add(id);
    if (handled.size > REMEMBERED) handled.delete(handled.values().next().value);
  }
  channel.ack(message);
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
await channel.assertQueue(DEAD_LETTERS, { durable: true, arguments: { 'x-queue-type': 'quorum' } });
await channel.assertQueue(QUEUE, { durable: true, arguments: ARGUMENTS });
for (const type of ['message.received', 'opt_out']) {
  await channel.bindQueue(QUEUE, 'sms.inbound', type);
}
// Without a bound the broker sends the whole queue at once.
await channel.prefetch(20);
// One event after the other, so that a repeat finds the first one handled.
let last = Promise.resolve();
await channel.consume(QUEUE, (message) => {
  // null: the queue was deleted.
  if (message === null) return fail(new Error('the consumer was cancelled'));
  last = last.then(() => settle(channel, file, message)).catch(fail);
});
