// Append each incoming text message and opt-out to a file, with amqplib.
//
// node subscribe.js FILE
//
// AMQP_URL is the address of RabbitMQ. Runs until you end it.

import { appendFile } from 'node:fs/promises';
import { setTimeout } from 'node:timers/promises';
import amqp from 'amqplib';

const URL = process.env.AMQP_URL ?? 'amqp://guest:guest@localhost:5672/';
// Your team's own queue. Every queue that is bound to the exchange gets a copy of each event.
const QUEUE = 'my-team.sms';
const DEAD_LETTERS = 'my-team.sms.dead';
const ARGUMENTS = {
  'x-queue-type': 'quorum',
  // An event that keeps failing becomes a dead letter.
  'x-delivery-limit': 5,
  'x-dead-letter-exchange': '',
  'x-dead-letter-routing-key': DEAD_LETTERS,
  // A dead letter leaves this queue only after the other queue has stored it.
  'x-dead-letter-strategy': 'at-least-once',
  'x-overflow': 'reject-publish',
};
const REMEMBERED = 10_000;
const PAUSE_MILLISECONDS = 1000;

/** Read an event. Return null if it has another form. */
function read(body) {
  try {
    const event = JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(body));
    const isEvent = typeof event?.type === 'string' && typeof event.data?.from === 'string';
    return isEvent ? event : null;
  } catch {
    return null;
  }
}

/** Put your code here. If it rejects, RabbitMQ delivers the event again. */
async function handle(file, id, { type, data }) {
  const record = { id: id ?? null, type, from: data.from };
  if (type === 'opt_out') {
    // The service has blocked this number. Do not send to it.
  } else {
    record.text = data.text ?? '';
  }
  await appendFile(file, `${JSON.stringify(record)}\n`);
}

const handled = new Set();

/** Handle an event, then ack it. If that fails, reject it. */
async function settle(channel, file, message) {
  const event = read(message.content);
  if (event === null) {
    // Another delivery would not help.
    console.error(`unreadable event, see ${DEAD_LETTERS}`);
    channel.reject(message, false);
    return;
  }
  // An event may arrive twice. The header contains its id, if the service sends one.
  const id = message.properties.headers?.['sms-bridge-event-id'];
  if (!handled.has(id)) {
    try {
      await handle(file, id, event);
    } catch (error) {
      console.error('event not handled, RabbitMQ delivers it again:', error);
      // A short fault must not use up the delivery limit. RabbitMQ 4.3 does not count a nack.
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

/** Exit, so that a supervisor restarts this program. */
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
// Without a prefetch, RabbitMQ sends the whole queue at once.
await channel.prefetch(20);
// One event at a time, so that a repeat comes after the first one is handled.
let last = Promise.resolve();
await channel.consume(QUEUE, (message) => {
  // null: the queue was deleted.
  if (message === null) return fail(new Error('the consumer was cancelled'));
  last = last.then(() => settle(channel, file, message)).catch(fail);
});
