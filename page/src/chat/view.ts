// <chat-view>: conversations at the left, the thread with its field for messages, and the settings at the right.

import { html, nothing } from 'lit'
import { customElement, property, state } from 'lit/decorators.js'
import { repeat } from 'lit/directives/repeat.js'
import type { Api } from '../api'
import { PageElement } from '../element'
import { icon } from '../icons'
import './answer'
import type { ChatAnswer } from './answer'
import './compare'
import './composer'
import type { ChatComposer } from './composer'
import './lanes'
import type { LaneDialog } from './lanes'
import { Session } from './session'
import './settings'
import './sidebar'
import { exported, imported, Store } from './store'
import { childrenOf, newConversation, shownPath } from './tree'
import './user-message'
import type { Conversation, Lane, Message, ServerFacts, Settings } from './types'

const NEAR_END = 80
const EXAMPLES = ['Why is the sky blue?', 'Write a haiku about a slow computer', 'Explain recursion with a short program']

@customElement('chat-view')
export class ChatView extends PageElement {
  @property({ attribute: false }) api!: Api
  @property({ type: Boolean }) active = false
  /** Id of the conversation to show; empty for a new one. */
  @property() path = ''
  @state() private conversations: Conversation[] = []
  @state() private facts: ServerFacts | null = null
  @state() private models: string[] = []
  @state() private problem = ''
  @state() private drawer: '' | 'list' | 'settings' = ''
  @state() private spoken = ''
  /** Log-probabilities of answers by another lane, by the answer's message. */
  private others = new Map<string, number[]>()
  private store = new Store()
  private session!: Session
  private follows = true
  private grown = 0

  override connectedCallback(): void {
    super.connectedCallback()
    this.session = new Session(this.api, this.store)
    this.session.addEventListener('changed', () => this.requestUpdate())
    this.session.addEventListener('progress', (event) => this.progress((event as CustomEvent<Message[]>).detail))
    this.session.addEventListener('answered', (event) => this.answered((event as CustomEvent<Message[]>).detail))
    this.api.addEventListener('key-changed', () => void this.loadFacts())
    this.api.addEventListener('found', () => void this.loadFacts())
    this.addEventListener('grown', () => this.keepAtEnd())
    void this.loadFacts()
    void this.loadConversations()
  }

  protected override willUpdate(changed: Map<string, unknown>): void {
    if (changed.has('path') && this.active && this.path !== this.session.conversation.id) this.show()
  }

  private async loadFacts(): Promise<void> {
    try {
      this.facts = await this.api.get<ServerFacts>('v1/page')
      const { data } = await this.api.get<{ data: { id: string; parent?: string | null; root: string }[] }>('v1/models')
      // Further names of the model itself would answer as the first one does.
      this.models = data.filter((each, index) => index === 0 || each.parent).map((each) => each.id)
      this.problem = ''
    } catch (error) {
      this.problem = (error as Error).message
    }
  }

  private async loadConversations(): Promise<void> {
    await this.readStore()
    if (this.path) this.show()
  }

  /** List the kept conversations and those of this window, which may be newer, newest first. */
  private async readStore(): Promise<void> {
    const kept = await this.store.all()
    const here = new Set(this.conversations.map((each) => each.id))
    const all = [...this.conversations, ...kept.filter((each) => !here.has(each.id))]
    this.conversations = all.sort((a, b) => b.updated - a.updated)
  }

  private show(): void {
    const found = this.conversations.find((each) => each.id === this.path)
    this.follows = true
    this.drawer = this.drawer === 'list' ? '' : this.drawer
    this.session.open(found ?? newConversation(this.session.conversation.settings))
    if (this.path && !found && this.conversations.length) location.hash = '#/chat'
  }

  private startNew(): void {
    this.session.open(newConversation(this.session.conversation.settings))
    this.drawer = ''
    location.hash = '#/chat'
    this.querySelector<ChatComposer>('chat-composer')?.focus()
  }

  private async send(text: string): Promise<void> {
    const { conversation } = this.session
    if (!this.conversations.includes(conversation)) this.conversations = [conversation, ...this.conversations]
    this.follows = true
    this.problem = ''
    try {
      const sent = this.session.send(text, shownPath(conversation).at(-1)?.id ?? '')
      history.replaceState(null, '', `#/chat/${conversation.id}`)
      this.spoken = 'The model has the message.'
      await sent
    } catch (error) {
      this.problem = (error as Error).message
    }
  }

  private progress(messages: Message[]): void {
    if (this.grown) return
    this.grown = requestAnimationFrame(() => {
      this.grown = 0
      for (const { id } of messages) this.querySelector<ChatAnswer>(`[data-message="${id}"]`)?.requestUpdate()
    })
    if (!this.session.running) this.requestUpdate()
  }

  private answered(messages: Message[]): void {
    const { status, error, tokenIds, search } = messages[0]!.answer!
    this.spoken =
      status === 'failed' ? `The answer failed: ${error}`
      : status === 'stopped' ? 'The answer was stopped.'
      : `The answer is complete, ${tokenIds.length} tokens${search ? `, chosen from ${search.branches.length} branches` : ''}.`
    for (const { id } of messages) this.querySelector<ChatAnswer>(`[data-message="${id}"]`)?.requestUpdate()
  }

  private get thread(): HTMLElement | null {
    return this.querySelector('.thread')
  }

  private keepAtEnd(): void {
    const thread = this.thread
    if (thread && this.follows) thread.scrollTop = thread.scrollHeight
  }

  private scrolled(event: Event): void {
    const { scrollTop, scrollHeight, clientHeight } = event.target as HTMLElement
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR_END
  }

  private change(changes: { settings?: Settings; lanes?: Lane[] }): void {
    Object.assign(this.session.conversation, changes)
    this.session.changed()
  }

  private async forget(conversation: Conversation): Promise<void> {
    if (!confirm(`Delete "${conversation.title || 'Untitled'}"? This cannot be undone.`)) return
    await this.store.remove(conversation.id)
    this.conversations = this.conversations.filter((each) => each !== conversation)
    if (conversation === this.session.conversation) this.startNew()
  }

  private exportAll(): void {
    const link = document.createElement('a')
    link.href = URL.createObjectURL(new Blob([exported(this.conversations)], { type: 'application/json' }))
    link.download = `transect-conversations-${new Date().toISOString().slice(0, 10)}.json`
    link.click()
    setTimeout(() => URL.revokeObjectURL(link.href), 1000)
  }

  private async importFile(file: File): Promise<void> {
    try {
      const found = imported(await file.text(), new Set(this.conversations.map((each) => each.id)))
      for (const each of found) await this.store.put(each)
      await this.readStore()
      this.spoken = `${found.length} conversations were imported.`
      this.problem = ''
    } catch (error) {
      this.problem = (error as Error).message
    }
  }

  private rename(conversation: Conversation, title: string): void {
    conversation.title = title
    this.session.changed(conversation)
    this.conversations = [...this.conversations]
  }

  protected override updated(): void {
    this.keepAtEnd()
  }

  protected override render() {
    const { conversation, running } = this.session
    const path = shownPath(conversation)
    const detail = <T>(event: Event) => (event as CustomEvent<T>).detail
    return html`<div class="chat ${this.drawer ? `shows-${this.drawer}` : ''}"
        @close-drawer=${() => (this.drawer = '')} @scored=${this.scored}>
      <aside class="side" aria-label="Conversations"><chat-list .conversations=${this.conversations} .shown=${conversation.id}
        @new-chat=${this.startNew} @delete=${(event: Event) => void this.forget(detail(event))} @export-all=${this.exportAll}
        @rename=${(event: Event) => this.rename(detail<{ conversation: Conversation }>(event).conversation, detail<{ title: string }>(event).title)}
        @import-file=${(event: Event) => void this.importFile(detail(event))}></chat-list></aside>
      <section class="talk" aria-label="Conversation">
        ${this.head()}
        <div class="thread" @scroll=${this.scrolled} tabindex="0" aria-label="Messages">
          ${path.length ? this.messages(path) : this.welcome()}
        </div>
        ${this.problem ? html`<p class="notice bad" role="alert">${this.problem}</p>` : nothing}
        <chat-composer .running=${running} .note=${conversation.lanes.map((lane) => lane.name).join(' · ')}
          @send=${(event: Event) => void this.send(detail(event))} @stop=${() => this.session.stop()}></chat-composer>
        <p class="hidden-text" role="status">${this.spoken}</p>
      </section>
      ${this.drawer === 'settings'
        ? html`<aside class="drawer" aria-label="Settings"><chat-settings .settings=${conversation.settings} .facts=${this.facts}
            .models=${this.models} @settings=${(event: Event) => this.change({ settings: detail(event) })}></chat-settings></aside>` : nothing}
      <lane-dialog .session=${this.session} .models=${this.models} @lanes=${(event: Event) => this.change({ lanes: detail(event) })}></lane-dialog>
    </div>`
  }

  private head() {
    const { lanes, settings } = this.session.conversation
    return html`<div class="talk-head">
      <button class="quiet only-narrow" aria-label="Conversations" title="Conversations" aria-expanded=${this.drawer === 'list'}
        @click=${() => (this.drawer = this.drawer === 'list' ? '' : 'list')}>${icon('menu')}</button>
      <h1>${settings.model || this.facts?.model || 'Chat'}</h1>
      <span class="head-end">
        <button class="quiet" aria-pressed=${lanes.length > 0} @click=${() => this.querySelector<LaneDialog>('lane-dialog')!.open()}>
          ${icon('compare')} <span>Compare</span></button>
        <button class="quiet" aria-expanded=${this.drawer === 'settings'} @click=${() => (this.drawer = this.drawer === 'settings' ? '' : 'settings')}>
          ${icon('tune')} <span>Settings</span></button>
      </span></div>`
  }

  private welcome() {
    return html`<div class="welcome"><img src="page/icon.svg" alt="" width="56" height="56" />
      <h2>Ask the model something</h2>
      <p>Answers come from this server and stay in this browser. Every token shows its probability, and can be exchanged for another.</p>
      ${this.facts && !this.facts.chat ? html`<p class="notice warning">This model has no chat template, so it cannot answer chats.</p>` : nothing}
      <div class="examples">${EXAMPLES.map((text) => html`<button @click=${() => void this.send(text)}>${text}</button>`)}</div></div>`
  }

  private messages(path: Message[]) {
    const shown = path.filter((each) => each.role !== 'tool')
    return repeat(shown, (each) => each.id, (each) => (each.role === 'user' ? this.user(each) : this.answers(each, each === path.at(-1))))
  }

  private user(message: Message) {
    return html`<user-message .message=${message} .siblings=${childrenOf(this.session.conversation, message.parent)}
      @edit=${(event: Event) => void this.session.edit(message, (event as CustomEvent<string>).detail)}
      @choose=${(event: Event) => this.session.choose((event as CustomEvent<Message>).detail)}></user-message>`
  }

  private answers(message: Message, isLast: boolean) {
    const siblings = childrenOf(this.session.conversation, message.parent).filter((each) => each.answer)
    const groups = [...new Set(siblings.map((each) => each.answer!.group || each.id))]
    const group = message.answer!.group || message.id
    const columns = siblings.filter((each) => (each.answer!.group || each.id) === group)
    const go = (step: number) => {
      const wanted = groups[groups.indexOf(group) + step]
      const first = siblings.find((each) => (each.answer!.group || each.id) === wanted)
      if (first) this.session.choose(first)
    }
    const at = groups.indexOf(group)
    return html`<div class="answers ${columns.length > 1 ? 'many' : ''}">
      ${groups.length > 1
        ? html`<div class="versions"><button class="quiet" aria-label="Earlier answer" ?disabled=${at === 0} @click=${() => go(-1)}>${icon('left')}</button>
            <span class="numbers">${at + 1} / ${groups.length}</span>
            <button class="quiet" aria-label="Later answer" ?disabled=${at === groups.length - 1} @click=${() => go(1)}>${icon('right')}</button></div>` : nothing}
      <div class="columns" style="--columns:${columns.length}">${repeat(columns, (each) => each.id, (each) => html`<div class="column">
        <chat-answer data-message=${each.id} .session=${this.session} .message=${each} .isLast=${isLast}
          .others=${this.others.get(each.id) ?? null}></chat-answer>
        ${columns.length > 1 && isLast
          ? html`<label class="check"><input type="radio" name="chosen-${group}" .checked=${each.id === message.id} @change=${() => this.session.choose(each)} />
              The conversation goes on with this one</label>` : nothing}</div>`)}</div>
      ${columns.length > 1 && columns.every((each) => each.answer!.status === 'done')
        ? html`<compare-view .session=${this.session} .messages=${columns}></compare-view>` : nothing}
    </div>`
  }

  private scored(event: CustomEvent<{ message: Message; values: number[] }>): void {
    this.others.set(event.detail.message.id, event.detail.values)
    this.requestUpdate()
  }
}
