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
 * Appends each text message and opt-out that comes in to a file.
 *
 * <p>java -cp 'lib/*' Subscribe.java FILE
 *
 * <p>AMQP_URL names the broker. Runs until it is ended; an event that was not acked comes again.
 */
class Subscribe {
  // Your team's own queue: each queue that is bound to the exchange gets a copy of each event.
  static final String QUEUE = "my-team.sms";
  static final String DEAD_LETTERS = "my-team.sms.dead";
  static final Map<String, Object> ARGUMENTS =
      Map.of(
          "x-queue-type", "quorum",
          // An event that fails again and again becomes a dead letter.
          "x-delivery-limit", 5,
          "x-dead-letter-exchange", "",
          "x-dead-letter-routing-key", DEAD_LETTERS,
          // A dead letter leaves this queue only when it is stored in the other.
          "x-dead-letter-strategy", "at-least-once",
          "x-overflow", "reject-publish");
  static final int REMEMBERED = 10_000;
  static final long PAUSE_MILLISECONDS = 1000;

  /** An event, as far as this program uses it. */
  record Event(String type, Data data) {}

  record Data(String from, String text) {}

  static final Gson GSON = new Gson();

  /** Reads an event; none if it has another form. */
  static Optional<Event> read(byte[] body) {
    try {
      // Its decoder refuses what is not UTF-8, which String would replace.
      var text = StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(body)).toString();
      return Optional.ofNullable(GSON.fromJson(text, Event.class))
          .filter(event -> event.type() != null)
          .filter(event -> event.data() != null && event.data().from() != null);
    } catch (CharacterCodingException | JsonParseException unreadable) {
      return Optional.empty();
    }
  }

  /** The place for your code. If it throws, the event is tried again. */
  static void handle(Path file, String id, Event event) throws IOException {
    var record = new JsonObject();
    record.addProperty("id", id);
    record.addProperty("type", event.type());
    record.addProperty("from", event.data().from());
    if (event.type().equals("opt_out")) {
      // The service has blocked this number: send it nothing more.
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

  /** Acks an event once it is handled; a failed one is rejected, never dropped. */
  static void process(Channel channel, Path file, Delivery delivery) throws IOException {
    long tag = delivery.getEnvelope().getDeliveryTag();
    Optional<Event> event = read(delivery.getBody());
    if (event.isEmpty()) {
      // No further try would read it.
      System.err.println("an event cannot be read: see " + DEAD_LETTERS);
      channel.basicReject(tag, false);
      return;
    }
    // The same event can come twice; the header tells, if the service gives its events ids.
    // Texts of headers are LongString, and no String.
    var headers = Optional.ofNullable(delivery.getProperties().getHeaders()).orElse(Map.of());
    Object header = headers.get("sms-bridge-event-id");
    String id = header == null ? null : header.toString();
    if (!handled.contains(id)) {
      try {
        handle(file, id, event.get());
      } catch (Exception error) {
        System.err.println("an event was not handled, and is tried again: " + error);
        // A short fault must not use up the tries. RabbitMQ 4.3 counts no nack as a try.
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
    // It opens a lost connection anew, with its queues, bindings and consumer.
    Connection connection = factory.newConnection();
    Channel channel = connection.createChannel();
    channel.queueDeclare(DEAD_LETTERS, true, false, false, Map.of("x-queue-type", "quorum"));
    channel.queueDeclare(QUEUE, true, false, false, ARGUMENTS);
    for (String type : new String[] {"message.received", "opt_out"}) {
      channel.queueBind(QUEUE, "sms.inbound", type);
    }
    // Without a bound the broker sends the whole queue at once.
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
