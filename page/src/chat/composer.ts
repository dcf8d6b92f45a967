// <chat-composer>: the field for the next message, with send and stop.

import { html, nothing } from 'lit'
import { customElement, property } from 'lit/decorators.js'
import { PageElement } from '../element'
import { icon } from '../icons'

@customElement('chat-composer')
export class ChatComposer extends PageElement {
  @property({ type: Boolean }) running = false
  @property() note = ''

  private get area(): HTMLTextAreaElement {
    return this.querySelector('textarea')!
  }

  override focus(): void {
    this.area.focus()
  }

  private grow(): void {
    this.area.style.height = 'auto'
    this.area.style.height = `${Math.min(this.area.scrollHeight, window.innerHeight * 0.4)}px`
  }

  private pressed(event: KeyboardEvent): void {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault()
      this.send()
    } else if (event.key === 'Escape' && this.running) this.dispatchEvent(new Event('stop', { bubbles: true }))
  }

  private send(): void {
    const text = this.area.value.trim()
    if (!text || this.running) return
    this.area.value = ''
    this.grow()
    this.dispatchEvent(new CustomEvent('send', { detail: text, bubbles: true }))
  }

  protected override render() {
    return html`<form class="composer" @submit=${(event: Event) => { event.preventDefault(); this.send() }}>
      <textarea rows="1" dir="auto" aria-label="Message" placeholder="Write a message" @input=${this.grow} @keydown=${this.pressed}></textarea>
      <div class="composer-end">
        ${this.note ? html`<span class="soft">${this.note}</span>` : nothing}
        ${this.running
          ? html`<button type="button" class="main round" title="Stop (Escape)" aria-label="Stop" @click=${() => this.dispatchEvent(new Event('stop', { bubbles: true }))}>${icon('stop')}</button>`
          : html`<button class="main round" title="Send (Enter)" aria-label="Send">${icon('send')}</button>`}
      </div></form>`
  }
}
