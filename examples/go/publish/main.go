// Command publish requests one SMS, and waits for its outcome.
//
//	publish TO TEXT [MESSAGE_ID]
//
// AMQP_URL is the address of RabbitMQ. It prints the outcome. The exit status is 0 if the SMS
// service has accepted the message, otherwise 1.
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
	// A one-time code is useless after this time, so the worker must not send it.
	expiresAfter = 5 * time.Minute
)

func randomID() string {
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		panic(err)
	}
	return fmt.Sprintf("%x", id)
}

// publish returns after RabbitMQ has stored the request.
func publish(ch *amqp.Channel, request map[string]string, properties amqp.Publishing) error {
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	properties.Body = body
	ctx, cancel := context.WithTimeout(context.Background(), brokerTime)
	defer cancel()
	returns := ch.NotifyReturn(make(chan amqp.Return, 1))
	// Mandatory, so that a missing queue is an error instead of a silent loss.
	confirm, err := ch.PublishWithDeferredConfirmWithContext(ctx, "", "sms.outbound", true, false, properties)
	if err != nil {
		return err
	}
	confirmed, err := confirm.WaitContext(ctx)
	if err != nil {
		return err
	}
	// RabbitMQ returns an unroutable message, and then confirms it too.
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

// waitForOutcome returns the raw outcome of one request.
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
		// The id from your own records. Use the same id to publish again after a crash, so that
		// the worker recognises the repeat.
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
