// node scripts/clients/try_sdks.mjs http://127.0.0.1:8080
// Tries a loop of 12 turns with a tool, and an answer of a schema, through clients in JavaScript, against a server of
// scripted_server.py. Needs, in a folder above: npm install ai @ai-sdk/openai-compatible @ai-sdk/anthropic openai
// @anthropic-ai/sdk zod
import { generateText, generateObject, streamText, tool, stepCountIs } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createAnthropic } from "@ai-sdk/anthropic";
import OpenAI from "openai";
import Anthropic from "@anthropic-ai/sdk";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const url = process.argv[2], model = "default_model", apiKey = "none";
const city = z.object({ city: z.string().max(12), rainy: z.boolean() });
const schema = { type: "object", properties: { city: { type: "string", maxLength: 12 }, rainy: { type: "boolean" } }, required: ["city", "rainy"], additionalProperties: false };
const command = { type: "object", properties: { command: { type: "string" } }, required: ["command"] };
const read = ({ command }) => `read: ${command}`;
let failed = false;
async function check(name, work) {
  try { console.log(`ok   ${name}: ${await work()}`); } catch (error) { failed = true; console.log(`FAIL ${name}: ${error}`); }
}
const bash = tool({ description: "Run a command", inputSchema: z.object({ command: z.string() }), execute: async input => read(input) });
for (const [name, provider] of [["@ai-sdk/openai-compatible", createOpenAICompatible({ name: "paged", baseURL: `${url}/v1`, apiKey, includeUsage: true, supportsStructuredOutputs: true })],
                                ["@ai-sdk/anthropic", createAnthropic({ baseURL: `${url}/v1`, apiKey })]]) {
  await check(`${name}, tools`, async () => {
    const result = await generateText({ model: provider(model), tools: { bash }, stopWhen: stepCountIs(20), prompt: "Read the files.", maxRetries: 0 });
    if (result.steps.length !== 12) throw new Error(`${result.steps.length} steps`);
    return result.text;
  });
  await check(`${name}, tools in a stream`, async () => {
    const result = streamText({ model: provider(model), tools: { bash }, stopWhen: stepCountIs(20), prompt: "Read them.", maxRetries: 0, onError({ error }) { throw error; } });
    await result.consumeStream();
    if ((await result.steps).length !== 12) throw new Error(`${(await result.steps).length} steps`);
    const usage = await result.usage;
    return `${await result.text} cached ${usage.inputTokenDetails?.cacheReadTokens ?? usage.cachedInputTokens}`;
  });
  await check(`${name}, schema`, async () => JSON.stringify((await generateObject({ model: provider(model), schema: city, prompt: "SCHEMA: which city?", maxRetries: 0 })).object));
}
await check("openai, tools", async () => {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
  const runner = client.chat.completions.runTools({ model, messages: [{ role: "user", content: "Read." }], tools: [{ type: "function", function: { name: "bash", description: "Run", parameters: command, parse: JSON.parse, function: read } }] }, { maxChatCompletions: 20 });
  return await runner.finalContent();
});
await check("openai, schema", async () => {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
  const answer = await client.chat.completions.parse({ model, messages: [{ role: "user", content: "SCHEMA: which city?" }], response_format: { type: "json_schema", json_schema: { name: "city", schema, strict: true } } });
  return JSON.stringify(city.parse(answer.choices[0].message.parsed));
});
await check("anthropic, tools", async () => {
  const client = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
  const messages = [{ role: "user", content: "Read." }];
  for (let turn = 1; turn < 20; turn++) {
    const answer = await client.messages.stream({ model, max_tokens: 200, messages, tools: [{ name: "bash", description: "Run", input_schema: command }] }).finalMessage();
    const calls = answer.content.filter(block => block.type === "tool_use");
    if (!calls.length) { if (turn !== 12) throw new Error(`${turn} turns`); return answer.content.find(block => block.type === "text").text; }
    messages.push({ role: "assistant", content: answer.content }, { role: "user", content: calls.map(call => ({ type: "tool_result", tool_use_id: call.id, content: read(call.input) })) });
  }
});
await check("anthropic, schema", async () => {
  const client = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
  const answer = await client.messages.create({ model, max_tokens: 200, messages: [{ role: "user", content: "SCHEMA: which city?" }], output_config: { format: { type: "json_schema", schema } } });
  return JSON.stringify(city.parse(JSON.parse(answer.content.find(block => block.type === "text").text)));
});
process.exit(failed ? 1 : 0);
