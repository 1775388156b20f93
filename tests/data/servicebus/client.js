// Use the lab's Service Bus with Microsoft's client for Node; print what came of it as JSON.
//
//   node client.js send CONNECTION_STRING < {"queue", "session", "type", "events": {variant: EventId}}
//   node client.js SCENARIO CONNECTION_STRING
"use strict";

const { readFileSync } = require("node:fs");
const { ServiceBusClient } = require("@azure/service-bus");

const WAIT = { maxWaitTimeInMs: 15000 };

async function one(receiver) {
  const [message] = await receiver.receiveMessages(1, WAIT);
  return message;
}

// Commands, as programs in JavaScript may send them.
const commands = {
  plain: (_, data) => ({ body: data }),
  text: (id, data, { session }) => ({
    body: JSON.stringify(data),
    bodyType: "value",
    properties: { messageId: id, groupId: session },
  }),
  twice: (_, data) => ({ body: JSON.stringify(data) }), // the client encodes every body as JSON
  structured: (id, data, { type }) => ({
    body: { ...attributes("", id, type), data },
    contentType: "application/cloudevents+json",
  }),
  binary: (id, data, { type }) => ({ body: data, applicationProperties: attributes("cloudEvents_", id, type) }),
  "binary-colon": (id, data, { type }) => ({
    body: Buffer.from(JSON.stringify(data)),
    applicationProperties: attributes("cloudEvents:", id, type),
  }),
  "binary-other": (id, data) => ({
    body: data,
    applicationProperties: attributes("cloudEvents_", id, "com.example.other"),
  }),
};

function attributes(prefix, id, type) {
  const values = Object.entries({ specversion: "1.0", type, id, source: "urn:test" });
  return Object.fromEntries(values.map(([name, value]) => [prefix + name, value]));
}

// Every message has an id: without one this client cannot renew its lock.
const scenarios = {
  async send(client) {
    const given = JSON.parse(readFileSync(0, "utf8"));
    const messages = Object.entries(given.events).map(([variant, event]) => ({
      ...commands[variant](variant, { EventId: event }, given),
      messageId: variant,
      sessionId: given.session,
    }));
    await client.createSender(given.queue).sendMessages(messages);
    return "sent";
  },

  async features(client) {
    const sender = client.createSender("plain");
    for (const name of ["m1", "m2"]) {
      await sender.sendMessages({ body: name, messageId: name, applicationProperties: { given: "kept" } });
    }
    const receiver = client.createReceiver("plain");
    const first = await one(receiver);
    const renewed = (await receiver.renewMessageLock(first)) >= first.lockedUntilUtc;
    await receiver.abandonMessage(first, { tried: "once", given: "changed" });
    const again = await one(receiver);
    const reasons = { deadLetterReason: "malformed", deadLetterErrorDescription: "no EventId", by: "client" };
    await receiver.deadLetterMessage(again, reasons);
    await receiver.deadLetterMessage(await one(receiver), reasons);
    const dead = client.createReceiver("plain", { subQueueType: "deadLetter" });
    const letters = [];
    for (let count = 0; count < 2; count++) {
      const letter = await one(dead);
      const { body, deadLetterReason, deadLetterErrorDescription, applicationProperties } = letter;
      letters.push([body, deadLetterReason, deadLetterErrorDescription, applicationProperties.by]);
      await dead.completeMessage(letter);
    }
    return {
      renewed,
      tokens: typeof first.lockToken === "string",
      abandoned: again.applicationProperties,
      dead: letters,
      sessions: await twoSessions(client),
    };
  },
};

async function twoSessions(client) {
  const sender = client.createSender("sessions");
  await sender.sendMessages(["a", "b"].map((name) => ({ body: name, messageId: name, sessionId: name })));
  const named = await client.acceptSession("sessions", "b");
  const locked = await client.acceptSession("sessions", "b").then(
    () => false,
    () => true,
  );
  await named.renewSessionLock();
  const message = await one(named);
  await named.completeMessage(message);
  const next = await client.acceptNextSession("sessions");
  const ids = [named.sessionId, next.sessionId];
  return { locked, ids, bodies: [message.body, (await one(next)).body] };
}

async function main() {
  const [, , scenario, connectionString] = process.argv;
  const client = new ServiceBusClient(connectionString, { retryOptions: { maxRetries: 0, timeoutInMs: 15000 } });
  try {
    console.log(JSON.stringify(await scenarios[scenario](client)));
  } finally {
    await client.close();
  }
}

main().then(
  () => process.exit(0),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
