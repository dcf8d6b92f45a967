// What the page knows of an engine: its steps of the last minutes, its requests, its KV blocks.

import type { Changes, LiveBill, LiveRequest, LiveStep, Route, State } from './protocol'

export const FREE = -1
export const CACHED = -2
export const HIDDEN = -3
/** Seconds and steps that are kept, and latencies of tokens. */
const KEPT_S = 300
const MOST_STEPS = 12_000
const MOST_SAMPLES = 100_000
/** Seconds after the end of a request before another gets its line: longer than the strip. */
const LANE_S = 35
const MOST_ROUTES = 30

/** One step of the engine. */
export interface Step {
  number: number
  begin: number
  end: number
  /** Least time that this hardware needs for it, in seconds; 0 if it is not known. */
  floor: number
  launched: string
  /** (sequence, first position, tokens) of each row, one after the other. */
  rows: number[]
  held: string
  waiting: number | null
  running: number | null
  late: string
  prefill: number
  decode: number
  /** Time since which there was a request, at most `begin`: before that the engine had nothing to do. */
  since: number
}

export interface Request extends LiveRequest {
  lane: number
  /** Tokens of the first choice so far. */
  tokens: number
  state: 'waiting' | 'running' | 'ended'
  preempted: boolean
  /** Beginning of its first step; null if it has run in none, or before the page saw it. */
  started: number | null
  firstToken: number | null
  ended: number | null
  reason: string
  left: number
}

interface Place {
  /** Positions that are computed. */
  end: number
  /** Time of the newest token. */
  at: number
}

export interface Sample {
  at: number
  /** Seconds. */
  value: number
}

export interface TimeParts {
  floor: number
  above: number
  host: number
  underWay: number
  idle: number
}

/** A snapshot that came: the queue of then, and the runs of blocks as they were before it. */
export interface Sight {
  at: number
  waiting: [number, boolean][]
  stats: Record<string, number>
  /** First block, blocks, owner and users of each run that changed, as before. */
  undo: number[]
  evicted: number[]
}

export class EngineModel {
  readonly steps: Step[] = []
  /** By first sequence; ended ones too while they are in sight. */
  readonly requests = new Map<number, Request>()
  readonly ttft: Sample[] = []
  readonly itl: Sample[] = []
  readonly routes: Route[] = []
  readonly marks: [number, string][] = []
  /** Snapshots of the blocks and the queue, oldest first. */
  readonly sights: Sight[] = []
  owners = new Int32Array(0)
  users = new Uint16Array(0)
  /** Time at which each block was evicted last, by block. */
  readonly evicted = new Map<number, number>()
  waiting: [number, boolean][] = []
  reason = ''
  queue: Changes['queue']
  stats: Record<string, number> = {}
  elsewhere = 0
  bill: LiveBill | null = null
  /** Counts changes of `owners`. */
  kvVersion = 0
  /** Newest time of the engine's clock. */
  now: number
  private readonly seqs = new Map<number, number>()
  private readonly places = new Map<number, Place>()
  private readonly lanes: number[] = []
  private readonly received = performance.now()
  private readonly offset: number

  constructor(readonly state: State) {
    this.now = state.now
    this.offset = state.now - this.received / 1000
    this.owners = new Int32Array(Number(state.limits.num_blocks)).fill(FREE)
    this.users = new Uint16Array(this.owners.length)
    this.take(state)
  }

  /** The engine's clock at this moment. */
  get clock(): number {
    return this.offset + performance.now() / 1000
  }

  take(changes: Changes): void {
    this.now = changes.now
    this.reason = changes.reason ?? ''
    if (changes.queue) this.queue = changes.queue
    for (const each of changes.requests ?? []) this.add(each)
    const ends = [...(changes.ends ?? [])]
    for (const each of changes.steps ?? []) {
      while (ends.length && ends[0]![4] < each[1] + each[2] / 1000 - 1e-6) this.finish(ends.shift()!)
      this.addStep(each)
    }
    ends.forEach((each) => this.finish(each))
    if (changes.kv) {
      const undo = runsBefore(changes.kv, this.owners, this.users)
      const evicted = changes.evicted ?? []
      this.sights.push({ at: changes.seen ?? this.now, waiting: changes.waiting ?? [], stats: changes.stats ?? this.stats, undo, evicted })
      this.drawBlocks(changes.kv, evicted)
    }
    if (changes.waiting) this.arrange(changes.waiting)
    if (changes.stats) this.stats = changes.stats
    this.elsewhere = changes.elsewhere ?? this.elsewhere
    if (changes.bill) this.bill = changes.bill
    this.marks.push(...(changes.marks ?? []))
    this.routes.push(...(changes.routed ?? []))
    this.routes.splice(0, this.routes.length - MOST_ROUTES)
    this.forget()
  }

  requestOf(seq: number): Request | undefined {
    const leader = this.seqs.get(seq)
    return leader === undefined ? undefined : this.requests.get(leader)
  }

  /** Unfinished requests, oldest first. */
  get open(): Request[] {
    return [...this.requests.values()].filter((each) => each.state !== 'ended')
  }

  /** Steps that ended within the last `seconds` before `until`. */
  recent(seconds: number, until: number): Step[] {
    return this.steps.filter((step) => step.end > until - seconds && step.end <= until + 1e-6)
  }

  /** Split the last `seconds` before `until`; the parts add up to them. */
  timeParts(seconds: number, until: number): TimeParts {
    const begin = until - seconds
    const parts: TimeParts = { floor: 0, above: 0, host: 0, underWay: 0, idle: 0 }
    let at = begin
    for (const step of this.recent(seconds, until)) {
      const from = Math.max(step.begin, at)
      const idle = Math.max(0, Math.min(step.since, from) - at)
      parts.idle += idle
      parts.host += from - at - idle
      const took = Math.max(0, step.end - from)
      const floor = Math.min(took, step.floor)
      parts.floor += floor
      parts.above += took - floor
      at = Math.max(at, step.end)
    }
    const busy = Math.min(until, Math.max(at, Math.min(...this.open.map((each) => each.arrival))))
    parts.idle += Math.max(0, busy - at)
    parts.underWay += Math.max(0, until - Math.max(at, busy))
    return parts
  }

  /** Blocks by kind: owned by one sequence, shared, cached and free. */
  blockCounts(): { own: number; shared: number; cached: number; free: number; hidden: number } {
    const counts = { own: 0, shared: 0, cached: 0, free: 0, hidden: 0 }
    this.owners.forEach((owner, block) => {
      if (owner >= 0) counts[this.users[block]! > 1 ? 'shared' : 'own']++
      else counts[owner === CACHED ? 'cached' : owner === HIDDEN ? 'hidden' : 'free']++
    })
    return counts
  }

  private add(given: LiveRequest): void {
    if (this.requests.has(given.seq)) return
    let lane = this.lanes.findIndex((until) => until < this.now - LANE_S)
    if (lane < 0) lane = this.lanes.length
    this.lanes[lane] = Infinity
    const known = given.known?.[0] ?? 0
    this.requests.set(given.seq, {
      ...given,
      lane,
      tokens: Math.max(0, known),
      state: 'waiting',
      preempted: false,
      started: given.known ? given.arrival : null,
      firstToken: null,
      ended: null,
      reason: '',
      left: given.known ? given.known.filter((tokens) => tokens >= 0).length : given.n,
    })
    for (let choice = 0; choice < given.n; choice++) {
      this.seqs.set(given.seq + choice, given.seq)
      const tokens = given.known?.[choice] ?? 0
      if (tokens > 0) this.places.set(given.seq + choice, { end: given.prompt + tokens - 1, at: 0 })
    }
  }

  private addStep(given: LiveStep): void {
    const [number, begin, ms, floor, launched, packed, held, waiting, running, , , late, accepted] = given
    const before = this.steps.at(-1)
    let rows = packed
    if (!rows) {
      if (!before) return
      rows = [...before.rows]
      for (let i = 0; i < rows.length; i += 3) [rows[i + 1], rows[i + 2]] = [rows[i + 1]! + rows[i + 2]!, 1]
    }
    const end = begin + ms / 1000
    const step: Step = {
      ...{ number, begin, end, floor: floor / 1000, launched, rows, held, waiting, running, late },
      ...{ prefill: 0, decode: 0, since: before ? this.busySince(before.end, begin) : begin },
    }
    const more = new Map(accepted)
    for (let i = 0; i < rows.length; i += 3) {
      const [seq, start, count] = [rows[i]!, rows[i + 1]!, rows[i + 2]!]
      const request = this.requestOf(seq)
      const prompt = request?.prompt ?? 0
      if (start < prompt || (count > 1 && !more.has(seq))) step.prefill += count
      else step.decode += count
      if (request) this.advance(request, seq, more.has(seq) ? start + 1 + more.get(seq)! : start + count, step)
    }
    this.steps.push(step)
  }

  /** Account for a row of a request that reaches position `end` in a step. */
  private advance(request: Request, seq: number, end: number, { begin, end: at }: Step): void {
    request.started ??= begin
    if (request.state === 'waiting') request.state = 'running'
    request.preempted = false
    const place = this.places.get(seq)
    if (end < request.prompt || end <= (place?.end ?? 0)) return
    const drawn = place ? end - place.end : 1
    if (!place) {
      if (request.firstToken === null && !request.known) {
        request.firstToken = at
        this.ttft.push({ at, value: at - request.arrival })
      }
    } else if (place.at) this.itl.push({ at, value: (at - place.at) / drawn })
    this.places.set(seq, { end, at })
    if (seq === request.seq) request.tokens = end - request.prompt + 1
  }

  private finish([leader, choice, reason, tokens, at]: NonNullable<Changes['ends']>[number]): void {
    const request = this.requests.get(leader)
    if (!request) return
    this.places.delete(leader + choice)
    if (choice === 0) [request.tokens, request.reason] = [tokens, reason]
    if (--request.left > 0) return
    request.state = 'ended'
    request.ended = this.lanes[request.lane] = at
    request.reason ||= reason
  }

  /** Time within a gap since which a request was there. */
  private busySince(from: number, to: number): number {
    let earliest = to
    for (const each of this.requests.values())
      if (each.ended === null || each.ended > from + 1e-6) earliest = Math.min(earliest, Math.max(from, each.arrival))
    return earliest
  }

  private drawBlocks(runs: number[], evicted: number[]): void {
    for (let i = 0; i < runs.length; i += 4) {
      const [first, count, owner, users] = [runs[i]!, runs[i + 1]!, runs[i + 2]!, runs[i + 3]!]
      this.owners.fill(owner, first, first + count)
      this.users.fill(users, first, first + count)
    }
    for (const block of evicted) this.evicted.set(block, this.now)
    if (runs.length || evicted.length) this.kvVersion++
  }

  private arrange(waiting: [number, boolean][]): void {
    this.waiting = waiting
    for (const [seq, preempted] of waiting) {
      const request = this.requestOf(seq)
      if (!request || request.state === 'ended') continue
      if (preempted && seq === request.seq) [request.state, request.preempted] = ['waiting', true]
    }
  }

  /** Drop what nobody can see any more. */
  private forget(): void {
    const oldest = this.now - KEPT_S
    const keep = <T>(list: T[], time: (item: T) => number) => {
      const gone = list.findIndex((item) => time(item) >= oldest)
      list.splice(0, gone < 0 ? list.length : gone)
    }
    const newest = this.steps.at(-1) // the next step may refer to its rows
    keep(this.steps, (step) => step.end)
    if (!this.steps.length && newest) this.steps.push(newest)
    this.steps.splice(0, this.steps.length - MOST_STEPS)
    this.itl.splice(0, this.itl.length - MOST_SAMPLES)
    keep(this.sights, (sight) => sight.at)
    keep(this.ttft, (sample) => sample.at)
    keep(this.itl, (sample) => sample.at)
    keep(this.marks, (mark) => mark[0])
    for (const [seq, request] of this.requests) {
      if (request.ended === null || request.ended >= oldest) continue
      this.requests.delete(seq)
      for (let choice = 0; choice < request.n; choice++) this.seqs.delete(seq + choice)
    }
    for (const [block, at] of this.evicted) if (at < this.now - 3) this.evicted.delete(block)
  }
}

/** List what runs of blocks hold now, in runs, before they change. */
function runsBefore(runs: number[], owners: Int32Array, users: Uint16Array): number[] {
  const found: number[] = []
  for (let i = 0; i < runs.length; i += 4) {
    let begin = runs[i]!
    const end = begin + runs[i + 1]!
    for (let block = begin + 1; block <= end; block++) {
      if (block < end && owners[block] === owners[begin] && users[block] === users[begin]) continue
      found.push(begin, block - begin, owners[begin]!, users[begin]!)
      begin = block
    }
  }
  return found
}

/** The smallest value that a share of all values does not exceed; null for none. */
export function quantile(values: number[], share: number): number | null {
  if (!values.length) return null
  const sorted = [...values].sort((a, b) => a - b)
  return sorted[Math.min(sorted.length - 1, Math.ceil(share * sorted.length) - 1)]!
}
