// The engine as it was: KV blocks and the queue at an earlier moment, from the changes since.

import type { EngineModel, Request } from './model'

/** A step that begins this little before a moment belongs to the time after it: times are rounded. */
const SAME_S = 1e-4

/** Return the model with the state of an earlier time: the same methods, over the blocks, queue and requests of then. */
export function modelAt(model: EngineModel, time: number): EngineModel {
  if (time >= model.now - 1e-6) return model
  const [owners, users] = [model.owners.slice(), model.users.slice()]
  // A snapshot is taken after a step, so those before the end of the next step are of this one.
  const next = model.steps.find((each) => each.end > time + 1e-6)?.end ?? Infinity
  let sight = model.sights[0]
  for (let i = model.sights.length - 1; i > 0; i--) {
    const later = model.sights[i]!
    if (later.at < next) {
      sight = later
      break
    }
    for (let run = 0; run < later.undo.length; run += 4) {
      const [first, count] = [later.undo[run]!, later.undo[run + 1]!]
      owners.fill(later.undo[run + 2]!, first, first + count)
      users.fill(later.undo[run + 3]!, first, first + count)
    }
  }
  const waiting = sight?.waiting ?? []
  const step = model.steps.filter((each) => each.end <= time + 1e-6).at(-1)
  const evicted = new Map<number, number>()
  for (const each of model.sights) if (each.at < next) for (const block of each.evicted) evicted.set(block, each.at)
  return Object.assign(Object.create(model) as EngineModel, {
    ...{ owners, users, waiting, evicted, now: time, stats: sight?.stats ?? model.stats },
    reason: step?.held ?? '',
    queue: step && model.queue ? { ...model.queue, waiting: step.waiting ?? 0, running: step.running ?? 0, under_way: null } : model.queue,
    requests: requestsAt(model, time, waiting),
    kvVersion: model.kvVersion + time,
  })
}

function requestsAt(model: EngineModel, time: number, waiting: [number, boolean][]): Map<number, Request> {
  const later = new Map<number, number>()
  for (let i = model.steps.length - 1; i >= 0 && model.steps[i]!.end > time + 1e-6; i--) {
    const { rows } = model.steps[i]!
    for (let row = 0; row < rows.length; row += 3) {
      const request = model.requests.get(rows[row]!)
      if (request && rows[row + 1]! + rows[row + 2]! >= request.prompt) later.set(request.seq, (later.get(request.seq) ?? 0) + 1)
    }
  }
  const preempted = new Set(waiting.filter((each) => each[1]).map((each) => each[0]))
  const found = new Map<number, Request>()
  for (const [seq, request] of model.requests) {
    if (request.arrival > time) continue
    const ended = request.ended !== null && request.ended <= time
    const waits = preempted.has(seq) || request.started === null || request.started > time - SAME_S
    found.set(seq, {
      ...request,
      ...(ended ? {} : { ended: null, reason: '', state: waits ? ('waiting' as const) : ('running' as const) }),
      preempted: !ended && preempted.has(seq),
      tokens: Math.max(0, request.tokens - (later.get(seq) ?? 0)),
      firstToken: request.firstToken !== null && request.firstToken <= time ? request.firstToken : null,
    })
  }
  return found
}
