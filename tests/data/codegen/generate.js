// Use schemas as consumers do; print the names of generated types, and what is wrong with the TypeScript and the examples.
// usage: generate.js FOLDER EXAMPLES SCHEMA..., compiles all of FOLDER/*.ts, which import ./events
const { readFileSync, readdirSync, writeFileSync } = require("fs");
const { basename, join } = require("path");
const Ajv = require("ajv/dist/2020").default;
const addFormats = require("ajv-formats").default;
const { compile } = require("json-schema-to-typescript");
const { FetchingJSONSchemaStore, InputData, JSONSchemaInput, quicktype } = require("quicktype-core");
const ts = require("typescript");

async function typescript(folder, schemas) {
  const options = { bannerComment: "", format: false };
  const parts = schemas.map((file) => compile(JSON.parse(readFileSync(file, "utf8")), basename(file), options));
  const text = (await Promise.all(parts)).join("\n");
  writeFileSync(join(folder, "events.ts"), text);
  const files = readdirSync(folder).filter((name) => name.endsWith(".ts"));
  const settings = { strict: true, noEmit: true, skipLibCheck: true, lib: ["lib.es2022.d.ts"], types: [] };
  const program = ts.createProgram(files.map((name) => join(folder, name)), settings);
  const faults = ts.getPreEmitDiagnostics(program).map(
    (one) => `${basename(one.file?.fileName ?? "")}: ${ts.flattenDiagnosticMessageText(one.messageText, " ")}`,
  );
  return { names: [...text.matchAll(/^export (?:interface|type) (\w+)/gm)].map((match) => match[1]), faults };
}

async function csharp(schema) {
  const input = new JSONSchemaInput(new FetchingJSONSchemaStore());
  await input.addSource({ name: "events", schema: readFileSync(schema, "utf8"), uris: ["#/definitions/"] });
  const inputData = new InputData();
  inputData.addInput(input);
  const { lines } = await quicktype({ inputData, lang: "csharp", rendererOptions: { framework: "SystemTextJson" } });
  return [...lines.join("\n").matchAll(/^ +public partial class (\w+)/gm)].map((match) => match[1]);
}

function invalid(examples, schemas) {
  const ajv = addFormats(new Ajv({ strict: true, allowUnionTypes: true }));
  for (const file of schemas) ajv.addSchema(JSON.parse(readFileSync(file, "utf8")), basename(file));
  for (const file of schemas) ajv.getSchema(basename(file)); // compiles it
  const matches = ajv.getSchema("cloudevent.v1.json");
  return readdirSync(examples).filter((name) => !matches(JSON.parse(readFileSync(join(examples, name), "utf8"))));
}

async function main([folder, examples, ...schemas]) {
  const all = schemas.find((file) => basename(file) === "cloudevent.v1.json");
  const code = { typescript: await typescript(folder, schemas), csharp: await csharp(all) };
  console.log(JSON.stringify({ ...code, invalid: invalid(examples, schemas) }));
}

main(process.argv.slice(2));
