// The live view of the engine.

import { html } from 'lit'
import { customElement, property } from 'lit/decorators.js'
import type { Api } from '../api'
import { PageElement } from '../element'

@customElement('engine-view')
export class EngineView extends PageElement {
  @property({ attribute: false }) api!: Api
  /** True while this tab is shown; nothing is fetched otherwise. */
  @property({ type: Boolean }) active = false
  /** Rest of the address behind `#/engine/`. */
  @property() path = ''

  protected override render() {
    return html`<p class="placeholder">The engine view is not built yet.</p>`
  }
}
