// Approve the first event that is announced, and print the receipt. Needs @azure/service-bus.
const { ServiceBusClient } = require("@azure/service-bus");

async function main() {
  const bus = new ServiceBusClient(process.env.SERVICEBUS_CONNECTION_STRING);
  const renewal = { maxAutoLockRenewalDurationInMs: 3600_000 }; // a drain may take longer than the lock
  const receiver = bus.createReceiver("scheduled-events", "approver", renewal);
  const sender = bus.createSender("approvals");
  let commandId = null;
  for await (const message of receiver.getMessageIterator()) {
    const event = message.body;
    const data = event.data;
    if (event.type === "io.imdsbridge.scheduledevent.scheduled.v1" && !commandId) {
      // Drain here. The approval releases every VM in data.Resources.
      commandId = event.id; // the same for a duplicate, which is then decided once
      const command = { EventId: data.EventId, Id: commandId, Reason: "drained" };
      await sender.sendMessages({ body: command, sessionId: data.ApprovalSession });
    }
    await receiver.completeMessage(message);
    if (commandId && event.causationid === commandId) {
      console.log(data.Outcome, data.Reason, data.Resources);
      break;
    }
  }
  await bus.close();
}

main();
