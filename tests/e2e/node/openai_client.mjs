// The official openai package for Node against a server: prints what it was told, as one JSON object.
// usage: node openai_client.mjs BASE_URL MODEL   (in a folder with the node_modules)

import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const chat = { model, messages, temperature: 0, max_tokens: 24 };
const text = { model, prompt: "Once upon a time", temperature: 0, max_tokens: 16 };
const parameters = {
  type: "object",
  properties: { word: { type: "string", maxLength: 12 } },
  required: ["word"],
  additionalProperties: false,
};
const call = {
  model,
  messages,
  temperature: 0,
  max_tokens: 60,
  tools: [{ type: "function", function: { name: "look_up", description: "Explains a word", parameters } }],
  tool_choice: { type: "function", function: { name: "look_up" } },
};
const format = { type: "json_schema", json_schema: { name: "word", strict: true, schema: parameters } };

const joined = async (options, read) => {
  let all = "";
  let finish = null;
  let usage = null;
  let deltas = 0;
  for await (const chunk of await options) {
    usage = chunk.usage ?? usage;
    for (const choice of chunk.choices) {
      const piece = read(choice);
      deltas += piece ? 1 : 0;
      all += piece ?? "";
      finish = choice.finish_reason ?? finish;
    }
  }
  return { text: all, finish, usage, deltas };
};

const refusal = async (promise) => {
  try {
    await promise;
    return null;
  } catch (error) {
    return { name: error.constructor.name, status: error.status, param: error.param, code: error.code };
  }
};

const stream = { stream: true, stream_options: { include_usage: true } };
const chatDelta = (choice) => choice.delta.content;
const helper = client.chat.completions.stream(call); // the client's own joining of deltas

const told = {
  models: (await client.models.list()).data.map((one) => one.id),
  chat: await client.chat.completions.create(chat),
  chatStream: await joined(client.chat.completions.create({ ...chat, ...stream }), chatDelta),
  text: await client.completions.create(text),
  textStream: await joined(client.completions.create({ ...text, ...stream }), (choice) => choice.text),
  call: await client.chat.completions.create(call),
  callStream: await helper.finalChatCompletion(),
  parsed: JSON.parse(
    (await client.chat.completions.create({ ...chat, max_tokens: 60, response_format: format })).choices[0].message
      .content,
  ),
  badField: await refusal(client.chat.completions.create({ ...chat, temperature: -1, stream: true })),
  unknownModel: await refusal(client.chat.completions.create({ ...chat, model: "no-such-model" })),
  tooLong: await refusal(client.completions.create({ ...text, prompt: "word ".repeat(9000) })),
};

const aborted = await client.completions.create({ ...text, max_tokens: 4000, stream: true });
for await (const _ of aborted) break; // leaving the loop aborts the request

console.log(JSON.stringify(told));
