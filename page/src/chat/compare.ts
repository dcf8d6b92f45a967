// <compare-view>: figures of answers side by side, and the log-probability of each answer by each of the others.

import { html, nothing } from 'lit'
import { customElement, property, state } from 'lit/decorators.js'
import type { Api } from '../api'
import { PageElement } from '../element'
import { type Bill, duration, fetchBill } from './bill'
import { speedOf } from './generate'
import type { Session } from './session'
import type { Answer, Message } from './types'

interface Scored {
  choices: { logprobs: { token_logprobs: (number | null)[] } }[]
}

/**
 * Compute the log-probability of each token of an answer by a lane, given the answer's own prompt.
 *
 * The tokens are sent as ids, so both models must have the same vocabulary.
 */
export async function scoreTokens(api: Api, model: string, answer: Answer): Promise<number[]> {
  const prompt = [...answer.promptTokenIds, ...answer.tokenIds]
  const body = { ...(model ? { model } : {}), prompt, echo: true, max_tokens: 0, logprobs: 0, temperature: 0 }
  const { choices } = await api.post<Scored>('v1/completions', body)
  return choices[0]!.logprobs.token_logprobs.slice(answer.promptTokenIds.length).map((each) => each ?? 0)
}

@customElement('compare-view')
export class CompareView extends PageElement {
  @property({ attribute: false }) session!: Session
  @property({ attribute: false }) messages: Message[] = []
  @state() private bills = new Map<string, Bill>()
  /** Mean log-probability of a token, by the answer's message and the lane's message. */
  @state() private scores = new Map<string, number>()
  @state() private problem = ''
  @state() private busy = false

  private async loadBills(): Promise<void> {
    for (const { id, answer } of this.messages) {
      try {
        this.bills = new Map(this.bills).set(id, await fetchBill(this.session.apiOf(answer!.lane), answer!))
      } catch {
        // A server of another make has no bills.
      }
    }
  }

  private async score(): Promise<void> {
    this.busy = true
    this.problem = ''
    try {
      for (const by of this.messages)
        for (const of of this.messages) {
          const lane = by.answer!.lane
          const values = await scoreTokens(this.session.apiOf(lane), String(by.answer!.body.model ?? lane?.model ?? ''), of.answer!)
          const sum = values.reduce((total, value) => total + value, 0)
          this.scores = new Map(this.scores).set(`${of.id} ${by.id}`, sum / Math.max(1, values.length))
          if (of !== by) this.dispatchEvent(new CustomEvent('scored', { detail: { message: of, values }, bubbles: true }))
        }
    } catch (error) {
      this.problem = `The answers cannot be scored: ${(error as Error).message}`
    }
    this.busy = false
  }

  protected override render() {
    const names = this.messages.map((each, index) => each.answer!.lane?.name ?? `Answer ${index + 1}`)
    const same = this.messages.every((each) => each.answer!.text === this.messages[0]!.answer!.text)
    const rows: [string, (message: Message) => unknown][] = [
      ['Tokens', ({ answer }) => answer!.tokenIds.length || answer!.tokens.length],
      ['First token after', ({ answer }) => duration(answer!.firstMs)],
      ['Tokens per second', ({ answer }) => speedOf(answer!).toFixed(1)],
      ...(this.bills.size ? ([
        ['Bill: first token', ({ id }) => time(this.bills.get(id)?.ttft?.ms)],
        ['Bill: other tokens', ({ id }) => time(this.bills.get(id)?.decode?.ms)],
      ] as [string, (message: Message) => unknown][]) : []),
      ...this.messages.filter(() => this.scores.size).map((by, index): [string, (message: Message) => unknown] => [
        `Log-probability by ${names[index]}`, (message) => this.cell(message, by)]),
    ]
    return html`<section class="compare card" aria-label="Comparison">
      <div class="table" tabindex="0"><table><thead><tr><th scope="col"><span class="hidden-text">Figure</span></th>${names.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
        <tbody>${rows.map(([name, cell]) => html`<tr><th scope="row">${name}</th>${this.messages.map((each) => html`<td class="numbers">${cell(each)}</td>`)}</tr>`)}</tbody></table></div>
      ${this.scores.size ? html`<p class="soft">Log-probabilities are means over the answer's tokens, in nats, with the difference from the answer's own model.</p>` : nothing}
      ${same ? html`<p class="soft">The answers are the same.</p>` : nothing}
      ${this.problem ? html`<p class="notice warning">${this.problem}</p>` : nothing}
      <div class="actions">
        <button ?disabled=${this.bills.size > 0} @click=${() => void this.loadBills()}>Bills</button>
        <button ?disabled=${this.busy} @click=${() => void this.score()}>${this.busy ? 'Scoring…' : 'Difference of log-probabilities'}</button>
      </div></section>`
  }

  private cell(message: Message, by: Message) {
    const value = this.scores.get(`${message.id} ${by.id}`)
    const own = this.scores.get(`${message.id} ${message.id}`)
    if (value === undefined) return '…'
    if (by === message || own === undefined) return value.toFixed(3)
    const difference = value - own
    return html`${value.toFixed(3)} <small>(${difference >= 0 ? '+' : '−'}${Math.abs(difference).toFixed(3)})</small>`
  }
}

function time(ms: number | undefined): string {
  return ms === undefined ? '–' : duration(ms)
}
