import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.Delivery;
import java.io.IOException;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.Base64;
import java.util.Map;
import java.util.Optional;

/**
 * Appends each text message that comes in to a file.
 *
 * <p>java -cp 'lib/*' Subscribe.java FILE
 *
 * <p>AMQP_URL names the broker. Runs until it is ended; what was not acked by then comes again.
 */
class Subscribe {
  // A queue of your team's own: what is bound to the exchange gets a copy of each event.
  static final String QUEUE = "my-team.sms";

  /** Reads an event: JSON, or the form that some services send. */
  static JsonElement read(Delivery delivery) {
    String body = new String(delivery.getBody(), StandardCharsets.UTF_8);
    String type = Optional.ofNullable(delivery.getProperties().getContentType()).orElse("");
    if (!type.split(";")[0].strip().equalsIgnoreCase("application/x-www-form-urlencoded")) {
      return JsonParser.parseString(body);
    }
    var event = new JsonObject();
    for (String pair : body.split("&")) {
      String[] parts = pair.split("=", 2);
      String value = parts.length == 2 ? parts[1] : "";
      event.addProperty(
          URLDecoder.decode(parts[0], StandardCharsets.UTF_8),
          URLDecoder.decode(value, StandardCharsets.UTF_8));
    }
    return event;
  }

  /** Writes an event as a line of JSON. */
  static String write(Delivery delivery) {
    var line = new JsonObject();
    // The same event can come twice. The service's id of it tells, where the service gives one.
    // Texts of headers are LongString, and no String.
    var headers = Optional.ofNullable(delivery.getProperties().getHeaders()).orElse(Map.of());
    Object id = headers.get("sms-bridge-event-id");
    line.addProperty("id", id == null ? null : id.toString());
    line.addProperty("type", delivery.getProperties().getType());
    try {
      var read = line.deepCopy();
      read.add("event", read(delivery));
      return read + "\n";
    } catch (RuntimeException | StackOverflowError unreadable) {
      // Nobody can read it, now or later: it is kept as it came, and does not stop the rest.
      line.addProperty("body", Base64.getEncoder().encodeToString(delivery.getBody()));
      return line + "\n";
    }
  }

  /** Does what is to be done with an event; whatever this throws, the event is not lost. */
  static void handle(Path file, Delivery delivery) throws IOException {
    Files.writeString(
        file, write(delivery), StandardOpenOption.CREATE, StandardOpenOption.APPEND);
  }

  /** Ends, so that whoever supervises this program starts it anew. */
  static void fail(String why) {
    System.err.println(why);
    // Not exit(): its hooks wait for this thread of the client.
    Runtime.getRuntime().halt(1);
  }

  public static void main(String[] arguments) throws Exception {
    Path file = Path.of(arguments[0]);
    var factory = new ConnectionFactory();
    factory.setUri(
        Optional.ofNullable(System.getenv("AMQP_URL")).orElse("amqp://guest:guest@localhost:5672/"));
    // It opens a lost connection anew, with its queue, binding and consumer.
    Connection connection = factory.newConnection();
    Channel channel = connection.createChannel();
    channel.queueDeclare(QUEUE, true, false, false, Map.of("x-queue-type", "quorum"));
    channel.queueBind(QUEUE, "sms.inbound", "message.received");
    // Without a bound the broker sends the whole queue at once.
    channel.basicQos(20);
    channel.basicConsume(
        QUEUE,
        false,
        (tag, delivery) -> {
          try {
            handle(file, delivery);
            channel.basicAck(delivery.getEnvelope().getDeliveryTag(), false);
          } catch (IOException | RuntimeException error) {
            fail(error.toString());
          }
        },
        tag -> fail("the consumer was cancelled"));
  }
}
