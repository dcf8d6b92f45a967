// Maths in Markdown: $...$, $$...$$, \(...\) and \[...\], as MathML by Temml.

import type { MarkdownIt, StateBlock, StateInline } from 'markdown-it'
import temml from 'temml'

const LONGEST = 4000
const BLOCKS: Record<string, string> = { $$: '$$', '\\[': '\\]' }

/** Convert a formula; one that cannot be read stays text. Nothing in it can load, link or run anything. */
export function mathHtml(formula: string, display: boolean): string {
  if (formula.length > LONGEST) return escaped(formula)
  try {
    return temml.renderToString(formula, { displayMode: display, throwOnError: true, trust: false, maxExpand: 500, maxSize: [20, 20] })
  } catch {
    return `<code>${escaped(display ? `$$${formula}$$` : `$${formula}$`)}</code>`
  }
}

function escaped(text: string): string {
  return text.replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;')
}

/** Find `$...$` or `\(...\)` at this place. Prices are none: the closing sign follows no space and precedes no digit. */
function inline(state: StateInline, silent: boolean): boolean {
  const { src, pos } = state
  const round = src.startsWith('\\(', pos)
  const wide = src.startsWith('$$', pos)
  if (!round && src[pos] !== '$') return false
  const open = round || wide ? 2 : 1
  const close = round ? '\\)' : wide ? '$$' : '$'
  const end = src.indexOf(close, pos + open)
  if (end < 0 || end - pos > LONGEST) return false
  const formula = src.slice(pos + open, end)
  if (!formula.trim()) return false
  if (open === 1 && (/^\s|\s$|\\$/.test(formula) || /[0-9]/.test(src[end + 1] ?? ''))) return false
  if (!silent) {
    const token = state.push('math', '', 0)
    token.content = formula
    token.markup = wide ? '$$' : '$'
  }
  state.pos = end + close.length
  return true
}

/** Find a block of lines between `$$` and `$$`, or `\[` and `\]`; one that is still open is shown as far as it goes. */
function block(state: StateBlock, begin: number, last: number, silent: boolean): boolean {
  const line = (at: number) => state.src.slice(state.bMarks[at]! + state.tShift[at]!, state.eMarks[at]!)
  const first = line(begin).trimEnd()
  const open = Object.keys(BLOCKS).find((mark) => first.startsWith(mark))
  if (!open) return false
  const close = BLOCKS[open]!
  const lines = [first.slice(2)]
  let at = begin
  let closed = lines[0]!.trimEnd().endsWith(close)
  if (!closed && lines[0]!.includes(close)) return false // text goes on behind the formula: it is inline
  if (silent) return true
  while (!closed && ++at < last) {
    lines.push(line(at))
    closed = lines.at(-1)!.trimEnd().endsWith(close)
  }
  const formula = lines.join('\n').trimEnd()
  const token = state.push('math_block', '', 0)
  token.content = closed ? formula.slice(0, -close.length) : formula
  token.markup = '$$'
  token.map = [begin, Math.min(at + 1, last)]
  state.line = Math.min(at + 1, last)
  return true
}

/** Add maths to a Markdown reader. */
export function withMath(markdown: MarkdownIt): void {
  markdown.inline.ruler.before('escape', 'math', inline)
  markdown.block.ruler.before('fence', 'math_block', block, { alt: ['paragraph', 'reference', 'blockquote', 'list'] })
  markdown.renderer.rules.math = (tokens, index) => mathHtml(tokens[index]!.content, tokens[index]!.markup === '$$')
  markdown.renderer.rules.math_block = (tokens, index) => `<p>${mathHtml(tokens[index]!.content, true)}</p>\n`
}
