// The openai package for Node.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { check, checkWeather, main, model, parameters, served, url } from "./outcomes.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "Name three colours." }];

await main({
  async models() {
    const found = [];
    for await (const each of client.models.list()) found.push(each.id);
    check(found.includes(model), found);
  },
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 12, temperature: 0 });
    check(answer.choices[0].message.content && answer.usage.completion_tokens === 12, answer);
  },
  async "streamed chat"() {
    const asked = { model, messages, max_tokens: 12, temperature: 0 };
    const whole = await client.chat.completions.create(asked);
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
      text += chunk.choices[0]?.delta?.content ?? "";
    check(text === whole.choices[0].message.content, text);
  },
  async "text completions"() {
    const answer = await client.completions.create({ model, prompt: "The sea is", max_tokens: 4, n: 2 });
    check(answer.choices.length === 2, answer);
  },
  async "structured output"() {
    const Colour = z.object({ name: z.enum(["red", "green", "blue"]), bright: z.boolean() });
    const asked = { model, messages, response_format: zodResponseFormat(Colour, "colour") };
    const answer = await client.chat.completions.parse(asked);
    check(typeof answer.choices[0].message.parsed.bright === "boolean", answer);
  },
  async tools() {
    const tool = { type: "function", function: { name: "weather", description: "Weather of a city.", parameters } };
    const asked = { model, messages, tools: [tool], tool_choice: "required", parallel_tool_calls: false };
    const answer = await client.chat.completions.create(asked);
    checkWeather(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments));
  },
  async "streamed tools"() {
    // runTools: the client calls the function that the model asks for, here while the call streams in.
    const seen = [];
    const run = (given) => (seen.push(given), "Sunny.");
    const tool = {
      type: "function",
      function: { name: "weather", description: "Weather of a city.", parameters, parse: JSON.parse, function: run },
    };
    const tool_choice = { type: "function", function: { name: "weather" } };
    await client.chat.completions.runTools({ model, messages, tools: [tool], tool_choice, stream: true }).done();
    await client.chat.completions.runTools({ model, messages, tools: [tool], tool_choice }).done();
    check(seen.length === 2, seen);
    seen.forEach(checkWeather);
  },
  async responses() {
    const format = { type: "json_schema", name: "weather", schema: parameters, strict: true };
    const asked = { model, input: "Weather?", text: { format } };
    const answer = await client.responses.create(asked);
    checkWeather(JSON.parse(answer.output_text));
    let text = "";
    for await (const event of await client.responses.create({ ...asked, stream: true }))
      if (event.type === "response.output_text.delta") text += event.delta;
    checkWeather(JSON.parse(text));
  },
  async embeddings() {
    await served("/v1/embeddings");
    const found = await client.embeddings.create({ model, input: ["The sea is blue.", "Two."] });
    check(found.data.length === 2 && found.data[0].embedding.length > 8, found.usage);
  },
  async "context overflow"() {
    const long = [{ role: "user", content: "sea ".repeat(9000) }];
    try {
      await client.chat.completions.create({ model, messages: long });
    } catch (error) {
      check(error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded", String(error));
      return;
    }
    check(false, "it was accepted");
  },
});
