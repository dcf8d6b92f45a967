// Conversations as they are kept in the browser and exported.
//
// A conversation is a tree of messages: editing a message, asking again, and continuing from another token add a
// sibling and lose nothing. `chosen` says which sibling is shown below each message.

import type { SearchMethod, SearchState } from './search'

/** Settings of requests. An absent number means the model's own default. */
export interface Settings {
  system: string
  model: string
  temperature?: number
  top_p?: number
  top_k?: number
  min_p?: number
  repetition_penalty?: number
  presence_penalty?: number
  frequency_penalty?: number
  max_tokens?: number
  seed?: number
  /** Stop strings, one a line. */
  stop: string
  /** Answers to each message. */
  n: number
  /** Alternatives kept of each token; 0 keeps no probabilities. */
  alternatives: number
  /** JSON schema of answers, as text; empty for none. */
  schema: string
  /** Tools as a JSON list, as text; empty for none. */
  tools: string
  /** Method of a search for the answer, and its settings that differ from their defaults; empty for none. */
  search: string
  searchOptions: Record<string, string | number | boolean | string[]>
}

export const NUMBERS = [
  'temperature', 'top_p', 'top_k', 'min_p', 'repetition_penalty', 'presence_penalty', 'frequency_penalty', 'max_tokens',
  'seed',
] as const

export const SETTINGS: Settings = {
  system: '', model: '', stop: '', n: 1, alternatives: 5, schema: '', tools: '', search: '', searchOptions: {},
}

/** A token that was drawn, or could have been. */
export interface Candidate {
  id: number
  text: string
  logprob: number
}

export interface Token extends Candidate {
  /** Likeliest tokens at this place, likeliest first. */
  top: Candidate[]
}

export interface Call {
  id: string
  name: string
  arguments: string
}

/** A way to get an answer: a server, a model or adapter, and settings that differ from the conversation's. */
export interface Lane {
  name: string
  /** Address of the server; empty for the server of this page. */
  server: string
  model: string
  temperature?: number
  top_p?: number
}

export type Status = 'running' | 'done' | 'stopped' | 'failed'

/** An answer of a model. Times are in milliseconds. */
export interface Answer {
  status: Status
  text: string
  thoughts: string
  calls: Call[]
  tokens: Token[]
  tokenIds: number[]
  promptTokenIds: number[]
  /** Id of the request at its server, for the bill, and the number of this answer among the request's. */
  requestId: string
  choice: number
  model: string
  lane: Lane | null
  /** Everything that the request sent besides the messages: to ask again in the same way. */
  body: Record<string, unknown>
  finish: string
  error: string
  /** Why the error may pass: the server was not there, or asks to come back. */
  passing: boolean
  promptTokens: number
  cachedTokens: number
  /** Time from the request to the first token, and from there to the last. */
  firstMs: number
  restMs: number
  /** Tokens after which another replica went on with the answer, without a promise of equal bits; -1 for never. */
  continuedAt: number
  /** Answers to one request, or to one request for each lane, are shown side by side. */
  group: string
  /** The answer and the number of its token from which this one was continued. */
  branch: { from: string; at: number } | null
  /** The search that found the answer. */
  search?: SearchState
}

export interface Message {
  id: string
  parent: string
  role: 'user' | 'assistant' | 'tool'
  /** Text of the user, or result of a tool. */
  text: string
  /** Id of the call that a tool's result answers. */
  callId?: string
  answer?: Answer
}

export interface Conversation {
  id: string
  title: string
  created: number
  updated: number
  settings: Settings
  lanes: Lane[]
  messages: Record<string, Message>
  /** Shown child of each message; the key '' is for the beginning. */
  chosen: Record<string, string>
}

/** What the server says of itself at /v1/page. */
export interface ServerFacts {
  version: string
  model: string
  max_model_len: number
  defaults: Record<string, number>
  max_new_tokens: number | null
  chat: boolean
  thinks: boolean
  operator: boolean
  replicas: number
  searches?: SearchMethod[]
}
