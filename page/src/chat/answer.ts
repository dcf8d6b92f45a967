// <chat-answer>: one answer with its thoughts, text, calls, marks, figures and actions.

import { html, nothing } from 'lit'
import { customElement, property, state } from 'lit/decorators.js'
import { PageElement } from '../element'
import { icon, type IconName } from '../icons'
import './bill'
import { duration } from './bill'
import { speedOf } from './generate'
import { copyText, type MarkdownText } from './markdown-text'
import './markdown-text'
import type { Session } from './session'
import './search-tree'
import './token-view'
import './tool-call'
import type { Answer, Message } from './types'

@customElement('chat-answer')
export class ChatAnswer extends PageElement {
  @property({ attribute: false }) session!: Session
  @property({ attribute: false }) message!: Message
  /** Log-probabilities of the tokens by another lane, for the token view. */
  @property({ attribute: false }) others: number[] | null = null
  @property({ type: Boolean }) isLast = false
  @state() private shows: 'text' | 'tokens' = 'text'
  @state() private billed = false
  @state() private copied = false

  private get answer(): Answer {
    return this.message.answer!
  }

  protected override updated(): void {
    const { text, thoughts, status } = this.answer
    const finished = status !== 'running'
    this.querySelector<MarkdownText>('.answer-text markdown-text')?.show(text, finished)
    this.querySelector<MarkdownText>('.thoughts markdown-text')?.show(thoughts, finished || text !== '')
  }

  private async copy(): Promise<void> {
    await copyText(this.answer.text)
    this.copied = true
    setTimeout(() => (this.copied = false), 1500)
  }

  private branch(event: CustomEvent): void {
    event.stopPropagation()
    this.shows = 'text'
    void this.session.branch(this.message, event.detail.at, event.detail.candidate)
  }

  protected override render() {
    const { answer } = this
    const running = answer.status === 'running'
    return html`<article class="answer" aria-busy=${running} aria-label="Answer${answer.model ? ` of ${answer.model}` : ''}">
      ${answer.lane ? html`<h3 class="lane-name">${answer.lane.name}</h3>` : nothing}
      ${answer.branch ? html`<p class="mark">${icon('branch')} Continued from token ${answer.branch.at + 1} of another answer</p>` : nothing}
      ${answer.search ? html`<search-tree .search=${answer.search}></search-tree>` : nothing}
      ${answer.thoughts ? this.thoughts() : nothing}
      ${this.shows === 'tokens'
        ? html`<token-view .answer=${answer} .count=${answer.tokens.length} .others=${this.others} @branch=${this.branch}></token-view>`
        : html`<div class="answer-text">${jsonOf(answer) ?? html`<markdown-text></markdown-text>`}</div>`}
      ${running && !answer.text && !answer.thoughts && !answer.calls.length
        ? html`<p class="waiting"><i></i><i></i><i></i><span class="hidden-text">The model has the question.</span></p>` : nothing}
      ${answer.calls.map((call) => html`<tool-call .session=${this.session} .message=${this.message} .call=${call}
        .open=${!running && this.isLast}></tool-call>`)}
      ${answer.continuedAt >= 0 ? html`<p class="mark continued">${icon('again')} Another replica of the model went on from token
        ${answer.continuedAt + 1}; its numbers may differ in the last bits.</p>` : nothing}
      ${answer.status === 'stopped' ? html`<p class="mark">${icon('stop')} Stopped</p>` : nothing}
      ${answer.finish === 'length' ? html`<p class="mark">Cut: the answer has all the tokens that it may have</p>` : nothing}
      ${answer.status === 'failed' ? this.failure() : nothing}
      ${running ? this.figures() : this.footer()}
      ${this.billed ? html`<bill-view .api=${this.session.apiOf(answer.lane)} .answer=${answer}></bill-view>` : nothing}
    </article>`
  }

  private thoughts() {
    const { text, calls, status } = this.answer
    const thinking = status === 'running' && !text && !calls.length
    return html`<details class="thoughts"><summary>${thinking ? 'Thinking…' : 'Thoughts'}</summary>
      <markdown-text></markdown-text></details>`
  }

  private failure() {
    return html`<div class="notice bad failure" role="alert"><span>${this.answer.error}</span>
      <button @click=${() => void this.session.retry(this.message)}>${icon('again')} Try again</button></div>`
  }

  private figures() {
    const { answer } = this
    const count = answer.tokenIds.length || answer.tokens.length
    const speed = speedOf(answer)
    return html`<span class="figures numbers">
      ${count ? html`<span>${count} tokens</span>` : nothing}
      ${speed ? html`<span>${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s</span>` : nothing}
      ${answer.firstMs ? html`<span>first after ${duration(answer.firstMs)}</span>` : nothing}
      ${answer.lane || answer.model ? html`<span class="model-name">${answer.model}</span>` : nothing}
    </span>`
  }

  private footer() {
    const { answer } = this
    const action = (name: IconName, label: string, run: () => void, pressed?: boolean) =>
      html`<button class="quiet" @click=${run} title=${label} aria-label=${label}
        aria-pressed=${pressed === undefined ? nothing : pressed}>${icon(name)}</button>`
    return html`<footer class="answer-footer">
      ${action('copy', this.copied ? 'Copied' : 'Copy the answer', () => void this.copy())}
      ${action('again', 'Ask again', () => void this.session.regenerate(this.message))}
      ${answer.tokens.length
        ? action('tokens', 'Tokens and their probabilities', () => (this.shows = this.shows === 'text' ? 'tokens' : 'text'), this.shows === 'tokens')
        : nothing}
      ${answer.requestId ? action('receipt', 'Bill: the time by cause', () => (this.billed = !this.billed), this.billed) : nothing}
      ${this.figures()}
    </footer>`
  }
}

/** Show an answer that is JSON, and nothing else, as such. */
function jsonOf(answer: Answer) {
  const text = answer.text.trim()
  if (answer.status === 'running' || !/^[[{]/.test(text)) return null
  try {
    return html`<figure class="code"><figcaption><span>json</span></figcaption><pre tabindex="0"><code>${JSON.stringify(JSON.parse(text), null, 2)}</code></pre></figure>`
  } catch {
    return null
  }
}
