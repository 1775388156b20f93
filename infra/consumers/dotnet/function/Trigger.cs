// NOT COMPILED, NOT TRIED: it needs Microsoft.Azure.Functions.Worker.Extensions.ServiceBus. Build it with
// `dotnet build -p:WithTrigger=true`; everything else in this folder was compiled without.
using Azure.Messaging.ServiceBus;
using Microsoft.Azure.Functions.Worker;

public sealed class Trigger(Notices notices)
{
    [Function("notices")]
    public async Task RunAsync(
        [ServiceBusTrigger("%EVENTS_TOPIC%", "%EVENTS_SUBSCRIPTION%", Connection = "ServiceBusConnection", AutoCompleteMessages = false)]
        ServiceBusReceivedMessage message, ServiceBusMessageActions actions, CancellationToken stopping)
    {
        if (await notices.HandleAsync(message.Body, stopping) is { } fault)
            await actions.DeadLetterMessageAsync(message, deadLetterReason: "NotAnEvent", deadLetterErrorDescription: fault, cancellationToken: stopping);
        else
            await actions.CompleteMessageAsync(message, stopping);
    }
}
