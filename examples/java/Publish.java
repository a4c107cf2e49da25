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
 * Asks for one SMS, and waits for its outcome.
 *
 * <p>java -cp 'lib/*' Publish.java TO TEXT [MESSAGE_ID]
 *
 * <p>AMQP_URL names the broker. Prints the outcome; ends with 0 when the SMS service has accepted
 * the message, else with 1.
 */
class Publish {
  static final long BROKER_MILLISECONDS = 10_000;
  static final long OUTCOME_SECONDS = 60;
  // A one-time code is worth nothing later, so it is not sent later.
  static final long EXPIRES_SECONDS = 300;

  /** Publishes a request; returns once the broker has it on disk, throws when it has not. */
  static void publish(Channel channel, Map<String, String> request, AMQP.BasicProperties properties)
      throws Exception {
    // A message that fits no queue is confirmed all the same; it is returned just before that.
    var returned = new AtomicReference<String>();
    channel.addReturnListener(message -> returned.set(message.getReplyText()));
    byte[] body = new Gson().toJson(request).getBytes(StandardCharsets.UTF_8);
    channel.basicPublish("", "sms.outbound", true, properties, body);
    channel.waitForConfirmsOrDie(BROKER_MILLISECONDS);
    if (returned.get() != null) {
      throw new IllegalStateException("returned: " + returned.get());
    }
  }

  /** Begins to wait for the outcome of one request. */
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
              // The id of the message in your own records: published again after a crash, with the
              // same id, a request can be recognised.
              .messageId(messageId)
              .timestamp(Date.from(now))
              .replyTo(replies)
              .correlationId(correlationId)
              // Seconds; currentTimeMillis() would make the message invalid.
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
