#!/bin/sh
# Append each text message that comes in to a file, with amqp-consume (Debian: amqp-tools), curl
# and jq.
#
#     subscribe.sh FILE
#
# AMQP_URL names the broker; RABBITMQ_API too, and its user, who needs the tag `management`. Runs
# until it is ended; what was not acked by then comes again.
#
# amqp-consume hands over the body alone: neither the type nor the headers of an event. Who needs
# them, to tell an event that comes twice or to read one that is a form, takes another language.
set -eu

api=${RABBITMQ_API:-http://guest:guest@localhost:15672/api}
vhost=${VHOST:-%2F}
# A queue of your team's own: what is bound to the exchange gets a copy of each event.
queue=my-team.sms

call() { # METHOD PATH, the body on standard input
    curl --silent --show-error --fail --max-time 10 --request "$1" \
        --header 'Content-Type: application/json' --data-binary @- "$api$2"
}
echo '{"durable": true, "arguments": {"x-queue-type": "quorum"}}' |
    call PUT "/queues/$vhost/$queue"
echo '{"routing_key": "message.received"}' |
    call POST "/bindings/$vhost/e/sms.inbound/q/$queue" >/dev/null

# What is no JSON, such as the form that some services send, is written down as it came. Acked is
# what the command has ended well with. An event with which it fails is kept, unacked, and blocks
# the rest: so the consumer is ended, and the event goes back to the queue.
export FILE="$1"
exec amqp-consume --url "${AMQP_URL:-amqp://guest:guest@localhost:5672/}" \
    --queue "$queue" --prefetch-count 1 -- \
    sh -c 'jq --compact-output --raw-input --slurp \
        ". as \$body | try {event: fromjson} catch {body: \$body}" >>"$FILE" ||
        { kill "$PPID"; exit 1; }'
