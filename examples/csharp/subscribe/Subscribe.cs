using System;
using System.Collections.Generic;
using System.IO;
using System.Text;
using System.Text.Json;
using System.Threading.Tasks;
using RabbitMQ.Client;
using RabbitMQ.Client.Events;

/// <summary>
/// Appends each incoming text message and opt-out to a file.
///
/// dotnet run --project subscribe -- FILE
///
/// AMQP_URL is the address of RabbitMQ. Runs until you end it.
/// </summary>
static class Subscribe
{
    // Your team's own queue. Every queue that is bound to the exchange gets a copy of each event.
    const string Queue = "my-team.sms";
    const string DeadLetters = "my-team.sms.dead";
    static readonly Dictionary<string, object> Arguments = new Dictionary<string, object>
    {
        ["x-queue-type"] = "quorum",
        // An event that keeps failing becomes a dead letter.
        ["x-delivery-limit"] = 5,
        ["x-dead-letter-exchange"] = "",
        ["x-dead-letter-routing-key"] = DeadLetters,
        // A dead letter leaves this queue only after the other queue has stored it.
        ["x-dead-letter-strategy"] = "at-least-once",
        ["x-overflow"] = "reject-publish",
    };
    const int Remembered = 10_000;
    static readonly TimeSpan Pause = TimeSpan.FromSeconds(1);

    /// <summary>The fields of an event that this program uses.</summary>
    class Event
    {
        public string Type { get; set; }
        public EventData Data { get; set; }
    }

    class EventData
    {
        public string From { get; set; }
        public string Text { get; set; }
    }

    static readonly JsonSerializerOptions Json = new JsonSerializerOptions(JsonSerializerDefaults.Web);

    /// <summary>Reads an event. Returns null if it has another form.</summary>
    static Event Read(ReadOnlySpan<byte> body)
    {
        try
        {
            Event read = JsonSerializer.Deserialize<Event>(body, Json);
            return read?.Type == null || read.Data?.From == null ? null : read;
        }
        catch (JsonException)
        {
            return null;
        }
    }

    /// <summary>Put your code here. If it throws, RabbitMQ delivers the event again.</summary>
    static void Handle(string file, string id, Event read)
    {
        var record = new Dictionary<string, string> { ["id"] = id, ["type"] = read.Type, ["from"] = read.Data.From };
        if (read.Type == "opt_out")
        {
            // The service has blocked this number. Do not send to it.
        }
        else
        {
            record["text"] = read.Data.Text ?? "";
        }
        File.AppendAllText(file, JsonSerializer.Serialize(record) + "\n");
    }

    static readonly HashSet<string> Handled = new HashSet<string>();
    static readonly Queue<string> Order = new Queue<string>();

    static void Remember(string id)
    {
        if (id == null || !Handled.Add(id))
        {
            return;
        }
        Order.Enqueue(id);
        if (Order.Count > Remembered)
        {
            Handled.Remove(Order.Dequeue());
        }
    }

    /// <summary>Handles an event, then acks it. If that fails, rejects it.</summary>
    static async Task Process(IChannel channel, string file, BasicDeliverEventArgs delivery)
    {
        Event read = Read(delivery.Body.Span);
        if (read == null)
        {
            // Another delivery would not help.
            Console.Error.WriteLine("unreadable event, see " + DeadLetters);
            await channel.BasicRejectAsync(delivery.DeliveryTag, false);
            return;
        }
        // An event may arrive twice. The header contains its id, if the service sends one.
        // Strings in headers arrive as byte[].
        object header = null;
        delivery.BasicProperties.Headers?.TryGetValue("sms-bridge-event-id", out header);
        string id = header is byte[] bytes ? Encoding.UTF8.GetString(bytes) : null;
        if (id == null || !Handled.Contains(id))
        {
            try
            {
                Handle(file, id, read);
            }
            catch (Exception error)
            {
                Console.Error.WriteLine("event not handled, RabbitMQ delivers it again: " + error.Message);
                // A short fault must not use up the delivery limit. RabbitMQ 4.3 does not count a nack.
                await Task.Delay(Pause);
                await channel.BasicRejectAsync(delivery.DeliveryTag, true);
                return;
            }
        }
        Remember(id);
        await channel.BasicAckAsync(delivery.DeliveryTag, false);
    }

    static async Task<int> Main(string[] arguments)
    {
        string url = Environment.GetEnvironmentVariable("AMQP_URL") ?? "amqp://guest:guest@localhost:5672/";
        // A lost connection ends the program. The client must not reconnect by itself.
        var factory = new ConnectionFactory { Uri = new Uri(url), AutomaticRecoveryEnabled = false };
        IConnection connection = await factory.CreateConnectionAsync();
        IChannel channel = await connection.CreateChannelAsync();
        var quorum = new Dictionary<string, object> { ["x-queue-type"] = "quorum" };
        await channel.QueueDeclareAsync(DeadLetters, durable: true, exclusive: false, autoDelete: false, arguments: quorum);
        await channel.QueueDeclareAsync(Queue, durable: true, exclusive: false, autoDelete: false, arguments: Arguments);
        foreach (string type in new[] { "message.received", "opt_out" })
        {
            await channel.QueueBindAsync(Queue, "sms.inbound", type);
        }
        // Without a prefetch, RabbitMQ sends the whole queue at once.
        await channel.BasicQosAsync(0, 20, false);
        // The client swallows exceptions of a consumer, so Main gets them and ends. A supervisor restarts
        // this program.
        var failed = new TaskCompletionSource<string>(TaskCreationOptions.RunContinuationsAsynchronously);
        var consumer = new AsyncEventingBasicConsumer(channel);
        consumer.ReceivedAsync += async (sender, delivery) =>
        {
            if (failed.Task.IsCompleted)
            {
                return;
            }
            try
            {
                await Process(channel, arguments[0], delivery);
            }
            catch (Exception error)
            {
                failed.TrySetResult(error.Message);
            }
        };
        consumer.UnregisteredAsync += (sender, cause) =>
        {
            failed.TrySetResult("the consumer was cancelled, or the connection is lost");
            return Task.CompletedTask;
        };
        await channel.BasicConsumeAsync(Queue, false, consumer);
        Console.Error.WriteLine(await failed.Task);
        // When the connection ends, events that were not acked return to the queue.
        return 1;
    }
}
