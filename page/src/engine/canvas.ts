// What the drawings of the engine view share: sharp canvases, the theme's colours, and a colour for each request.

import { PageElement } from '../element'

/** Colours of the theme that is shown, from the style sheet. */
export interface Palette {
  dark: boolean
  text: string
  soft: string
  faint: string
  line: string
  surface: string
  raised: string
  accent: string
  prefill: string
  decode: string
  bad: string
  warning: string
}

export function paletteOf(element: HTMLElement): Palette {
  const probe = document.createElement('span')
  probe.hidden = true
  element.append(probe)
  const color = (name: string): string => {
    probe.style.color = `var(${name})`
    return getComputedStyle(probe).color
  }
  const found: Palette = {
    dark: false,
    text: color('--text'),
    soft: color('--soft'),
    faint: color('--faint'),
    line: color('--line'),
    surface: color('--surface'),
    raised: color('--raised'),
    accent: color('--accent'),
    prefill: color('--series-1'),
    decode: color('--series-3'),
    bad: color('--bad'),
    warning: color('--warning'),
  }
  probe.remove()
  found.dark = Number(found.text.match(/\d+/)?.[0] ?? 0) > 128
  return found
}

/** The colour of a request, by its number: neighbours differ most. */
export function colorOf(seq: number, dark: boolean): string {
  const hue = (seq * 137.508 + 200) % 360
  return dark ? `hsl(${hue} 58% 64%)` : `hsl(${hue} 62% 45%)`
}

/** A component with one canvas that is as wide as the component, and redrawn when its size or the theme changes. */
export abstract class Drawing extends PageElement {
  protected palette!: Palette
  protected width = 0
  protected height = 0
  private observer?: ResizeObserver
  private readonly scheme = matchMedia('(prefers-color-scheme: dark)')
  private readonly themes = new MutationObserver(() => this.recolor())

  override connectedCallback(): void {
    super.connectedCallback()
    this.scheme.addEventListener('change', this.recolor)
    this.themes.observe(document.documentElement, { attributes: true, attributeFilter: ['data-theme'] })
  }

  override disconnectedCallback(): void {
    this.observer?.disconnect()
    this.themes.disconnect()
    this.scheme.removeEventListener('change', this.recolor)
    super.disconnectedCallback()
  }

  protected override firstUpdated(): void {
    this.recolor()
    this.observer = new ResizeObserver(() => this.draw())
    this.observer.observe(this.canvas.parentElement!)
  }

  protected get canvas(): HTMLCanvasElement {
    return this.querySelector('canvas')!
  }

  private readonly recolor = (): void => {
    this.palette = paletteOf(this)
    this.draw()
  }

  /** Prepare the canvas for a drawing of this height in pixels; null while it is not shown. */
  protected begin(height: number): CanvasRenderingContext2D | null {
    const canvas = this.canvas
    this.width = canvas.parentElement!.clientWidth
    this.height = height
    if (!this.width) return null
    const ratio = window.devicePixelRatio || 1
    const [w, h] = [Math.round(this.width * ratio), Math.round(height * ratio)]
    if (canvas.width !== w || canvas.height !== h) {
      canvas.width = w
      canvas.height = h
      canvas.style.height = `${height}px`
    }
    const context = canvas.getContext('2d')!
    context.setTransform(ratio, 0, 0, ratio, 0, 0)
    context.clearRect(0, 0, this.width, height)
    context.font = `11px ${getComputedStyle(this).fontFamily}`
    context.textBaseline = 'middle'
    return context
  }

  abstract draw(): void
}
