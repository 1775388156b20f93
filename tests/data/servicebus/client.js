// Use the lab's Service Bus with Microsoft's client for Node; print what came of it as JSON.
//
//   node client.js send CONNECTION_STRING < {"queue", "session", "type", "events": {variant: EventId}}
//   node client.js SCENARIO CONNECTION_STRING
"use strict";

const { readFileSync } = require("node:fs");
const { ServiceBusClient } = require("@azure/service-bus");

const WAIT = { maxWaitTimeInMs: 15000 };
const SILENCE = { maxWaitTimeInMs: 500 };

async function one(receiver) {
  const [message] = await receiver.receiveMessages(1, WAIT);
  return message;
}

async function bodies(receiver, count) {
  const found = [];
  while (found.length < count) {
    const message = await one(receiver);
    if (!message) break;
    found.push(message.body);
    await receiver.completeMessage(message);
  }
  const more = await receiver.receiveMessages(1, SILENCE);
  return found.concat(more.map((message) => message.body));
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

  async send_receive_complete(client) {
    const sender = client.createSender("plain");
    await sender.sendMessages({
      body: { specversion: "1.0" },
      messageId: "m1",
      subject: "s",
      correlationId: "c",
      contentType: "application/json",
      applicationProperties: { EventStatus: "Scheduled", number: 5, flag: true },
    });
    const receiver = client.createReceiver("plain");
    const message = await one(receiver);
    const renewed = await receiver.renewMessageLock(message);
    const renewedFor = [renewed - message.enqueuedTimeUtc >= 60000, renewed - Date.now() <= 60000];
    await receiver.completeMessage(message);
    return {
      body: message.body,
      messageId: message.messageId,
      subject: message.subject,
      correlationId: message.correlationId,
      contentType: message.contentType,
      properties: message.applicationProperties,
      deliveryCount: message.deliveryCount,
      lockToken: typeof message.lockToken,
      locksFor60Seconds: renewedFor.every(Boolean),
      more: (await receiver.receiveMessages(1, SILENCE)).length,
    };
  },

  async batch(client) {
    const sender = client.createSender("plain");
    const batch = await sender.createMessageBatch();
    for (let number = 0; number < 20; number++) batch.tryAddMessage({ body: number, messageId: `m${number}` });
    await sender.sendMessages(batch);
    return { limit: batch.maxSizeInBytes, bodies: await bodies(client.createReceiver("plain"), 20) };
  },

  async abandon_peek(client) {
    const sender = client.createSender("plain");
    await sender.sendMessages([{ body: "1", messageId: "m1" }, { body: "2", messageId: "m2" }]);
    const receiver = client.createReceiver("plain");
    const peeked = (await receiver.peekMessages(10)).map((message) => message.body);
    await receiver.abandonMessage(await one(receiver));
    const again = await one(receiver);
    await receiver.completeMessage(again);
    const second = await one(receiver);
    await receiver.completeMessage(second);
    return { peeked, deliveryCount: again.deliveryCount, second: second.body };
  },

  async sessions(client) {
    const sender = client.createSender("sessions");
    await sender.sendMessages([
      { body: "1", messageId: "m1", sessionId: "a" },
      { body: "x", messageId: "m2", sessionId: "b" },
      { body: "2", messageId: "m3", sessionId: "a" },
    ]);
    const receiver = await client.acceptSession("sessions", "a");
    const locked = await client.acceptSession("sessions", "a").then(
      () => "accepted",
      (error) => error.code,
    );
    const renewed = await receiver.renewSessionLock();
    const own = await bodies(receiver, 2);
    const next = await client.acceptNextSession("sessions");
    const others = await bodies(next, 1);
    const without = await sender.sendMessages({ body: "none" }).then(
      () => "sent",
      (error) => error.code,
    );
    return { own, locked, renewed: renewed > new Date(), next: next.sessionId, others, without };
  },

  async topic_filters(client) {
    const sender = client.createSender("events");
    const event = (body, subject, applicationProperties) => ({
      body,
      messageId: `m${body}`,
      subject,
      applicationProperties,
    });
    await sender.sendMessages([
      event("1", "wanted", { EventStatus: "Scheduled", EventType: "Reboot", Resources: ",vm1,vm2," }),
      event("2", "wanted", { EventStatus: "Started", EventType: "Freeze", Resources: ",vm1," }),
    ]);
    return {
      all: await bodies(client.createReceiver("events", "all"), 2),
      bySubject: await bodies(client.createReceiver("events", "by-subject"), 1),
      bySql: await bodies(client.createReceiver("events", "by-sql"), 1),
    };
  },

  async duplicates(client) {
    const sender = client.createSender("deduplicated");
    for (const body of ["1", "2"]) await sender.sendMessages({ body, messageId: "same" });
    await sender.sendMessages({ body: "3", messageId: "other" });
    return await bodies(client.createReceiver("deduplicated"), 2);
  },

  async refusals(client) {
    const code = (promise) =>
      promise.then(
        () => "none",
        (error) => error.code,
      );
    return {
      missing: await code(client.createSender("nowhere").sendMessages({ body: "1" })),
      large: await code(client.createSender("plain").sendMessages({ body: "x".repeat(300000) })),
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
