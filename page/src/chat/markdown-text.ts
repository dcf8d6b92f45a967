// <markdown-text>: Markdown that grows. Blocks that cannot change any more are rendered once; only the last block is
// rendered again as its text arrives, at most once a frame, and less often where that takes long.

import type { Token } from 'markdown-it'
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
    if (this.growCode(source)) return
    const tokens = parse(source)
    // The last block of the outermost level may still change; those before it are as they will be.
    const last = this.finished ? tokens.length : tokens.findLastIndex((token) => token.level === 0 && token.map !== null)
    if (last > 0) {
      this.settle(tokens.slice(0, last), this.finished ? source.length : offsetOfLine(source, tokens[last]!.map![0]))
      this.tail.replaceChildren(nodesOf(tokens.slice(last)))
    } else if (!this.settleItems(source, tokens)) this.tail.replaceChildren(nodesOf(tokens))
  }

  /** Render blocks for good, which end at `length` in the rest of the text. */
  private settle(tokens: Token[], length: number): void {
    const nodes = nodesOf(tokens)
    for (const code of nodes.querySelectorAll<HTMLElement>('code[data-language]'))
      colorCode(code, code.textContent ?? '', code.dataset.language ?? '')
    this.settledNodes.append(nodes)
    this.settled += length
  }

  /** Render all but the last item of a long list for good. Returns false if the text is no such list. */
  private settleItems(source: string, tokens: Token[]): boolean {
    if (source.length < LONG || !/list_open$/.test(tokens[0]?.type ?? '')) return false
    const items = tokens.filter((token) => token.type === 'list_item_open' && token.level === 1)
    const cut = items.length > 1 ? offsetOfLine(source, items.at(-1)!.map![0]) : 0
    if (!cut) return false
    this.settle(parse(source.slice(0, cut)), cut)
    this.tail.replaceChildren(nodesOf(parse(source.slice(cut))))
    return true
  }

  /** Append to an open block of code without building it again. Returns false if the tail is none. */
  private growCode(source: string): boolean {
    if (this.finished) return false
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
