import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.Delivery;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
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

  /** Does what is to be done with an event; whatever this throws, the event is not lost. */
  static void handle(Path file, Delivery delivery) throws IOException {
    var line = new JsonObject();
    // The same event can come twice. The service's id of it tells, where the service gives one.
    // Texts of headers are LongString, and no String.
    Object id = delivery.getProperties().getHeaders().get("sms-bridge-event-id");
    line.addProperty("id", id == null ? null : id.toString());
    line.addProperty("type", delivery.getProperties().getType());
    String body = new String(delivery.getBody(), StandardCharsets.UTF_8);
    line.add("event", JsonParser.parseString(body));
    Files.writeString(file, line + "\n", StandardOpenOption.CREATE, StandardOpenOption.APPEND);
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
