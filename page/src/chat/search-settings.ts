// The part of the settings that asks for a search: a method of the server, and a field for each of its settings.

import { html, nothing } from 'lit'
import type { SearchMethod, SearchSetting } from './search'
import type { Settings } from './types'

type Options = Settings['searchOptions']

/** Draw the fields. `set` gets the name of the method, empty for none, and the settings that differ from defaults. */
export function searchFields(methods: SearchMethod[], settings: Settings, set: (search: string, options: Options) => void) {
  const options = settings.searchOptions ?? {}
  const method = methods.find((each) => each.name === settings.search)
  const change = (name: string, value: Options[string] | undefined): void => {
    const { [name]: _, ...rest } = options
    set(settings.search, value === undefined ? rest : { ...rest, [name]: value })
  }
  return html`<details ?open=${Boolean(method)}><summary>Search: more compute for one answer</summary>
    <label>Method <select name="search" @change=${(event: Event) => set((event.target as HTMLSelectElement).value, {})}>
      <option value="" ?selected=${!method}>none: one answer as it is drawn</option>
      ${methods.map((each) => html`<option value=${each.name} ?selected=${each === method}>${each.name.replaceAll('_', ' ')}</option>`)}
    </select></label>
    ${method
      ? html`<p class="soft">${method.about} Its tree is drawn above the answer. Tokens have no probabilities then.</p>
          ${method.settings.map((each) => field(each, options[each.name], (value) => change(each.name, value)))}
          <label class="number-field"><span>budget <small>Tokens of all branches together.</small></span>
            <input type="number" name="search-budget" min="1" step="1" placeholder="none" .value=${String(options.budget ?? '')}
              @change=${(event: Event) => change('budget', numberIn(event))} /></label>`
      : nothing}
  </details>`
}

function field(setting: SearchSetting, given: Options[string] | undefined, change: (value: Options[string] | undefined) => void) {
  const { name, help, kind, choices } = setting
  const label = html`<span>${name.replaceAll('_', ' ')} <small>${help}</small></span>`
  if (kind === 'flag')
    return html`<label class="check"><input type="checkbox" name="search-${name}" .checked=${Boolean(given ?? setting.default)}
      @change=${(event: Event) => change((event.target as HTMLInputElement).checked)} />${label}</label>`
  if (kind === 'choice')
    return html`<label>${label}<select name="search-${name}" @change=${(event: Event) => change((event.target as HTMLSelectElement).value)}>
      ${choices.map((each) => html`<option ?selected=${each === (given ?? setting.default)}>${each}</option>`)}</select></label>`
  if (kind === 'number')
    return html`<label class="number-field">${label}<input type="number" name="search-${name}" min=${setting.least ?? nothing}
      max=${setting.most ?? nothing} step=${setting.whole ? 1 : 'any'} placeholder=${String(setting.default)}
      .value=${String(given ?? '')} @change=${(event: Event) => change(numberIn(event))} /></label>`
  const shown = Array.isArray(given) ? given.join(', ') : JSON.stringify(given ?? '').slice(1, -1)
  const usual = Array.isArray(setting.default) ? 'none' : JSON.stringify(setting.default).slice(1, -1)
  return html`<label>${label}<input name="search-${name}" placeholder=${usual} .value=${shown}
    @change=${(event: Event) => change(textIn(event, setting.list))} /></label>`
}

function numberIn(event: Event): number | undefined {
  const input = event.target as HTMLInputElement
  return input.value !== '' && input.reportValidity() ? Number(input.value) : undefined
}

/** Read a text, in which \n is a new line, or a list with commas. */
function textIn(event: Event, list: boolean): string | string[] | undefined {
  const { value } = event.target as HTMLInputElement
  if (!value.trim()) return undefined
  return list ? value.split(',').map((each) => each.trim()).filter(Boolean) : value.replaceAll('\\n', '\n')
}
