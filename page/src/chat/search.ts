// The state of a search (best of n, votes, beams) as its events tell it; see docs/serve/search.md.

/** A line of tokens that continues another one, or the prompt if `parent` is null. */
export interface SearchBranch {
  id: number
  parent: number | null
  state: 'new' | 'alive' | 'ended' | 'dropped'
  tokens: number
  finish_reason: string | null
  scores: Record<string, number | null>
  /** Short answer that votes. */
  answer: string | null
  adapter?: string
  /** Known at the end. */
  text?: string
}

export interface SearchState {
  method: string
  /** Tokens that the engine drew for all branches. */
  tokens: number
  votes: Record<string, number> | null
  branches: SearchBranch[]
  /** The branch that is the answer; null while the search runs. */
  chosen: number | null
  endedBy: string
}

/** What a chunk says: changed branches while the search runs, and everything at its end. */
export interface SearchNews {
  method: string
  tokens: number
  votes?: Record<string, number>
  branches?: SearchBranch[]
  chosen?: number
  ended_by?: string
}

/** A method that the server offers, with its settings. */
export interface SearchMethod {
  name: string
  about: string
  settings: SearchSetting[]
}

export interface SearchSetting {
  name: string
  help: string
  default: unknown
  kind: 'number' | 'text' | 'choice' | 'flag'
  whole: boolean
  /** Values are a list, written with commas. */
  list: boolean
  least: number | null
  most: number | null
  choices: string[]
}

export function taken(before: SearchState | null, news: SearchNews): SearchState {
  const branches = new Map((before?.branches ?? []).map((each) => [each.id, each]))
  for (const each of news.branches ?? []) branches.set(each.id, { ...branches.get(each.id), ...each })
  return {
    method: news.method, tokens: news.tokens, votes: news.votes ?? before?.votes ?? null,
    branches: [...branches.values()], chosen: news.chosen ?? before?.chosen ?? null, endedBy: news.ended_by ?? '',
  }
}

/** A branch with its place in the drawing. */
export interface Placed {
  branch: SearchBranch
  /** Tokens before its first one. */
  start: number
  row: number
  /** Row of its parent, or of the prompt. */
  from: number
}

/** Lay the branches out: tokens from left to right, a row for each; those of one parent are neighbours. */
export function layOut(branches: SearchBranch[]): Placed[] {
  const children = new Map<number | null, SearchBranch[]>()
  for (const each of branches) {
    const siblings = children.get(each.parent)
    if (siblings) siblings.push(each)
    else children.set(each.parent, [each])
  }
  const placed: Placed[] = []
  let rows = 0
  const place = (branch: SearchBranch, start: number, from: number): void => {
    const row = rows
    placed.push({ branch, start, row, from })
    const following = children.get(branch.id) ?? []
    if (!following.length) rows++
    following.forEach((each) => place(each, start + branch.tokens, row))
  }
  for (const each of children.get(null) ?? []) place(each, 0, -1)
  return placed
}

/** The branches from the first one to this one. */
export function lineOf(branches: SearchBranch[], id: number | null): SearchBranch[] {
  const found: SearchBranch[] = []
  for (let at = id; at !== null; ) {
    const branch = branches.find((each) => each.id === at)
    if (!branch) break
    found.unshift(branch)
    at = branch.parent
  }
  return found
}
