// The panels beside the drawings: each has a line that says what it means, and its numbers as text.

import { html, nothing, type TemplateResult } from 'lit'
import { styleMap } from 'lit/directives/style-map.js'
import { count, counted, duration, percent, shortId } from './format'
import { quantile, type EngineModel, type Sample } from './model'
import type { LiveBill, Span } from './protocol'

/** Colours of the parts of a time, from the theme. */
const TONES: Record<string, string> = {
  compute: 'var(--series-3)',
  recompute: 'var(--series-2)',
  others: 'var(--series-1)',
  host: 'var(--series-5)',
  ranks: 'var(--series-4)',
  preempted: 'var(--bad)',
  starved: 'var(--series-6)',
}

export interface Part {
  name: string
  text: string
  /** Seconds, unless the bar says otherwise. */
  value: number
  color: string
}

/** A bar of parts that fill it, and the same as a list. */
export function stackedBar(parts: Part[], label: string, format: (value: number) => string = duration): TemplateResult {
  const whole = parts.reduce((sum, part) => sum + part.value, 0) || 1
  const shown = parts.filter((part) => part.value > 0)
  return html`
    <div class="stack" role="img" aria-label="${label}: ${shown.map((p) => `${p.name} ${percent(p.value / whole)}`).join(', ')}">
      ${shown.map((part) => html`<span style=${styleMap({ flexGrow: `${part.value / whole}`, background: part.color })}></span>`)}
    </div>
    <ul class="parts numbers">
      ${shown.map(
        (part) => html`<li>
          <span class="swatch" style=${styleMap({ background: part.color })}></span>
          <span class="part-name">${part.text}</span>
          <span>${format(part.value)}</span><b>${percent(part.value / whole)}</b>
        </li>`,
      )}
    </ul>
  `
}

export function tile(label: string, value: string, note: string, tone = ''): TemplateResult {
  return html`<div class="tile ${tone}">
    <span class="tile-label">${label}</span><strong class="numbers">${value}</strong><span class="tile-note">${note}</span>
  </div>`
}

export function timePanel(model: EngineModel, seconds: number, until: number): TemplateResult {
  const found = model.timeParts(seconds, until)
  const parts: Part[] = [
    { name: 'floor', text: 'floor: the least that this hardware needs', value: found.floor, color: 'var(--series-3)' },
    { name: 'above the floor', text: model.state.floors ? 'above the floor' : 'in steps', value: found.above, color: 'var(--series-1)' },
    { name: 'host', text: 'between steps: planning and sending', value: found.host, color: 'var(--series-5)' },
    { name: 'under way', text: 'a step that has not ended', value: found.underWay, color: 'var(--series-6)' },
    { name: 'idle', text: 'idle: no request is here', value: found.idle, color: 'var(--line)' },
  ]
  return html`<section class="card panel">
    <h2>Time</h2>
    <p class="hint">The last ${seconds} seconds, split. The parts add up to 100%: what is not floor can be won back.</p>
    ${stackedBar(parts, 'Time of the engine')}
    ${model.state.floors
      ? nothing
      : html`<p class="hint">No floor is shown: this machine was not measured. Run <code>transect hardware</code> once, and start the server again.</p>`}
  </section>`
}

/** Latencies as points over time, with their target as a line. */
function latencyPlot(samples: Sample[], target: number, seconds: number, until: number, name: string): TemplateResult {
  const shown = samples.filter((each) => each.at > until - seconds && each.at <= until + 1e-6)
  const values = shown.map((each) => each.value)
  const [p50, p99] = [quantile(values, 0.5), quantile(values, 0.99)]
  const met = shown.length ? values.filter((value) => value <= target).length / shown.length : null
  const top = Math.max(target * 1.25, (p99 ?? 0) * 1.1, 1e-3)
  const every = Math.max(1, Math.ceil(shown.length / 400))
  const y = (value: number) => 60 - (Math.min(value, top) / top) * 56
  const points = shown.filter((_, i) => i % every === 0)
  return html`
    <svg class="plot" viewBox="0 0 300 62" preserveAspectRatio="none" role="img"
      aria-label="${name}: median ${duration(p50)}, 99th percentile ${duration(p99)}, target ${duration(target)}">
      <line class="target" x1="0" x2="300" y1=${y(target)} y2=${y(target)}></line>
      <path class="points" d=${points.map((p) => `M${(300 - ((until - p.at) / seconds) * 300).toFixed(1)} ${y(p.value).toFixed(1)}h0`).join('')}></path>
    </svg>
    <p class="figures numbers">
      <span>median <b>${duration(p50)}</b></span><span>p99 <b>${duration(p99)}</b></span>
      <span class=${met === null ? '' : met >= 0.99 ? 'good' : met >= 0.9 ? 'fair' : 'bad'}>
        ${met === null ? 'none in this time' : html`<b>${percent(met)}</b> within the target`}
      </span>
    </p>
  `
}

export function latencyPanel(
  model: EngineModel,
  targets: { ttft: number; itl: number },
  change: (name: 'ttft' | 'itl', ms: number) => void,
  seconds: number,
  until: number,
): TemplateResult {
  const field = (name: 'ttft' | 'itl', label: string) => html`<label class="target-field">${label}
    <input type="number" min="1" step="1" .value=${String(Math.round(targets[name] * 1000))}
      @change=${(event: Event) => change(name, Number((event.target as HTMLInputElement).value))} /></label>`
  return html`<section class="card panel">
    <h2>Latency against targets</h2>
    <p class="hint">TTFT: from a request's arrival to its first token. ITL: between two tokens of an answer. Every point is
      one of them; the dashed line is the target.</p>
    <div class="latency"><h3>TTFT</h3>${field('ttft', 'Target of TTFT, ms')}</div>
    ${latencyPlot(model.ttft, targets.ttft, seconds, until, 'TTFT')}
    <div class="latency"><h3>ITL</h3>${field('itl', 'Target of ITL, ms')}</div>
    ${latencyPlot(model.itl, targets.itl, seconds, until, 'ITL')}
  </section>`
}

const REASONS: Record<string, string> = {
  places: 'all places for sequences are taken (max_num_seqs)',
  kv: 'too few KV blocks are free for its tokens',
  adapters: 'other adapters take all places for adapters (max_loras)',
  budget: 'the step is full: its budget of tokens is spent',
  batch: 'the static batch runs to its end first',
  flight: 'the step under way has to end first',
}

export function waitingPanel(model: EngineModel, until: number, follow: (id: string) => void): TemplateResult {
  const order = new Map(model.waiting.map(([seq], place) => [seq, place]))
  const waits = model.open
    .filter((each) => each.state === 'waiting')
    .sort((a, b) => (order.get(a.seq) ?? 1e9) - (order.get(b.seq) ?? 1e9) || a.arrival - b.arrival)
  const reason = (place: number, preempted: boolean) => {
    const head = REASONS[model.reason] ?? 'the step under way has to end first'
    if (preempted) return `preempted, its blocks went to others; ${place ? 'behind the head of the queue' : head}`
    return place ? 'behind the head of the queue' : head
  }
  return html`<section class="card panel">
    <h2>Waiting <span class="count numbers">${model.queue?.waiting ?? waits.length}</span></h2>
    <p class="hint">Requests without KV blocks, in the order of their turns. The scheduler says why the first of them was not
      admitted to the last step; the others wait behind it.</p>
    ${model.elsewhere ? html`<p class="notice">${counted(model.elsewhere, 'request')} wait for a grammar or an adapter.</p>` : nothing}
    ${waits.length
      ? html`<div class="scroll" tabindex="0" role="region" aria-label="Waiting requests">
          <table><thead><tr><th scope="col">Request</th><th scope="col">Waits</th><th scope="col">Prompt</th><th scope="col">Because</th></tr></thead>
          <tbody class="numbers">${waits.slice(0, 50).map(
            (each, place) => html`<tr>
              <td><button class="link" @click=${() => follow(each.id)}>${shortId(each.id)}</button></td>
              <td>${duration(Math.max(0, until - each.arrival))}</td><td>${count(each.prompt)}</td>
              <td class="because">${reason(place, each.preempted)}</td>
            </tr>`,
          )}</tbody></table></div>`
      : html`<p class="empty">No request waits.</p>`}
  </section>`
}

function spanOf(span: Span, name: string, words: Record<string, string>): TemplateResult {
  const parts = Object.entries(span.parts_ms).map(([part, ms]) => ({
    name: part,
    text: words[part] ?? part,
    value: ms / 1000,
    color: TONES[part] ?? (part.startsWith('queue') ? 'var(--series-2)' : 'var(--series-7)'),
  }))
  const floor = span.floor_ms === null ? '' : ` · floor of its own tokens ${duration(span.floor_ms / 1000)}`
  return html`<h3>${name} <span class="numbers soft">${duration(span.ms / 1000)}${floor}</span></h3>
    ${parts.length ? stackedBar(parts, name) : html`<p class="empty">Nothing yet.</p>`}`
}

export function billPanel(
  model: EngineModel,
  bill: LiveBill | null,
  followed: string,
  follow: (id: string) => void,
): TemplateResult {
  const requests = [...model.requests.values()].sort((a, b) => b.arrival - a.arrival).slice(0, 60)
  const missing = followed && !requests.some((each) => each.id === followed)
  return html`<section class="card panel">
    <h2>Bill of a request</h2>
    <p class="hint">Where each millisecond of one request goes, while it runs. Click a line of the strip, or choose here.</p>
    <label class="follow">Request
      <select @change=${(event: Event) => follow((event.target as HTMLSelectElement).value)}>
        <option value="" ?selected=${!followed}>none</option>
        ${missing ? html`<option value=${followed} selected>${shortId(followed)}</option>` : nothing}
        ${requests.map(
          (each) => html`<option value=${each.id} ?selected=${each.id === followed}>
            ${shortId(each.id)} · ${each.prompt} + ${each.tokens} tokens · ${each.reason || each.state}</option>`,
        )}
      </select></label>
    ${!followed
      ? html`<p class="empty">No request is chosen.</p>`
      : !bill || !bill.known
        ? html`<p class="empty">Nothing is known of this request yet, or it ended too long ago.</p>`
        : billBody(bill, model.state.words.parts)}
  </section>`
}

/** A bill: its tokens, and the parts of its time. */
export function billBody(bill: LiveBill, words: Record<string, string>): TemplateResult {
  return html`
    <p class="figures numbers">
      <span>prompt <b>${count(bill.prompt_tokens)}</b></span><span>answer <b>${count(bill.output_tokens)}</b> tokens</span>
      <span>${bill.finish_reason ? html`ended: <b>${bill.finish_reason}</b>` : html`<b>${bill.first_token ? 'decodes' : 'has no token yet'}</b>`}</span>
    </p>
    ${bill.ttft ? spanOf(bill.ttft, bill.first_token ? 'To the first token' : 'So far', words) : nothing}
    ${bill.decode ? spanOf(bill.decode, 'From there to the newest token', words) : nothing}
  `
}

export function routerPanel(model: EngineModel): TemplateResult | typeof nothing {
  if (model.state.engines < 2) return nothing
  const most = Math.max(1, ...model.routes.flatMap((each) => each.offers.map(([, load, tokens]) => load + tokens)))
  return html`<section class="card panel wide">
    <h2>Router</h2>
    <p class="hint">A request goes to the replica that would finish it first: the tokens that it has to compute already, and
      those of the prompt that its prefix cache does not have. The smallest sum wins.</p>
    ${model.routes.length
      ? html`<div class="scroll" tabindex="0" role="region" aria-label="Choices of the router">
          <table><thead><tr><th scope="col">Request</th><th scope="col">Went to</th><th scope="col">Replica: load + tokens of the prompt</th></tr></thead>
          <tbody class="numbers">${[...model.routes].reverse().slice(0, 12).map(
            (each) => html`<tr><td>${shortId(each.id)}</td><td>replica ${each.to}</td><td>
              ${each.offers.map(
                ([replica, load, tokens]) => html`<div class="offer ${replica === each.to ? 'won' : ''}">
                  <span>${replica}</span>
                  <span class="offer-bar"><i style=${styleMap({ width: `${(100 * load) / most}%`, background: 'var(--series-7)' })}></i><i
                    style=${styleMap({ width: `${(100 * tokens) / most}%`, background: 'var(--series-1)' })}></i></span>
                  <span>${count(load)} + ${count(tokens)}</span></div>`,
              )}</td></tr>`,
          )}</tbody></table></div>`
      : html`<p class="empty">No request has come since the server was started.</p>`}
  </section>`
}

/** The strip as a table, for those who read rather than look. */
export function stepsTable(model: EngineModel, until: number): TemplateResult {
  const steps = model.recent(60, until).slice(-20).reverse()
  return html`<div class="scroll" tabindex="0" role="region" aria-label="The newest steps">
    <table><caption class="hidden-text">The newest steps</caption>
      <thead><tr><th scope="col">Step</th><th scope="col">Prefill</th><th scope="col">Decode</th><th scope="col">Rows</th>
        <th scope="col">Took</th><th scope="col">Floor</th><th scope="col">Launched</th></tr></thead>
      <tbody class="numbers">${steps.map(
        (step) => html`<tr><td>${step.number}</td><td>${step.prefill}</td><td>${step.decode}</td><td>${step.rows.length / 3}</td>
          <td>${duration(step.end - step.begin)}</td><td>${step.floor ? duration(step.floor) : '–'}</td><td>${step.launched || '–'}</td></tr>`,
      )}</tbody></table></div>`
}

export function blocksTable(model: EngineModel): TemplateResult {
  const held = new Map<number, [number, number]>()
  model.owners.forEach((owner, block) => {
    if (owner < 0) return
    const [own, shared] = held.get(owner) ?? [0, 0]
    held.set(owner, model.users[block]! > 1 ? [own, shared + 1] : [own + 1, shared])
  })
  return html`<div class="scroll" tabindex="0" role="region" aria-label="KV blocks by request">
    <table><caption class="hidden-text">KV blocks by request</caption>
      <thead><tr><th scope="col">Request</th><th scope="col">Own blocks</th><th scope="col">Shared blocks</th></tr></thead>
      <tbody class="numbers">${[...held].map(([owner, [own, shared]]) => {
        const request = model.requestOf(owner)
        return html`<tr><td>${request ? shortId(request.id) : owner}</td><td>${own}</td><td>${shared}</td></tr>`
      })}</tbody></table></div>`
}
