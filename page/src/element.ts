// The base of all components of this page.

import { LitElement } from 'lit'

/** A component that renders into the page itself, so that one style sheet serves all components. */
export class PageElement extends LitElement {
  protected override createRenderRoot(): HTMLElement {
    return this
  }
}
