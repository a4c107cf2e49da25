// Request one SMS with amqplib, and wait for its outcome.
//
// node publish.js TO TEXT [MESSAGE_ID]
//
// AMQP_URL is the address of RabbitMQ. Prints the outcome. The exit status is 0 if the SMS service has
// accepted the message, otherwise 1.

import { randomUUID } from 'node:crypto';
import amqp from 'amqplib';

const URL = process.env.AMQP_URL ?? 'amqp://guest:guest@localhost:5672/';
const BROKER_MS = 10_000;
const OUTCOME_MS = 60_000;
// A one-time code is useless after this time, so the worker must not send it.
const EXPIRES_SECONDS = 300;

/** Reject if the promise takes too long. */
function within(milliseconds, promise, what) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`${what}: not within ${milliseconds} ms`)), milliseconds);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

/** Publish a request. Resolves after RabbitMQ has stored it, otherwise rejects. */
function publish(channel, request, options) {
  return new Promise((resolve, reject) => {
    // RabbitMQ returns an unroutable message, and then confirms it too.
    channel.once('return', () => reject(new Error('there is no queue sms.outbound')));
    const body = Buffer.from(JSON.stringify(request));
    channel.publish('', 'sms.outbound', body, { ...options, mandatory: true }, (error) =>
      error ? reject(error) : resolve());
  });
}

/** Resolve with the outcome of this request. */
function outcomeOf(channel, replies, correlationId) {
  return new Promise((resolve, reject) => {
    const onMessage = (message) => {
      if (message === null) reject(new Error('the reply queue is gone'));
      else if (message.properties.correlationId === correlationId) resolve(JSON.parse(message.content));
    };
    channel.consume(replies, onMessage, { noAck: true }).catch(reject);
  });
}

const [to, text, messageId = randomUUID()] = process.argv.slice(2);
if (text === undefined) {
  console.error('usage: node publish.js TO TEXT [MESSAGE_ID]');
  process.exit(1);
}
const connection = await amqp.connect(URL, { timeout: BROKER_MS });
try {
  const channel = await connection.createConfirmChannel();
  const lost = new Promise((_, reject) => connection.once('error', reject));
  const { queue: replies } = await channel.assertQueue('', { exclusive: true });
  const correlationId = randomUUID();
  const outcome = outcomeOf(channel, replies, correlationId);
  // AMQP uses whole seconds, and Date uses milliseconds.
  const now = Math.floor(Date.now() / 1000);
  const published = publish(channel, { to, from: 'Acme', text }, {
    contentType: 'application/json',
    persistent: true,
    // The id from your own records. Use the same id to publish again after a crash, so that
    // the worker recognises the repeat.
    messageId,
    timestamp: now,
    replyTo: replies,
    correlationId,
    headers: { 'sms-bridge-expires-at': now + EXPIRES_SECONDS },
  });
  await within(BROKER_MS, Promise.race([published, lost]), 'confirm');
  const answer = await within(OUTCOME_MS, Promise.race([outcome, lost]), `outcome of ${messageId}`);
  console.log(JSON.stringify(answer));
  process.exitCode = answer.outcome === 'sent' ? 0 : 1;
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
} finally {
  await connection.close().catch(() => {});
}
