// The chat.

import { html } from 'lit'
import { customElement, property } from 'lit/decorators.js'
import type { Api } from '../api'
import { PageElement } from '../element'

@customElement('chat-view')
export class ChatView extends PageElement {
  @property({ attribute: false }) api!: Api
  @property({ type: Boolean }) active = false
  @property() path = ''

  protected override render() {
    return html`<p class="placeholder">The chat is not built yet.</p>`
  }
}
