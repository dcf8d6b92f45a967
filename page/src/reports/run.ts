// Training runs: curves beside each other, and of the chosen run its samples, memory, layout and settings.

import { html, nothing, type TemplateResult } from 'lit'
import { tile, stackedBar, type Part } from '../engine/panels'
import { count } from '../engine/format'
import './chart'
import { layoutPanel } from './layout'
import { short, type Series } from './chart'
import type { Account, Line, Run, Term } from './report'

export const SERIES = ['var(--series-1)', 'var(--series-2)', 'var(--series-3)', 'var(--series-4)', 'var(--series-5)', 'var(--series-6)', 'var(--series-7)']
const KNOWN = new Set(['kind', 'time', 'step', 'loss', 'tokens', 'labels', 'seconds', 'peak_bytes', 'flops', 'tokens_per_second', 'learning_rate', 'gradient_norm', 'mfu'])
const GIB = 2 ** 30

export function gib(bytes: number): string {
  return bytes >= GIB / 10 ? `${(bytes / GIB).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`
}

function values(lines: Line[], name: string): [number, number][] {
  return lines.filter((line) => typeof line[name] === 'number').map((line) => [line.step, line[name] as number])
}

/** Exponential mean, corrected for its beginning. */
function smooth(points: [number, number][], weight: number): [number, number][] {
  let [sum, all] = [0, 0]
  return points.map(([x, y]) => {
    sum = weight * sum + (1 - weight) * y
    all = weight * all + (1 - weight)
    return [x, sum / all]
  })
}

export interface RunView {
  runs: Run[]
  chosen: number
  smoothing: number
  change(change: Partial<{ chosen: number; smoothing: number }>): void
}

export function runPage(view: RunView): TemplateResult {
  const run = view.runs[view.chosen] ?? view.runs[0]!
  const last = run.steps.at(-1)
  const checks = run.others.filter((line) => line.kind === 'evaluation')
  const color = (index: number) => SERIES[index % SERIES.length]!
  const several = view.runs.length > 1
  const loss: Series[] = view.runs.flatMap((each, i) => {
    const points = values(each.steps, 'loss')
    const name = several ? each.name : 'training loss'
    const found: Series[] = [{ name, color: color(i), points: smooth(points, view.smoothing) }]
    if (view.smoothing > 0 && !several) found.unshift({ name, color: color(i), points, faint: true })
    const dots = values(each.others.filter((line) => line.kind === 'evaluation'), 'loss')
    if (dots.length) found.push({ name: several ? `${each.name}, validation` : 'validation loss', color: several ? color(i) : color(i + 1), points: dots, dots: true })
    return found
  })
  const curve = (name: string): Series[] =>
    view.runs.map((each, i) => ({ name: several ? each.name : name, color: color(i), points: smooth(values(each.steps, name), name === 'learning_rate' ? 0 : view.smoothing) }))
  const extra = [...new Set(view.runs.flatMap((each) => [...each.steps.slice(0, 1), ...each.steps.slice(-1)].flatMap(Object.keys)))].filter((name) => !KNOWN.has(name))
  const mfu = typeof last?.mfu === 'number' ? last.mfu : null
  return html`
    <div class="tiles">
      ${tile('Step', count(last?.step ?? 0), goal(run))}
      ${tile('Loss', last ? Number(last.loss).toFixed(4) : '–', 'nats per token, last step')}
      ${tile('Validation', checks.length ? Number(checks.at(-1)!.loss).toFixed(4) : '–', checks.length ? `at step ${checks.at(-1)!.step}` : 'not measured')}
      ${tile('Speed', last ? `${short(Number(last.tokens_per_second))}/s` : '–', 'tokens, last step')}
      ${tile('MFU', mfu === null ? '–' : `${(100 * mfu).toFixed(0)}%`, mfu === null ? 'no measured rate' : 'of the matrix rate')}
      ${tile('Memory', last && Number(last.peak_bytes) ? gib(Number(last.peak_bytes)) : '–', 'peak of the GPU')}
    </div>
    <section class="card panel">
      <div class="panel-head">
        <h2>Loss</h2>
        <label class="inline">Smoothing
          <input type="range" min="0" max="0.99" step="0.01" .value=${String(view.smoothing)}
            @input=${(event: Event) => view.change({ smoothing: Number((event.target as HTMLInputElement).value) })} /></label>
      </div>
      <p class="hint">How surprised the model is by the next token, in nats: lower is better. Dots are measured on text that it does not
        learn from; where they rise while the line falls, it learns by heart.${run.every > 1 ? ` One of ${run.every} steps is shown.` : ''}</p>
      <line-chart label="Loss over steps" .series=${loss}></line-chart>
    </section>
    <div class="grid">
      <div class="column">
        ${panel('Speed', 'Tokens that a second of training reads.', html`<line-chart label="Tokens per second over steps" zero .series=${curve('tokens_per_second')}></line-chart>`)}
        ${panel('Learning rate', 'How far a step may move the weights: it warms up, and falls towards the end.', html`<line-chart label="Learning rate over steps" zero .series=${curve('learning_rate')}></line-chart>`)}
        ${run.memory?.length === 1 ? accountPanel(run.memory[0]!, 'Memory, as predicted') : nothing}
        ${extra.map((name) => panel(name.replaceAll('_', ' '), 'A number of this objective.', html`<line-chart label="${name} over steps" .series=${curve(name)}></line-chart>`))}
      </div>
      <div class="column">
        ${panel('Gradient norm', 'The length of the gradient before it is clipped. Peaks are surprises; growth without end is divergence.', html`<line-chart label="Gradient norm over steps" zero .series=${curve('gradient_norm')}></line-chart>`)}
        ${samplesPanel(run)}
      </div>
    </div>
    ${memoryPanels(run)}
    ${run.layout ? layoutPanel(run.layout) : nothing}
    ${settingsPanel(run)}
  `
}

function goal(run: Run): string {
  const steps = (run.config as { steps?: number } | null)?.steps
  const saved = run.checkpoints.length ? `, ${run.checkpoints.length} checkpoint${run.checkpoints.length > 1 ? 's' : ''}` : ''
  return `${steps ? `of ${count(steps)}` : 'of this run'}${saved}`
}

function panel(title: string, hint: string, content: TemplateResult): TemplateResult {
  return html`<section class="card panel"><h2>${title}</h2><p class="hint">${hint}</p>${content}</section>`
}

function samplesPanel(run: Run): TemplateResult {
  const samples = run.others.filter((line) => line.kind === 'sample')
  if (!samples.length)
    return panel('Samples', 'Answers of the model while it learns.', html`<p class="empty">This run draws none: set samples.prompts.</p>`)
  const prompts = [...new Set(samples.map((line) => String(line.prompt)))]
  return panel(
    'Samples',
    'Answers of the model while it learns, the newest first.',
    html`${prompts.map((prompt) => {
      const answers = samples.filter((line) => line.prompt === prompt).reverse()
      return html`<details class="sample" open><summary>${prompt}</summary>
        <div class="scroll" tabindex="0" role="region" aria-label="Answers to ${prompt}"><ol>${answers.slice(0, 20).map(
          (line) => html`<li><span class="numbers soft">step ${line.step}</span><p>${line.answer}</p></li>`,
        )}</ol></div></details>`
    })}`,
  )
}

function partsOf(terms: Term[]): Part[] {
  return terms
    .filter((term) => term.bytes > 0)
    .map((term, i) => ({ name: term.name, text: term.name, value: term.bytes, color: SERIES[i % SERIES.length]! }))
}

/** Terms of memory as a bar, and with their reasons. */
export function accountPanel(account: Account, title: string): TemplateResult {
  const parts = partsOf(account.terms)
  const worst = account.phases.reduce((a, b) => (b.bytes > a.bytes ? b : a))
  return html`<section class="card panel">
    <h2>${title}</h2>
    <p class="hint">What the memory is for. The peak, ${gib(account.peak)}, is at the ${worst.name}; with the margin
      ${gib(account.needed)} have to be free.</p>
    ${stackedBar(parts, title, gib)}
    <details><summary>The arithmetic, and the moments of a step</summary>
      <ul class="terms">${account.terms.filter((term) => term.bytes).map((term) => html`<li><b>${term.name}</b> ${gib(term.bytes)}: ${term.why}</li>`)}</ul>
      <table><thead><tr><th scope="col">Moment</th><th scope="col">Held</th></tr></thead>
        <tbody class="numbers">${account.phases.map((phase) => html`<tr><td>${phase.name}</td><td>${gib(phase.bytes)}</td></tr>`)}</tbody></table>
      ${account.host?.length ? html`<p class="soft">In host memory: ${account.host.map((term) => `${term.name} ${gib(term.bytes)}`).join(', ')}</p>` : nothing}
    </details>
  </section>`
}

function memoryPanels(run: Run): TemplateResult | typeof nothing {
  if (!run.memory || run.memory.length < 2) return nothing
  return html`<div class="grid">${run.memory.map((account, i) => accountPanel(account, `Memory of stage ${i}, as predicted`))}</div>`
}

function settingsPanel(run: Run): TemplateResult | typeof nothing {
  if (!run.config) return nothing
  const rows: [string, string][] = []
  const walk = (value: unknown, path: string): void => {
    if (value && typeof value === 'object' && !Array.isArray(value))
      for (const [name, each] of Object.entries(value)) walk(each, path ? `${path}.${name}` : name)
    else if (value !== null && value !== '' && !(Array.isArray(value) && !value.length)) rows.push([path, JSON.stringify(value)])
  }
  walk(run.config, '')
  return html`<section class="card panel">
    <h2>Settings</h2>
    <p class="hint">Checkpoints:
      ${run.checkpoints.length ? run.checkpoints.map((step) => `step ${step}`).join(', ') : 'none'}.</p>
    <details><summary>${rows.length} settings</summary><div class="scroll" tabindex="0" role="region" aria-label="Settings">
      <table><thead><tr><th scope="col">Setting</th><th scope="col">Value</th></tr></thead>
        <tbody>${rows.map(([name, value]) => html`<tr><td>${name}</td><td class="because">${value}</td></tr>`)}</tbody></table></div></details>
  </section>`
}
