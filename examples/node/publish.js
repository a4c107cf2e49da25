// Ask for one SMS with amqplib, and wait for its outcome.
//
// node publish.js TO TEXT [MESSAGE_ID]
//
// AMQP_URL names the broker. Prints the outcome; ends with 0 when the SMS service has accepted the
// message, else with 1.

import { randomUUID } from 'node:crypto';
import amqp from 'amqplib';

const URL = process.env.AMQP_URL ?? 'amqp://guest:guest@localhost:5672/';
const BROKER_MS = 10_000;
const OUTCOME_MS = 60_000;
// A one-time code is worth nothing later, so it is not sent later.
const EXPIRES_SECONDS = 300;

/** Reject after a time, whatever the promise does. */
function within(milliseconds, promise, what) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`${what}: not within ${milliseconds} ms`)), milliseconds);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

/** Publish a request; resolves once the broker has it on disk, rejects when it has not. */
function publish(channel, request, options) {
  return new Promise((resolve, reject) => {
    // A message that fits no queue is confirmed all the same; it is returned just before that.
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
  // AMQP counts in whole seconds, Date in milliseconds.
  const now = Math.floor(Date.now() / 1000);
  const published = publish(channel, { to, from: 'Acme', text }, {
    contentType: 'application/json',
    persistent: true,
    // The id of the message in your own records: published again after a crash, with the
    // same id, a request can be recognised.
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
