import com.google.gson.Gson;
import com.google.gson.JsonObject;
import com.google.gson.JsonParseException;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.Delivery;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Optional;
import java.util.Set;

/**
 * Appends each incoming text message and opt-out to a file.
 *
 * <p>java -cp 'lib/*' Subscribe.java FILE
 *
 * <p>AMQP_URL is the address of RabbitMQ. Runs until you end it.
 */
class Subscribe {
  // Your team's own queue. Every queue that is bound to the exchange gets a copy of each event.
  static final String QUEUE = "my-team.sms";
  static final String DEAD_LETTERS = "my-team.sms.dead";
  static final Map<String, Object> ARGUMENTS =
      Map.of(
          "x-queue-type", "quorum",
          // An event that keeps failing becomes a dead letter.
          "x-delivery-limit", 5,
          "x-dead-letter-exchange", "",
          "x-dead-letter-routing-key", DEAD_LETTERS,
          // A dead letter leaves this queue only after the other queue has stored it.
          "x-dead-letter-strategy", "at-least-once",
          "x-overflow", "reject-publish");
  static final int REMEMBERED = 10_000;
  static final long PAUSE_MILLISECONDS = 1000;

  /** The fields of an event that this program uses. */
  record Event(String type, Data data) {}

  record Data(String from, String text) {}

  static final Gson GSON = new Gson();

  /** Reads an event. Returns nothing if it has another form. */
  static Optional<Event> read(byte[] body) {
    try {
      // The decoder refuses invalid UTF-8, which String would replace.
      var text = StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(body)).toString();
      return Optional.ofNullable(GSON.fromJson(text, Event.class))
          .filter(event -> event.type() != null)
          .filter(event -> event.data() != null && event.data().from() != null);
    } catch (CharacterCodingException | JsonParseException unreadable) {
      return Optional.empty();
    }
  }

  /** Put your code here. If it throws, RabbitMQ delivers the event again. */
  static void handle(Path file, String id, Event event) throws IOException {
    var record = new JsonObject();
    record.addProperty("id", id);
    record.addProperty("type", event.type());
    record.addProperty("from", event.data().from());
    if (event.type().equals("opt_out")) {
      // The service has blocked this number. Do not send to it.
    } else {
      record.addProperty("text", Optional.ofNullable(event.data().text()).orElse(""));
    }
    Files.writeString(file, record + "\n", StandardOpenOption.CREATE, StandardOpenOption.APPEND);
  }

  static final Set<String> handled =
      Collections.newSetFromMap(
          new LinkedHashMap<>() {
            @Override
            protected boolean removeEldestEntry(Map.Entry<String, Boolean> eldest) {
              return size() > REMEMBERED;
            }
          });

  /** Handles an event, then acks it. If that fails, rejects it. */
  static void process(Channel channel, Path file, Delivery delivery) throws IOException {
    long tag = delivery.getEnvelope().getDeliveryTag();
    Optional<Event> event = read(delivery.getBody());
    if (event.isEmpty()) {
      // Another delivery would not help.
      System.err.println("unreadable event, see " + DEAD_LETTERS);
      channel.basicReject(tag, false);
      return;
    }
    // An event may arrive twice. The header contains its id, if the service sends one.
    // Strings in headers arrive as LongString.
    var headers = Optional.ofNullable(delivery.getProperties().getHeaders()).orElse(Map.of());
    Object header = headers.get("sms-bridge-event-id");
    String id = header == null ? null : header.toString();
    if (!handled.contains(id)) {
      try {
        handle(file, id, event.get());
      } catch (Exception error) {
        System.err.println("event not handled, RabbitMQ delivers it again: " + error);
        // A short fault must not use up the delivery limit. RabbitMQ 4.3 does not count a nack.
        pause();
        channel.basicReject(tag, true);
        return;
      }
    }
    if (id != null) {
      handled.add(id);
    }
    channel.basicAck(tag, false);
  }

  static void pause() {
    try {
      Thread.sleep(PAUSE_MILLISECONDS);
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
    }
  }

  /** Exits, so that a supervisor restarts this program. */
  static void fail(String why) {
    System.err.println(why);
    // Not exit(), whose hooks wait for this thread of the client.
    Runtime.getRuntime().halt(1);
  }

  public static void main(String[] arguments) throws Exception {
    Path file = Path.of(arguments[0]);
    var factory = new ConnectionFactory();
    factory.setUri(
        Optional.ofNullable(System.getenv("AMQP_URL")).orElse("amqp://guest:guest@localhost:5672/"));
    // The client restores a lost connection with its queues, bindings and consumer.
    Connection connection = factory.newConnection();
    Channel channel = connection.createChannel();
    channel.queueDeclare(DEAD_LETTERS, true, false, false, Map.of("x-queue-type", "quorum"));
    channel.queueDeclare(QUEUE, true, false, false, ARGUMENTS);
    for (String type : new String[] {"message.received", "opt_out"}) {
      channel.queueBind(QUEUE, "sms.inbound", type);
    }
    // Without a prefetch, RabbitMQ sends the whole queue at once.
    channel.basicQos(20);
    channel.basicConsume(
        QUEUE,
        false,
        (tag, delivery) -> {
          try {
            process(channel, file, delivery);
          } catch (IOException | RuntimeException error) {
            fail(error.toString());
          }
        },
        tag -> fail("the consumer was cancelled"));
  }
}
