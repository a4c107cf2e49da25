// A worker that an engineer who knows Go and RabbitMQ writes in a day: from the queue to the API,
// acked after the answer.
//
// It lacks dead letters, growing delays, deduplication and reconnects (it ends, and is restarted).
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	answerTimeout = 30 * time.Second
	// Delay before a message that was not accepted returns to the queue.
	retryAfter = time.Second
)

var (
	sent = promauto.NewCounter(prometheus.CounterOpts{
		Name: "sent_total", Help: "Messages that the API accepted.",
	})
	seconds = promauto.NewHistogram(prometheus.HistogramOpts{
		Name: "send_seconds", Help: "From the request to the answer.",
	})
)

type sendRequest struct {
	To   string `json:"to"`
	From string `json:"from"`
	Text string `json:"text"`
}

func main() {
	inFlight, err := strconv.Atoi(os.Getenv("BENCH_IN_FLIGHT"))
	if err != nil {
		log.Fatal(err)
	}
	go serveMetrics()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, inFlight); err != nil {
		log.Fatal(err)
	}
}

func serveMetrics() {
	http.Handle("/metrics", promhttp.Handler())
	log.Fatal(http.ListenAndServe("127.0.0.1:"+os.Getenv("BENCH_METRICS_PORT"), nil))
}

// run works until ctx ends, then finishes the messages in flight.
func run(ctx context.Context, inFlight int) error {
	connection, err := amqp.Dial(os.Getenv("BENCH_AMQP_URL"))
	if err != nil {
		return err
	}
	defer connection.Close()
	channel, err := connection.Channel()
	if err != nil {
		return err
	}
	// Twice the concurrency, so that the next message is there before the last ack.
	if err := channel.Qos(2*inFlight, 0, false); err != nil {
		return err
	}
	deliveries, err := channel.Consume(os.Getenv("BENCH_QUEUE"), "worker", false, false, false, false, nil)
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { channel.Cancel("worker", false) })

	settled := make(chan settlement, 2*inFlight)
	sender := newSender(inFlight)
	var senders sync.WaitGroup
	for range inFlight {
		senders.Go(func() {
			for delivery := range deliveries {
				settled <- settle(delivery, sender.send(&delivery))
			}
		})
	}
	go func() { senders.Wait(); close(settled) }()
	if err := ack(channel, settled); err != nil {
		return err
	}
	if ctx.Err() == nil {
		return errors.New("the broker ended the channel")
	}
	return nil
}

type sender struct {
	client *http.Client
	url    string
	key    string
}

func newSender(inFlight int) *sender {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConns = inFlight
	transport.MaxIdleConnsPerHost = inFlight
	transport.MaxConnsPerHost = inFlight
	return &sender{
		client: &http.Client{Transport: transport, Timeout: answerTimeout},
		url:    os.Getenv("BENCH_API_URL") + "/v1/messages",
		key:    "Bearer " + os.Getenv("BENCH_API_KEY"),
	}
}

var errInvalid = errors.New("not a send request")

// send returns nil if the API has accepted the message, and errInvalid if it can never be sent.
func (s *sender) send(delivery *amqp.Delivery) error {
	var request sendRequest
	if err := json.Unmarshal(delivery.Body, &request); err != nil {
		return errInvalid
	}
	if request.To == "" || request.From == "" || request.Text == "" {
		return errInvalid
	}
	post, err := http.NewRequest(http.MethodPost, s.url, bytes.NewReader(delivery.Body))
	if err != nil {
		return err
	}
	post.Header.Set("Authorization", s.key)
	post.Header.Set("Content-Type", "application/json")
	post.Header.Set("Idempotency-Key", delivery.MessageId)
	begun := time.Now()
	answer, err := s.client.Do(post)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	// A connection is reused only if the whole answer was read.
	if _, err := io.Copy(io.Discard, answer.Body); err != nil {
		return err
	}
	seconds.Observe(time.Since(begun).Seconds())
	if answer.StatusCode/100 != 2 {
		return fmt.Errorf("the API answered %s", answer.Status)
	}
	sent.Inc()
	return nil
}

// A settlement is a settled delivery. isAcked: it is already acked.
type settlement struct {
	tag     uint64
	isAcked bool
}

func settle(delivery amqp.Delivery, err error) settlement {
	if err == nil {
		return settlement{delivery.DeliveryTag, false}
	}
	log.Print(err)
	isInvalid := errors.Is(err, errInvalid)
	if !isInvalid {
		time.Sleep(retryAfter)
	}
	if err := delivery.Nack(false, !isInvalid); err != nil {
		log.Print(err)
	}
	return settlement{delivery.DeliveryTag, true}
}

// ack acks all settled deliveries: in one frame up to the first unsettled one, the others one by one.
func ack(channel *amqp.Channel, settled <-chan settlement) error {
	// All tags up to this one are settled, and the following ones above it.
	frontier, beyond := uint64(0), map[uint64]struct{}{}
	var fresh []uint64
	for first := range settled {
		fresh = fresh[:0]
		note := func(one settlement) {
			beyond[one.tag] = struct{}{}
			if !one.isAcked {
				fresh = append(fresh, one.tag)
			}
		}
		note(first)
		for range len(settled) {
			note(<-settled)
		}
		for {
			if _, isSettled := beyond[frontier+1]; !isSettled {
				break
			}
			frontier++
			delete(beyond, frontier)
		}
		// RabbitMQ accepts each tag only once, even with multiple.
		upTo := uint64(0)
		for _, tag := range fresh {
			if tag <= frontier {
				upTo = max(upTo, tag)
			} else if err := channel.Ack(tag, false); err != nil {
				return err
			}
		}
		if upTo > 0 {
			if err := channel.Ack(upTo, true); err != nil {
				return err
			}
		}
	}
	return nil
}
