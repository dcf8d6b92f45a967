// Reports of `explain run`, traces, rooflines and training runs.

import { html } from 'lit'
import { customElement, property } from 'lit/decorators.js'
import type { Api } from '../api'
import { PageElement } from '../element'

@customElement('report-view')
export class ReportView extends PageElement {
  @property({ attribute: false }) api!: Api
  /** True while this tab is shown; nothing is fetched otherwise. */
  @property({ type: Boolean }) active = false
  /** Rest of the address behind `#/reports/`. */
  @property() path = ''

  protected override render() {
    return html`<p class="placeholder">Reports are not built yet.</p>`
  }
}
