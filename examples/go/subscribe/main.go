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
	"os"

	amqp "github.com/rabbitmq/amqp091-go"
)

// A queue of your team's own: what is bound to the exchange gets a copy of each event.
const queue = "my-team.sms"

// handle does what is to be done with an event; when it fails, the event is not lost.
func handle(path string, delivery amqp.Delivery) error {
	line, err := json.Marshal(map[string]any{
		// The same event can come twice. The service's id of it tells, where the service gives one.
		"id":    delivery.Headers["sms-bridge-event-id"],
		"type":  delivery.Type,
		"event": json.RawMessage(delivery.Body),
	})
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
	url := cmp.Or(os.Getenv("AMQP_URL"), "amqp://guest:guest@localhost:5672/")
	connection, err := amqp.Dial(url)
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
