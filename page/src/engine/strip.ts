// The strip: the steps of the engine over time, and below them one line for each request.

import { html, nothing } from 'lit'
import { customElement, property, state } from 'lit/decorators.js'
import { Drawing, colorOf } from './canvas'
import { counted, duration, percent, shortId } from './format'
import type { EngineModel, Request, Step } from './model'

const AXIS = 18
const STEPS = 74
const GAP = 14
const LEFT = 0
const MOST_LANES = 48

@customElement('step-strip')
export class StepStrip extends Drawing {
  @property({ attribute: false }) model!: EngineModel
  /** Seconds that are shown. */
  @property({ type: Number }) seconds = 10
  /** Time at the right edge, on the engine's clock. */
  @property({ attribute: false }) until = 0
  @property({ attribute: false }) followed: number | null = null
  /** Number of the step that is described below the strip. */
  @state() private chosen: number | null = null

  protected override render() {
    const hidden = this.lanes.filter((each) => each.lane >= MOST_LANES).length
    return html`
      <div class="drawing" tabindex="0" role="group" aria-label="Steps over time. Left and right arrows choose a step."
        @keydown=${this.pressed} @pointermove=${this.pointed} @pointerdown=${this.pointed} @click=${this.clicked}>
        <canvas aria-hidden="true"></canvas>
      </div>
      ${hidden ? html`<p class="hint">${counted(hidden, 'more request')} have no line here.</p>` : nothing}
      <p class="readout numbers" aria-live=${this.chosen === null ? 'off' : 'polite'}>${this.description()}</p>
    `
  }

  protected override updated(): void {
    if (this.palette) this.draw()
  }

  /** Time of the newest step; steps are drawn in seconds before it. */
  @property({ attribute: false }) newest = 0

  private get lanes(): Request[] {
    const from = this.until - this.seconds
    return [...this.model.requests.values()]
      .filter((each) => (each.ended === null || each.ended > from) && each.arrival < this.until)
      .sort((a, b) => a.lane - b.lane)
  }

  private x(time: number): number {
    return LEFT + ((time - (this.until - this.seconds)) / this.seconds) * (this.width - LEFT)
  }

  override draw(): void {
    if (!this.model) return
    const lanes = this.lanes
    const rows = Math.min(MOST_LANES, Math.max(4, ...lanes.map((each) => each.lane + 1)))
    const lane = rows > 24 ? 9 : 13
    const context = this.begin(AXIS + STEPS + GAP + rows * lane + 6)
    if (!context) return
    const steps = this.model.steps.filter((each) => each.end > this.until - this.seconds && each.begin < this.until)
    this.drawAxis(context)
    this.drawSteps(context, steps)
    this.drawLanes(context, lanes.filter((each) => each.lane < rows), steps, lane)
  }

  private drawAxis(context: CanvasRenderingContext2D): void {
    const every = this.seconds > 20 ? 5 : this.seconds > 8 ? 2 : 1
    context.fillStyle = this.palette.faint
    context.strokeStyle = this.palette.line
    context.lineWidth = 1
    context.beginPath()
    for (let back = 0; back <= this.seconds; back += every) {
      const x = Math.round(this.x(this.until - back)) - 0.5
      context.moveTo(x, AXIS)
      context.lineTo(x, this.height)
      context.textAlign = back ? 'center' : 'right'
      const ago = back + Math.max(0, this.newest - this.until)
      if (x > 14) context.fillText(ago < 0.5 ? 'now' : `−${Math.round(10 * ago) / 10} s`, Math.min(x, this.width - 2), AXIS / 2)
    }
    context.stroke()
  }

  /** Draw steps as blocks: as wide as they took, filled up to the part of their time that is floor. */
  private drawSteps(context: CanvasRenderingContext2D, steps: Step[]): void {
    const { prefill, decode, raised, text, warning } = this.palette
    const bottom = AXIS + STEPS
    for (const step of steps) {
      const [x, right] = [this.x(step.begin), this.x(step.end)]
      const width = Math.max(1, right - x - (right - x > 4 ? 1 : 0))
      const whole = step.prefill + step.decode || 1
      const share = step.prefill / whole
      context.fillStyle = raised
      context.fillRect(x, AXIS + 4, width, STEPS - 4)
      let y = AXIS + 4
      for (const [color, part] of [[prefill, share], [decode, 1 - share]] as const) {
        const height = (STEPS - 4) * part
        context.fillStyle = color
        context.globalAlpha = 0.42
        context.fillRect(x, y, width, height)
        y += height
      }
      const filled = Math.min(1, step.floor / (step.end - step.begin || 1)) * (STEPS - 4)
      context.globalAlpha = 1
      context.fillStyle = share > 0.5 ? prefill : decode
      context.fillRect(x, bottom - filled, width, filled)
      if (step.launched === 'eager' || step.launched === 'captured') {
        context.fillStyle = warning
        context.fillRect(x, AXIS + 1, width, 3)
      }
      if (step.number === this.chosen) {
        context.strokeStyle = text
        context.lineWidth = 1.5
        context.strokeRect(x - 0.5, AXIS + 3, Math.max(3, width + 1), STEPS - 2)
      }
    }
  }

  private drawLanes(context: CanvasRenderingContext2D, lanes: Request[], steps: Step[], lane: number): void {
    const top = AXIS + STEPS + GAP
    const { prefill, faint, dark, text, bad } = this.palette
    const middle = (request: Request) => top + request.lane * lane + lane / 2
    const last = this.until
    for (const request of lanes) {
      const y = middle(request)
      const from = Math.max(this.x(request.arrival), 0)
      const to = this.x(Math.min(request.ended ?? last, last))
      context.strokeStyle = request.seq === this.followed ? text : colorOf(request.seq, dark)
      context.globalAlpha = request.state === 'waiting' && request.ended === null ? 0.55 : 0.4
      context.lineWidth = request.seq === this.followed ? 2 : 1
      context.setLineDash(request.state === 'waiting' ? [3, 3] : [])
      context.beginPath()
      context.moveTo(from, y)
      context.lineTo(Math.max(from + 1, to), y)
      context.stroke()
    }
    context.setLineDash([])
    context.globalAlpha = 1
    for (const step of steps) {
      const [x, right] = [this.x(step.begin), this.x(step.end)]
      const gap = right - x > 5 ? 1 : 0
      for (let i = 0; i < step.rows.length; i += 3) {
        const request = this.model.requestOf(step.rows[i]!)
        if (!request || request.lane >= MOST_LANES) continue
        const reads = step.rows[i + 1]! < request.prompt
        const thick = reads ? lane - 2 : Math.max(3, lane * 0.5)
        context.fillStyle = reads ? prefill : colorOf(request.seq, dark)
        context.fillRect(x, middle(request) - thick / 2, Math.max(1, right - x - gap), thick)
      }
    }
    for (const request of lanes) {
      if (request.ended === null || request.ended > last) continue
      const x = this.x(request.ended)
      context.fillStyle = request.reason === 'error' || request.reason === 'abort' ? bad : faint
      context.fillRect(x, middle(request) - lane * 0.35, 2, lane * 0.7)
    }
    context.textAlign = 'left'
    for (const request of lanes) {
      if (request.state !== 'waiting' || request.ended !== null) continue
      const x = Math.max(2, this.x(request.arrival) + 4)
      const label = request.preempted ? 'preempted' : 'waits'
      context.fillStyle = this.palette.surface
      context.fillRect(x - 2, middle(request) - 5, context.measureText(label).width + 4, 10)
      context.fillStyle = faint
      context.fillText(label, x, middle(request))
    }
  }

  private readonly pressed = (event: KeyboardEvent): void => {
    const steps = this.model.steps
    if (!steps.length || !['ArrowLeft', 'ArrowRight', 'Home', 'End', 'Escape'].includes(event.key)) return
    event.preventDefault()
    if (event.key === 'Escape') return void (this.chosen = null)
    const at = steps.findIndex((each) => each.number === this.chosen)
    const moved = { ArrowLeft: at < 0 ? steps.length - 1 : at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1 }
    const next = moved[event.key as keyof typeof moved]!
    const step = steps[Math.max(0, Math.min(steps.length - 1, next))]!
    this.chosen = step.number
    this.dispatchEvent(new CustomEvent('moment', { detail: step, bubbles: true }))
  }

  private readonly pointed = (event: PointerEvent): void => {
    const time = this.timeAt(event)
    const step = this.model.steps.find((each) => each.begin <= time && time <= each.end)
    if (step) this.chosen = step.number
  }

  private timeAt(event: MouseEvent): number {
    const x = event.clientX - this.canvas.getBoundingClientRect().left
    return this.until - this.seconds + (x / this.width) * this.seconds
  }

  /** A click on a request's line follows that request. */
  private readonly clicked = (event: MouseEvent): void => {
    const y = event.clientY - this.canvas.getBoundingClientRect().top - AXIS - STEPS - GAP
    const lanes = this.lanes
    const rows = Math.max(4, ...lanes.map((each) => each.lane + 1))
    const lane = Math.floor(y / (Math.min(rows, MOST_LANES) > 24 ? 9 : 13))
    const found = lanes.filter((each) => each.lane === lane && each.arrival <= this.timeAt(event)).at(-1)
    if (found) this.dispatchEvent(new CustomEvent('follow', { detail: found.id, bubbles: true }))
  }

  /** One step in words. */
  private description(): string {
    const step = this.model.steps.find((each) => each.number === this.chosen)
    if (!step) return 'Point at a step, or choose one with the arrow keys, to read what it did.'
    const took = step.end - step.begin
    const ids: string[] = []
    for (let i = 0; i < step.rows.length; i += 3) {
      const request = this.model.requestOf(step.rows[i]!)
      if (request) ids.push(shortId(request.id))
    }
    const kind = step.prefill && step.decode ? 'prefill beside decode' : step.prefill ? 'prefill' : 'decode'
    const parts = [
      `Step ${step.number}: ${kind}, ${counted(step.prefill + step.decode, 'token')} of ${counted(step.rows.length / 3, 'row')}`,
      step.floor ? `${duration(took)}, floor ${duration(step.floor)} (${percent(step.floor / took)})` : duration(took),
    ]
    if (step.launched) parts.push(step.launched === 'graph' ? 'CUDA graph' : step.launched)
    if (step.late) parts.push(this.model.state.words.late[step.late] ?? step.late)
    if (ids.length) parts.push(`requests ${ids.slice(0, 8).join(', ')}${ids.length > 8 ? ' …' : ''}`)
    return parts.join(' · ')
  }
}
