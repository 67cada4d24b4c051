// Packages for Node: an answer and a stream; of OpenAI's also a response, of Ollama's also the list.
import Anthropic from "@anthropic-ai/sdk";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import { Ollama } from "ollama";
import OpenAI from "openai";

const url = process.env.TRY_URL;
const messages = [{ role: "user", content: "Tell me a story." }];
const check = (what) => { if (!what) throw new Error(`nothing came: ${what}`); };
const clients = {
  async openai() {
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
    const ask = { model: "demo", messages, max_tokens: 16 };
    check((await client.chat.completions.create(ask)).choices[0].message.content);
    let text = "";
    for await (const part of await client.chat.completions.create({ ...ask, stream: true })) text += part.choices[0]?.delta?.content ?? "";
    check(text);
    check((await client.responses.create({ model: "demo", input: "A story.", max_output_tokens: 16 })).output_text);
  },
  async anthropic() {
    const client = new Anthropic({ baseURL: url, apiKey: "none" });
    const ask = { model: "demo", messages, max_tokens: 16 };
    check((await client.messages.create(ask)).content[0].text);
    check(await client.messages.stream(ask).finalText());
  },
  async ollama() {
    const client = new Ollama({ host: url });
    check((await client.chat({ model: "demo", messages, options: { num_predict: 16 } })).message.content);
    let text = "";
    for await (const part of await client.chat({ model: "demo", messages, stream: true, options: { num_predict: 16 } })) text += part.message.content;
    check(text);
    check((await client.list()).models.length);
  },
  async ai() {
    const model = createOpenAICompatible({ name: "try", baseURL: `${url}/v1`, apiKey: "none" })("demo");
    check((await generateText({ model, prompt: "A story.", maxOutputTokens: 16 })).text);
    let text = "";
    for await (const part of streamText({ model, prompt: "A story.", maxOutputTokens: 16 }).textStream) text += part;
    check(text);
  },
};
await clients[process.argv[2]]();
