// <token-view>: an answer token by token. Each token shows its probability and what else could have stood there.
//
// With the keys: left and right go through the tokens, up and down through the alternatives, Enter continues the
// answer from the alternative, Escape goes back to the token.

import { html, nothing, type PropertyValues } from 'lit'
import { customElement, property, state } from 'lit/decorators.js'
import { guard } from 'lit/directives/guard.js'
import { PageElement } from '../element'
import { icon } from '../icons'
import type { Answer, Candidate, Token } from './types'

const BLOCK = 200
const NAMES: Record<string, string> = { '': 'no text', ' ': 'space', '\n': 'line end', '\n\n': 'two line ends' }
const LEVELS = [0.9, 0.6, 0.3, 0.1, 0.03]

/** Level of surprise of a probability: 0 for a sure token to 5 for a rare one. */
export function levelOf(logprob: number): number {
  const probability = Math.exp(logprob)
  const level = LEVELS.findIndex((least) => probability >= least)
  return level < 0 ? LEVELS.length : level
}

/** Write a probability as a percentage. */
export function percent(logprob: number): string {
  const value = 100 * Math.exp(logprob)
  return value >= 99.95 ? '100%' : value >= 10 ? `${value.toFixed(0)}%` : value >= 0.1 ? `${value.toFixed(1)}%` : '<0.1%'
}

/** Write a token's text so that spaces and line ends can be seen. */
export function visible(text: string): string {
  return text === '' ? '∅' : text.replace(/\n/g, '⏎').replace(/\t/g, '⇥').replace(/^ | $/g, '␣')
}

@customElement('token-view')
export class TokenView extends PageElement {
  @property({ attribute: false }) answer!: Answer
  /** Log-probabilities of the tokens by another model; null if there is none to compare with. */
  @property({ attribute: false }) others: number[] | null = null
  /** Number of tokens: a change of it renders the view anew, since the answer object itself stays. */
  @property({ type: Number }) count = 0
  @property({ type: Boolean }) canBranch = true
  @state() private at = -1
  /** Number of the selected alternative; -1 for none. */
  @state() private alternative = -1
  @state() private place = { left: 0, top: 0 }

  private get tokens(): Token[] {
    return this.answer.tokens
  }

  protected override updated(changed: PropertyValues): void {
    if (changed.has('at' as keyof TokenView) && this.at >= 0) this.placePanel()
  }

  private choicesAt(at: number): Candidate[] {
    const token = this.tokens[at]
    if (!token) return []
    return token.top.some((each) => each.id === token.id && each.text === token.text) ? token.top : [...token.top, token]
  }

  private placePanel(): void {
    const element = this.querySelector<HTMLElement>(`[data-at="${this.at}"]`)
    if (!element) return
    const box = element.getBoundingClientRect()
    const own = this.getBoundingClientRect()
    const place = { left: Math.max(0, Math.min(box.left - own.left, own.width - 300)), top: box.bottom - own.top + 6 }
    if (place.left !== this.place.left || place.top !== this.place.top) this.place = place
    this.querySelector('.token-panel')?.scrollIntoView({ block: 'nearest' })
  }

  private pressed(event: KeyboardEvent): void {
    const last = this.tokens.length - 1
    const choices = this.choicesAt(this.at)
    const moves: Record<string, () => void> = {
      ArrowRight: () => this.go(Math.min(last, this.at + 1)),
      ArrowLeft: () => this.go(Math.max(0, this.at - 1)),
      Home: () => this.go(0),
      End: () => this.go(last),
      ArrowDown: () => (this.alternative = Math.min(choices.length - 1, this.alternative + 1)),
      ArrowUp: () => (this.alternative = Math.max(-1, this.alternative - 1)),
      Enter: () => this.choose(choices[this.alternative]),
      Escape: () => (this.alternative >= 0 ? (this.alternative = -1) : (this.at = -1)),
    }
    if (!moves[event.key] || event.altKey || event.ctrlKey || event.metaKey) return
    event.preventDefault()
    event.stopPropagation()
    moves[event.key]!()
  }

  private go(at: number): void {
    this.at = at
    this.alternative = -1
    this.querySelector(`[data-at="${at}"]`)?.scrollIntoView({ block: 'nearest' })
  }

  private hover(event: Event): void {
    const at = (event.target as HTMLElement).dataset?.at
    if (at !== undefined && Number(at) !== this.at) {
      this.at = Number(at)
      this.alternative = -1
    }
  }

  private choose(candidate: Candidate | undefined): void {
    if (!candidate || candidate.id < 0 || !this.canBranch) return
    this.dispatchEvent(new CustomEvent('branch', { detail: { at: this.at, candidate }, bubbles: true }))
    this.at = this.alternative = -1
  }

  protected override render() {
    const blocks = Array.from({ length: Math.ceil(this.tokens.length / BLOCK) }, (_, index) => index * BLOCK)
    return html`
      <div class="tokens" role="listbox" tabindex="0" aria-label="Tokens of the answer: arrow keys move, Enter continues from an alternative"
        aria-activedescendant=${this.at >= 0 ? this.optionId(this.at) : nothing}
        @keydown=${this.pressed} @mouseover=${this.hover} @click=${this.hover}
        @focus=${() => this.at < 0 && this.tokens.length && this.go(0)} dir="auto">${blocks.map((begin) => this.block(begin))}</div>
      ${this.at >= 0 && this.tokens[this.at] ? this.panel() : nothing}
      <p class="hidden-text" aria-live="polite">${this.spoken()}</p>
    `
  }

  private optionId(at: number): string {
    return `token-${this.answer.requestId}-${this.answer.choice}-${at}`
  }

  private block(begin: number) {
    const part = this.tokens.slice(begin, begin + BLOCK)
    const selected = this.at >= begin && this.at < begin + BLOCK ? this.at : -1
    // Of a long answer only the block with the selected token is rendered again.
    const state = [part.length, selected, this.others, this.answer]
    return html`<span role="presentation">${guard(state, () => part.map((token, index) => this.token(token, begin + index)))}</span>`
  }

  private token(token: Token, at: number) {
    const branched = this.answer.branch?.at === at
    const kind = this.others ? differenceClass(token.logprob - (this.others[at] ?? token.logprob)) : `level-${levelOf(token.logprob)}`
    const text = token.text === '' ? '∅' : token.text.replace(/\n/g, '⏎\n')
    // No white space in this template: it would show between the tokens.
    return html`<span role="option" id=${this.optionId(at)} data-at=${at} aria-selected=${at === this.at} aria-label=${token.text.trim() ? nothing : NAMES[token.text] ?? 'white space'}
      class="token ${kind} ${branched ? 'branched' : ''}">${text}</span>`
  }

  private panel() {
    const token = this.tokens[this.at]!
    const other = this.others?.[this.at]
    return html`<div class="token-panel" style="left:${this.place.left}px;top:${this.place.top}px">
      <p><b class="mono">${visible(token.text)}</b> <span class="numbers">${percent(token.logprob)}</span>
        <small>token ${this.at + 1} of ${this.tokens.length}, log-probability ${token.logprob.toFixed(3)}</small></p>
      ${other === undefined ? nothing : html`<p><small>by the other: ${percent(other)}, ${difference(token.logprob - other)}</small></p>`}
      <ol>${this.choicesAt(this.at).map((each, index) => this.candidate(each, index, each.id === token.id && each.text === token.text))}</ol>
    </div>`
  }

  private candidate(each: Candidate, index: number, drawn: boolean) {
    return html`<li><button tabindex="-1" class="candidate ${index === this.alternative ? 'selected' : ''}" ?disabled=${!this.canBranch || each.id < 0}
      title="Continue the answer from here with this token" @click=${() => this.choose(each)}>
      <span class="mono">${visible(each.text)}</span>${drawn ? html`<small>drawn</small>` : nothing}
      <span class="candidate-bar"><i style="width:${(100 * Math.exp(each.logprob)).toFixed(1)}%"></i></span>
      <span class="numbers">${percent(each.logprob)}</span>${icon('branch')}</button></li>`
  }

  private spoken(): string {
    const token = this.tokens[this.at]
    if (!token) return ''
    const chosen = this.choicesAt(this.at)[this.alternative]
    if (chosen) return `Alternative ${this.alternative + 1}: ${visible(chosen.text)}, ${percent(chosen.logprob)}. Enter continues from here.`
    return `${visible(token.text)}, ${percent(token.logprob)}`
  }
}

function difference(value: number): string {
  return `${value >= 0 ? '+' : '−'}${Math.abs(value).toFixed(3)} nats`
}

/** Class of a token by the difference of its log-probabilities in two models. */
function differenceClass(value: number): string {
  if (Math.abs(value) < 0.05) return 'same'
  const size = Math.abs(value) < 0.5 ? 1 : Math.abs(value) < 2 ? 2 : 3
  return value > 0 ? `more-${size}` : `less-${size}`
}
