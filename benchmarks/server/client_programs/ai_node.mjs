// Vercel's AI SDK (ai) with its provider for OpenAI-compatible servers.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";
import { check, checkWeather, main, model as name, served, url } from "./outcomes.mjs";

const provider = createOpenAICompatible({
  name: "transect",
  baseURL: `${url}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(name);
const asked = { model, prompt: "Name three colours.", maxOutputTokens: 12, temperature: 0, maxRetries: 0 };
const inputSchema = z.object({ city: z.enum(["Oslo", "Rome"]), days: z.number().int().min(1).max(9) });
const tools = { weather: tool({ description: "Weather of a city.", inputSchema }) };

await main({
  async chat() {
    const answer = await generateText(asked);
    check(answer.text && answer.usage.outputTokens === 12, answer.usage);
  },
  async "streamed chat"() {
    const answer = streamText(asked);
    let text = "";
    for await (const piece of answer.textStream) text += piece;
    check(text === (await generateText(asked)).text && (await answer.usage).outputTokens === 12, text);
  },
  async "text completions"() {
    const answer = await generateText({ ...asked, model: provider.completionModel(name) });
    check(answer.text, answer);
  },
  async "structured output"() {
    const schema = z.object({ name: z.enum(["red", "green", "blue"]), bright: z.boolean() });
    const answer = await generateObject({ model, schema, prompt: "Name a colour.", maxRetries: 0 });
    check(typeof answer.object.bright === "boolean", answer.object);
  },
  async tools() {
    const answer = await generateText({ ...asked, maxOutputTokens: 100, tools, toolChoice: "required" });
    checkWeather(answer.toolCalls[0].input);
  },
  async "streamed tools"() {
    const toolChoice = { type: "tool", toolName: "weather" };
    const answer = streamText({ ...asked, maxOutputTokens: 100, tools, toolChoice });
    checkWeather((await answer.toolCalls)[0].input);
  },
  async embeddings() {
    await served("/v1/embeddings");
    const values = ["The sea is blue.", "Two."];
    const found = await embedMany({ model: provider.textEmbeddingModel(name), values, maxRetries: 0 });
    check(found.embeddings.length === 2 && found.embeddings[0].length > 8, found.usage);
  },
});
