// The map of KV blocks: every block of the pool in the colour of the request that holds it.

import { html } from 'lit'
import { customElement, property, state } from 'lit/decorators.js'
import { Drawing, colorOf } from './canvas'
import { counted, shortId } from './format'
import { CACHED, FREE, HIDDEN, type EngineModel } from './model'

const LEAST_CELL = 3
const MOST_CELL = 14
const FLASH_S = 2

@customElement('kv-map')
export class KvMap extends Drawing {
  @property({ attribute: false }) model!: EngineModel
  /** Changes whenever the map has to be drawn again. */
  @property({ type: Number }) version = 0
  @property({ attribute: false }) followed: number | null = null
  @state() private chosen: number | null = null
  private cell = 6
  private perCell = 1
  private columns = 1

  protected override render() {
    return html`
      <div class="drawing" tabindex="0" role="group" aria-label="Map of KV blocks. Arrow keys choose a block."
        @keydown=${this.pressed} @pointermove=${this.pointed} @pointerdown=${this.pointed}
        @pointerleave=${() => (this.chosen = null)}>
        <canvas aria-hidden="true"></canvas>
      </div>
      <p class="readout numbers" aria-live=${this.chosen === null ? 'off' : 'polite'}>${this.description()}</p>
    `
  }

  protected override updated(): void {
    if (this.palette) this.draw()
  }

  override draw(): void {
    if (!this.model) return
    const { owners, users } = this.model
    const width = this.canvas.parentElement!.clientWidth || 1
    const area = width * Math.min(220, Math.max(120, width * 0.42))
    this.cell = Math.max(LEAST_CELL, Math.min(MOST_CELL, Math.floor(Math.sqrt(area / Math.max(1, owners.length)))))
    this.columns = Math.max(1, Math.floor(width / this.cell))
    const room = this.columns * Math.max(1, Math.floor(240 / this.cell))
    this.perCell = Math.ceil(owners.length / room) || 1
    const cells = Math.ceil(owners.length / this.perCell)
    const context = this.begin(Math.ceil(cells / this.columns) * this.cell)
    if (!context) return
    const { dark, line, faint, surface, bad, text } = this.palette
    const size = this.cell - (this.cell > 4 ? 1 : 0.5)
    for (let index = 0; index < cells; index++) {
      const block = this.blockOf(index)
      const owner = owners[block]!
      const [x, y] = [(index % this.columns) * this.cell, Math.floor(index / this.columns) * this.cell]
      context.globalAlpha = owner === FREE ? 0.5 : owner === CACHED || owner === HIDDEN ? 0.42 : 1
      context.fillStyle = owner >= 0 ? colorOf(owner, dark) : owner === FREE ? line : faint
      if (owner >= 0 && this.followed !== null && owner !== this.followed) context.globalAlpha = 0.3
      context.fillRect(x, y, size, size)
      context.globalAlpha = 1
      if (owner >= 0 && users[block]! > 1) {
        context.fillStyle = surface
        const dot = Math.max(1.5, size / 2.6)
        context.fillRect(x + (size - dot) / 2, y + (size - dot) / 2, dot, dot)
      }
      const lost = this.model.evicted.get(block)
      if (lost !== undefined && this.model.now - lost < FLASH_S) {
        context.strokeStyle = bad
        context.lineWidth = 1.5
        context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1)
      }
      if (index === this.chosen) {
        context.strokeStyle = text
        context.lineWidth = 1.5
        context.strokeRect(x - 0.5, y - 0.5, size + 1, size + 1)
      }
    }
  }

  /** The block that a cell shows: the first with an owner if the cell stands for several. */
  private blockOf(cell: number): number {
    const first = cell * this.perCell
    const end = Math.min(first + this.perCell, this.model.owners.length)
    for (let block = first; block < end; block++) if (this.model.owners[block]! >= 0) return block
    return first
  }

  private readonly pressed = (event: KeyboardEvent): void => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }
    const move = moves[event.key as keyof typeof moves]
    if (move === undefined) return
    event.preventDefault()
    const cells = Math.ceil(this.model.owners.length / this.perCell)
    this.chosen = this.chosen === null ? 0 : Math.max(0, Math.min(cells - 1, this.chosen + move))
  }

  private readonly pointed = (event: PointerEvent): void => {
    const box = this.canvas.getBoundingClientRect()
    const column = Math.floor((event.clientX - box.left) / this.cell)
    const cell = Math.floor((event.clientY - box.top) / this.cell) * this.columns + column
    const inside = column < this.columns && cell >= 0 && cell * this.perCell < this.model.owners.length
    this.chosen = inside ? cell : null
  }

  private description(): string {
    if (this.chosen === null) return 'Point at a block, or use the arrow keys, to read whose it is.'
    const block = this.blockOf(this.chosen)
    const owner = this.model.owners[block] ?? FREE
    const name = this.perCell > 1 ? `Blocks ${this.chosen * this.perCell} and ${this.perCell - 1} more` : `Block ${block}`
    if (owner === FREE) return `${name}: free`
    if (owner === CACHED) return `${name}: free, and its contents can be used again by a prompt that begins alike`
    if (owner === HIDDEN) return `${name}: not yours`
    const request = this.model.requestOf(owner)
    const users = this.model.users[block]!
    const shared = users > 1 ? `, shared by ${counted(users, 'sequence')}` : ''
    return `${name}: request ${request ? shortId(request.id) : owner}${shared}`
  }
}
