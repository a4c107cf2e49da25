#!/bin/sh
# Append each text message and opt-out that comes in to a file, with amqp-consume (Debian:
# amqp-tools), curl and jq.
#
#     subscribe.sh FILE
#
# AMQP_URL names the broker; RABBITMQ_API too, and its user, who needs the tag `management`. Runs
# until it is ended; an event that was not acked comes again.
#
# amqp-consume hands over the body alone, without headers: an event is told from its repeat only if
# its body has the id in `id`, as all have but those of the preset generic.
set -eu

FILE=$1
HANDLED=$(mktemp)
export FILE HANDLED
consumer=
trap 'rm -f "$HANDLED"; [ -z "$consumer" ] || kill "$consumer"' EXIT
trap 'exit 143' INT TERM
api=${RABBITMQ_API:-http://guest:guest@localhost:15672/api}
vhost=${VHOST:-%2F}
# Your team's own queue: each queue that is bound to the exchange gets a copy of each event.
queue=my-team.sms
dead_letters=my-team.sms.dead

call() { # METHOD PATH, the body on standard input
    curl --silent --show-error --fail --max-time 10 --request "$1" \
        --header 'Content-Type: application/json' --data-binary @- "$api$2"
}
echo '{"durable": true, "arguments": {"x-queue-type": "quorum"}}' |
    call PUT "/queues/$vhost/$dead_letters"
# An event that fails again and again becomes a dead letter, which leaves its queue only when it is
# stored in the other.
echo '{"durable": true, "arguments": {
        "x-queue-type": "quorum", "x-delivery-limit": 5,
        "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "'"$dead_letters"'",
        "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}}' |
    call PUT "/queues/$vhost/$queue"
for type in message.received opt_out; do
    echo '{"routing_key": "'"$type"'"}' |
        call POST "/bindings/$vhost/e/sms.inbound/q/$queue" >/dev/null
done

# What is run for each event, with its body as standard input; exit code 0 acks it.
process='
    # In an opt_out the service has blocked the number: send it nothing more.
    record=$(jq --compact-output --slurp --exit-status "
        if length == 1 then .[0] else error(\"not an event\") end
        | {id, type: (.type | strings), from: (.data.from | strings)}
          + if .type == \"opt_out\" then {} else {text: (.data.text // \"\")} end
    ") &&
    id=$(printf "%s" "$record" | jq --raw-output ".id // empty") &&
    # The same event can come twice.
    if [ -z "$id" ] || ! grep --quiet --fixed-strings --line-regexp -e "$id" "$HANDLED"; then
        # Put your code here. If it fails, the event is tried again.
        printf "%s\n" "$record" >>"$FILE" &&
        if [ -n "$id" ]; then
            recent=$(tail --lines=999 "$HANDLED") && printf "%s\n" "$recent" "$id" >"$HANDLED"
        fi
    fi ||
    # amqp-consume would keep the event; without it, the event goes back to the queue. Each such
    # return counts as a try, and so an event that cannot be read is a dead letter after a few.
    { echo "an event was not handled, and is tried again" >&2; kill "$PPID"; exit 1; }'
while :; do
    amqp-consume --url "${AMQP_URL:-amqp://guest:guest@localhost:5672/}" \
        --queue "$queue" --prefetch-count 1 -- sh -c "$process" &
    consumer=$!
    wait "$consumer" || true
    # A short fault must not use up the tries.
    sleep 1
done
