// The events of `GET /live`, as server/operations/live_reader.py writes them. Times are seconds of the engine's clock.

export interface LiveRequest {
  /** Sequence number of its first choice; the others follow. */
  seq: number
  id: string
  n: number
  client: string
  own: boolean
  prompt: number
  max: number | null
  arrival: number
  /** Known tokens of each choice, -1 if it has ended; null for a request that begins here. */
  known: number[] | null
  adapter: string
  grammar: boolean
  priority: number
}

/** Number, begin, ms, floor in ms, launched, rows, reason of the queue, waiting, running, free blocks, ms between
 * ranks, cause of a late step, accepted drafts. Rows are (sequence, first position, tokens), one after the other; null
 * for those of the step before, each advanced by one token. */
export type LiveStep = [
  number,
  number,
  number,
  number,
  string,
  number[] | null,
  string,
  number | null,
  number | null,
  number | null,
  number,
  string,
  [number, number][],
]

export interface Route {
  id: string
  to: number
  /** Replica, its load in tokens, and the tokens of the prompt that it does not have. */
  offers: [number, number, number][]
}

export interface Span {
  ms: number
  parts_ms: Record<string, number>
  floor_ms: number | null
  tokens: number
}

export interface LiveBill {
  request_id: string
  known: boolean
  arrival: number
  until: number
  prompt_tokens: number
  output_tokens: number
  finish_reason: string
  first_token: boolean
  ttft: Span | null
  decode: Span | null
}

export interface Changes {
  now: number
  reason?: string
  requests?: LiveRequest[]
  steps?: LiveStep[]
  /** First sequence, choice, reason, output tokens, time. */
  ends?: [number, number, string, number, number][]
  marks?: [number, string][]
  routed?: Route[]
  queue?: { waiting: number; running: number; free: number; under_way: number | null }
  /** First block, blocks, owner, users of each changed run; see explain/engine/kv_map.py. */
  kv?: number[]
  evicted?: number[]
  /** Time of the snapshot that `kv` and `waiting` are of. */
  seen?: number
  /** Waiting sequences in the order of their turns; true if they were preempted. */
  waiting?: [number, boolean][]
  elsewhere?: number
  stats?: Record<string, number>
  bill?: LiveBill | null
}

export interface State extends Changes {
  type: 'state'
  engine: number
  engines: number
  operator: boolean
  model: string
  device: { name: string | null; kind: string | null; threads: number | null; dtype: string | null }
  floors: boolean
  lag: number
  limits: Record<string, number | string | null>
  /** Names of the orders that the scheduler can have. */
  policies?: string[]
  words: { parts: Record<string, string>; late: Record<string, string> }
}

export type LiveEvent =
  | State
  | (Changes & { type: 'tick' })
  | { type: 'down'; reason: string | null }
  | { type: 'bye' }
