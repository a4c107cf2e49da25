// A webhook receiver that an engineer who knows Go and RabbitMQ writes in a day: verify, publish
// mandatory and persistent, wait for the confirm, answer 200.
//
// It lacks deduplication, several secrets and reconnects (it ends, and is restarted).
package main

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	maxBodyBytes   = 1 << 20
	headerTimeout  = 10 * time.Second
	confirmTimeout = 10 * time.Second
	// Returned messages that no request has checked yet.
	maxReturns = 1024
)

var (
	received = promauto.NewCounterVec(prometheus.CounterOpts{
		Name: "received_total", Help: "Webhooks by the status of the answer.",
	}, []string{"status"})
	seconds = promauto.NewHistogram(prometheus.HistogramOpts{
		Name: "publish_seconds", Help: "From the publish to the confirm.",
	})
)

func main() {
	go serveMetrics()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx); err != nil {
		log.Fatal(err)
	}
}

func serveMetrics() {
	metrics := http.NewServeMux()
	metrics.Handle("/metrics", promhttp.Handler())
	log.Fatal(http.ListenAndServe("127.0.0.1:"+os.Getenv("BENCH_METRICS_PORT"), metrics))
}

// run serves until ctx ends, then finishes the requests in flight.
func run(ctx context.Context) error {
	connection, err := amqp.Dial(os.Getenv("BENCH_AMQP_URL"))
	if err != nil {
		return err
	}
	defer connection.Close()
	publisher, err := newPublisher(connection)
	if err != nil {
		return err
	}
	routes := http.NewServeMux()
	routes.Handle("POST /webhooks", &receiver{[]byte(os.Getenv("BENCH_SECRET")), publisher})
	server := &http.Server{
		Addr:              "127.0.0.1:" + os.Getenv("BENCH_PORT"),
		Handler:           routes,
		ReadHeaderTimeout: headerTimeout,
	}
	ended := make(chan error, 1)
	go func() { ended <- server.ListenAndServe() }()
	select {
	case err := <-ended:
		return err
	case err := <-connection.NotifyClose(make(chan *amqp.Error, 1)):
		return err
	case <-ctx.Done():
		return server.Shutdown(context.Background())
	}
}

type receiver struct {
	secret    []byte
	publisher *publisher
}

func (r *receiver) ServeHTTP(writer http.ResponseWriter, request *http.Request) {
	status := r.receive(writer, request)
	writer.WriteHeader(status)
	received.WithLabelValues(strconv.Itoa(status)).Inc()
}

func (r *receiver) receive(writer http.ResponseWriter, request *http.Request) int {
	body, err := io.ReadAll(http.MaxBytesReader(writer, request.Body, maxBodyBytes))
	if err != nil {
		return http.StatusRequestEntityTooLarge
	}
	given, err := hex.DecodeString(request.Header.Get("X-Service-Signature"))
	mac := hmac.New(sha256.New, r.secret)
	mac.Write(body)
	if err != nil || !hmac.Equal(mac.Sum(nil), given) {
		return http.StatusUnauthorized
	}
	var event struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(body, &event); err != nil || event.Type == "" {
		return http.StatusBadRequest
	}
	ctx, cancel := context.WithTimeout(request.Context(), confirmTimeout)
	defer cancel()
	if err := r.publisher.publish(ctx, event.Type, body); err != nil {
		log.Print(err)
		return http.StatusServiceUnavailable
	}
	return http.StatusOK
}

type publisher struct {
	channel  *amqp.Channel
	exchange string
	last     atomic.Uint64

	mutex    sync.Mutex
	returns  chan amqp.Return
	returned map[string]struct{}
}

func newPublisher(connection *amqp.Connection) (*publisher, error) {
	channel, err := connection.Channel()
	if err != nil {
		return nil, err
	}
	if err := channel.Confirm(false); err != nil {
		return nil, err
	}
	return &publisher{
		channel:  channel,
		exchange: os.Getenv("BENCH_EXCHANGE"),
		returns:  channel.NotifyReturn(make(chan amqp.Return, maxReturns)),
		returned: map[string]struct{}{},
	}, nil
}

// publish returns nil if the broker has confirmed the message and a queue has received it.
func (p *publisher) publish(ctx context.Context, routingKey string, body []byte) error {
	begun := time.Now()
	id := strconv.FormatUint(p.last.Add(1), 10)
	confirm, err := p.channel.PublishWithDeferredConfirmWithContext(
		ctx, p.exchange, routingKey, true, false, amqp.Publishing{
			MessageId:    id,
			ContentType:  "application/json",
			DeliveryMode: amqp.Persistent,
			Body:         body,
		})
	if err != nil {
		return err
	}
	isConfirmed, err := confirm.WaitContext(ctx)
	if err != nil {
		return err
	}
	seconds.Observe(time.Since(begun).Seconds())
	if !isConfirmed {
		return errors.New("the broker refused to store it")
	}
	if p.wasReturned(id) {
		return errors.New("no queue takes it: " + routingKey)
	}
	return nil
}

// wasReturned must be called after the confirm, because the broker returns a message before that.
func (p *publisher) wasReturned(id string) bool {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for range len(p.returns) {
		p.returned[(<-p.returns).MessageId] = struct{}{}
	}
	_, found := p.returned[id]
	delete(p.returned, id)
	return found
}
