// <chat-list>: the kept conversations, with export and import.

import { html, nothing } from 'lit'
import { customElement, property, state } from 'lit/decorators.js'
import { PageElement } from '../element'
import { icon } from '../icons'
import type { Conversation } from './types'

@customElement('chat-list')
export class ChatList extends PageElement {
  @property({ attribute: false }) conversations: Conversation[] = []
  @property() shown = ''
  @state() private filter = ''
  @state() private renaming = ''

  private say(name: string, detail?: unknown): void {
    this.dispatchEvent(new CustomEvent(name, { detail, bubbles: true }))
  }

  private chosen(event: Event): void {
    const input = event.target as HTMLInputElement
    const file = input.files?.[0]
    if (file) this.say('import-file', file)
    input.value = ''
  }

  private rename(conversation: Conversation, event: Event): void {
    event.preventDefault()
    const title = String(new FormData(event.target as HTMLFormElement).get('title') ?? '').trim()
    this.renaming = ''
    if (title) this.say('rename', { conversation, title })
  }

  protected override render() {
    const wanted = this.filter.toLowerCase()
    const found = this.conversations.filter((each) => textOf(each).toLowerCase().includes(wanted))
    return html`
      <button class="new-chat" @click=${() => this.say('new-chat')}>${icon('plus')} New chat</button>
      ${this.conversations.length > 7
        ? html`<input type="search" placeholder="Search" aria-label="Search conversations"
            @input=${(event: Event) => (this.filter = (event.target as HTMLInputElement).value)} />` : nothing}
      <ul>${found.map((each) => this.entry(each))}</ul>
      <div class="list-end">
        <button class="quiet" @click=${() => this.say('export-all')} ?disabled=${!this.conversations.length}>${icon('download')} Export</button>
        <button class="quiet" @click=${() => this.querySelector<HTMLInputElement>('.import')!.click()}>${icon('upload')} Import</button>
        <input class="import" type="file" accept=".json,application/json" hidden @change=${this.chosen} />
      </div>
      <p class="soft">Conversations are kept in this browser only.</p>
    `
  }

  private entry(each: Conversation) {
    if (this.renaming === each.id)
      return html`<li><form @submit=${(event: Event) => this.rename(each, event)}>
        <input name="title" aria-label="New name" .value=${each.title} @blur=${() => (this.renaming = '')} /></form></li>`
    const title = each.title || 'Untitled'
    return html`<li class=${each.id === this.shown ? 'shown' : ''}>
      <a href="#/chat/${each.id}" aria-current=${each.id === this.shown ? 'true' : nothing} title=${title} dir="auto">${title}</a>
      <button class="quiet" title="Rename" aria-label="Rename ${title}" @click=${() => this.startRenaming(each)}>${icon('edit')}</button>
      <button class="quiet" title="Delete" aria-label="Delete ${title}" @click=${() => this.say('delete', each)}>${icon('trash')}</button>
    </li>`
  }

  private async startRenaming(each: Conversation): Promise<void> {
    this.renaming = each.id
    await this.updateComplete
    this.querySelector<HTMLInputElement>('li input')?.select()
  }
}

function textOf(conversation: Conversation): string {
  return [conversation.title, ...Object.values(conversation.messages).map((each) => each.answer?.text ?? each.text)].join('\n')
}
