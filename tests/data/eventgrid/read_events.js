// Reads requests ([{headers, body}]) from standard input with the npm package `cloudevents`, and prints the events.
"use strict";

const { HTTP } = require("cloudevents");

let given = "";
process.stdin.on("data", (part) => (given += part));
process.stdin.on("end", () => {
  const events = JSON.parse(given).flatMap((request) => HTTP.toEvent(request));
  for (const event of events) event.validate();
  console.log(JSON.stringify(events.map((event) => event.toJSON())));
});
