// <search-tree>: the branches of a search while it runs, its votes, and the winner; the same as a list.

import { html, nothing, svg } from 'lit'
import { customElement, property, state } from 'lit/decorators.js'
import { PageElement } from '../element'
import { stackedBar } from '../engine/panels'
import { layOut, lineOf, type Placed, type SearchBranch, type SearchState } from './search'

const WIDTH = 640
const LEFT = 14
const MOST_SERIES = 6
const WORDS: Record<SearchBranch['state'], string> = {
  new: 'waits', alive: 'draws tokens', ended: 'ended', dropped: 'dropped',
}

@customElement('search-tree')
export class SearchTree extends PageElement {
  @property({ attribute: false }) search!: SearchState
  /** Branch that the keys or the pointer chose. */
  @state() private read: number | null = null

  private get placed(): Placed[] {
    return layOut(this.search.branches)
  }

  protected override render() {
    const { search, placed } = this
    const winners = new Set(lineOf(search.branches, search.chosen).map((each) => each.id))
    return html`<section class="search" aria-label="Search">
      <p class="figures numbers"><b>${search.method.replaceAll('_', ' ')}</b>
        ${(['alive', 'ended', 'dropped'] as const).map((each) => html`<span>${this.count(each)} ${each}</span>`)}
        <span>${search.tokens} tokens drawn</span></p>
      <div class="drawing" tabindex="0" role="group" aria-label="${this.summary()} Up and down arrows choose a branch."
        @keydown=${this.pressed} @pointerleave=${() => (this.read = null)}>${this.drawing(placed, winners)}</div>
      <p class="readout numbers" aria-live=${this.read === null ? 'off' : 'polite'}>${this.readout(winners)}</p>
      ${this.votes()}
      <details><summary>Branches as a list</summary>${this.list(winners)}</details>
    </section>`
  }

  private count(wanted: SearchBranch['state']): number {
    return this.search.branches.filter((each) => each.state === wanted).length
  }

  private summary(): string {
    const parts = (['alive', 'ended', 'dropped'] as const).map((each) => `${this.count(each)} ${each}`)
    return `Tree of ${this.search.branches.length} branches, ${parts.join(', ')}.`
  }

  /** Branches as bars, as long as their tokens, with lines from their parents. */
  private drawing(placed: Placed[], winners: Set<number>) {
    const rows = Math.max(1, ...placed.map((each) => each.row + 1))
    const row = rows > 40 ? 7 : rows > 16 ? 11 : 18
    const longest = Math.max(24, ...placed.map((each) => each.start + each.branch.tokens))
    const height = rows * row + 10
    const x = (tokens: number) => LEFT + 16 + (tokens / longest) * (WIDTH - LEFT - 34)
    const y = (at: number) => 5 + (at < 0 ? rows / 2 : at + 0.5) * row
    return html`<svg viewBox="0 0 ${WIDTH} ${height}" style="max-height:${Math.max(height, 60)}px" aria-hidden="true">
      <circle class="prompt" cx=${LEFT - 6} cy=${y(-1)} r="4"></circle>
      ${placed.map(({ branch, start, row: at, from }) => {
        const [begin, end] = [x(start), Math.max(x(start) + 3, x(start + branch.tokens))]
        const origin = from < 0 ? LEFT - 2 : begin - 14
        const kind = `${branch.state}${winners.has(branch.id) ? ' won' : ''}${branch.id === this.read ? ' read' : ''}`
        return svg`<g class=${kind} @pointermove=${() => (this.read = branch.id)} @pointerdown=${() => (this.read = branch.id)}>
          <path class="edge" d="M${origin} ${y(from)}C${begin} ${y(from)} ${origin} ${y(at)} ${begin} ${y(at)}"></path>
          <line class="reach" x1=${begin} x2=${WIDTH} y1=${y(at)} y2=${y(at)} stroke-width=${row}></line>
          <line class="tokens-drawn" x1=${begin} x2=${end} y1=${y(at)} y2=${y(at)} stroke-width=${Math.max(3, row * 0.45)}
            style=${this.colorOf(branch)}></line>
          ${branch.state === 'dropped' ? svg`<path class="cross" d="M${end + 4} ${y(at) - 3}l6 6m0 -6l-6 6"></path>` : nothing}
          ${winners.has(branch.id) && branch.id === this.search.chosen ? svg`<path class="check" d="M${end + 4} ${y(at)}l3 4l6 -8"></path>` : nothing}
        </g>`
      })}
    </svg>`
  }

  /** Branches that vote for one answer have its colour. */
  private colorOf(branch: SearchBranch): string {
    const at = branch.answer === null ? -1 : this.ranked().findIndex(([answer]) => answer === branch.answer)
    return at < 0 ? '' : `stroke: var(--series-${1 + (at % MOST_SERIES)})`
  }

  private ranked(): [string, number][] {
    return Object.entries(this.search.votes ?? {}).sort((a, b) => b[1] - a[1])
  }

  private votes() {
    const ranked = this.ranked()
    if (!ranked.length) return nothing
    const parts = ranked.slice(0, 8).map(([answer, weight], at) => ({
      name: answer, text: answer, value: weight, color: `var(--series-${1 + (at % MOST_SERIES)})`,
    }))
    return html`<div class="votes">${stackedBar(parts, 'Votes', (value) => `${Number(value.toFixed(2))} ${value === 1 ? 'vote' : 'votes'}`)}</div>`
  }

  private scoresOf(branch: SearchBranch): string {
    return Object.entries(branch.scores).map(([judge, score]) => `${judge} ${score === null ? 'failed' : score.toFixed(3)}`).join(', ')
  }

  private readout(winners: Set<number>): string {
    const branch = this.search.branches.find((each) => each.id === this.read)
    if (!branch) return 'Point at a branch, or choose one with the arrow keys, to read it.'
    const text = lineOf(this.search.branches, branch.id).map((each) => each.text ?? '').join('')
    const parts = [
      `Branch ${branch.id}${winners.has(branch.id) ? ', the answer' : ''}: ${WORDS[branch.state]}, ${branch.tokens} tokens`,
      branch.answer === null ? '' : `votes for ${branch.answer}`, this.scoresOf(branch), text.trim().slice(-240),
    ]
    return parts.filter(Boolean).join(' · ')
  }

  private list(winners: Set<number>) {
    return html`<div class="scroll" tabindex="0" role="region" aria-label="Branches of the search">
      <table><caption class="hidden-text">Branches of the search</caption>
        <thead><tr><th scope="col">Branch</th><th scope="col">From</th><th scope="col">State</th><th scope="col">Tokens</th>
          <th scope="col">Scores</th><th scope="col">Answer</th></tr></thead>
        <tbody class="numbers">${this.search.branches.map(
          (each) => html`<tr><td>${each.id}${each.adapter ? ` (${each.adapter})` : ''}</td><td>${each.parent ?? 'prompt'}</td>
            <td>${winners.has(each.id) ? 'won' : WORDS[each.state]}</td><td>${each.tokens}</td>
            <td>${this.scoresOf(each) || '–'}</td><td class="because">${each.answer ?? each.text?.trim().slice(0, 80) ?? '–'}</td></tr>`,
        )}</tbody></table></div>`
  }

  private readonly pressed = (event: KeyboardEvent): void => {
    const order = this.placed.map((each) => each.branch.id)
    if (!order.length || !['ArrowUp', 'ArrowDown', 'Home', 'End', 'Escape'].includes(event.key)) return
    event.preventDefault()
    event.stopPropagation()
    if (event.key === 'Escape') return void (this.read = null)
    const at = this.read === null ? -1 : order.indexOf(this.read)
    const moved = { ArrowUp: at < 0 ? order.length - 1 : at - 1, ArrowDown: at + 1, Home: 0, End: order.length - 1 }
    this.read = order[Math.max(0, Math.min(order.length - 1, moved[event.key as keyof typeof moved]!))]!
  }
}
