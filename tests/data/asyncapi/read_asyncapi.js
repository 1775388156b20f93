// Reads an AsyncAPI document with the npm package `@asyncapi/parser`; prints what the parser has to say of it, and the
// document with everything that it refers to put in its place. Called by tests/test_asyncapi.py: node read_asyncapi.js FILE
"use strict";

const { Parser, fromFile } = require("@asyncapi/parser");

async function main() {
  const { document, diagnostics } = await fromFile(new Parser(), process.argv[2]).parse();
  return { diagnostics, document: document ? document.json() : null };
}

main().then((found) => console.log(JSON.stringify(found)));
