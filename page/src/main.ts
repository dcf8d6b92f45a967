// The page's shell: the way between its parts, the theme, the key, and the state of the connection.
//
// The address says what is shown: `#/chat/...`, `#/engine/...` or `#/reports/...`. Each part is an element that gets
// `api`, `active` (it is shown) and `path` (the rest of the address). Parts stay in the page when another is shown.

import { html, nothing } from 'lit'
import { customElement, state } from 'lit/decorators.js'
import { Api } from './api'
import './chat/view'
import './engine/view'
import { PageElement } from './element'
import { icon } from './icons'
import './key-dialog'
import type { KeyDialog } from './key-dialog'
import { BOARD } from './reports/view'

type Part = 'chat' | 'engine' | 'reports'
type Theme = 'auto' | 'light' | 'dark'

const ALL: Record<Part, string> = { chat: 'Chat', engine: 'Engine', reports: 'Reports' }
/** The parts that are there: `transect board` has no model. */
const PARTS = (BOARD ? { reports: ALL.reports } : ALL) as Record<Part, string>
const THEMES: Theme[] = ['auto', 'light', 'dark']
const STORED_THEME = 'transect.theme'
const RETRY_MS = 1000

@customElement('transect-page')
export class TransectPage extends PageElement {
  private readonly api = new Api()
  @state() private shown: Part = 'chat'
  @state() private path = ''
  @state() private theme: Theme = (localStorage.getItem(STORED_THEME) as Theme | null) ?? 'auto'
  /** State of the connection; `back` is shown shortly after the server has come back. */
  @state() private connection: 'good' | 'lost' | 'back' = 'good'

  override connectedCallback(): void {
    super.connectedCallback()
    window.addEventListener('hashchange', this.follow)
    window.addEventListener('keydown', this.pressed)
    this.api.addEventListener('key-needed', () => this.askForKey(true))
    this.api.addEventListener('lost', () => void this.waitForServer())
    this.follow()
    this.applyTheme()
  }

  override disconnectedCallback(): void {
    window.removeEventListener('hashchange', this.follow)
    window.removeEventListener('keydown', this.pressed)
    super.disconnectedCallback()
  }

  private readonly follow = (): void => {
    const [, part = '', ...rest] = location.hash.split('/')
    this.shown = part in PARTS ? (part as Part) : (Object.keys(PARTS)[0] as Part)
    this.path = rest.map(decoded).join('/')
    document.title = `${PARTS[this.shown]} · Transect`
  }

  /** Alt+1, Alt+2 and Alt+3 show the parts. */
  private readonly pressed = (event: KeyboardEvent): void => {
    const part = (Object.keys(PARTS) as Part[])[Number(event.key) - 1]
    if (!event.altKey || event.ctrlKey || event.metaKey || !part) return
    event.preventDefault()
    location.hash = `#/${part}`
  }

  private async waitForServer(): Promise<void> {
    if (this.connection === 'lost') return
    this.connection = 'lost'
    for (;;) {
      await new Promise((done) => setTimeout(done, RETRY_MS))
      if (await this.api.answers()) break
    }
    this.connection = 'back'
    this.api.dispatchEvent(new Event('found'))
    setTimeout(() => (this.connection = this.connection === 'back' ? 'good' : this.connection), 4000)
  }

  private applyTheme(): void {
    document.documentElement.dataset.theme = this.theme
  }

  private changeTheme(): void {
    this.theme = THEMES[(THEMES.indexOf(this.theme) + 1) % THEMES.length]!
    localStorage.setItem(STORED_THEME, this.theme)
    this.applyTheme()
  }

  private askForKey(refused = false): void {
    this.querySelector<KeyDialog>('key-dialog')!.open(refused)
  }

  protected override render() {
    const link = (part: Part) =>
      html`<a href="#/${part}" aria-current=${this.shown === part ? 'page' : nothing}>${PARTS[part]}</a>`
    return html`
      <a class="skip" href="#main" @click=${this.skip}>Skip to the content</a>
      <header class="bar">
        <a class="brand" href="#/${Object.keys(PARTS)[0]}" aria-label="Transect"><img src="page/icon.svg" alt="" width="24" height="24" /><span>Transect</span></a>
        <nav aria-label="Parts of this page">${(Object.keys(PARTS) as Part[]).map(link)}</nav>
        <div class="bar-end">
          <button class="quiet" @click=${this.changeTheme} title="Theme: ${this.theme}" aria-label="Theme: ${this.theme}">
            ${icon(this.theme === 'auto' ? 'contrast' : this.theme === 'light' ? 'sun' : 'moon')}
          </button>
          <button class="quiet" @click=${() => this.askForKey()} title="API key" aria-label="API key">
            ${icon('key')}
          </button>
        </div>
      </header>
      <div class="connection" role="status">${this.connectionLine()}</div>
      <main id="main" tabindex="-1">
        ${BOARD ? nothing : this.withModel()}
        <report-view .api=${this.api} .active=${this.shown === 'reports'} .path=${this.rest('reports')}
          ?hidden=${this.shown !== 'reports'}></report-view>
      </main>
      <key-dialog .api=${this.api}></key-dialog>
    `
  }

  private withModel() {
    return html`
      <chat-view .api=${this.api} .active=${this.shown === 'chat'} .path=${this.rest('chat')}
        ?hidden=${this.shown !== 'chat'}></chat-view>
      <engine-view .api=${this.api} .active=${this.shown === 'engine'} .path=${this.rest('engine')}
        ?hidden=${this.shown !== 'engine'}></engine-view>`
  }

  private rest(part: Part): string {
    return part === this.shown ? this.path : ''
  }

  private skip(event: Event): void {
    event.preventDefault()
    this.querySelector<HTMLElement>('#main')!.focus()
  }

  private connectionLine() {
    if (this.connection === 'lost')
      return html`<p class="notice warning">The server does not answer. This page tries again every
        second; nothing of yours is lost.</p>`
    if (this.connection === 'back') return html`<p class="notice good">The server is back.</p>`
    return nothing
  }
}

/** Decode a part of the address; one that cannot be decoded stays as it is. */
function decoded(text: string): string {
  try {
    return decodeURIComponent(text)
  } catch {
    return text
  }
}
