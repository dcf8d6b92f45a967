// <what-if>: the recent load again, under other settings of the scheduler, on a virtual clock.

import { html, nothing } from 'lit'
import { customElement, property, state } from 'lit/decorators.js'
import { type Api } from '../api'
import { PageElement } from '../element'
import { icon } from '../icons'
import { count, duration, percent } from './format'
import type { State } from './protocol'

interface Latencies {
  requests: number
  tokens_per_second: number
  ttft: Record<string, number>
  itl: Record<string, number>
}

interface Prediction {
  measured: Latencies
  simulated_unchanged: Latencies
  predicted: Latencies
  warnings: string[]
}

/** A setting of the scheduler as a field. */
interface Field {
  name: string
  label: string
  choices?: string[]
}

const FIELDS: Field[] = [
  { name: 'scheduling_policy', label: 'Order' },
  { name: 'max_num_seqs', label: 'Sequences at once' },
  { name: 'max_num_batched_tokens', label: 'Tokens a step' },
  { name: 'num_blocks', label: 'KV blocks' },
]
const ROWS: [string, (found: Latencies) => number | undefined, (value: number) => string, boolean][] = [
  ['TTFT, median', (each) => each.ttft.p50, duration, false],
  ['TTFT, p99', (each) => each.ttft.p99, duration, false],
  ['ITL, median', (each) => each.itl.p50, duration, false],
  ['ITL, p99', (each) => each.itl.p99, duration, false],
  ['Tokens a second', (each) => each.tokens_per_second, count, true],
]

@customElement('what-if')
export class WhatIf extends PageElement {
  @property({ attribute: false }) api!: Api
  @property({ attribute: false }) state!: State
  @state() private busy = false
  @state() private problem = ''
  @state() private found: Prediction | null = null
  @state() private changed = ''

  private async predict(event: SubmitEvent): Promise<void> {
    event.preventDefault()
    const given = new FormData(event.target as HTMLFormElement)
    const set: Record<string, unknown> = {}
    for (const [name, value] of given) if (name !== 'more' && value) set[name] = parsed(String(value))
    for (const line of String(given.get('more') ?? '').split('\n')) {
      const [name, ...rest] = line.split('=')
      if (name?.trim() && rest.length) set[name.trim()] = parsed(rest.join('=').trim())
    }
    ;[this.busy, this.problem, this.found] = [true, '', null]
    this.changed = Object.entries(set).map(([name, value]) => `${name} = ${String(value)}`).join(', ') || 'nothing'
    try {
      this.found = await this.api.post<Prediction>('v1/decisions/what-if', { set, engine: this.state.engine })
    } catch (error) {
      this.problem = error instanceof Error ? error.message : String(error)
    }
    this.busy = false
  }

  protected override render() {
    const { limits, policies } = this.state
    return html`<section class="card panel wide">
      <h2>What if</h2>
      <p class="hint">The recent requests arrive again as they did, and the shipping scheduler serves them with other settings on a
        virtual clock. Step times are predicted from those that were measured.</p>
      <form class="what-if" @submit=${this.predict}>
        ${FIELDS.map(({ name, label }) => html`<label>${label}
          ${name === 'scheduling_policy'
            ? html`<select name=${name}>${(policies ?? []).map((each) => html`<option ?selected=${each === limits[name]}>${each}</option>`)}</select>`
            : html`<input type="number" name=${name} min="1" step="1" placeholder=${String(limits[name] ?? '')} />`}</label>`)}
        <label class="more">Others, one a line<textarea name="more" rows="1" class="mono" spellcheck="false" placeholder="longest_first=true"></textarea></label>
        <button class="main" ?disabled=${this.busy}>${icon('play')} ${this.busy ? 'Replaying …' : 'Replay'}</button>
      </form>
      ${this.problem ? html`<p class="notice bad" role="alert">${this.problem}</p>` : nothing}
      <div role="status">${this.found ? this.table(this.found) : nothing}</div>
    </section>`
  }

  private table(found: Prediction) {
    const { measured, simulated_unchanged: same, predicted } = found
    return html`<p class="hint">Changed: ${this.changed}; ${count(measured.requests)} requests. Compare the last two columns: both are the model's.</p>
      <div class="scroll" tabindex="0" role="region" aria-label="Prediction">
      <table><thead><tr><th scope="col"></th><th scope="col">Measured</th><th scope="col">Model, unchanged</th><th scope="col">Model, changed</th><th scope="col">Change</th></tr></thead>
      <tbody class="numbers">${ROWS.map(([name, of, format, more]) => {
        const [was, before, after] = [of(measured), of(same), of(predicted)]
        if (was === undefined || before === undefined || after === undefined) return nothing
        const change = before ? after / before - 1 : 0
        const tone = Math.abs(change) < 0.02 ? '' : change > 0 === more ? 'passed' : 'refused'
        return html`<tr><th scope="row">${name}</th><td>${format(was)}</td><td>${format(before)}</td><td>${format(after)}</td>
          <td class=${tone}>${change > 0 ? '+' : '−'}${percent(Math.abs(change))}</td></tr>`
      })}</tbody></table></div>
      ${found.warnings.map((each) => html`<p class="notice warning">${each}</p>`)}`
  }
}

function parsed(value: string): unknown {
  try {
    return JSON.parse(value)
  } catch {
    return value
  }
}
