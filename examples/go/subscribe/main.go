// Command subscribe appends each text message and opt-out that comes in to a file.
//
//	subscribe FILE
//
// AMQP_URL names the broker. It runs until it is ended; an event that was not acked comes again.
package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"log"
	"os"
	"time"
	"unicode/utf8"

	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	// Your team's own queue: each queue that is bound to the exchange gets a copy of each event.
	queue       = "my-team.sms"
	deadLetters = "my-team.sms.dead"
	remembered  = 10_000
	pause       = time.Second
)

var arguments = amqp.Table{
	"x-queue-type": "quorum",
	// An event that fails again and again becomes a dead letter.
	"x-delivery-limit":          5,
	"x-dead-letter-exchange":    "",
	"x-dead-letter-routing-key": deadLetters,
	// A dead letter leaves this queue only when it is stored in the other.
	"x-dead-letter-strategy": "at-least-once",
	"x-overflow":             "reject-publish",
}

// An event, as far as this program uses it.
type event struct {
	Type string `json:"type"`
	Data struct {
		From string `json:"from"`
		Text string `json:"text"`
	} `json:"data"`
}

// read reads an event; it fails if the body has another form.
func read(body []byte) (event, error) {
	var read event
	if !utf8.Valid(body) {
		return read, errors.New("not UTF-8")
	}
	if err := json.Unmarshal(body, &read); err != nil {
		return read, err
	}
	if read.Type == "" || read.Data.From == "" {
		return read, errors.New("not an event")
	}
	return read, nil
}

// handle is the place for your code. If it fails, the event is tried again.
func handle(path string, id any, event event) error {
	record := map[string]any{"id": id, "type": event.Type, "from": event.Data.From}
	if event.Type == "opt_out" {
		// The service has blocked this number: send it nothing more.
	} else {
		record["text"] = event.Data.Text
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

// recent holds the ids of the events that were handled last.
type recent struct {
	ids   map[any]bool
	order []any
}

func (r *recent) add(id any) {
	if id == nil || r.ids[id] {
		return
	}
	r.ids[id] = true
	r.order = append(r.order, id)
	if len(r.order) > remembered {
		delete(r.ids, r.order[0])
		r.order = r.order[1:]
	}
}

// process acks an event once it is handled; a failed one is rejected, never dropped.
func process(path string, delivery amqp.Delivery, handled *recent) error {
	event, err := read(delivery.Body)
	if err != nil {
		// No further try would read it.
		log.Print("an event cannot be read: see ", deadLetters)
		return delivery.Reject(false)
	}
	// The same event can come twice; the header tells, if the service gives its events ids.
	id := delivery.Headers["sms-bridge-event-id"]
	if !handled.ids[id] {
		if err := handle(path, id, event); err != nil {
			log.Print("an event was not handled, and is tried again: ", err)
			// A short fault must not use up the tries. RabbitMQ 4.3 counts no nack as a try.
			time.Sleep(pause)
			return delivery.Reject(true)
		}
	}
	handled.add(id)
	return delivery.Ack(false)
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
	quorum := amqp.Table{"x-queue-type": "quorum"}
	if _, err := ch.QueueDeclare(deadLetters, true, false, false, false, quorum); err != nil {
		return err
	}
	if _, err := ch.QueueDeclare(queue, true, false, false, false, arguments); err != nil {
		return err
	}
	for _, key := range []string{"message.received", "opt_out"} {
		if err := ch.QueueBind(queue, key, "sms.inbound", false, nil); err != nil {
			return err
		}
	}
	// Without a bound the broker sends the whole queue at once.
	if err := ch.Qos(20, 0, false); err != nil {
		return err
	}
	deliveries, err := ch.Consume(queue, "", false, false, false, false, nil)
	if err != nil {
		return err
	}
	handled := &recent{ids: map[any]bool{}}
	for delivery := range deliveries {
		if err := process(path, delivery, handled); err != nil {
			return err
		}
	}
	return errors.New("the connection or the queue is gone")
}

func main() {
	log.Fatal(run(os.Args[1]))
}
