// One conversation at work: what the user does to it, and the requests that run for it.
//
// Dispatches `changed` when messages came or went or a request ended, and `progress` while answers grow.

import { Api } from '../api'
import { generate, type Given, randomSeed, requestFields } from './generate'
import type { Store } from './store'
import { apiMessages, append, newAnswer, newConversation, newId, pathTo, removeMessage } from './tree'
import type { Answer, Candidate, Conversation, Lane, Message, Settings } from './types'

const SAVE_MS = 2000
/** Share of the time that saving may take while answers grow. */
const SHARE = 0.02

export class Session extends EventTarget {
  conversation: Conversation = newConversation()
  private jobs = new Map<AbortController, Message[]>()
  private saving = 0
  private pause = SAVE_MS
  /** Keys for other servers, by address; kept in memory only. */
  readonly keys = new Map<string, string>()

  constructor(
    readonly api: Api,
    private readonly store: Store,
  ) {
    super()
  }

  /** Show another conversation. Running answers of the one before go on. */
  open(conversation: Conversation): void {
    this.conversation = conversation
    this.dispatchEvent(new Event('changed'))
  }

  get running(): boolean {
    return [...this.jobs.values()].some((messages) => messages.some((each) => each.id in this.conversation.messages))
  }

  /** Return the server of a lane. */
  apiOf(lane: Lane | null): Api {
    return lane?.server ? new Api(lane.server, this.keys.get(lane.server) ?? '') : this.api
  }

  /** Add a message of the user below the last shown one, and get answers. */
  async send(text: string, parent: string): Promise<void> {
    const message = append(this.conversation, { parent, role: 'user', text })
    await this.respond(message.id)
  }

  /** Replace a message of the user: the old one stays as a sibling, with all that followed. */
  async edit(message: Message, text: string): Promise<void> {
    await this.send(text, message.parent)
  }

  /** Get answers to the conversation up to a message: one for each lane, or as many as the settings say. */
  async respond(parent: string): Promise<void> {
    const { settings, lanes } = this.conversation
    const group = newId()
    const seed = settings.seed ?? randomSeed()
    const ways: (Lane | null)[] = lanes.length ? lanes : [null]
    const requests = ways.map((lane) => {
      const body = this.fieldsOf({ ...settings, seed }, lane)
      const count = lanes.length || settings.search ? 1 : settings.n
      if (count > 1) body.n = count
      const messages = Array.from({ length: count }, (_, choice) =>
        append(this.conversation, {
          parent, role: 'assistant', text: '', answer: { ...newAnswer(), choice, body: { ...body }, lane, group },
        }),
      )
      return { lane, messages }
    })
    this.conversation.chosen[parent] = requests[0]!.messages[0]!.id
    await Promise.all(requests.map(({ lane, messages }) => this.run(lane, messages)))
  }

  private fieldsOf(settings: Settings, lane: Lane | null): Record<string, unknown> {
    const own: Partial<Settings> = lane ? { model: lane.model || (lane.server ? '' : settings.model) } : {}
    if (lane?.temperature !== undefined) own.temperature = lane.temperature
    if (lane?.top_p !== undefined) own.top_p = lane.top_p
    return requestFields({ ...settings, ...own })
  }

  /** Ask again for an answer, with another seed. */
  async regenerate(message: Message): Promise<void> {
    const { seed: _, given: __, n: ___, ...body } = message.answer!.body
    const fresh = { ...newAnswer(), body: { ...body, seed: randomSeed() }, lane: message.answer!.lane, group: newId() }
    await this.run(fresh.lane, [append(this.conversation, { parent: message.parent, role: 'assistant', text: '', answer: fresh })])
  }

  /** Send the same request again in place of an answer that failed. */
  async retry(message: Message): Promise<void> {
    const { body, lane, group, choice } = message.answer!
    const { n: _, ...fields } = body
    if (choice && !fields.given) fields.given = { tokenIds: [], choice } satisfies Given
    const answer = { ...newAnswer(), body: fields, lane, group, choice }
    removeMessage(this.conversation, message.id)
    await this.run(lane, [append(this.conversation, { parent: message.parent, role: 'assistant', text: '', answer })])
  }

  /**
   * Continue an answer from its token number `at` with a candidate in that token's place.
   *
   * The tokens before are given to the server, which draws the rest as it drew the answer: with the same candidate
   * the rest is the same.
   */
  async branch(message: Message, at: number, candidate: Candidate): Promise<void> {
    const from = message.answer!
    const tokenIds = [...from.tokens.slice(0, at).map((token) => token.id), candidate.id]
    const { n: _, ...body } = from.body
    const answer: Answer = {
      ...newAnswer(),
      choice: from.choice,
      body: { ...body, given: { tokenIds, choice: from.choice } satisfies Given },
      tokens: [...from.tokens.slice(0, at), { ...candidate, top: from.tokens[at]!.top }],
      lane: from.lane,
      group: newId(),
      branch: { from: message.id, at },
    }
    await this.run(answer.lane, [append(this.conversation, { parent: message.parent, role: 'assistant', text: '', answer })])
  }

  /** Add the result of a tool. When all calls of the answer have one, the model answers them. */
  async giveResult(message: Message, callId: string, text: string): Promise<void> {
    const path = [...this.resultsOf(message)]
    const result = append(this.conversation, { parent: path.at(-1)?.id ?? message.id, role: 'tool', text, callId })
    path.push(result)
    const open = message.answer!.calls.some((call) => !path.some((each) => each.callId === call.id))
    if (open) this.changed()
    else await this.respond(result.id)
  }

  /** List the results below an answer with calls, in their order. */
  resultsOf(message: Message): Message[] {
    const found: Message[] = []
    let at: string | undefined = this.conversation.chosen[message.id]
    while (at && this.conversation.messages[at]?.role === 'tool') {
      found.push(this.conversation.messages[at]!)
      at = this.conversation.chosen[at]
    }
    return found
  }

  remove(message: Message): void {
    removeMessage(this.conversation, message.id)
    this.changed()
  }

  /** Show another sibling below a message. */
  choose(message: Message): void {
    this.conversation.chosen[message.parent] = message.id
    this.changed()
  }

  /** Stop all running answers of the shown conversation, or one. */
  stop(message?: Message): void {
    for (const [job, messages] of this.jobs) {
      const own = messages.some((each) => (message ? each.id === message.id : each.id in this.conversation.messages))
      if (own) job.abort()
    }
  }

  private async run(lane: Lane | null, messages: Message[]): Promise<void> {
    const job = new AbortController()
    const conversation = this.conversation
    this.jobs.set(job, messages)
    this.changed()
    const path = pathTo(conversation, messages[0]!.parent)
    const answers = messages.map((each) => each.answer!)
    await generate(this.apiOf(lane), apiMessages(conversation.settings.system, path), answers, job.signal, () => {
      this.dispatchEvent(new CustomEvent('progress', { detail: messages }))
      this.saveSoon(conversation)
    })
    this.jobs.delete(job)
    this.changed(conversation)
    this.dispatchEvent(new CustomEvent('answered', { detail: messages }))
  }

  /** Save a conversation, and have it shown anew. */
  changed(conversation = this.conversation): void {
    void this.save(conversation)
    this.dispatchEvent(new Event('changed'))
  }

  private async save(conversation: Conversation): Promise<void> {
    if (!Object.keys(conversation.messages).length) return
    this.pause = Math.max(SAVE_MS, (await this.store.put(conversation)) / SHARE)
  }

  private saveSoon(conversation: Conversation): void {
    if (this.saving) return
    this.saving = window.setTimeout(() => {
      this.saving = 0
      void this.save(conversation)
    }, this.pause)
  }
}
