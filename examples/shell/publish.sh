#!/bin/sh
# Request one SMS through RabbitMQ's management API with curl and jq, and wait for its outcome.
#
#     publish.sh TO TEXT [MESSAGE_ID]
#
# RABBITMQ_API is the address of the API. Its user needs the tag `management`. Prints the outcome. The
# exit status is 0 if the SMS service has accepted the message, otherwise 1.
#
# Debian's amqp-publish sets no message_id and does not wait for a confirm. This API does both, but is
# slow: for more than a few messages per second, use an AMQP client.
set -eu

api=${RABBITMQ_API:-http://guest:guest@localhost:15672/api}
vhost=${VHOST:-%2F}
to=$1 text=$2
# The id from your own records. Use the same id to publish again after a crash, so that
# the worker recognises the repeat.
message_id=${3:-$(cat /proc/sys/kernel/random/uuid)}
correlation_id=$(cat /proc/sys/kernel/random/uuid)
replies=replies.$correlation_id
outcome_seconds=60
# A one-time code is useless after this time, so the worker must not send it.
expires_seconds=300

# The body comes from a pipe, because process lists show command lines.
call() { # METHOD PATH, the body on standard input
    curl --silent --show-error --fail --max-time 10 --request "$1" \
        --header 'Content-Type: application/json' --data-binary @- "$api$2"
}

# An exclusive queue would disappear after this request. This queue expires by itself.
echo '{"durable": true, "arguments": {"x-expires": 600000}}' | call PUT "/queues/$vhost/$replies"

# printf is built into the shell, and jq reads number and text from standard input, so neither appears
# in process lists. The API answers after the confirm. "routed" is false if no queue gets the message.
printf '%s\0%s' "$to" "$text" |
    jq --raw-input --slurp --compact-output \
        --arg message_id "$message_id" --arg correlation_id "$correlation_id" \
        --arg replies "$replies" --argjson expires_seconds "$expires_seconds" '
        split("\u0000") as [$to, $text] | {
            routing_key: "sms.outbound",
            properties: {
                content_type: "application/json",
                delivery_mode: 2,
                message_id: $message_id,
                timestamp: (now | floor),
                reply_to: $replies,
                correlation_id: $correlation_id,
                headers: {"sms-bridge-expires-at": (now + $expires_seconds | floor)}
            },
            payload: ({to: $to, from: "Acme", text: $text} | tojson),
            payload_encoding: "string"
        }' |
    call POST "/exchanges/$vhost/amq.default/publish" |
    jq --exit-status .routed >/dev/null ||
    { echo "$message_id: not published; is there a queue sms.outbound?" >&2; exit 1; }

deadline=$(($(date +%s) + outcome_seconds))
while [ "$(date +%s)" -lt "$deadline" ]; do
    outcome=$(echo '{"count": 10, "ackmode": "ack_requeue_false", "encoding": "auto"}' |
        call POST "/queues/$vhost/$replies/get" |
        jq --raw-output --arg id "$correlation_id" \
            '.[] | select(.properties.correlation_id == $id) | .payload')
    if [ -n "$outcome" ]; then
        echo "$outcome"
        : | call DELETE "/queues/$vhost/$replies"
        echo "$outcome" | jq --exit-status '.outcome == "sent"' >/dev/null && exit 0
        exit 1
    fi
    sleep 0.5
done
echo "$message_id: no outcome yet; it may still be sent" >&2
exit 1
