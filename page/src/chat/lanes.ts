// <lane-dialog>: the ways to answer that are compared: models or adapters, settings, or another server.

import { html, nothing } from 'lit'
import { customElement, property, state } from 'lit/decorators.js'
import { Api } from '../api'
import { PageElement } from '../element'
import { icon } from '../icons'
import type { Session } from './session'
import type { Lane } from './types'

const MOST = 4

@customElement('lane-dialog')
export class LaneDialog extends PageElement {
  @property({ attribute: false }) session!: Session
  @property({ attribute: false }) models: string[] = []
  @state() private lanes: Lane[] = []
  /** Models of other servers by address; null while a server gives none. */
  @state() private others = new Map<string, string[] | null>()

  open(): void {
    const lanes = this.session.conversation.lanes
    const second = this.models[1] ?? ''
    const fresh: Lane[] = [
      { name: this.models[0] ?? 'A', server: '', model: '' },
      second ? { name: second, server: '', model: second } : { name: 'likeliest tokens', server: '', model: '', temperature: 0 },
    ]
    this.lanes = (lanes.length ? lanes : fresh).map((lane) => ({ ...lane }))
    this.querySelector('dialog')!.showModal()
  }

  private change(index: number, changes: Partial<Lane>): void {
    this.lanes = this.lanes.map((lane, at) => (at === index ? { ...lane, ...changes } : lane))
  }

  private async askServer(index: number, address: string): Promise<void> {
    const server = address.trim().replace(/\/+$/, '').replace(/\/v1$/, '')
    this.change(index, { server, model: '' })
    if (server) await this.loadModels(server)
  }

  private async loadModels(server: string): Promise<void> {
    let found: string[] | null
    try {
      const { data } = await new Api(server, this.session.keys.get(server) ?? '').get<{ data: { id: string }[] }>('v1/models')
      found = data.map((each) => each.id)
    } catch {
      found = null
    }
    this.others = new Map(this.others).set(server, found)
  }

  private setKey(server: string, key: string): void {
    this.session.keys.set(server, key)
    void this.loadModels(server)
  }

  private finish(event: Event, lanes: Lane[]): void {
    event.preventDefault()
    this.querySelector('dialog')!.close()
    this.dispatchEvent(new CustomEvent('lanes', { detail: lanes, bubbles: true }))
  }

  protected override render() {
    return html`<dialog aria-labelledby="lanes-title">
      <form @submit=${(event: Event) => this.finish(event, this.lanes)}>
        <h2 id="lanes-title">Compare side by side</h2>
        <p>Each message is answered by all of these, with the other settings of the conversation and the same seed.</p>
        ${this.lanes.map((lane, index) => this.lane(lane, index))}
        ${this.lanes.length < MOST
          ? html`<button type="button" @click=${() => (this.lanes = [...this.lanes, { name: `lane ${this.lanes.length + 1}`, server: '', model: '' }])}>
              ${icon('plus')} Another one</button>` : nothing}
        <div class="actions">
          <button type="button" @click=${(event: Event) => this.finish(event, [])}>Compare nothing</button>
          <button class="main" ?disabled=${this.lanes.length < 2}>Compare</button>
        </div>
      </form></dialog>`
  }

  private lane(lane: Lane, index: number) {
    const given = (event: Event) => (event.target as HTMLInputElement).value
    const number = (event: Event) => (given(event) === '' ? undefined : Number(given(event)))
    const models = lane.server ? this.others.get(lane.server) : this.models
    return html`<fieldset class="lane"><legend>${index + 1}</legend>
      <label>Name <input required maxlength="40" .value=${lane.name} @change=${(event: Event) => this.change(index, { name: given(event) })} /></label>
      <label>Model or adapter <select @change=${(event: Event) => this.change(index, { model: given(event) })}>
        <option value="">the server's own</option>
        ${(models ?? []).map((name) => html`<option value=${name} ?selected=${lane.model === name}>${name}</option>`)}</select></label>
      <label>Temperature <input type="number" min="0" max="2" step="any" placeholder="as set" .value=${String(lane.temperature ?? '')}
        @change=${(event: Event) => this.change(index, { temperature: number(event) })} /></label>
      <label>Top p <input type="number" min="0.01" max="1" step="any" placeholder="as set" .value=${String(lane.top_p ?? '')}
        @change=${(event: Event) => this.change(index, { top_p: number(event) })} /></label>
      <label class="wide">Another server's address <input type="url" placeholder="http://127.0.0.1:8001 — empty for this one" .value=${lane.server}
        @change=${(event: Event) => void this.askServer(index, given(event))} /></label>
      ${lane.server ? html`<label class="wide">Its key <input type="password" autocomplete="off" placeholder="if it wants one; kept in memory"
        @change=${(event: Event) => this.setKey(lane.server, given(event))} /></label>` : nothing}
      ${lane.server && models === null ? html`<p class="notice warning wide">This server gives no list of models: check the address and the key,
        and that it allows this page (CORS).</p>` : nothing}
      ${this.lanes.length > 2 ? html`<button type="button" class="quiet wide" @click=${() => (this.lanes = this.lanes.filter((_, at) => at !== index))}>
        ${icon('trash')} Remove</button>` : nothing}
    </fieldset>`
  }
}
