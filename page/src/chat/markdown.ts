// Markdown of models as safe nodes. HTML in it stays text; what markdown-it makes is sanitized again by DOMPurify.

import DOMPurify from 'dompurify'
import MarkdownIt, { type Token } from 'markdown-it'
import { withMath } from './math'

const reader = new MarkdownIt({ html: false, linkify: true, maxNesting: 240 })
withMath(reader)

// A picture's address would tell another server that it is looked at: it becomes a link.
reader.renderer.rules.image = (tokens, index) => {
  const token = tokens[index]!
  const text = token.content || 'picture'
  return `<a href="${reader.utils.escapeHtml(String(token.attrGet('src') ?? ''))}">${reader.utils.escapeHtml(text)}</a>`
}

// Code has a head with its language and a button that copies it. The text is coloured when the block is complete.
reader.renderer.rules.fence = (tokens, index) => {
  const token = tokens[index]!
  const language = reader.utils.escapeHtml(token.info.trim().split(/\s+/)[0]!.slice(0, 30).toLowerCase())
  return (
    `<figure class="code" dir="ltr"><figcaption><span>${language || 'code'}</span>` +
    `<button type="button" class="quiet copy-code">Copy</button></figcaption>` +
    `<pre tabindex="0"><code data-language="${language}">${reader.utils.escapeHtml(token.content)}</code></pre></figure>\n`
  )
}
reader.renderer.rules.table_open = () => '<div class="table" tabindex="0"><table>\n'
reader.renderer.rules.table_close = () => '</table></div>\n'

// Each block finds its own direction, so that Arabic and Hebrew read from the right.
reader.core.ruler.push('directions', (state) => {
  for (const token of state.tokens) {
    if (token.nesting === 1 && /^(p|h[1-6]|li|blockquote|td|th)$/.test(token.tag)) token.attrSet('dir', 'auto')
    // The page has its own first headings.
    if (token.type === 'heading_open' || token.type === 'heading_close') token.tag = `h${Math.min(6, Number(token.tag[1]) + 2)}`
  }
})

const MATH = 'http://www.w3.org/1998/Math/MathML'
const RULES = {
  USE_PROFILES: { html: true, mathMl: true },
  FORBID_TAGS: ['style', 'form', 'input', 'textarea', 'select', 'img', 'video', 'audio', 'picture', 'source', 'svg'],
  FORBID_ATTR: ['style', 'id', 'name', 'srcset', 'src', 'action', 'background'],
  ALLOW_DATA_ATTR: false,
  ADD_ATTR: ['data-language', 'target'],
  RETURN_DOM_FRAGMENT: true as const,
}
// Temml sets spaces and colours of formulas as styles; nothing else may have any.
DOMPurify.addHook('uponSanitizeAttribute', (node, attribute) => {
  if (attribute.attrName === 'style' && node.namespaceURI === MATH) attribute.forceKeepAttr = true
})
DOMPurify.addHook('afterSanitizeAttributes', (node) => {
  if (node.tagName !== 'A') return
  node.setAttribute('target', '_blank')
  node.setAttribute('rel', 'noopener noreferrer nofollow')
})

/** Read a text. Tokens of level 0 with a `map` begin the blocks of the outermost level. */
export function parse(text: string): Token[] {
  return reader.parse(text, {})
}

/** Turn tokens of `parse` into safe nodes. */
export function nodesOf(tokens: Token[]): DocumentFragment {
  return DOMPurify.sanitize(reader.renderer.render(tokens, reader.options, {}), RULES) as unknown as DocumentFragment
}
