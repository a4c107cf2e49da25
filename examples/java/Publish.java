import com.google.gson.Gson;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.rabbitmq.client.AMQP;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import java.nio.charset.StandardCharsets;
import java.time.Instant;
import java.util.Date;
import java.util.Map;
import java.util.Optional;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicReference;

/**
 * Requests one SMS, and waits for its outcome.
 *
 * <p>java -cp 'lib/*' Publish.java TO TEXT [MESSAGE_ID]
 *
 * <p>AMQP_URL is the address of RabbitMQ. Prints the outcome. The exit status is 0 if the SMS service
 * has accepted the message, otherwise 1.
 */
class Publish {
  static final long BROKER_MILLISECONDS = 10_000;
  static final long OUTCOME_SECONDS = 60;
  // A one-time code is useless after this time, so the worker must not send it.
  static final long EXPIRES_SECONDS = 300;

  /** Publishes a request. Returns after RabbitMQ has stored it, otherwise throws. */
  static void publish(Channel channel, Map<String, String> request, AMQP.BasicProperties properties)
      throws Exception {
    // RabbitMQ returns an unroutable message, and then confirms it too.
    var returned = new AtomicReference<String>();
    channel.addReturnListener(message -> returned.set(message.getReplyText()));
    byte[] body = new Gson().toJson(request).getBytes(StandardCharsets.UTF_8);
    channel.basicPublish("", "sms.outbound", true, properties, body);
    channel.waitForConfirmsOrDie(BROKER_MILLISECONDS);
    if (returned.get() != null) {
      throw new IllegalStateException("returned: " + returned.get());
    }
  }

  /** Starts to wait for the outcome of one request. */
  static CompletableFuture<JsonObject> outcomeOf(
      Channel channel, String replies, String correlationId) throws Exception {
    var outcome = new CompletableFuture<JsonObject>();
    channel.basicConsume(
        replies,
        true,
        (tag, reply) -> {
          if (correlationId.equals(reply.getProperties().getCorrelationId())) {
            String body = new String(reply.getBody(), StandardCharsets.UTF_8);
            outcome.complete(JsonParser.parseString(body).getAsJsonObject());
          }
        },
        (tag, cause) -> outcome.completeExceptionally(cause));
    return outcome;
  }

  static boolean send(String to, String text, String messageId) throws Exception {
    var factory = new ConnectionFactory();
    factory.setUri(
        Optional.ofNullable(System.getenv("AMQP_URL")).orElse("amqp://guest:guest@localhost:5672/"));
    try (Connection connection = factory.newConnection()) {
      Channel channel = connection.createChannel();
      channel.confirmSelect();
      String replies = channel.queueDeclare().getQueue();
      String correlationId = UUID.randomUUID().toString();
      var outcome = outcomeOf(channel, replies, correlationId);
      Instant now = Instant.now();
      var properties =
          new AMQP.BasicProperties.Builder()
              .contentType("application/json")
              .deliveryMode(2)
              // The id from your own records. Use the same id to publish again after a crash, so that
              // the worker recognises the repeat.
              .messageId(messageId)
              .timestamp(Date.from(now))
              .replyTo(replies)
              .correlationId(correlationId)
              // Whole seconds. With milliseconds, the message would be invalid.
              .headers(Map.of("sms-bridge-expires-at", now.getEpochSecond() + EXPIRES_SECONDS))
              .build();
      publish(channel, Map.of("to", to, "from", "Acme", "text", text), properties);
      JsonObject found = outcome.get(OUTCOME_SECONDS, TimeUnit.SECONDS);
      System.out.println(found);
      return found.get("outcome").getAsString().equals("sent");
    }
  }

  public static void main(String[] arguments) {
    String messageId = arguments.length > 2 ? arguments[2] : UUID.randomUUID().toString();
    boolean isSent = false;
    try {
      isSent = send(arguments[0], arguments[1], messageId);
    } catch (TimeoutException error) {
      System.err.println(messageId + ": not confirmed, or no outcome yet; it may still be sent");
    } catch (Exception error) {
      System.err.println(messageId + ": " + error);
    }
    System.exit(isSent ? 0 : 1);
  }
}
