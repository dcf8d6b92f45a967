// <markdown-text>: Markdown that grows. Blocks that cannot change any more are rendered once; only the last block is
// rendered again as its text arrives, at most once a frame, and less often where that takes long.

import { colorCode } from './code-colors'
import { nodesOf, parse } from './markdown'

/** Share of the time that rendering may take while an answer arrives. */
const SHARE = 0.25
/** Length of the last block from which its finished parts, such as items of a list, are split off. */
const LONG = 3000

export class MarkdownText extends HTMLElement {
  private text = ''
  /** Characters whose blocks are rendered for good. */
  private settled = 0
  private settledNodes = document.createElement('div')
  private tail = document.createElement('div')
  private finished = false
  private waiting = 0
  private notBefore = 0

  connectedCallback(): void {
    if (this.settledNodes.parentNode) return
    this.classList.add('markdown')
    this.settledNodes.className = this.tail.className = 'blocks'
    this.append(this.settledNodes, this.tail)
    this.addEventListener('click', (event) => void this.copyCode(event))
  }

  disconnectedCallback(): void {
    cancelAnimationFrame(this.waiting)
    this.waiting = 0
  }

  /** Show a text. `finished`: nothing will be added to it. */
  show(text: string, finished: boolean): void {
    if (text === this.text && finished === this.finished) return
    if (!text.startsWith(this.text)) this.reset()
    if (this.finished && !finished) this.reset()
    this.text = text
    this.finished = finished
    if (!this.waiting) this.waiting = requestAnimationFrame(this.frame)
  }

  private reset(): void {
    this.settled = 0
    this.settledNodes.replaceChildren()
    this.tail.replaceChildren()
  }

  private readonly frame = (now: number): void => {
    if (now < this.notBefore && !this.finished) {
      this.waiting = requestAnimationFrame(this.frame)
      return
    }
    this.waiting = 0
    const began = performance.now()
    this.renderTail()
    this.notBefore = now + (performance.now() - began) * (1 / SHARE - 1)
    this.dispatchEvent(new Event('grown', { bubbles: true }))
  }

  private renderTail(): void {
    const source = this.text.slice(this.settled)
    const { tokens, blocks } = parse(source)
    let rest = tokens
    let restSource = source
    const cut = this.finished ? source.length : this.cutBefore(source, blocks)
    if (cut > 0) {
      const done = cut === source.length ? tokens : parse(source.slice(0, cut)).tokens
      const nodes = nodesOf(done)
      for (const code of nodes.querySelectorAll<HTMLElement>('code[data-language]'))
        colorCode(code, code.textContent ?? '', code.dataset.language ?? '')
      this.settledNodes.append(nodes)
      this.settled += cut
      restSource = source.slice(cut)
      rest = restSource ? parse(restSource).tokens : []
    }
    if (!this.growCode(restSource)) this.tail.replaceChildren(nodesOf(rest))
  }

  /** Append to an open block of code without building it again. Returns false if the tail is none. */
  private growCode(source: string): boolean {
    const open = /^ {0,3}(`{3,}|~{3,})[^\n`]*\n/.exec(source)
    const code = this.tail.firstElementChild?.querySelector('code[data-language]')
    if (!open || !code || this.tail.childElementCount !== 1) return false
    const body = source.slice(open[0].length)
    if (body.includes(`\n${open[1]}`) || body.startsWith(open[1]!)) return false
    const shown = code.textContent ?? ''
    if (!body.startsWith(shown.replace(/\n$/, ''))) return false
    const kept = shown.endsWith('\n') && !body.startsWith(shown) ? shown.slice(0, -1) : shown
    if (kept !== shown) code.textContent = kept
    code.append(body.slice(kept.length))
    return true
  }

  /** Find the number of leading characters whose blocks cannot change any more. */
  private cutBefore(source: string, blocks: { type: string; begin: number; end: number }[]): number {
    const last = blocks.at(-1)
    if (!last) return 0
    let line = last.begin
    if (/list_open$/.test(last.type) && source.length > LONG) line = this.lastItem(source, line)
    return line === 0 ? 0 : offsetOfLine(source, line)
  }

  /** Find the line of the last item of a long list: the items before it cannot change. */
  private lastItem(source: string, begin: number): number {
    const { tokens } = parse(source)
    const items = tokens.filter((token) => token.type === 'list_item_open' && token.level === 1 && token.map![0] >= begin)
    return items.length > 1 ? items.at(-1)!.map![0] : begin
  }

  private async copyCode(event: Event): Promise<void> {
    const button = (event.target as Element).closest('.copy-code')
    const code = button?.closest('figure')?.querySelector('code')
    if (!button || !code) return
    await copyText(code.textContent ?? '')
    button.textContent = 'Copied'
    setTimeout(() => (button.textContent = 'Copy'), 1500)
  }
}

function offsetOfLine(source: string, line: number): number {
  let at = 0
  for (let count = 0; count < line; count++) at = source.indexOf('\n', at) + 1
  return at
}

/** Copy a text. The clipboard's own interface needs a secure address, which http beyond this machine is not. */
export async function copyText(text: string): Promise<void> {
  if (navigator.clipboard) return navigator.clipboard.writeText(text)
  const area = document.createElement('textarea')
  area.value = text
  document.body.append(area)
  area.select()
  document.execCommand('copy')
  area.remove()
}

customElements.define('markdown-text', MarkdownText)
