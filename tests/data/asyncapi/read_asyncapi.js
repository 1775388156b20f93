// Reads an AsyncAPI document with the npm package `@asyncapi/parser`; prints what the parser reports, and the document
// with every reference resolved. Called by tests/integration/test_asyncapi.py: node read_asyncapi.js FILE
"use strict";

const { Parser, fromFile } = require("@asyncapi/parser");

async function main() {
  const { document, diagnostics } = await fromFile(new Parser(), process.argv[2]).parse();
  return { diagnostics, document: document ? document.json() : null };
}

main().then((found) => console.log(JSON.stringify(found)));
