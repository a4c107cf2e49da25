using System;
using System.Collections.Generic;
using System.IO;
using System.Net;
using System.Text;
using System.Text.Json;
using System.Threading.Tasks;
using RabbitMQ.Client;
using RabbitMQ.Client.Events;

/// <summary>
/// Appends each text message that comes in to a file.
///
/// dotnet run --project subscribe -- FILE
///
/// AMQP_URL names the broker. Runs until it is ended; what was not acked by then comes again.
/// </summary>
static class Subscribe
{
    // A queue of your team's own: what is bound to the exchange gets a copy of each event.
    const string Queue = "my-team.sms";

    /// <summary>Reads an event: JSON, or the form that some services send.</summary>
    static object Read(BasicDeliverEventArgs delivery)
    {
        string type = (delivery.BasicProperties.ContentType ?? "").Split(';')[0].Trim();
        if (!type.Equals("application/x-www-form-urlencoded", StringComparison.OrdinalIgnoreCase))
        {
            using (JsonDocument document = JsonDocument.Parse(delivery.Body))
            {
                return document.RootElement.Clone();
            }
        }
        var form = new Dictionary<string, string>();
        foreach (string pair in Encoding.UTF8.GetString(delivery.Body.Span).Split('&'))
        {
            string[] parts = pair.Split('=', 2);
            form[WebUtility.UrlDecode(parts[0])] = parts.Length == 2 ? WebUtility.UrlDecode(parts[1]) : "";
        }
        return form;
    }

    /// <summary>Does what is to be done with an event; whatever this throws, it is not lost.</summary>
    static void Handle(string file, BasicDeliverEventArgs delivery)
    {
        // The same event can come twice. The service's id of it tells, where the service gives one.
        // Texts of headers are byte[], and no string.
        object id = null;
        delivery.BasicProperties.Headers?.TryGetValue("sms-bridge-event-id", out id);
        var line = new Dictionary<string, object>
        {
            ["id"] = id is byte[] bytes ? Encoding.UTF8.GetString(bytes) : null,
            ["type"] = delivery.BasicProperties.Type,
        };
        try
        {
            line["event"] = Read(delivery);
        }
        catch (JsonException)
        {
            // Nobody can read it, now or later: it is kept as it came, and does not stop the rest.
            line["body"] = Convert.ToBase64String(delivery.Body.Span);
        }
        File.AppendAllText(file, JsonSerializer.Serialize(line) + "\n");
    }

    static async Task<int> Main(string[] arguments)
    {
        string url = Environment.GetEnvironmentVariable("AMQP_URL") ?? "amqp://guest:guest@localhost:5672/";
        // A lost connection ends the program as well, rather than be opened anew in its back.
        var factory = new ConnectionFactory { Uri = new Uri(url), AutomaticRecoveryEnabled = false };
        IConnection connection = await factory.CreateConnectionAsync();
        IChannel channel = await connection.CreateChannelAsync();
        var quorum = new Dictionary<string, object> { ["x-queue-type"] = "quorum" };
        await channel.QueueDeclareAsync(Queue, durable: true, exclusive: false, autoDelete: false, arguments: quorum);
        await channel.QueueBindAsync(Queue, "sms.inbound", "message.received");
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
                Handle(arguments[0], delivery);
                await channel.BasicAckAsync(delivery.DeliveryTag, false);
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
