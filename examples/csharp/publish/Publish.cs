using System;
using System.Collections.Generic;
using System.Text;
using System.Text.Json;
using System.Threading;
using System.Threading.Tasks;
using RabbitMQ.Client;
using RabbitMQ.Client.Events;

/// <summary>
/// Requests one SMS, and waits for its outcome.
///
/// dotnet run --project publish -- TO TEXT [MESSAGE_ID]
///
/// AMQP_URL is the address of RabbitMQ. Prints the outcome. The exit status is 0 if the SMS service has
/// accepted the message, otherwise 1.
/// </summary>
static class Publish
{
    static readonly TimeSpan BrokerTime = TimeSpan.FromSeconds(10);
    static readonly TimeSpan OutcomeTime = TimeSpan.FromSeconds(60);
    // A one-time code is useless after this time, so the worker must not send it.
    const long ExpiresSeconds = 300;

    /// <summary>Starts to wait for the outcome of one request.</summary>
    static async Task<Task<string>> OutcomeOf(IChannel channel, string replies, string correlationId)
    {
        var outcome = new TaskCompletionSource<string>(TaskCreationOptions.RunContinuationsAsynchronously);
        var consumer = new AsyncEventingBasicConsumer(channel);
        consumer.ReceivedAsync += (sender, reply) =>
        {
            if (reply.BasicProperties.CorrelationId == correlationId)
            {
                // The client reuses the body's buffer after this handler.
                outcome.TrySetResult(Encoding.UTF8.GetString(reply.Body.ToArray()));
            }
            return Task.CompletedTask;
        };
        consumer.UnregisteredAsync += (sender, cause) =>
        {
            outcome.TrySetException(new InvalidOperationException("the reply queue is gone, or the connection is lost"));
            return Task.CompletedTask;
        };
        await channel.BasicConsumeAsync(replies, true, consumer);
        return outcome.Task;
    }

    static async Task<bool> Send(string to, string text, string messageId)
    {
        string url = Environment.GetEnvironmentVariable("AMQP_URL") ?? "amqp://guest:guest@localhost:5672/";
        var factory = new ConnectionFactory
        {
            Uri = new Uri(url),
            RequestedConnectionTimeout = BrokerTime,
            // The reply queue disappears with its connection.
            AutomaticRecoveryEnabled = false,
        };
        IConnection connection = await factory.CreateConnectionAsync();
        try
        {
            // With both, a publish returns after RabbitMQ has stored the message, and otherwise throws.
            var confirms = new CreateChannelOptions(
                publisherConfirmationsEnabled: true, publisherConfirmationTrackingEnabled: true);
            IChannel channel = await connection.CreateChannelAsync(confirms);
            string replies = (await channel.QueueDeclareAsync()).QueueName;
            string correlationId = Guid.NewGuid().ToString();
            Task<string> outcome = await OutcomeOf(channel, replies, correlationId);
            long now = DateTimeOffset.UtcNow.ToUnixTimeSeconds();
            var properties = new BasicProperties
            {
                ContentType = "application/json",
                Persistent = true,
                // The id from your own records. Use the same id to publish again after a crash, so that
                // the worker recognises the repeat.
                MessageId = messageId,
                Timestamp = new AmqpTimestamp(now),
                ReplyTo = replies,
                CorrelationId = correlationId,
                // Whole seconds. The client refuses a DateTime in a header.
                Headers = new Dictionary<string, object> { ["sms-bridge-expires-at"] = now + ExpiresSeconds },
            };
            var request = new Dictionary<string, string> { ["to"] = to, ["from"] = "Acme", ["text"] = text };
            byte[] body = JsonSerializer.SerializeToUtf8Bytes(request);
            using (var deadline = new CancellationTokenSource(BrokerTime))
            {
                // Mandatory, so that a missing queue is an error instead of a silent loss.
                await channel.BasicPublishAsync("", "sms.outbound", true, properties, body, deadline.Token);
            }
            string told = await outcome.WaitAsync(OutcomeTime);
            Console.WriteLine(told);
            using (JsonDocument document = JsonDocument.Parse(told))
            {
                return document.RootElement.GetProperty("outcome").GetString() == "sent";
            }
        }
        finally
        {
            await connection.CloseAsync();
        }
    }

    static async Task<int> Main(string[] arguments)
    {
        string messageId = arguments.Length > 2 ? arguments[2] : Guid.NewGuid().ToString();
        try
        {
            return await Send(arguments[0], arguments[1], messageId) ? 0 : 1;
        }
        catch (Exception error) when (error is TimeoutException || error is OperationCanceledException)
        {
            Console.Error.WriteLine($"{messageId}: not confirmed, or no outcome yet; it may still be sent");
        }
        catch (Exception error)
        {
            Console.Error.WriteLine($"{messageId}: {error.Message}");
        }
        return 1;
    }
}
