// The server's API as this page uses it: JSON, streams of server-sent events, errors, and the key.
//
// A key is kept in memory. It goes to localStorage only if the user asks for that, and only for this server.

/** An answer that is an error, or no answer at all (`status` 0). */
export class ApiProblem extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly code: string | null = null,
    /** Seconds after which the server asks to try again. */
    readonly retryAfter: number | null = null,
  ) {
    super(message)
  }

  /** True if the server is not there, or will be back: sending the same request again may succeed. */
  get passing(): boolean {
    return this.status === 0 || this.status === 429 || this.status === 502 || this.status === 503
  }
}

/** One event of a stream: the text of its data, or of a comment. */
export interface SseEvent {
  data: string | null
  comment: string | null
  event: string
}

const STORED_KEY = 'transect.key'
const UNREACHABLE = 'The server does not answer. It may be restarting; try again in a moment.'

/**
 * A server and the key for it.
 *
 * Dispatches `key-needed` on a 401, `key-changed` when the key was set, and `lost` when a request got no answer. The
 * shell dispatches `found` when the server is back.
 */
export class Api extends EventTarget {
  private secret: string | null
  readonly base: string

  /** @param base address of the server; the default is the server of this page, with any prefix of a proxy. */
  constructor(base?: string, key?: string) {
    super()
    this.base = (base ?? new URL('.', document.baseURI).href).replace(/\/+$/, '')
    this.secret = key ?? (base === undefined ? localStorage.getItem(STORED_KEY) : null)
  }

  get key(): string | null {
    return this.secret
  }

  /** Set the key; null forgets it. `keep`: store it in this browser. */
  setKey(key: string | null, keep = false): void {
    this.secret = key || null
    if (keep && key) localStorage.setItem(STORED_KEY, key)
    else localStorage.removeItem(STORED_KEY)
    this.dispatchEvent(new Event('key-changed'))
  }

  get keyIsStored(): boolean {
    return localStorage.getItem(STORED_KEY) !== null
  }

  /** Send a request. `path` is relative to the server, such as `v1/models`. Throws ApiProblem, or AbortError. */
  async fetch(path: string, options: RequestInit = {}): Promise<Response> {
    const headers = new Headers(options.headers)
    if (this.secret) headers.set('Authorization', `Bearer ${this.secret}`)
    let response: Response
    try {
      response = await fetch(`${this.base}/${path.replace(/^\/+/, '')}`, { ...options, headers, cache: 'no-store' })
    } catch (error) {
      if (options.signal?.aborted) throw error
      this.dispatchEvent(new Event('lost'))
      throw new ApiProblem(0, UNREACHABLE)
    }
    if (!response.ok) {
      const problem = await problemOf(response)
      if (problem.status === 401) this.dispatchEvent(new Event('key-needed'))
      throw problem
    }
    return response
  }

  /** Return true if the server answers and takes work. Never throws. */
  async answers(): Promise<boolean> {
    try {
      return (await fetch(`${this.base}/health`, { cache: 'no-store' })).ok
    } catch {
      return false
    }
  }

  /** Get JSON. */
  async get<T>(path: string, signal?: AbortSignal): Promise<T> {
    return (await (await this.fetch(path, { signal })).json()) as T
  }

  /** Post JSON, and return the answer's JSON. */
  async post<T>(path: string, body: unknown, signal?: AbortSignal): Promise<T> {
    return (await (await this.fetch(path, posted(body, signal))).json()) as T
  }

  /** Post JSON, and yield the events of the answer. Ends at `[DONE]`, which is not yielded. */
  async *stream(path: string, body: unknown, signal?: AbortSignal): AsyncGenerator<SseEvent> {
    yield* eventsOf(await this.fetch(path, posted(body, signal)), signal)
  }

  /** Get a stream of events, without end. */
  async *watch(path: string, signal?: AbortSignal): AsyncGenerator<SseEvent> {
    yield* eventsOf(await this.fetch(path, { signal }), signal)
  }
}

function posted(body: unknown, signal?: AbortSignal): RequestInit {
  return { method: 'POST', body: JSON.stringify(body), headers: { 'Content-Type': 'application/json' }, signal }
}

/** Read an error's body, which has OpenAI's form unless a proxy made it. */
async function problemOf(response: Response): Promise<ApiProblem> {
  let message = `The server answered ${response.status} ${response.statusText}`.trim()
  let code: string | null = null
  try {
    const { error } = await response.json()
    message = error.message ?? message
    code = error.code ?? null
  } catch {
    // Not JSON: the status alone is said.
  }
  const after = Number(response.headers.get('Retry-After') ?? Number.NaN)
  return new ApiProblem(response.status, message, code, Number.isFinite(after) ? after : null)
}

/** Split a response into events. An `error` object in the data is thrown as ApiProblem. */
async function* eventsOf(response: Response, signal?: AbortSignal): AsyncGenerator<SseEvent> {
  const reader = response.body!.getReader()
  const decoder = new TextDecoder()
  let rest = ''
  try {
    for (;;) {
      let chunk: ReadableStreamReadResult<Uint8Array>
      try {
        chunk = await reader.read()
      } catch (error) {
        if (signal?.aborted) throw error
        throw new ApiProblem(0, 'The connection broke off in the middle of the answer. What has arrived is kept.')
      }
      rest += decoder.decode(chunk.value, { stream: !chunk.done })
      const blocks = rest.split(/\r?\n\r?\n/)
      rest = blocks.pop()!
      for (const block of blocks) {
        const event = parsed(block)
        if (event.data === '[DONE]') return
        if (event.data?.startsWith('{"error"')) throw problemIn(event.data)
        yield event
      }
      if (chunk.done) return
    }
  } finally {
    reader.cancel().catch(() => undefined)
  }
}

function parsed(block: string): SseEvent {
  const data: string[] = []
  const comments: string[] = []
  let event = 'message'
  for (const line of block.split(/\r?\n/)) {
    const at = line.indexOf(':')
    const name = at < 0 ? line : line.slice(0, at)
    const value = at < 0 ? '' : line.slice(at + 1).replace(/^ /, '')
    if (at === 0) comments.push(value)
    else if (name === 'data') data.push(value)
    else if (name === 'event') event = value
  }
  return { data: data.length ? data.join('\n') : null, comment: comments.length ? comments.join('\n') : null, event }
}

function problemIn(data: string): ApiProblem {
  const { error } = JSON.parse(data)
  return new ApiProblem(error.status ?? 500, error.message ?? 'The answer ended with an error.', error.code ?? null)
}
