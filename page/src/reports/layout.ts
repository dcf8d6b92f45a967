// Layouts of training runs: which rank computes what, the schedule of a pipeline, and the ranking of `transect plan training`.

import { html, nothing, svg, type TemplateResult } from 'lit'
import { count, percent } from '../engine/format'
import { stackedBar, type Part } from '../engine/panels'

/** Coordinates of a rank, and its run of layers: first, and number. */
export interface Rank {
  rank: number
  data: number
  pipeline: number
  tensor: number
  context: number
}

export interface Timeline {
  /** Forward passes that the schedule takes. */
  length: number
  bubbles: number[]
  kept: number[]
  /** Action such as F0 or B3b, begin and end, for each rank. */
  actions: [string, number, number][][]
}

export interface Layout {
  sizes: Record<'data' | 'pipeline' | 'context' | 'tensor', number>
  words: string
  /** Sentences: what is shared, what is cut. */
  notes: string[]
  ranks: Rank[]
  /** Layers of each stage. */
  layers: number[]
  schedule: (Timeline & { name: string }) | null
}

export interface Ranked {
  layout: string
  needed: number
  seconds: number
  tokens_per_second: number
  [part: string]: number | string | boolean
}

/** What `transect plan training --json` prints. */
export interface Ranking {
  budget: number
  layouts: Ranked[]
  why: string[]
  do_not_fit: Ranked[]
  refused: { layout: string; why: string }[]
}

const PARTS: [string, string, string][] = [
  ['compute', 'compute', 'var(--series-3)'],
  ['recompute', 'computed again', 'var(--series-2)'],
  ['gradients', 'gradients that are waited for', 'var(--series-4)'],
  ['communication', 'communication that is waited for', 'var(--series-1)'],
  ['bubble', 'bubble: stages wait', 'var(--series-5)'],
  ['optimizer', 'optimizer', 'var(--series-6)'],
  ['host', 'host', 'var(--series-7)'],
]

const AXES = { data: 'other micro-batches', pipeline: 'other layers', context: 'other tokens of a sequence', tensor: 'a part of each layer' }

/** A rank as a square: a row for each replica, a column for each stage; inside it the ranks that share its layers. */
export function layoutPanel(layout: Layout): TemplateResult {
  const { sizes, ranks } = layout
  const inner = sizes.tensor * sizes.context
  const cell = inner > 4 ? 15 : 22
  const [wide, high] = [sizes.tensor * cell, sizes.context * cell]
  const [left, top, gap] = [70, 24, 12]
  const column = Math.max(wide + gap, sizes.pipeline > 1 ? 124 : 0)
  const width = left + sizes.pipeline * column
  const height = top + sizes.data * (high + gap)
  const x = (rank: Rank) => left + rank.pipeline * column + rank.tensor * cell
  const y = (rank: Rank) => top + rank.data * (high + gap) + rank.context * cell
  const stage = (at: number) => `stage ${at}${layout.layers.length ? `: ${layout.layers[at]} layers` : ''}`
  const used = (Object.keys(AXES) as (keyof typeof AXES)[]).filter((axis) => sizes[axis] > 1)
  return html`<section class="card panel">
    <h2>Layout</h2>
    <p class="hint">${layout.words}. Each square is a rank. ${used.length ? html`Along ${used.map((axis, at) => html`${at ? '; along ' : ''}<b>${axis}</b> (${sizes[axis]}) they compute ${AXES[axis]}`)}.` : 'One device computes everything.'}
      ${layout.notes.map((note) => html` ${note}`)}</p>
    <div class="scroll" tabindex="0" role="region" aria-label="Ranks of the layout">
      <svg class="ranks" width=${width} height=${height} role="img" aria-label="${count(ranks.length)} ranks: ${layout.words}">
        ${sizes.pipeline > 1 || layout.layers.length ? Array.from({ length: sizes.pipeline }, (_, at) => svg`<text x=${left + at * column} y="14">${stage(at)}</text>`) : nothing}
        ${Array.from({ length: sizes.data }, (_, at) => (sizes.data > 1 ? svg`<text x="0" y=${top + at * (high + gap) + high / 2 + 4}>replica ${at}</text>` : nothing))}
        ${ranks.map((rank) => svg`<g><rect x=${x(rank)} y=${y(rank)} width=${cell - 2} height=${cell - 2} rx="3"
            style="fill: color-mix(in srgb, var(--series-${1 + (rank.pipeline % 7)}) ${sizes.tensor > 1 ? 65 - (35 * rank.tensor) / sizes.tensor : 50}%, var(--surface))"></rect>
          ${cell > 15 ? svg`<text class="number" x=${x(rank) + cell / 2 - 1} y=${y(rank) + cell / 2 + 3}>${rank.rank}</text>` : nothing}</g>`)}
      </svg></div>
    <details><summary>Ranks as a table</summary><div class="scroll" tabindex="0" role="region" aria-label="Ranks">
      <table><thead><tr><th scope="col">Rank</th><th scope="col">Replica</th><th scope="col">Stage</th><th scope="col">Context</th><th scope="col">Tensor</th></tr></thead>
        <tbody class="numbers">${ranks.map((rank) => html`<tr><td>${rank.rank}</td><td>${rank.data}</td><td>${rank.pipeline}</td><td>${rank.context}</td><td>${rank.tensor}</td></tr>`)}</tbody></table></div></details>
    ${layout.schedule ? scheduleDrawing(layout.schedule.name, layout.schedule) : nothing}
  </section>`
}

/** The passes of each stage over time. */
export function scheduleDrawing(name: string, timeline: Timeline): TemplateResult {
  const [left, row, width] = [52, 20, 900]
  const x = (time: number) => left + (time / timeline.length) * (width - left)
  const waits = timeline.bubbles.map((each, rank) => `stage ${rank} ${percent(each)}`).join(', ')
  return html`<h3>${name} <span class="soft">${Number(timeline.length.toPrecision(4))} forward passes long, up to
      ${percent(Math.max(...timeline.bubbles))} of it waiting, at most ${Math.max(...timeline.kept)} activations kept</span></h3>
    <svg class="schedule" viewBox="0 0 ${width} ${timeline.actions.length * row}" role="img" aria-label="Schedule ${name}: waiting ${waits}">
      ${timeline.actions.map((actions, rank) => svg`<text x="0" y=${rank * row + 14}>stage ${rank}</text>
        ${actions.map(([action, begin, end]) => {
          const wide = Math.max(0.5, x(end) - x(begin) - 0.8)
          return svg`<g class=${action.startsWith('F') ? 'forward' : 'backward'}><rect x=${x(begin)} y=${rank * row + 2} width=${wide} height=${row - 4} rx="2"></rect>
            ${wide > 14 ? svg`<text class="number" x=${x(begin) + wide / 2} y=${rank * row + 14}>${action.slice(1)}</text>` : nothing}</g>`
        })}`)}
    </svg>
    <ul class="legend"><li><span class="swatch prefill"></span>forward pass of a micro-batch</li><li><span class="swatch decode"></span>backward pass</li><li>empty: the stage waits</li></ul>`
}

export function schedulesPage(schedules: Record<string, Timeline>): TemplateResult {
  return html`<section class="card panel"><h2>Pipeline schedules</h2>
    <p class="hint">Each row is a stage, each block a pass of one micro-batch. Shorter is faster; kept activations are memory.</p>
    ${Object.entries(schedules).map(([name, timeline]) => scheduleDrawing(name, timeline))}</section>`
}

/** Layouts beside each other: the time of a step by cause. */
export function rankingPage(ranking: Ranking, gib: (bytes: number) => string): TemplateResult {
  const longest = Math.max(...ranking.layouts.map((each) => each.seconds), 1e-9)
  const parts = (each: Ranked): Part[] => PARTS.map(([name, text, color]) => ({ name, text, color, value: Number(each[name] ?? 0) }))
  const best = ranking.layouts[0]
  return html`<section class="card panel">
      <h2>Layouts, the fastest first</h2>
      <p class="hint">Predicted time of a step by cause. Only layouts that fit into ${gib(ranking.budget)} a device are ranked.</p>
      <div class="scroll tall" tabindex="0" role="region" aria-label="Layouts by speed">
        <table><thead><tr><th scope="col">Layout</th><th scope="col">Tokens/s</th><th scope="col">Memory</th><th scope="col">Time of a step</th></tr></thead>
        <tbody class="numbers">${ranking.layouts.slice(0, 40).map((each) => html`<tr><td>${each.layout}</td><td>${count(each.tokens_per_second)}</td><td>${gib(each.needed)}</td>
          <td class="bar-cell"><span class="time-bar" style="width: ${(100 * each.seconds) / longest}%" role="img"
            aria-label=${parts(each).filter((part) => part.value > 0).map((part) => `${part.text} ${percent(part.value / each.seconds)}`).join(', ')}>
            ${parts(each).map((part) => (part.value > 0 ? html`<i style="flex: ${part.value / each.seconds} 0 0; background: ${part.color}"></i>` : nothing))}</span></td></tr>`)}
        </tbody></table></div>
      ${best ? html`<h3>${best.layout}</h3>${stackedBar(parts(best), 'Time of a step')}` : html`<p class="notice bad">No layout fits.</p>`}
      ${ranking.why.length ? html`<h3>Why</h3><ul class="terms">${ranking.why.map((each) => html`<li>${each}</li>`)}</ul>` : nothing}
    </section>
    ${ranking.do_not_fit.length + ranking.refused.length
      ? html`<section class="card panel"><h2>Others</h2><details><summary>${ranking.do_not_fit.length} do not fit, ${ranking.refused.length} cannot be used</summary>
          <ul class="terms">${ranking.do_not_fit.map((each) => html`<li><b>${each.layout}</b> needs ${gib(each.needed)}</li>`)}
            ${ranking.refused.map((each) => html`<li><b>${each.layout}</b> ${each.why}</li>`)}</ul></details></section>`
      : nothing}`
}
