using System;
using System.Collections.Generic;
using System.IO;
using System.Text;
using System.Text.Json;
using System.Threading.Tasks;
using RabbitMQ.Client;
using RabbitMQ.Client.Events;

/// <summary>
/// Appends each text message and opt-out that comes in to a file.
///
/// dotnet run --project subscribe -- FILE
///
/// AMQP_URL names the broker. Runs until it is ended; an event that was not acked comes again.
/// </summary>
static class Subscribe
{
    // Your team's own queue: each queue that is bound to the exchange gets a copy of each event.
    const string Queue = "my-team.sms";
    const string DeadLetters = "my-team.sms.dead";
    static readonly Dictionary<string, object> Arguments = new Dictionary<string, object>
    {
        ["x-queue-type"] = "quorum",
        // An event that fails again and again becomes a dead letter.
        ["x-delivery-limit"] = 5,
        ["x-dead-letter-exchange"] = "",
        ["x-dead-letter-routing-key"] = DeadLetters,
        // A dead letter leaves this queue only when it is stored in the other.
        ["x-dead-letter-strategy"] = "at-least-once",
        ["x-overflow"] = "reject-publish",
    };
    const int Remembered = 10_000;
    static readonly TimeSpan Pause = TimeSpan.FromSeconds(1);

    /// <summary>An event, as far as this program uses it.</summary>
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

    /// <summary>Reads an event; null if it has another form.</summary>
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

    /// <summary>The place for your code. If it throws, the event is tried again.</summary>
    static void Handle(string file, string id, Event read)
    {
        var record = new Dictionary<string, string> { ["id"] = id, ["type"] = read.Type, ["from"] = read.Data.From };
        if (read.Type == "opt_out")
        {
            // The service has blocked this number: send it nothing more.
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

    /// <summary>Acks an event once it is handled; a failed one is rejected, never dropped.</summary>
    static async Task Process(IChannel channel, string file, BasicDeliverEventArgs delivery)
    {
        Event read = Read(delivery.Body.Span);
        if (read == null)
        {
            // No further try would read it.
            Console.Error.WriteLine("an event cannot be read: see " + DeadLetters);
            await channel.BasicRejectAsync(delivery.DeliveryTag, false);
            return;
        }
        // The same event can come twice; the header tells, if the service gives its events ids.
        // Texts of headers are byte[], and no string.
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
                Console.Error.WriteLine("an event was not handled, and is tried again: " + error.Message);
                // A short fault must not use up the tries. RabbitMQ 4.3 counts no nack as a try.
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
        // A lost connection ends the program as well, rather than be opened anew in its back.
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
        // Without a bound the broker sends the whole queue at once.
        await channel.BasicQosAsync(0, 20, false);
        // What a consumer throws the client swallows, so it is handed to Main, which ends: whoever
        // supervises this program starts it anew.
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
        // What was not acked goes back to the queue with the connection.
        return 1;
    }
}
