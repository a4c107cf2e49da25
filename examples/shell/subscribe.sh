#!/bin/sh
# Append each incoming text message and opt-out to a file, with amqp-consume (Debian: amqp-tools),
# curl and jq.
#
#     subscribe.sh FILE
#
# AMQP_URL is the address of RabbitMQ, and RABBITMQ_API that of its management API. The user needs the
# tag `management`. Runs until you end it.
#
# amqp-consume passes on only the body, without headers. The program recognises a repeat if the body
# contains an `id`, which only events of the preset generic may lack.
set -eu

FILE=$1
HANDLED=$(mktemp)
export FILE HANDLED
consumer=
trap 'rm -f "$HANDLED"; [ -z "$consumer" ] || kill "$consumer"' EXIT
trap 'exit 143' INT TERM
api=${RABBITMQ_API:-http://guest:guest@localhost:15672/api}
vhost=${VHOST:-%2F}
# Your team's own queue. Every queue that is bound to the exchange gets a copy of each event.
queue=my-team.sms
dead_letters=my-team.sms.dead

call() { # METHOD PATH, the body on standard input
    curl --silent --show-error --fail --max-time 10 --request "$1" \
        --header 'Content-Type: application/json' --data-binary @- "$api$2"
}
echo '{"durable": true, "arguments": {"x-queue-type": "quorum"}}' |
    call PUT "/queues/$vhost/$dead_letters"
# An event that keeps failing becomes a dead letter, which leaves this queue only after the other
# queue has stored it.
echo '{"durable": true, "arguments": {
        "x-queue-type": "quorum", "x-delivery-limit": 5,
        "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "'"$dead_letters"'",
        "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}}' |
    call PUT "/queues/$vhost/$queue"
for type in message.received opt_out; do
    echo '{"routing_key": "'"$type"'"}' |
        call POST "/bindings/$vhost/e/sms.inbound/q/$queue" >/dev/null
done

# Runs for each event, with the body as standard input. Exit status 0 acks the event.
process='
    # After an opt_out, the service has blocked the number. Do not send to it.
    record=$(jq --compact-output --slurp --exit-status "
        if length == 1 then .[0] else error(\"not an event\") end
        | {id, type: (.type | strings), from: (.data.from | strings)}
          + if .type == \"opt_out\" then {} else {text: (.data.text // \"\")} end
    ") &&
    id=$(printf "%s" "$record" | jq --raw-output ".id // empty") &&
    # An event may arrive twice.
    if [ -z "$id" ] || ! grep --quiet --fixed-strings --line-regexp -e "$id" "$HANDLED"; then
        # Put your code here. If it fails, RabbitMQ delivers the event again.
        printf "%s\n" "$record" >>"$FILE" &&
        if [ -n "$id" ]; then
            recent=$(tail --lines=999 "$HANDLED") && printf "%s\n" "$recent" "$id" >"$HANDLED"
        fi
    fi ||
    # amqp-consume would hold the event. If it ends, the event returns to the queue. Each return
    # counts towards the delivery limit, so an unreadable event becomes a dead letter.
    { echo "event not handled, RabbitMQ delivers it again" >&2; kill "$PPID"; exit 1; }'
while :; do
    amqp-consume --url "${AMQP_URL:-amqp://guest:guest@localhost:5672/}" \
        --queue "$queue" --prefetch-count 1 -- sh -c "$process" &
    consumer=$!
    wait "$consumer" || true
    # A short fault must not use up the delivery limit.
    sleep 1
done
