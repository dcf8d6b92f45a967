// Reports of `explain run`, traces, rooflines, bills and training runs: opened from files, or by `transect board`.

import { html, nothing, type TemplateResult } from 'lit'
import { customElement, property, state } from 'lit/decorators.js'
import type { Api } from '../api'
import { PageElement } from '../element'
import { billBody } from '../engine/panels'
import { icon } from '../icons'
import { explanationPage, jobPage, rooflinePage } from './program'
import { KINDS, read, recognize, type Report, type Run } from './report'
import { flowPage } from './flow'
import { rankingPage, schedulesPage } from './layout'
import { accountPanel, gib, runPage } from './run'

const LOOK_MS = 3000
/** True if `transect board` sent this page: there is no model behind it. */
export const BOARD = document.querySelector('meta[name="transect-board"]') !== null

@customElement('report-view')
export class ReportView extends PageElement {
  @property({ attribute: false }) api!: Api
  /** True while this tab is shown; nothing is fetched otherwise. */
  @property({ type: Boolean }) active = false
  /** Rest of the address behind `#/reports/`: the name of a report. */
  @property() path = ''
  @state() private opened: Report[] = []
  @state() private served: Report[] = []
  @state() private problems: string[] = []
  @state() private over = false
  @state() private smoothing = 0.6
  @state() private rank = 0
  private timer = 0

  override connectedCallback(): void {
    super.connectedCallback()
    this.addEventListener('dragover', this.dragged)
    this.addEventListener('dragleave', () => (this.over = false))
    this.addEventListener('drop', this.dropped)
  }

  protected override firstUpdated(): void {
    for (const event of ['key-changed', 'found']) this.api.addEventListener(event, this.again)
  }

  override disconnectedCallback(): void {
    clearTimeout(this.timer)
    super.disconnectedCallback()
  }

  protected override updated(changed: Map<string, unknown>): void {
    if (!changed.has('active')) return
    clearTimeout(this.timer)
    if (this.active) void this.look()
  }

  /** Read once more: with another key, or from a server that is back. */
  private readonly again = (): void => {
    clearTimeout(this.timer)
    this.served = []
    this.problems = []
    if (this.active) void this.look()
  }

  /** Read what `transect board` serves, or the flows that a server shows to its operator, again and again: they grow. */
  private async look(): Promise<void> {
    try {
      if (!BOARD && !(await this.api.get<{ flows?: number }>('v1/page')).flows) return
      const found = await this.api.get<{ name: string; content: unknown }[]>(BOARD ? 'board.json' : 'v1/flows')
      this.served = found.flatMap(({ name, content }) => this.recognized(name, content))
    } catch (error) {
      this.problems = [error instanceof Error ? error.message : String(error)]
    }
    if (this.active && this.served.some((each) => each.kind === 'run' || each.kind === 'flow')) this.timer = window.setTimeout(() => void this.look(), LOOK_MS)
  }

  private recognized(name: string, content: unknown): Report[] {
    try {
      return [{ name, ...recognize(content) }]
    } catch (error) {
      this.problems = [`${name}: ${(error as Error).message}`]
      return []
    }
  }

  private async open(files: Iterable<File>): Promise<void> {
    this.problems = []
    for (const file of files)
      try {
        const report = read(file.name, await file.text())
        this.opened = [...this.opened.filter((each) => each.name !== report.name), report]
        location.hash = `#/reports/${encodeURIComponent(report.name)}`
      } catch (error) {
        this.problems = [...this.problems, `${file.name}: ${(error as Error).message}`]
      }
  }

  private readonly dragged = (event: DragEvent): void => {
    event.preventDefault()
    this.over = true
  }

  private readonly dropped = (event: DragEvent): void => {
    event.preventDefault()
    this.over = false
    void this.open(event.dataTransfer?.files ?? [])
  }

  private get reports(): Report[] {
    return [...this.served, ...this.opened]
  }

  protected override render() {
    const reports = this.reports
    const shown = reports.find((each) => each.name === this.path) ?? reports[0]
    return html`<div class="engine reports ${this.over ? 'over' : ''}">
      <header class="engine-head">
        <div><h1>${shown ? shown.name : 'Reports'}</h1><p class="soft">${shown ? KINDS[shown.kind] : 'Nothing leaves this page: files are read here.'}</p></div>
        <div class="controls">
          ${reports.length > 1 ? this.choice(reports, shown!) : nothing}
          <button @click=${() => this.querySelector<HTMLInputElement>('.file')!.click()}>${icon('upload')} Open files</button>
          <input class="file" type="file" multiple hidden accept=".json,.jsonl" aria-label="Files to open"
            @change=${(event: Event) => void this.open((event.target as HTMLInputElement).files ?? [])} />
        </div>
      </header>
      ${this.problems.map((problem) => html`<p class="notice bad" role="alert">${problem}</p>`)}
      ${shown ? this.page(shown) : this.help()}
    </div>`
  }

  private choice(reports: Report[], shown: Report) {
    return html`<label class="inline">Report
      <select @change=${(event: Event) => (location.hash = `#/reports/${encodeURIComponent((event.target as HTMLSelectElement).value)}`)}>
        ${reports.map((each) => html`<option value=${each.name} ?selected=${each === shown}>${each.name}</option>`)}
      </select></label>`
  }

  private page(report: Report): TemplateResult {
    switch (report.kind) {
      case 'run': {
        const runs = this.reports.flatMap((each) => (each.kind === 'run' ? [each.data] : []))
        const view = { runs, chosen: runs.indexOf(report.data), smoothing: this.smoothing, change: this.changeRun(runs) }
        return runPage(view)
      }
      case 'explanation':
        return explanationPage(report.data)
      case 'job':
        return jobPage(report.data, this.rank, (rank) => (this.rank = rank))
      case 'roofline':
        return rooflinePage(report.data)
      case 'bill':
        return html`<section class="card panel"><h2>Bill of a request</h2>
          <p class="hint">Where each millisecond of the request went.</p>${billBody(report.data, {})}</section>`
      case 'flow':
        return flowPage(report.data)
      case 'ranking':
        return rankingPage(report.data, gib)
      case 'schedules':
        return schedulesPage(report.data)
      case 'memory':
        return accountPanel(report.data, 'Memory, as predicted')
    }
  }

  private changeRun(runs: Run[]) {
    return (change: Partial<{ chosen: number; smoothing: number }>): void => {
      if (change.smoothing !== undefined) this.smoothing = change.smoothing
      if (change.chosen !== undefined) location.hash = `#/reports/${encodeURIComponent(runs[change.chosen]!.name)}`
    }
  }

  private help() {
    if (BOARD) return html`<p class="placeholder">Reading …</p>`
    const rows: [string, string][] = [
      ['transect explain run --json FILE -- python script.py', 'the time of a program by cause, and changes that pay'],
      ['transect explain trace TRACE --json FILE', 'the same of a recorded trace'],
      ['transect roofline MODEL --json FILE', 'a model below the ceilings of a device'],
      ['transect explain request URL ID --json > FILE', 'the bill of a request'],
      ['transect memory MODEL --json > FILE', 'an account of memory'],
      ['transect plan training RUN.toml --json > FILE', 'layouts of a training run, by speed'],
      ['transect plan schedule --json > FILE', 'schedules of pipelines'],
      ['RUN/log.jsonl', 'the log of a training run'],
    ]
    return html`<section class="card drop">
      ${icon('upload')}
      <h2>Drop files here</h2>
      <p class="soft">Or start <code>transect board PATH</code>, which shows training runs while they grow.</p>
      <table><thead><tr><th scope="col">Written by</th><th scope="col">Shows</th></tr></thead>
        <tbody>${rows.map(([command, text]) => html`<tr><td><code>${command}</code></td><td>${text}</td></tr>`)}</tbody></table>
    </section>`
  }
}
