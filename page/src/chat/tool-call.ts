// <tool-call>: a function that the model wants to have called, and the result that the user gives for it.

import { html, nothing } from 'lit'
import { customElement, property } from 'lit/decorators.js'
import { PageElement } from '../element'
import type { Session } from './session'
import type { Call, Message } from './types'

@customElement('tool-call')
export class ToolCallView extends PageElement {
  @property({ attribute: false }) session!: Session
  @property({ attribute: false }) message!: Message
  @property({ attribute: false }) call!: Call
  /** True if a result may be given now. */
  @property({ type: Boolean }) open = false

  private give(event: Event): void {
    event.preventDefault()
    const text = new FormData(event.target as HTMLFormElement).get('result')
    void this.session.giveResult(this.message, this.call.id, String(text ?? ''))
  }

  protected override render() {
    const result = this.session.resultsOf(this.message).find((each) => each.callId === this.call.id)
    return html`<section class="call" aria-label="Call of ${this.call.name}">
      <h4><span>Call</span> <code>${this.call.name}</code></h4>
      <pre tabindex="0"><code>${pretty(this.call.arguments)}</code></pre>
      ${result ? html`<h4><span>Result</span></h4><pre tabindex="0"><code>${pretty(result.text)}</code></pre>` : nothing}
      ${this.open && !result
        ? html`<form @submit=${this.give}><label>Result of the call<textarea name="result" rows="2" required></textarea></label>
            <button>Send the result</button></form>`
        : nothing}
    </section>`
  }
}

/** Indent JSON; text that is not (yet) JSON stays as it is. */
function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2)
  } catch {
    return text
  }
}
