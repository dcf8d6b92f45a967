// Reports as files have them: which kind a file is, and its contents.

import type { LiveBill } from '../engine/protocol'
import type { Flow } from './flow'
import type { Layout, Ranking, Timeline } from './layout'

export interface Term {
  name: string
  bytes: number
  why: string
}

/** The account of memory of `transect memory --json`, or of a run's rank. */
export interface Account {
  peak: number
  needed: number
  margin: number
  terms: Term[]
  host: Term[]
  phases: { name: string; bytes: number; held: Record<string, number> }[]
}

export interface Line {
  kind: string
  step: number
  [name: string]: number | string | null
}

export interface Run {
  kind: 'training run'
  name: string
  steps: Line[]
  /** Only every so many steps are there. */
  every: number
  /** Validation losses and samples. */
  others: Line[]
  checkpoints: number[]
  config: Record<string, unknown> | null
  layout: Layout | null
  memory: Account[] | null
}

export interface Finding {
  title: string
  evidence: string
  gain: number
  share: number
  advice: string
  apply?: string
  where?: string
}

export interface Explanation {
  wall_s: number
  plain_s: number
  on_gpu: boolean
  parts_s: Record<string, number>
  findings: Finding[]
  operators: { name: string; shapes: unknown; calls: number; seconds: number; floor_s: number | null }[]
  notes: string[]
  facts: Record<string, unknown>
}

/** Several processes of `transect explain run -- torchrun ...`. */
export interface Job {
  status: number
  findings: Finding[]
  ranks: ({ name: string; step_s: number; waiting_s: number } & Explanation)[]
}

export interface Point {
  name: string
  group: string
  flops: number
  bytes: number
  intensity: number
  floor_s: number
  measured_s: number | null
  bound: string
}

export interface Roofline {
  device: string
  bytes_per_second: number
  flops_per_second: Record<string, number>
  source: string
  points: Point[]
}

export type Contents =
  | { kind: 'run'; data: Run }
  | { kind: 'explanation'; data: Explanation }
  | { kind: 'job'; data: Job }
  | { kind: 'roofline'; data: Roofline }
  | { kind: 'bill'; data: LiveBill }
  | { kind: 'memory'; data: Account }
  | { kind: 'flow'; data: Flow }
  | { kind: 'ranking'; data: Ranking }
  | { kind: 'schedules'; data: Record<string, Timeline> }

export type Report = Contents & { name: string }

export const KINDS: Record<Contents['kind'], string> = {
  run: 'Training run',
  explanation: 'Explained program',
  job: 'Explained processes',
  roofline: 'Roofline',
  bill: 'Bill of a request',
  memory: 'Memory',
  flow: 'Flow',
  ranking: 'Layouts of a training run',
  schedules: 'Pipeline schedules',
}

/** Return the kind of a report's contents. Throws an Error with a sentence for people. */
export function recognize(given: unknown): Contents {
  const has = (...names: string[]) => typeof given === 'object' && given !== null && names.every((name) => name in given)
  if (has('kind', 'steps') && (given as Run).kind === 'training run') return { kind: 'run', data: given as Run }
  if (has('kind', 'steps') && (given as Flow).kind === 'flow') return { kind: 'flow', data: given as Flow }
  if (has('layouts', 'do_not_fit')) return { kind: 'ranking', data: given as Ranking }
  if (has() && Object.keys(given as object).length && Object.values(given as object).every((each) => each?.bubbles && each.actions))
    return { kind: 'schedules', data: given as Record<string, Timeline> }
  if (has('parts_s', 'findings')) return { kind: 'explanation', data: given as Explanation }
  if (has('ranks', 'findings', 'status')) return { kind: 'job', data: given as Job }
  if (has('points', 'bytes_per_second')) return { kind: 'roofline', data: given as Roofline }
  if (has('request_id', 'ttft')) return { kind: 'bill', data: { ...(given as LiveBill), known: true, first_token: (given as LiveBill).ttft !== null } }
  if (has('terms', 'phases')) return { kind: 'memory', data: given as Account }
  if (has('traceEvents')) throw new Error('This is a trace: explain it with `transect board FILE`, or `transect explain trace FILE --json OUT` and open OUT.')
  throw new Error('This JSON is none of the reports that this page shows.')
}

/** Read a file's text. Throws an Error with a sentence for people. */
export function read(name: string, text: string): Report {
  if (name.endsWith('.jsonl')) return { name, kind: 'run', data: runOf(name, text) }
  let given: unknown
  try {
    given = JSON.parse(text)
  } catch {
    throw new Error('This file is not JSON.')
  }
  return { name, ...recognize(given) }
}

/** A run from its log alone. */
function runOf(name: string, text: string): Run {
  const lines: Line[] = []
  for (const line of text.split('\n')) {
    try {
      if (line.trim()) lines.push(JSON.parse(line) as Line)
    } catch {
      // The last line of a run that was killed.
    }
  }
  if (!lines.some((line) => line.kind === 'step')) throw new Error('This log has no steps of a training run.')
  return {
    ...{ kind: 'training run', name, every: 1, checkpoints: [], config: null, layout: null, memory: null },
    steps: lines.filter((line) => line.kind === 'step'),
    others: lines.filter((line) => line.kind !== 'step'),
  }
}
