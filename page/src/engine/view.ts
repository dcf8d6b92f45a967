// The live view of the engine: its steps, queue, KV blocks and times, while somebody looks.

import { html, nothing } from 'lit'
import { customElement, property, state } from 'lit/decorators.js'
import { type Api, ApiProblem } from '../api'
import { PageElement } from '../element'
import { icon } from '../icons'
import { count, counted, duration, percent } from './format'
import './kv'
import { EngineModel, quantile, type Step } from './model'
import { billPanel, blocksTable, latencyPanel, routerPanel, stepsTable, tile, timePanel, waitingPanel } from './panels'
import { modelAt } from './past'
import type { LiveEvent } from './protocol'
import './strip'
import './what-if'

const AGAIN_MS = 1500
const PANELS_MS = 250
/** The strip shows this much of the past, so that it moves evenly between two deltas. */
const DELAY_S = 0.25
const WINDOWS = [5, 10, 30]

@customElement('engine-view')
export class EngineView extends PageElement {
  @property({ attribute: false }) api!: Api
  /** True while this tab is shown; nothing is fetched otherwise. */
  @property({ type: Boolean }) active = false
  /** Rest of the address behind `#/engine/`: the id of a request to follow. */
  @property() path = ''
  @state() private model: EngineModel | null = null
  @state() private problem = ''
  @state() private link: 'off' | 'connecting' | 'live' | 'lost' = 'off'
  @state() private paused = false
  @state() private seconds = 10
  @state() private engine = 0
  @state() private followed = ''
  @state() private targets = { ttft: 1, itl: 0.1 }
  /** Time that is shown at the right edge of the strip. */
  @state() private until = 0
  /** Time up to which the panels are computed: a few times a second, so that they can be read. */
  @state() private read = 0
  private reading: AbortController | null = null
  private frame = 0
  private panelsAt = 0

  override connectedCallback(): void {
    super.connectedCallback()
    document.addEventListener('visibilitychange', this.decide)
    this.api?.addEventListener('key-changed', this.restart)
    this.api?.addEventListener('found', this.restart)
    this.addEventListener('follow', (event) => this.follow((event as CustomEvent<string>).detail))
    this.addEventListener('keydown', this.pressed)
    this.addEventListener('moment', (event) => this.lookAt((event as CustomEvent<Step>).detail, false))
  }

  override disconnectedCallback(): void {
    document.removeEventListener('visibilitychange', this.decide)
    this.api.removeEventListener('key-changed', this.restart)
    this.api.removeEventListener('found', this.restart)
    this.stop()
    super.disconnectedCallback()
  }

  protected override willUpdate(changed: Map<string, unknown>): void {
    if (changed.has('path') && this.active && this.path !== this.followed) {
      this.followed = this.path
      if (this.reading) queueMicrotask(this.restart)
    }
    if (changed.has('active')) queueMicrotask(this.decide)
  }

  /** Read while the view is shown and not paused; nothing is asked for otherwise. */
  private readonly decide = (): void => {
    const wanted = this.active && !document.hidden && !this.paused
    if (wanted && !this.reading) void this.watch()
    else if (!wanted && this.reading) this.stop()
  }

  private readonly restart = (): void => {
    this.stop()
    this.decide()
  }

  private stop(): void {
    this.reading?.abort()
    this.reading = null
    cancelAnimationFrame(this.frame)
    if (this.link !== 'off') this.link = 'off'
  }

  private async watch(): Promise<void> {
    const reading = (this.reading = new AbortController())
    this.link = 'connecting'
    this.frame = requestAnimationFrame(this.advance)
    while (!reading.signal.aborted) {
      try {
        const query = new URLSearchParams({ engine: String(this.engine), follow: this.followed })
        for await (const event of this.api.watch(`live?${query}`, reading.signal))
          if (event.data) this.take(JSON.parse(event.data) as LiveEvent)
        this.link = 'lost'
      } catch (error) {
        if (reading.signal.aborted) return
        this.link = 'lost'
        this.problem = error instanceof Error ? error.message : String(error)
        if (error instanceof ApiProblem && error.code === 'request_not_found') this.followed = ''
        else if (error instanceof ApiProblem && !error.passing) return this.giveUp()
      }
      await new Promise((done) => setTimeout(done, AGAIN_MS))
    }
  }

  /** Stop after an error that will not pass: a wrong key, or an engine without a log. A new key starts again. */
  private giveUp(): void {
    this.reading = null
    this.model = null
  }

  private take(event: LiveEvent): void {
    if (event.type === 'state') {
      this.model = new EngineModel(event)
      const target = Number(event.limits.itl_target)
      if (target > 0 && !this.targetsChanged) this.targets = { ...this.targets, itl: target }
    } else if (event.type === 'tick') this.model?.take(event)
    else {
      this.link = 'lost'
      this.problem = event.type === 'bye' ? 'The server shuts down.' : `The engine has ended: ${event.reason ?? 'no reason is known'}`
      return
    }
    this.link = 'live'
    this.problem = ''
  }

  private targetsChanged = false

  private readonly advance = (): void => {
    if (!this.reading) return
    const model = this.model
    if (model && this.link === 'live') {
      this.until = model.clock - DELAY_S
      const now = performance.now()
      if (now - this.panelsAt > PANELS_MS) {
        this.panelsAt = now
        this.read = model.now
      }
    }
    this.frame = requestAnimationFrame(this.advance)
  }

  private readonly pressed = (event: KeyboardEvent): void => {
    const target = event.target as HTMLElement
    if (event.key !== ' ' || /^(BUTTON|INPUT|SELECT|SUMMARY|TEXTAREA|A)$/.test(target.tagName)) return
    event.preventDefault()
    this.togglePause()
  }

  private togglePause(): void {
    this.paused = !this.paused
    if (this.model) this.until = this.read = this.model.now
    this.decide()
  }

  private follow(id: string): void {
    this.followed = id
    if (this.model) this.model.bill = null
    history.replaceState(null, '', id ? `#/engine/${encodeURIComponent(id)}` : '#/engine')
    if (this.paused) this.requestUpdate()
    else this.restart()
  }

  private choose(engine: number): void {
    this.engine = engine
    this.model = null
    this.restart()
  }

  protected override render() {
    return html`<div class="engine">
      <header class="engine-head">
        <div>
          <h1>Engine</h1>
          <p class="soft">${this.subtitle()}</p>
        </div>
        <div class="controls">
          <span class="status ${this.paused ? 'paused' : this.link}" role="status">${this.paused ? 'paused' : LINKS[this.link]}</span>
          ${this.model && this.model.state.engines > 1 ? this.engineChoice(this.model.state.engines) : nothing}
          <div class="segments" role="group" aria-label="Seconds that are shown">
            ${WINDOWS.map((each) => html`<button aria-pressed=${this.seconds === each} @click=${() => (this.seconds = each)}>${each} s</button>`)}
          </div>
          ${this.paused && this.model ? this.lookingBack(this.model) : nothing}
          <button @click=${() => this.togglePause()} aria-keyshortcuts="Space">
            ${icon(this.paused ? 'play' : 'pause')} ${this.paused ? 'Resume' : 'Pause'}
          </button>
        </div>
      </header>
      ${this.problem ? html`<p class="notice ${this.model ? 'warning' : 'bad'}" role="alert">${this.problem}</p>` : nothing}
      ${this.model ? this.panels(this.model) : this.problem ? nothing : html`<p class="placeholder">Connecting to the engine …</p>`}
    </div>`
  }

  private subtitle(): string {
    const state = this.model?.state
    if (!state) return 'What the engine does, step by step.'
    const { name, threads, dtype } = state.device
    const model = state.model.split('/').pop() ?? ''
    const device = [name, threads ? counted(threads, 'thread') : '', dtype].filter(Boolean).join(', ')
    return [model, device, state.operator ? '' : 'your own requests only'].filter(Boolean).join(' · ')
  }

  private engineChoice(engines: number) {
    return html`<label class="inline">Replica
      <select @change=${(event: Event) => this.choose(Number((event.target as HTMLSelectElement).value))}>
        ${Array.from({ length: engines }, (_, i) => html`<option value=${i} ?selected=${i === this.engine}>${i}</option>`)}
      </select></label>`
  }

  /** While paused: a slider over the steps that the page still knows. The arrow keys go from step to step. */
  private lookingBack(model: EngineModel) {
    const last = model.steps.length - 1
    const at = model.steps.findLastIndex((step) => step.end <= this.read + 1e-6)
    const move = (event: Event) => this.lookAt(model.steps[Number((event.target as HTMLInputElement).value)], true)
    const ago = Math.max(0, model.now - this.read)
    const step = model.steps[Math.max(0, at)]
    return html`<label class="inline">Look back
      <input type="range" min="0" max=${last} step="1" .value=${String(at < 0 ? last : at)} @input=${move}
        aria-valuetext="step ${step?.number ?? 0}, ${duration(ago)} ago" />
      <span class="numbers look-back">step ${step?.number ?? 0}, ${duration(ago)} ago</span></label>`
  }

  /** Show everything as it was at the end of a step. `whole`: the strip ends there too. */
  private lookAt(step: Step | undefined, whole: boolean): void {
    if (!step || !this.paused) return
    this.read = step.end
    if (whole || step.begin < this.until - this.seconds || step.end > this.until) this.until = step.end
  }

  private panels(whole: EngineModel) {
    const until = this.read || whole.now
    const model = this.paused ? modelAt(whole, until) : whole
    const strip = this.paused && this.until !== until ? modelAt(whole, this.until) : model
    const followed = this.followedSeq(model)
    const operator = model.state.operator
    return html`
      ${this.tiles(model, until)}
      <section class="card panel">
        <h2>Steps</h2>
        <p class="hint">Above, each block is one step: one pass of the model over some tokens of many requests. Its width is its
          time, and it is filled up to its <b>floor</b>, the least time that this hardware needs. Below, each line is a request
          in the colour of its KV blocks.</p>
        <step-strip .model=${strip} .newest=${whole.now} .seconds=${this.seconds} .until=${this.until || whole.now} .followed=${followed}></step-strip>
        <ul class="legend">
          <li><span class="swatch prefill"></span>prefill: reads a prompt</li>
          <li><span class="swatch decode"></span>decode: draws the next token of each answer</li>
          <li><span class="swatch floor"></span>floor</li>
          <li><span class="swatch waits"></span>waits</li>
          ${model.state.device.kind === 'cuda' ? html`<li><span class="swatch eager"></span>launched kernel by kernel, not as a graph</li>` : nothing}
        </ul>
        <details><summary>Steps as a table</summary>${stepsTable(model, until)}</details>
      </section>
      <div class="grid">
        <div class="column">
          ${operator ? timePanel(model, this.seconds, until) : nothing}
          ${this.kvPanel(model, followed)}
          ${waitingPanel(model, until, (id) => this.follow(id))}
        </div>
        <div class="column">
          ${latencyPanel(model, this.targets, this.changeTarget, this.seconds, until)}
          ${billPanel(model, model.bill, this.followed, (id) => this.follow(id))}
        </div>
        ${routerPanel(model)}
        ${operator ? html`<what-if .api=${this.api} .state=${whole.state}></what-if>` : nothing}
      </div>`
  }

  private tiles(model: EngineModel, until: number) {
    const steps = model.recent(this.seconds, until)
    const out = steps.reduce((sum, step) => sum + step.decode, 0)
    const read = steps.reduce((sum, step) => sum + step.prefill, 0)
    const times = steps.map((step) => step.end - step.begin)
    const floors = steps.reduce((sum, step) => sum + step.floor, 0)
    const spent = times.reduce((sum, each) => sum + each, 0)
    const kv = model.blockCounts()
    const used = (kv.own + kv.shared) / Math.max(1, model.owners.length)
    const open = model.open
    const running = open.filter((each) => each.state === 'running').length
    const span = Math.min(this.seconds, Math.max(1, until - (model.steps[0]?.begin ?? until)))
    return html`<div class="tiles">
      ${tile('Decode', `${count(out / span)}/s`, 'tokens drawn')}
      ${tile('Prefill', `${count(read / span)}/s`, 'prompt tokens read')}
      ${tile('Running', count(running), `of at most ${count(Number(model.state.limits.max_num_seqs))}`)}
      ${tile('Waiting', count(open.length - running), open.length > running ? 'see why below' : 'nobody', open.length > running ? 'fair' : '')}
      ${tile('KV blocks', percent(used), `${count(kv.own + kv.shared)} of ${count(model.owners.length)}`, used > 0.95 ? 'fair' : '')}
      ${tile('Step', duration(quantile(times, 0.5)), floors ? `${percent(floors / (spent || 1))} of it is floor` : 'median')}
    </div>`
  }

  private kvPanel(model: EngineModel, followed: number | null) {
    const kv = model.blockCounts()
    const evictions = model.stats.kv_evictions
    const operator = model.state.operator
    const hits = model.stats.prefix_query_tokens ? model.stats.prefix_hit_tokens! / model.stats.prefix_query_tokens : null
    return html`<section class="card panel">
      <h2>KV blocks</h2>
      <p class="hint">The memory of keys and values, in blocks of ${model.state.limits.block_size} tokens. A colour is a request; a
        dot marks blocks that several share; grey ones are free, but a prompt that begins alike can use their contents.</p>
      <kv-map .model=${model} .version=${model.kvVersion} .followed=${followed}></kv-map>
      <ul class="legend">
        <li><span class="swatch mine"></span>of one request</li>
        <li><span class="swatch shared"></span>shared</li>
        <li><span class="swatch cached"></span>${operator ? 'free, contents cached' : 'not yours'}</li>
        ${operator ? html`<li><span class="swatch free"></span>free</li><li><span class="swatch evicted"></span>evicted just now</li>` : nothing}
      </ul>
      <p class="figures numbers">
        <span><b>${count(kv.own)}</b> own</span><span><b>${count(kv.shared)}</b> shared</span>
        ${operator
          ? html`<span><b>${count(kv.cached)}</b> cached</span><span><b>${count(kv.free)}</b> free</span>
              <span><b>${count(evictions ?? 0)}</b> evicted so far</span>
              ${hits === null ? nothing : html`<span><b>${percent(hits)}</b> of prompts found in the cache</span>`}`
          : html`<span><b>${count(kv.hidden)}</b> not yours</span>`}
      </p>
      <details><summary>Blocks as a table</summary>${blocksTable(model)}</details>
    </section>`
  }

  private followedSeq(model: EngineModel): number | null {
    if (!this.followed) return null
    const bare = this.followed.replace(/^(chatcmpl|cmpl|resp|msg)[-_]/, '')
    for (const each of model.requests.values()) if (`${each.id}-`.startsWith(`${bare}-`)) return each.seq
    return null
  }

  private readonly changeTarget = (name: 'ttft' | 'itl', ms: number): void => {
    if (!(ms > 0)) return
    this.targetsChanged = true
    this.targets = { ...this.targets, [name]: ms / 1000 }
  }
}

const LINKS = { off: 'not connected', connecting: 'connecting', live: 'live', lost: 'no connection' }
