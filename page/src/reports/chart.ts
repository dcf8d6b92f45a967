// A chart of lines and points, with the values at the pointer as text, and as a table.

import { html, nothing, svg } from 'lit'
import { customElement, property, state } from 'lit/decorators.js'
import { PageElement } from '../element'

export interface Series {
  name: string
  color: string
  points: [number, number][]
  /** Points instead of a line. */
  dots?: boolean
  faint?: boolean
}

const HEIGHT = 230
const LEFT = 54
const BOTTOM = 24
const TOP = 10
const RIGHT = 12
const MOST_POINTS = 1500

@customElement('line-chart')
export class LineChart extends PageElement {
  @property({ attribute: false }) series: Series[] = []
  @property() label = ''
  @property() xLabel = 'step'
  /** Both axes in powers of ten. */
  @property({ type: Boolean }) log = false
  @property({ type: Boolean }) zero = false
  @state() private width = 640
  @state() private at: number | null = null
  private readonly observer = new ResizeObserver(([entry]) => (this.width = Math.max(220, entry!.contentRect.width)))

  override connectedCallback(): void {
    super.connectedCallback()
    this.observer.observe(this)
  }

  override disconnectedCallback(): void {
    this.observer.disconnect()
    super.disconnectedCallback()
  }

  protected override render() {
    const all = this.series.flatMap((each) => each.points).filter(([, y]) => Number.isFinite(y))
    if (!all.length) return html`<p class="empty">No values yet.</p>`
    const [xs, ys] = [all.map(([x]) => x), all.map(([, y]) => y)]
    const [x0, x1] = [Math.min(...sample(xs)), Math.max(...sample(xs))]
    const sorted = [...ys].sort((a, b) => a - b)
    const high = sorted[sorted.length - 1]!
    const top = this.log ? high : Math.min(high, sorted[Math.floor(0.995 * (sorted.length - 1))]! * 1.25 + 1e-12)
    const low = this.zero ? 0 : sorted[0]!
    const yTicks = this.log ? decades(low, top) : ticks(low, top)
    const xTicks = this.log ? decades(x0, x1) : ticks(x0, x1)
    const scale = (value: number, from: number, to: number, a: number, b: number) => {
      const f = this.log ? Math.log10 : (v: number) => v
      return a + ((f(value) - f(from)) / (f(to) - f(from) || 1)) * (b - a)
    }
    const [yLow, yHigh] = [Math.min(low, yTicks[0]!), Math.max(top, yTicks.at(-1)!)]
    const [xLow, xHigh] = this.log ? [Math.min(x0, xTicks[0]!), Math.max(x1, xTicks.at(-1)!)] : [x0, x1]
    const x = (value: number) => scale(value, xLow, xHigh, LEFT, this.width - RIGHT)
    const y = (value: number) => scale(Math.min(value, yHigh), yLow, yHigh, HEIGHT - BOTTOM, TOP)
    const move = (event: PointerEvent) => {
      const place = event.clientX - this.getBoundingClientRect().left
      this.at = nearest(all, (point) => Math.abs(x(point[0]) - place))
    }
    const press = (event: KeyboardEvent) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key]
      if (!step) return
      event.preventDefault()
      const values = [...new Set(xs)].sort((a, b) => a - b)
      const now = this.at === null ? values.length : values.findIndex((value) => value >= this.at!)
      this.at = values[Math.max(0, Math.min(values.length - 1, now + step * Math.max(1, Math.floor(values.length / 100))))]!
    }
    const path = (points: [number, number][]) =>
      thin(points).map((point, i) => `${i ? 'L' : 'M'}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`).join('')
    return html`
      <div class="line-chart" tabindex="0" role="group" aria-label="${this.label}. Left and right arrows read values."
        @pointermove=${move} @pointerleave=${() => (this.at = null)} @keydown=${press}>
        <svg width=${this.width} height=${HEIGHT} aria-hidden="true">
          ${yTicks.map((tick) => svg`<line class="rule" x1=${LEFT} x2=${this.width - RIGHT} y1=${y(tick)} y2=${y(tick)}></line>
            <text x=${LEFT - 8} y=${y(tick) + 4} text-anchor="end">${short(tick)}</text>`)}
          ${xTicks.map((tick) => svg`<text x=${x(tick)} y=${HEIGHT - 6} text-anchor="middle">${short(tick)}</text>`)}
          ${this.series.map((each) =>
            each.dots
              ? each.points.map((point) => svg`<circle cx=${x(point[0])} cy=${y(point[1])} r="4" style="fill:${each.color}"></circle>`)
              : svg`<path d=${path(each.points)} style="stroke:${each.color};opacity:${each.faint ? 0.3 : 1}"></path>`,
          )}
          ${this.at === null ? nothing : svg`<line class="cursor" x1=${x(this.at)} x2=${x(this.at)} y1=${TOP} y2=${HEIGHT - BOTTOM}></line>`}
        </svg>
      </div>
      <p class="readout numbers" aria-live=${this.at === null ? 'off' : 'polite'}>${this.description()}</p>
    `
  }

  private description() {
    const legend = this.series.filter((each) => !each.faint)
    return html`${this.at === null ? nothing : html`<b>${this.xLabel} ${short(this.at)}</b>`}
      ${legend.map((each) => {
        const value = this.at === null ? null : closest(each.points, this.at)
        return html`<span class="legend-item"><span class="swatch ${each.dots ? 'dot' : ''}" style="background:${each.color}"></span>
          ${each.name}${value === null ? '' : ` ${short(value)}`}</span>`
      })}`
  }
}

/** Values for minima and maxima, which spread arguments cannot have too many of. */
function sample(values: number[]): number[] {
  if (values.length < 50_000) return values
  return [values[0]!, values[values.length - 1]!]
}

function thin(points: [number, number][]): [number, number][] {
  const every = Math.ceil(points.length / MOST_POINTS)
  return every < 2 ? points : points.filter((_, i) => i % every === 0 || i === points.length - 1)
}

function nearest(points: [number, number][], distance: (point: [number, number]) => number): number | null {
  let [best, least] = [null as number | null, Infinity]
  for (const point of points) if (distance(point) < least) [best, least] = [point[0], distance(point)]
  return best
}

/** The value at x, or at the last point before it. */
function closest(points: [number, number][], x: number): number | null {
  let found: number | null = null
  for (const [at, value] of points) {
    if (at > x) break
    found = value
  }
  return found
}

/** About five round numbers between two. */
function ticks(low: number, high: number): number[] {
  const span = high - low || Math.abs(high) || 1
  const rough = span / 4
  const power = 10 ** Math.floor(Math.log10(rough))
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough)!
  const found: number[] = []
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Number(at.toPrecision(12)))
  return found.length ? found : [low]
}

function decades(low: number, high: number): number[] {
  const found: number[] = []
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) found.push(10 ** power)
  return found
}

/** A number in few characters: 1.2k, 3.45M, 0.0012. */
export function short(value: number): string {
  const size = Math.abs(value)
  for (const [limit, letter] of [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e4, 'k']] as const)
    if (size >= limit) return `${Number((value / (limit === 1e4 ? 1e3 : limit)).toPrecision(3))}${letter}`
  if (size >= 1 || size === 0) return String(Number(value.toPrecision(5)))
  return size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3)))
}
