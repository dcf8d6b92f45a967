// Colours for code: comments, strings, numbers and keywords, by one expression for most languages.

const KEYWORDS = new Set(
  (
    'abstract and as assert async await begin break case catch class const constexpr continue def default defer del do done ' +
    'elif else end enum except export extends extern false False finally fn for from func function go if impl import in ' +
    'include inline interface is lambda let loop match mod module mut namespace new nil None nonlocal not null of or ' +
    'package pass private protected pub public raise return self static struct super switch template then this throw ' +
    'trait true True try type typedef typename undefined union unsafe use using var virtual void when where while with ' +
    'yield int float double char bool long short unsigned string str select insert update delete table create SELECT FROM ' +
    'WHERE INSERT UPDATE DELETE JOIN GROUP ORDER BY LIMIT VALUES INTO echo fi esac local'
  ).split(' '),
)
const HASH_COMMENTS = new Set(['python', 'py', 'bash', 'sh', 'shell', 'zsh', 'yaml', 'yml', 'toml', 'ruby', 'rb', 'r', 'perl', 'make', 'dockerfile', 'julia', 'elixir', ''])
const STRINGS = String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|` + '`(?:\\\\.|[^`\\\\])*`?'
const WORDS = String.raw`\b\d[\w.]*\b|\b[A-Za-z_]\w*\b`
const LONGEST = 60_000

/** Split code into coloured pieces, and append them to an element. */
export function colorCode(into: HTMLElement, code: string, language: string): void {
  if (code.length > LONGEST) {
    into.textContent = code
    return
  }
  const hash = HASH_COMMENTS.has(language)
  const comments = hash ? String.raw`#[^\n]*` : language === 'sql' || language === 'lua' ? String.raw`--[^\n]*` : String.raw`\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`
  const pattern = new RegExp(`(${comments})|(${STRINGS})|(${WORDS})`, 'g')
  const pieces = document.createDocumentFragment()
  let at = 0
  for (const match of code.matchAll(pattern)) {
    const [text, comment, string, word] = match
    const kind = comment ? 'comment' : string ? 'string' : /^\d/.test(word!) ? 'number' : KEYWORDS.has(word!) ? 'keyword' : ''
    if (!kind) continue
    pieces.append(code.slice(at, match.index))
    const span = document.createElement('span')
    span.className = `code-${kind}`
    span.textContent = text
    pieces.append(span)
    at = match.index + text.length
  }
  pieces.append(code.slice(at))
  into.replaceChildren(pieces)
}
