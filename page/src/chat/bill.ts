// <bill-view>: the time of a request by cause, as the server's bill says. The parts sum to the whole.

import { html, nothing } from 'lit'
import { customElement, property, state } from 'lit/decorators.js'
import type { Api } from '../api'
import { PageElement } from '../element'
import type { Answer } from './types'

export interface BillSpan {
  ms: number
  parts_ms: Record<string, number>
  floor_ms: number | null
  tokens: number
}

export interface Bill {
  prompt_tokens: number
  cached_tokens: number
  output_tokens: number
  engines: number
  ttft: BillSpan | null
  decode: BillSpan | null
}

/** Ask a server for the bill of an answer. */
export function fetchBill(api: Api, answer: Answer): Promise<Bill> {
  return api.get<Bill>(`v1/requests/${encodeURIComponent(answer.requestId)}/bill?choice=${answer.choice}`)
}

/** Write a time so that three digits count. */
export function duration(ms: number): string {
  if (ms >= 100_000) return `${(ms / 1000).toFixed(0)} s`
  if (ms >= 1000) return `${(ms / 1000).toFixed(ms >= 10_000 ? 1 : 2)} s`
  return ms >= 10 ? `${ms.toFixed(0)} ms` : `${ms.toFixed(1)} ms`
}

@customElement('bill-view')
export class BillView extends PageElement {
  @property({ attribute: false }) api!: Api
  @property({ attribute: false }) answer!: Answer
  @state() private bill: Bill | null = null
  @state() private problem = ''

  override connectedCallback(): void {
    super.connectedCallback()
    void this.load()
  }

  private async load(): Promise<void> {
    try {
      this.bill = await fetchBill(this.api, this.answer)
    } catch (error) {
      this.problem = `There is no bill: ${(error as Error).message}`
    }
  }

  protected override render() {
    if (this.problem) return html`<p class="notice">${this.problem}</p>`
    if (!this.bill) return html`<p class="soft">Reading the bill…</p>`
    const { ttft, decode, cached_tokens, prompt_tokens, engines } = this.bill
    return html`
      ${ttft ? this.span('To the first token', ttft, `${prompt_tokens} prompt tokens, ${cached_tokens} from the cache`) : nothing}
      ${decode ? this.span('The other tokens', decode, `${decode.tokens} tokens`) : nothing}
      ${engines > 1 ? html`<p class="soft">${engines} replicas had this request, one after another.</p>` : nothing}
    `
  }

  private span(title: string, span: BillSpan, note: string) {
    const parts = Object.entries(span.parts_ms).sort((a, b) => b[1] - a[1])
    return html`<section class="bill">
      <h4>${title} <span class="numbers">${duration(span.ms)}</span> <small>${note}${span.floor_ms ? html`; floor ${duration(span.floor_ms)}` : nothing}</small></h4>
      <div class="bill-bar" aria-hidden="true">
        ${parts.map(([, ms], index) => html`<i style="flex-grow:${ms};background:var(--series-${(index % 7) + 1})"></i>`)}
      </div>
      <dl>${parts.map(([name, ms], index) => html`<div>
        <dt><i style="background:var(--series-${(index % 7) + 1})"></i>${name}</dt><dd class="numbers">${duration(ms)}</dd></div>`)}</dl>
    </section>`
  }
}
