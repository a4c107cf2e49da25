// Command publish asks for one SMS, and waits for its outcome.
//
//	publish TO TEXT [MESSAGE_ID]
//
// AMQP_URL names the broker. It prints the outcome, and ends with 0 when the SMS service has
// accepted the message, else with 1.
package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	brokerTime  = 10 * time.Second
	outcomeTime = 60 * time.Second
	// A one-time code is worth nothing later, so it is not sent later.
	expiresAfter = 5 * time.Minute
)

func randomID() string {
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		panic(err)
	}
	return fmt.Sprintf("%x", id)
}

// publish returns once the broker has the request on disk.
func publish(ch *amqp.Channel, request map[string]string, properties amqp.Publishing) error {
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	properties.Body = body
	ctx, cancel := context.WithTimeout(context.Background(), brokerTime)
	defer cancel()
	returns := ch.NotifyReturn(make(chan amqp.Return, 1))
	// Mandatory: a queue that is not there is an error, and not a message that is lost in silence.
	confirm, err := ch.PublishWithDeferredConfirmWithContext(ctx, "", "sms.outbound", true, false, properties)
	if err != nil {
		return err
	}
	confirmed, err := confirm.WaitContext(ctx)
	if err != nil {
		return err
	}
	// A message that fits no queue is confirmed all the same; it is returned just before that.
	select {
	case returned := <-returns:
		return fmt.Errorf("returned: %s", returned.ReplyText)
	default:
	}
	if !confirmed {
		return errors.New("the broker refused the message")
	}
	return nil
}

// waitForOutcome returns the outcome of one request as it came.
func waitForOutcome(replies <-chan amqp.Delivery, correlationID string) ([]byte, error) {
	deadline := time.After(outcomeTime)
	for {
		select {
		case reply, open := <-replies:
			if !open {
				return nil, errors.New("the connection is lost")
			}
			if reply.CorrelationId == correlationID {
				return reply.Body, nil
			}
		case <-deadline:
			return nil, errors.New("no outcome yet; it may still be sent")
		}
	}
}

func run(to, text, messageID string) error {
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
	if err := ch.Confirm(false); err != nil {
		return err
	}
	queue, err := ch.QueueDeclare("", false, true, true, false, nil)
	if err != nil {
		return err
	}
	replies, err := ch.Consume(queue.Name, "", true, true, false, false, nil)
	if err != nil {
		return err
	}
	correlationID := randomID()
	now := time.Now()
	err = publish(ch, map[string]string{"to": to, "from": "Acme", "text": text}, amqp.Publishing{
		ContentType:  "application/json",
		DeliveryMode: amqp.Persistent,
		// The id of the message in your own records: published again after a crash, with the
		// same id, a request can be recognised.
		MessageId:     messageID,
		Timestamp:     now,
		ReplyTo:       queue.Name,
		CorrelationId: correlationID,
		Headers:       amqp.Table{"sms-bridge-expires-at": now.Add(expiresAfter).Unix()},
	})
	if err != nil {
		return err
	}
	body, err := waitForOutcome(replies, correlationID)
	if err != nil {
		return fmt.Errorf("%s: %w", messageID, err)
	}
	fmt.Println(string(body))
	var outcome struct{ Outcome string }
	if err := json.Unmarshal(body, &outcome); err != nil {
		return err
	}
	if outcome.Outcome != "sent" {
		return fmt.Errorf("%s: %s", messageID, outcome.Outcome)
	}
	return nil
}

func main() {
	arguments := append(os.Args[1:], randomID())
	if err := run(arguments[0], arguments[1], arguments[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
