// Explained programs and rooflines.

import { html, nothing, svg, type TemplateResult } from 'lit'
import { count, duration, percent } from '../engine/format'
import { stackedBar, tile, type Part } from '../engine/panels'
import './chart'
import { short } from './chart'
import type { Explanation, Finding, Job, Roofline } from './report'
import { SERIES } from './run'

/** Parts of a program's time, as explain/program/split.py names them. */
export const PARTS: Record<string, [string, string]> = {
  floor: ['at the floor: the least that the shapes need', 'var(--series-3)'],
  inefficiency: ['kernels above their floor', 'var(--series-1)'],
  unrated: ['kernels whose shapes are not in the trace, C++ kernels among them', 'var(--series-7)'],
  padding: ['computing on padding', 'var(--series-4)'],
  launch: ['launch-bound: calling operators, and short gaps between them', 'var(--series-5)'],
  host: ['host-bound: Python and other work between operators', 'var(--series-2)'],
  sync: ['synchronisation: .item(), .cpu(), allocation', 'var(--bad)'],
  loading: ['data loading', 'var(--series-6)'],
  copies: ['copies, conversions and changes of layout', 'color-mix(in srgb, var(--series-1) 50%, var(--surface))'],
  communication: ['communication that nothing hides', 'color-mix(in srgb, var(--series-4) 50%, var(--surface))'],
  recompilation: ['compiling', 'color-mix(in srgb, var(--series-2) 50%, var(--surface))'],
  startup: ['start-up: imports', 'color-mix(in srgb, var(--series-6) 50%, var(--surface))'],
  profiler: ['what profiling itself cost', 'var(--line)'],
  unexplained: ['unexplained', 'var(--line-strong)'],
}

export function explanationPage(found: Explanation): TemplateResult {
  const parts: Part[] = Object.entries(found.parts_s).map(([name, value]) => ({
    name,
    value,
    text: PARTS[name]?.[0] ?? name,
    color: PARTS[name]?.[1] ?? 'var(--series-7)',
  }))
  const own = parts.reduce((sum, part) => sum + (part.name === 'profiler' ? 0 : part.value), 0)
  const floor = (found.parts_s.floor ?? 0) / (own || 1)
  const gain = found.findings.reduce((sum, each) => sum + each.gain, 0)
  return html`
    <div class="tiles">
      ${tile('Wall time', duration(found.plain_s), 'without profiling')}
      ${tile('At the floor', percent(floor), found.on_gpu ? 'of a GPU program' : 'of a CPU program')}
      ${tile('Findings', count(found.findings.length), found.findings.length ? 'changes that pay' : 'nothing gains 2%')}
      ${tile('To gain', duration(gain), 'if all findings were done')}
    </div>
    <section class="card panel"><h2>Time by cause</h2>
      <p class="hint">The wall time of the program, each moment under one cause. The parts add up to 100%.</p>
      ${stackedBar(parts, 'Time by cause')}</section>
    ${findingsPanel(found.findings)}
    ${operatorsPanel(found)}
    ${found.notes?.length ? html`<section class="card panel"><h2>Notes</h2><ul class="terms">${found.notes.map((note) => html`<li>${note}</li>`)}</ul></section>` : nothing}
  `
}

function findingsPanel(findings: Finding[]): TemplateResult {
  return html`<section class="card panel"><h2>Findings</h2>
    <p class="hint">Changes by their predicted gain, with the evidence for each.</p>
    ${findings.length
      ? html`<ol class="findings">${findings.map(
          (each) => html`<li>
            <p><b>${each.title}</b> <span class="numbers gain">${duration(each.gain)} to gain (${percent(each.share)})</span></p>
            <p class="soft">${each.evidence}</p>
            ${each.where ? html`<p class="soft mono">${each.where}</p>` : nothing}
            <p>Do: ${each.advice}${each.apply ? html` <code>--apply ${each.apply}</code>` : nothing}</p></li>`,
        )}</ol>`
      : html`<p class="empty">None that would gain 2% or more.</p>`}</section>`
}

function operatorsPanel(found: Explanation): TemplateResult {
  const most = Math.max(...found.operators.map((op) => op.seconds), 1e-12)
  return html`<section class="card panel"><h2>Operators</h2>
    <p class="hint">Those that take the most time. The dark part of a bar is its floor.</p>
    <div class="scroll tall" tabindex="0" role="region" aria-label="Operators">
      <table><thead><tr><th scope="col">Operator</th><th scope="col">Calls</th><th scope="col">Time</th><th scope="col">Of floor</th><th scope="col"><span class="hidden-text">Bar</span></th></tr></thead>
      <tbody class="numbers">${found.operators.slice(0, 40).map((op) => {
        const share = op.floor_s === null ? null : op.floor_s / op.seconds
        return html`<tr><td class="because"><b>${op.name}</b> <span class="soft">${op.shapes ? JSON.stringify(op.shapes) : ''}</span></td><td>${count(op.calls)}</td>
          <td>${duration(op.seconds)}</td><td>${share === null ? '–' : percent(share)}</td>
          <td><span class="op-bar" style="width:${(100 * op.seconds) / most}px"><i style="width:${100 * Math.min(1, share ?? 0)}%"></i></span></td></tr>`
      })}</tbody></table></div></section>`
}

export function jobPage(job: Job, chosen: number, choose: (rank: number) => void): TemplateResult {
  const slowest = job.ranks.reduce((a, b) => (b.step_s - b.waiting_s > a.step_s - a.waiting_s ? b : a), job.ranks[0]!)
  return html`
    <section class="card panel"><h2>Processes</h2>
      <p class="hint">Ranks wait for the last of them: the one with the most work of its own sets the pace.</p>
      <table><thead><tr><th scope="col">Process</th><th scope="col">Step</th><th scope="col">Waits for others</th><th scope="col"></th></tr></thead>
        <tbody class="numbers">${job.ranks.map(
          (rank, i) => html`<tr><td><button class="link" aria-pressed=${i === chosen} @click=${() => choose(i)}>${rank.name}</button></td>
            <td>${duration(rank.step_s)}</td><td>${duration(rank.waiting_s)}</td><td>${rank === slowest && job.ranks.length > 1 ? 'others wait for it' : ''}</td></tr>`,
        )}</tbody></table></section>
    ${findingsPanel(job.findings)}
    ${job.ranks[chosen]?.parts_s ? explanationPage(job.ranks[chosen]!) : nothing}`
}

const WIDTH = 720
const HEIGHT = 340

export function rooflinePage(found: Roofline): TemplateResult {
  const groups = [...new Set(found.points.map((point) => point.group))]
  const color = (group: string) => SERIES[groups.indexOf(group) % SERIES.length]!
  const roofs = Object.entries(found.flops_per_second)
  const peak = Math.max(...roofs.map(([, rate]) => rate))
  const placed = found.points.filter((point) => point.intensity > 0 && point.flops > 0)
  const rate = (point: Roofline['points'][number]) => point.flops / (point.measured_s ?? point.floor_s)
  const xs = [...placed.map((point) => point.intensity), peak / found.bytes_per_second]
  const [x0, x1] = [10 ** Math.floor(Math.log10(Math.min(...xs) / 1.5)), 10 ** Math.ceil(Math.log10(Math.max(...xs) * 3))]
  const ys = [...placed.map(rate), peak]
  const [y0, y1] = [10 ** Math.floor(Math.log10(Math.min(...ys) / 2)), peak * 3]
  const at = (value: number, from: number, to: number) => (Math.log10(value) - Math.log10(from)) / (Math.log10(to) - Math.log10(from))
  const x = (value: number) => 62 + at(value, x0, x1) * (WIDTH - 74)
  const y = (value: number) => HEIGHT - 40 - at(value, y0, y1) * (HEIGHT - 56)
  const powers = (from: number, to: number) => {
    const all: number[] = []
    for (let p = Math.ceil(Math.log10(from)); p <= Math.log10(to); p++) all.push(10 ** p)
    return all
  }
  const roof = (flops: number) => {
    const ridge = flops / found.bytes_per_second
    const start = Math.max(y0, x0 * found.bytes_per_second)
    return `M${x(start / found.bytes_per_second)} ${y(start)}L${x(ridge)} ${y(flops)}L${x(x1)} ${y(flops)}`
  }
  return html`
    <section class="card panel"><h2>${found.device}</h2>
      <p class="hint">Each dot is a piece of work. The slope is the bandwidth of memory, the flat lines are the rates of matrix
        products: nothing can be above them. Left of the bend, bytes bound the work; right of it, FLOPs.
        ${found.source ? `Ceilings: ${found.source}.` : ''}</p>
      <svg class="roofline" viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label="Roofline of ${found.device} with ${placed.length} points; the table below has their numbers">
        ${powers(y0, y1).map((tick) => line(62, y(tick), WIDTH - 12, y(tick), label(56, y(tick) + 4, `${short(tick)}`, 'end')))}
        ${powers(x0, x1).map((tick) => line(x(tick), 16, x(tick), HEIGHT - 40, label(x(tick), HEIGHT - 24, short(tick), 'middle')))}
        ${label((WIDTH + 62) / 2, HEIGHT - 6, 'FLOPs per byte', 'middle')}
        ${label(66, 12, 'FLOP/s', 'start')}
        ${roofs.map(([name, flops]) => [svgPath(roof(flops)), label(WIDTH - 14, y(flops) - 6, name, 'end')])}
        ${placed.map((point) => dot(x(point.intensity), y(rate(point)), color(point.group), point.measured_s === null))}
      </svg>
      <ul class="legend">${groups.map((group) => html`<li><span class="swatch" style="background:${color(group)}"></span>${group || 'work'}</li>`)}</ul>
    </section>
    <section class="card panel"><h2>Points</h2>
      <div class="scroll tall" tabindex="0" role="region" aria-label="Points"><table>
        <thead><tr><th scope="col">Work</th><th scope="col">Group</th><th scope="col">FLOPs/byte</th><th scope="col">Floor</th><th scope="col">Measured</th><th scope="col">Of floor</th><th scope="col">Bound by</th></tr></thead>
        <tbody class="numbers">${found.points.map(
          (point) => html`<tr><td class="because">${point.name}</td><td>${point.group}</td><td>${short(point.intensity)}</td><td>${duration(point.floor_s)}</td>
            <td>${point.measured_s === null ? '–' : duration(point.measured_s)}</td><td>${point.measured_s === null ? '–' : percent(point.floor_s / point.measured_s)}</td><td>${point.bound}</td></tr>`,
        )}</tbody></table></div></section>`
}

function line(x1: number, y1: number, x2: number, y2: number, more: unknown) {
  return svg`<line class="rule" x1=${x1} y1=${y1} x2=${x2} y2=${y2}></line>${more}`
}

function label(x: number, y: number, text: string, anchor: string) {
  return svg`<text x=${x} y=${y} text-anchor=${anchor}>${text}</text>`
}

function svgPath(d: string) {
  return svg`<path class="roof" d=${d}></path>`
}

/** A dot; hollow if nothing was measured, and it stands at its floor. */
function dot(x: number, y: number, color: string, hollow: boolean) {
  return svg`<circle cx=${x} cy=${y} r="5" style="fill:${hollow ? 'none' : color};stroke:${color};stroke-width:2"></circle>`
}
