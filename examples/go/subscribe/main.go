// Command subscribe appends each incoming text message and opt-out to a file.
//
//	subscribe FILE
//
// AMQP_URL is the address of RabbitMQ. It runs until you end it.
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
	// Your team's own queue. Every queue that is bound to the exchange gets a copy of each event.
	queue       = "my-team.sms"
	deadLetters = "my-team.sms.dead"
	remembered  = 10_000
	pause       = time.Second
)

var arguments = amqp.Table{
	"x-queue-type": "quorum",
	// An event that keeps failing becomes a dead letter.
	"x-delivery-limit":          5,
	"x-dead-letter-exchange":    "",
	"x-dead-letter-routing-key": deadLetters,
	// A dead letter leaves this queue only after the other queue has stored it.
	"x-dead-letter-strategy": "at-least-once",
	"x-overflow":             "reject-publish",
}

// The fields of an event that this program uses.
type event struct {
	Type string `json:"type"`
	Data struct {
		From string `json:"from"`
		Text string `json:"text"`
	} `json:"data"`
}

// read reads an event. It fails if the body has another form.
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

// handle contains your code. If it fails, RabbitMQ delivers the event again.
func handle(path string, id any, event event) error {
	record := map[string]any{"id": id, "type": event.Type, "from": event.Data.From}
	if event.Type == "opt_out" {
		// The service has blocked this number. Do not send to it.
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

// recent contains the ids of the last handled events.
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

// process handles an event, then acks it. If that fails, it rejects the event.
func process(path string, delivery amqp.Delivery, handled *recent) error {
	event, err := read(delivery.Body)
	if err != nil {
		// Another delivery would not help.
		log.Print("unreadable event, see ", deadLetters)
		return delivery.Reject(false)
	}
	// An event may arrive twice. The header contains its id, if the service sends one.
	id := delivery.Headers["sms-bridge-event-id"]
	if !handled.ids[id] {
		if err := handle(path, id, event); err != nil {
			log.Print("event not handled, RabbitMQ delivers it again: ", err)
			// A short fault must not use up the delivery limit. RabbitMQ 4.3 does not count a nack.
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
	// Without a prefetch, RabbitMQ sends the whole queue at once.
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
