// Command subscribe appends each text message that comes in to a file.
//
//	subscribe FILE
//
// AMQP_URL names the broker. It runs until it is ended; what was not acked by then comes again.
package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"log"
	"net/url"
	"os"
	"strings"
	"unicode/utf8"

	amqp "github.com/rabbitmq/amqp091-go"
)

// A queue of your team's own: what is bound to the exchange gets a copy of each event.
const queue = "my-team.sms"

// read returns an event's members: JSON, or the form that some services send; nil where it is
// neither.
func read(delivery amqp.Delivery) any {
	kind, _, _ := strings.Cut(delivery.ContentType, ";")
	if strings.EqualFold(strings.TrimSpace(kind), "application/x-www-form-urlencoded") {
		form, err := url.ParseQuery(string(delivery.Body))
		if err != nil {
			return nil
		}
		event := map[string]string{}
		for name := range form {
			event[name] = form.Get(name)
		}
		return event
	}
	if !utf8.Valid(delivery.Body) || !json.Valid(delivery.Body) {
		return nil
	}
	return json.RawMessage(delivery.Body)
}

// handle does what is to be done with an event; when it fails, the event is not lost.
func handle(path string, delivery amqp.Delivery) error {
	record := map[string]any{
		// The same event can come twice. The service's id of it tells, where the service gives one.
		"id":   delivery.Headers["sms-bridge-event-id"],
		"type": delivery.Type,
	}
	if event := read(delivery); event != nil {
		record["event"] = event
	} else {
		// Nobody can read it, now or later: it is kept as it came, in base64, and does not stop
		// the rest.
		record["body"] = delivery.Body
	}
	line, err := json.Marshal(record)
	if err != nil {
		return err
	}
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(append(line, '\n'))
	return errors.Join(err, file.Close())
}

func run(path string) error {
	address := cmp.Or(os.Getenv("AMQP_URL"), "amqp://guest:guest@localhost:5672/")
	connection, err := amqp.Dial(address)
	if err != nil {
		return err
	}
	defer connection.Close()
	ch, err := connection.Channel()
	if err != nil {
		return err
	}
	arguments := amqp.Table{"x-queue-type": "quorum"}
	if _, err := ch.QueueDeclare(queue, true, false, false, false, arguments); err != nil {
		return err
	}
	if err := ch.QueueBind(queue, "message.received", "sms.inbound", false, nil); err != nil {
		return err
	}
	// Without a bound the broker sends the whole queue at once.
	if err := ch.Qos(20, 0, false); err != nil {
		return err
	}
	deliveries, err := ch.Consume(queue, "", false, false, false, false, nil)
	if err != nil {
		return err
	}
	for delivery := range deliveries {
		if err := handle(path, delivery); err != nil {
			return err
		}
		if err := delivery.Ack(false); err != nil {
			return err
		}
	}
	return errors.New("the connection or the queue is gone")
}

func main() {
	log.Fatal(run(os.Args[1]))
}
