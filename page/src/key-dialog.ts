// The dialog that takes an API key.

import { html, nothing } from 'lit'
import { customElement, property, state } from 'lit/decorators.js'
import type { Api } from './api'
import { PageElement } from './element'

@customElement('key-dialog')
export class KeyDialog extends PageElement {
  @property({ attribute: false }) api!: Api
  @state() private refused = false

  /** Show the dialog. `refused`: the server wants a key, or another one. */
  open(refused: boolean): void {
    const dialog = this.dialog
    if (dialog.open) return
    this.refused = refused
    dialog.showModal()
  }

  private get dialog(): HTMLDialogElement {
    return this.querySelector('dialog')!
  }

  private save(event: Event): void {
    event.preventDefault()
    const form = event.target as HTMLFormElement
    const values = new FormData(form)
    this.dialog.close()
    this.api.setKey(String(values.get('key') ?? '').trim(), values.has('keep'))
    form.reset()
  }

  private forget(): void {
    this.dialog.close()
    this.api.setKey(null)
  }

  protected override render() {
    const why = this.api?.key
      ? 'The server does not know this key. Give another one.'
      : 'This server wants an API key. The person who runs it has one for you.'
    return html`
      <dialog aria-labelledby="key-title" class="small">
        <form @submit=${this.save}>
          <h2 id="key-title">API key</h2>
          ${this.refused ? html`<p class="notice warning" role="alert">${why}</p>` : nothing}
          <p>The key is kept in memory, and forgotten when this page is closed. The key of <code>--admin-api-key</code>
            also opens the views of the engine.</p>
          <label>Key <input name="key" type="password" autocomplete="off" required /></label>
          <label class="check"><input name="keep" type="checkbox" .checked=${this.api?.keyIsStored ?? false} />
            Remember it in this browser</label>
          <div class="actions">
            ${this.api?.key ? html`<button type="button" @click=${this.forget}>Forget the key</button>` : nothing}
            <button type="button" @click=${() => this.dialog.close()}>Cancel</button>
            <button class="main">Use the key</button>
          </div>
        </form>
      </dialog>
    `
  }
}
