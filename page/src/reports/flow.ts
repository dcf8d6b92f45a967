// The chain of a flow: its steps with states, figures and reasons, while it runs.

import { html, nothing, type TemplateResult } from 'lit'
import { count, duration, percent } from '../engine/format'
import { stackedBar, tile } from '../engine/panels'
import { icon, type IconName } from '../icons'

/** A measure of the gate. */
interface Verdict {
  passed: boolean
  reason: string
  candidate: number | null
  current: number | null
  interval: [number, number] | null
}

/** A rate that the watch compares: hits and requests of both versions, the interval of the difference, and its limit. */
interface Rate {
  candidate: [number, number]
  current: [number, number]
  difference: [number, number]
  bar: number
}

export interface FlowStep {
  name: string
  state: 'waiting' | 'running' | 'interrupted' | 'done' | 'stopped' | 'failed' | 'left out'
  kept: boolean
  /** Unix time in seconds; 0 if it has not started. */
  began: number
  seconds: number
  problem: string
  outcome: { reason?: string; passed?: boolean; figures?: Record<string, unknown>; outputs?: Record<string, unknown> }
}

export interface Flow {
  kind: 'flow'
  name: string
  file: string
  updated: number
  running: boolean
  steps: FlowStep[]
}

const SIGNS: Record<FlowStep['state'], IconName | null> = {
  waiting: null, running: 'play', interrupted: 'pause', done: 'check', stopped: 'close', failed: 'close', 'left out': null,
}

const isVerdict = (value: unknown): value is Verdict => typeof value === 'object' && value !== null && 'passed' in value && 'reason' in value

export function flowPage(flow: Flow): TemplateResult {
  const at = (name: string) => flow.steps.find((step) => step.name === name)
  const [gate, release, register, promoted] = [at('gate'), at('release'), at('register'), at('promote')]
  const verdicts = Object.values(gate?.outcome.figures ?? {}).filter(isVerdict)
  const shares = sharesOf(release)
  const decided = flow.steps.filter((step) => step.outcome.reason || step.problem).at(-1)
  const done = flow.steps.filter((step) => step.state === 'done').length
  const used = flow.steps.filter((step) => step.state !== 'left out').length
  const now = flow.steps.find((step) => ['running', 'interrupted', 'failed', 'stopped'].includes(step.state))
  return html`
    <div class="tiles">
      ${tile('Flow', flow.running ? 'runs' : now ? now.state : done === used ? 'done' : 'stands', now ? now.name : `${done} of ${used} steps`, now && now.state !== 'running' ? 'fair' : '')}
      ${tile('Version', String(register?.outcome.figures?.version ?? '–').split(':').pop()!, 'registered')}
      ${tile('Gate', verdicts.length ? `${verdicts.filter((each) => each.passed).length} / ${verdicts.length}` : (gate?.state ?? '–'), verdicts.length ? 'measures passed' : 'result')}
      ${promoted?.outcome.reason
        ? tile('Canary', promoted.outcome.passed ? 'promoted' : 'rolled back', 'the release is decided')
        : tile('Canary', shares ? percent(shares.at(-1)![1]) : '–', shares ? 'of the requests' : 'not released')}
    </div>
    <section class="card panel">
      <h2>Chain</h2>
      <p class="hint">From data to a release. A step that did not change is kept from an earlier run; one that does not pass stops the chain.</p>
      <ol class="chain" aria-label="Steps of the flow">${flow.steps.map(link)}</ol>
      ${decided
        ? html`<p class="notice ${decided.problem || decided.outcome.passed === false ? 'bad' : 'good'}" role="status">
            <b>Last decision, by ${decided.name}:</b> ${decided.problem || decided.outcome.reason}</p>`
        : nothing}
    </section>
    <div class="grid">${flow.steps.filter((step) => step.outcome.reason || step.problem || step.outcome.figures).map((step) => stepPanel(step, shares))}</div>
  `
}

/** Shares of the versions that a release serves, the candidate last; null if nothing is released. */
function sharesOf(release: FlowStep | undefined): [string, number][] | null {
  const found = Object.entries(release?.outcome.figures ?? {}).filter((each): each is [string, number] => typeof each[1] === 'number')
  const candidate = release?.outcome.outputs?.candidate
  const whole = found.reduce((sum, [, share]) => sum + share, 0)
  if (!whole) return null
  return found.map(([name, share]): [string, number] => [name, share / whole]).sort((a, b) => Number(a[0] === candidate) - Number(b[0] === candidate))
}

function link(step: FlowStep) {
  const sign = SIGNS[step.state]
  const took = step.seconds ? duration(step.seconds) : step.state === 'running' && step.began ? `since ${duration(Date.now() / 1000 - step.began)}` : ''
  return html`<li class="link ${step.state.replace(' ', '-')}" aria-current=${step.state === 'running' ? 'step' : nothing}>
    <span class="sign">${sign ? icon(sign) : nothing}</span>
    <b>${step.name}</b><span class="soft">${step.state}${step.kept ? ', kept' : ''}</span><span class="soft numbers">${took}</span></li>`
}

function stepPanel(step: FlowStep, shares: [string, number][] | null): TemplateResult {
  const figures = Object.entries(step.outcome.figures ?? {})
  const verdicts = figures.filter((each): each is [string, Verdict] => isVerdict(each[1]))
  const rates = step.name === 'watch' ? Object.entries((step.outcome.figures?.rates ?? {}) as Record<string, Rate>) : []
  const plain = figures.filter(([, value]) => value !== null && typeof value !== 'object')
  return html`<section class="card panel" aria-label="Step ${step.name}">
    <h2>${step.name} <span class="count">${step.state}</span></h2>
    ${step.outcome.reason ? html`<p class="hint">${step.outcome.reason}</p>` : nothing}
    ${step.problem ? html`<p class="notice bad">${step.problem}</p>` : nothing}
    ${verdicts.length ? verdictTable(verdicts) : nothing}
    ${rates.length ? rateTable(rates) : nothing}
    ${step.name === 'release' && shares
      ? stackedBar(shares.map(([name, share], at) => ({ name: name || 'base', text: name || 'the base model', value: share, color: `var(--series-${at ? 2 : 1})` })), 'Shares of the requests', percent)
      : plain.length
        ? html`<p class="figures numbers">${plain.map(([name, value]) => html`<span>${name} <b>${typeof value === 'number' ? short(value) : String(value)}</b></span>`)}</p>`
        : nothing}
  </section>`
}

function verdictTable(verdicts: [string, Verdict][]) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Measures of the gate">
    <table><thead><tr><th scope="col">Measure</th><th scope="col">Result</th><th scope="col">Candidate</th><th scope="col">Current</th><th scope="col">Because</th></tr></thead>
    <tbody class="numbers">${verdicts.map(
      ([name, each]) => html`<tr><td>${name}</td><td class=${each.passed ? 'passed' : 'refused'}>${each.passed ? 'passed' : 'failed'}</td>
        <td>${each.candidate === null ? '–' : short(each.candidate)}</td><td>${each.current === null ? '–' : short(each.current)}</td>
        <td class="because">${each.reason}</td></tr>`,
    )}</tbody></table></div>`
}

/** Intervals of differences beside their limits. */
function rateTable(rates: [string, Rate][]) {
  const reach = Math.max(0.02, ...rates.flatMap(([, rate]) => [...rate.difference.map(Math.abs), rate.bar])) * 1.1
  const x = (value: number) => 100 + (value / reach) * 100
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Rates that the watch compares">
    <table><thead><tr><th scope="col">Rate</th><th scope="col">Candidate</th><th scope="col">Current</th><th scope="col">Difference, and its limit</th></tr></thead>
    <tbody class="numbers">${rates.map(
      ([name, { candidate, current, difference: [low, high], bar }]) => html`<tr><td>${name}</td>
        <td>${candidate[0]} of ${count(candidate[1])}</td><td>${current[0]} of ${count(current[1])}</td>
        <td>${percent(low)} to ${percent(high)}, limit ${percent(bar)}
          <svg class="interval" viewBox="0 0 200 12" aria-hidden="true"><line class="zero" x1="100" x2="100" y1="0" y2="12"></line>
            <line class="limit" x1=${x(bar)} x2=${x(bar)} y1="0" y2="12"></line>
            <line class=${low > bar ? 'span worse' : 'span'} x1=${x(low)} x2=${x(high)} y1="6" y2="6"></line></svg></td></tr>`,
    )}</tbody></table></div>`
}

function short(value: number): string {
  return Number.isInteger(value) ? count(value) : Number(value.toPrecision(4)).toString()
}
