// <user-message>: a message of the user, which can be edited; its versions are kept.

import { html, nothing } from 'lit'
import { customElement, property, state } from 'lit/decorators.js'
import { PageElement } from '../element'
import { icon } from '../icons'
import type { Message } from './types'

@customElement('user-message')
export class UserMessage extends PageElement {
  @property({ attribute: false }) message!: Message
  @property({ attribute: false }) siblings: Message[] = []
  @state() private editing = false

  private async edit(): Promise<void> {
    this.editing = true
    await this.updateComplete
    const area = this.querySelector('textarea')!
    area.focus()
    area.setSelectionRange(area.value.length, area.value.length)
  }

  private finish(): void {
    const text = this.querySelector('textarea')!.value.trim()
    this.editing = false
    if (text && text !== this.message.text) this.dispatchEvent(new CustomEvent('edit', { detail: text }))
  }

  private pressed(event: KeyboardEvent): void {
    if (event.key === 'Escape') this.editing = false
    else if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault()
      this.finish()
    }
  }

  protected override render() {
    if (this.editing)
      return html`<div class="user editing"><textarea rows="3" dir="auto" aria-label="Edit the message" .value=${this.message.text} @keydown=${this.pressed}></textarea>
        <div class="actions"><button @click=${() => (this.editing = false)}>Cancel</button>
          <button class="main" @click=${this.finish}>Send again</button></div></div>`
    const at = this.siblings.indexOf(this.message)
    const go = (step: number) => this.dispatchEvent(new CustomEvent('choose', { detail: this.siblings[at + step] }))
    return html`<div class="user"><div class="user-text" dir="auto">${this.message.text}</div>
      <div class="user-actions">
        ${this.siblings.length > 1
          ? html`<button class="quiet" aria-label="Earlier version" ?disabled=${at === 0} @click=${() => go(-1)}>${icon('left')}</button>
              <span class="numbers">${at + 1} / ${this.siblings.length}</span>
              <button class="quiet" aria-label="Later version" ?disabled=${at === this.siblings.length - 1} @click=${() => go(1)}>${icon('right')}</button>` : nothing}
        <button class="quiet" title="Edit" aria-label="Edit the message" @click=${() => void this.edit()}>${icon('edit')}</button>
      </div></div>`
  }
}
