// <chat-settings>: system prompt, model and sampling of a conversation. Empty fields leave the value to the model.

import { html, nothing } from 'lit'
import { customElement, property } from 'lit/decorators.js'
import { PageElement } from '../element'
import { icon } from '../icons'
import { searchFields } from './search-settings'
import { NUMBERS, type ServerFacts, type Settings } from './types'

type NumberName = (typeof NUMBERS)[number]

interface Field {
  label: string
  least: number
  most: number
  step: number
  /** Value without a default of the model, as the placeholder says it. */
  usual: string
  hint: string
}

const FIELDS: Record<NumberName, Field> = {
  temperature: { label: 'Temperature', least: 0, most: 2, step: 0.1, usual: '1', hint: '0 always takes the likeliest token' },
  top_p: { label: 'Top p', least: 0.01, most: 1, step: 0.01, usual: '1', hint: 'draw from the likeliest tokens with this share' },
  top_k: { label: 'Top k', least: 0, most: 1000, step: 1, usual: 'all', hint: 'draw from this many of the likeliest tokens' },
  min_p: { label: 'Min p', least: 0, most: 1, step: 0.01, usual: '0', hint: 'least share of the likeliest token' },
  repetition_penalty: { label: 'Repetition penalty', least: 0.1, most: 2, step: 0.05, usual: '1', hint: 'above 1: fewer tokens again' },
  presence_penalty: { label: 'Presence penalty', least: -2, most: 2, step: 0.1, usual: '0', hint: 'for each token that was used' },
  frequency_penalty: { label: 'Frequency penalty', least: -2, most: 2, step: 0.1, usual: '0', hint: 'for each use of a token' },
  max_tokens: { label: 'Most tokens', least: 1, most: 1e6, step: 1, usual: 'up to the context', hint: 'length of an answer' },
  seed: { label: 'Seed', least: 0, most: 2 ** 53 - 1, step: 1, usual: 'random', hint: 'same seed, same answer' },
}
const MAIN: NumberName[] = ['temperature', 'top_p', 'top_k', 'max_tokens', 'seed']

@customElement('chat-settings')
export class ChatSettings extends PageElement {
  @property({ attribute: false }) settings!: Settings
  @property({ attribute: false }) facts: ServerFacts | null = null
  @property({ attribute: false }) models: string[] = []

  private readonly setSearch = (search: string, searchOptions: Settings['searchOptions']): void => {
    this.dispatchEvent(new CustomEvent('settings', { detail: { ...this.settings, search, searchOptions }, bubbles: true }))
  }

  private set(name: keyof Settings, value: string | number | undefined): void {
    const next = { ...this.settings, [name]: value }
    if (value === undefined) delete next[name]
    this.dispatchEvent(new CustomEvent('settings', { detail: next, bubbles: true }))
  }

  protected override render() {
    const rest = NUMBERS.filter((name) => !MAIN.includes(name))
    return html`<form class="settings" aria-label="Settings" @submit=${(event: Event) => event.preventDefault()}>
      <div class="drawer-head"><h2>Settings</h2>
        <button type="button" class="quiet" aria-label="Close the settings" title="Close" @click=${() => this.dispatchEvent(new Event('close-drawer', { bubbles: true }))}>${icon('close')}</button></div>
      ${this.text('system', 'System prompt', 4, 'Instructions that stand before every conversation')}
      ${this.models.length > 1 ? this.modelChoice() : nothing}
      ${MAIN.map((name) => this.number(name))}
      <div class="row">
        <label>Answers at once <input type="number" min="1" max="8" .value=${String(this.settings.n)}
          @change=${(event: Event) => this.set('n', Math.max(1, Math.min(8, Number(value(event)) || 1)))} /></label>
        <label>Alternatives of tokens <input type="number" min="0" max="20" .value=${String(this.settings.alternatives)}
          @change=${(event: Event) => this.set('alternatives', Math.max(0, Math.min(20, Number(value(event)) || 0)))} /></label>
      </div>
      <details><summary>More sampling</summary>${rest.map((name) => this.number(name))}
        ${this.text('stop', 'Stop strings', 2, 'One a line; the answer ends before one')}</details>
      ${this.facts?.searches?.length ? searchFields(this.facts.searches, this.settings, this.setSearch) : nothing}
      <details><summary>JSON and tools</summary>
        ${this.text('schema', 'JSON schema of answers', 5, '{"type": "object", "properties": {…}}', true)}
        ${this.text('tools', 'Tools, as a JSON list', 5, '[{"type": "function", "function": {"name": …}}]', true)}</details>
    </form>`
  }

  private modelChoice() {
    return html`<label>Model <select @change=${(event: Event) => this.set('model', value(event))}>
      ${this.models.map((name, index) => html`<option value=${index ? name : ''} ?selected=${this.settings.model === name}>${name}</option>`)}
    </select></label>`
  }

  private number(name: NumberName) {
    const { label, least, most, step, usual, hint } = FIELDS[name]
    const given = this.settings[name]
    const preset = this.facts?.defaults[name] ?? (name === 'max_tokens' ? this.facts?.max_new_tokens : null)
    return html`<label class="number-field"><span>${label} <small>${hint}</small></span>
      <input type="number" name=${name} min=${least} max=${most} step=${step === 1 ? 1 : 'any'} .value=${given === undefined ? '' : String(given)}
        placeholder=${preset === null || preset === undefined ? usual : `${preset} (the model's)`}
        @change=${(event: Event) => this.set(name, numberOf(event))} /></label>`
  }

  private text(name: 'system' | 'stop' | 'schema' | 'tools', label: string, rows: number, placeholder: string, code = false) {
    return html`<label>${label}<textarea name=${name} rows=${rows} class=${code ? 'mono' : ''} placeholder=${placeholder} .value=${this.settings[name]}
      spellcheck=${code ? 'false' : nothing} @change=${(event: Event) => this.set(name, value(event))}></textarea></label>`
  }
}

function value(event: Event): string {
  return (event.target as HTMLInputElement).value
}

function numberOf(event: Event): number | undefined {
  const input = event.target as HTMLInputElement
  if (input.value === '' || !input.checkValidity()) {
    if (!input.reportValidity()) return undefined
    return undefined
  }
  return Number(input.value)
}
