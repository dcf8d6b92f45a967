// One request for answers, and its stream read into `Answer` objects.

import { Api, ApiProblem } from '../api'
import { taken, type SearchNews } from './search'
import type { Answer, Candidate, Settings, Token } from './types'

interface LogprobEntry {
  token: string
  token_id?: number
  logprob: number
  top_logprobs?: LogprobEntry[]
}

interface ChunkChoice {
  index: number
  delta: {
    content?: string
    reasoning_content?: string
    reasoning?: string
    tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[]
  }
  logprobs?: { content: LogprobEntry[] | null } | null
  token_ids?: number[] | null
  finish_reason?: string | null
}

interface Chunk {
  id: string
  model: string
  choices: ChunkChoice[]
  prompt_token_ids?: number[] | null
  search?: SearchNews
  usage?: { prompt_tokens: number; prompt_tokens_details?: { cached_tokens: number }; continued?: string } | null
}

/** Write settings as fields of a request. A seed is always given, so that each answer can be continued exactly. */
export function requestFields(settings: Settings): Record<string, unknown> {
  const body: Record<string, unknown> = { seed: settings.seed ?? randomSeed() }
  if (settings.model) body.model = settings.model
  for (const name of ['temperature', 'top_p', 'top_k', 'min_p', 'repetition_penalty', 'presence_penalty',
    'frequency_penalty', 'max_tokens'] as const) {
    if (settings[name] !== undefined) body[name] = settings[name]
  }
  const stop = settings.stop.split('\n').filter(Boolean)
  if (stop.length) body.stop = stop
  if (settings.search) body.search = { method: settings.search, ...settings.searchOptions, details: true }
  else if (settings.alternatives > 0) Object.assign(body, { logprobs: true, top_logprobs: settings.alternatives })
  if (settings.schema.trim())
    body.response_format = {
      type: 'json_schema', json_schema: { name: 'answer', schema: parsed(settings.schema, 'The JSON schema') },
    }
  if (settings.tools.trim()) body.tools = parsed(settings.tools, 'The list of tools')
  return body
}

function parsed(text: string, name: string): unknown {
  try {
    return JSON.parse(text)
  } catch (error) {
    throw new ApiProblem(400, `${name} in the settings is not valid JSON: ${(error as Error).message}`)
  }
}

export function randomSeed(): number {
  return crypto.getRandomValues(new Uint32Array(1))[0]!
}

/**
 * Send a request and fill the answers as they arrive: one for each of the request's choices, by `Answer.choice`.
 *
 * @param changed called after each event. Never throws: errors are in the answers.
 */
export async function generate(
  api: Api,
  messages: Record<string, unknown>[],
  answers: Answer[],
  signal: AbortSignal,
  changed: () => void,
): Promise<void> {
  const began = performance.now()
  const firsts = new Map<Answer, number>()
  const { given, ...fields } = answers[0]!.body as { given?: Given }
  const body = {
    ...fields, ...(given ? { continue_token_ids: given.tokenIds, continue_choice: given.choice } : {}), messages,
    stream: true, stream_options: { include_usage: true }, return_token_ids: true,
  }
  try {
    for await (const event of api.stream('v1/chat/completions', body, signal)) {
      const now = performance.now()
      if (event.comment?.startsWith('continued'))
        for (const answer of answers) if (answer.status === 'running') answer.continuedAt = answer.tokenIds.length
      if (event.data === null) continue
      const chunk = JSON.parse(event.data) as Chunk
      for (const answer of answers) {
        answer.requestId ||= chunk.id
        answer.model = chunk.model || answer.model
        if (chunk.search) answer.search = taken(answer.search ?? null, chunk.search)
        if (chunk.prompt_token_ids) answer.promptTokenIds = chunk.prompt_token_ids
        if (chunk.usage) {
          answer.promptTokens = chunk.usage.prompt_tokens
          answer.cachedTokens = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0
        }
      }
      for (const choice of chunk.choices) {
        const answer = answers.find((each) => each.choice === choice.index)
        if (!answer) continue
        const before = answer.tokenIds.length
        take(answer, choice, given)
        const news = answer.text.length + answer.thoughts.length + answer.calls.length > 0
        if (!firsts.has(answer) && news && before >= (given?.tokenIds.length ?? 0)) {
          firsts.set(answer, now)
          answer.firstMs = now - began
        }
        if (firsts.has(answer)) answer.restMs = now - firsts.get(answer)!
      }
      changed()
    }
    for (const answer of answers) if (answer.status === 'running') answer.status = 'done'
  } catch (error) {
    for (const answer of answers) if (answer.status === 'running') end(answer, error, signal)
  }
  changed()
}

/** Tokens that an answer begins with, and the number of the answer that they are of. */
export interface Given {
  tokenIds: number[]
  choice: number
}

function end(answer: Answer, error: unknown, signal: AbortSignal): void {
  if (signal.aborted) {
    answer.status = 'stopped'
    return
  }
  answer.status = 'failed'
  answer.error = error instanceof Error ? error.message : String(error)
  answer.passing = error instanceof ApiProblem && error.passing
}

function take(answer: Answer, choice: ChunkChoice, given?: Given): void {
  const { delta } = choice
  answer.text += delta.content ?? ''
  answer.thoughts += delta.reasoning_content ?? delta.reasoning ?? ''
  for (const piece of delta.tool_calls ?? []) {
    const call = (answer.calls[piece.index] ??= { id: piece.id ?? '', name: '', arguments: '' })
    call.name += piece.function?.name ?? ''
    call.arguments += piece.function?.arguments ?? ''
  }
  if (choice.token_ids && !(given && answer.tokenIds.length < given.tokenIds.length))
    answer.tokenIds.push(...choice.token_ids)
  else if (choice.token_ids) answer.tokenIds = [...choice.token_ids]
  for (const entry of choice.logprobs?.content ?? []) answer.tokens.push(tokenOf(entry))
  if (choice.finish_reason) {
    answer.finish = choice.finish_reason
    answer.status = 'done'
  }
}

function tokenOf(entry: LogprobEntry): Token {
  return { ...candidateOf(entry), top: (entry.top_logprobs ?? []).map(candidateOf) }
}

function candidateOf(entry: LogprobEntry): Candidate {
  return { id: entry.token_id ?? -1, text: entry.token, logprob: entry.logprob }
}

/** Tokens per second after the first one; 0 while unknown. */
export function speedOf(answer: Answer): number {
  const drawn = answer.tokenIds.length || answer.tokens.length
  const given = (answer.body.given as Given | undefined)?.tokenIds.length ?? 0
  return answer.restMs > 0 && drawn - given > 1 ? (drawn - given - 1) / (answer.restMs / 1000) : 0
}
