// Numbers and names as people read them.

/** Milliseconds with three digits, or seconds from one second on. */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return '–'
  if (seconds >= 100) return `${seconds.toFixed(0)} s`
  if (seconds >= 1) return `${seconds.toFixed(seconds >= 10 ? 1 : 2)} s`
  const ms = seconds * 1000
  return `${ms.toFixed(ms >= 100 ? 0 : ms >= 10 ? 1 : 2)} ms`
}

export function percent(share: number): string {
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`
}

export function count(value: number | null | undefined): string {
  return value === null || value === undefined ? '–' : Math.round(value).toLocaleString('en')
}

/** The beginning of a request's id: enough to tell requests apart. */
export function shortId(id: string): string {
  return id.length > 10 ? id.slice(0, 6) : id
}

/** Plural of a noun with its number. */
export function counted(value: number, noun: string): string {
  return `${count(value)} ${noun}${value === 1 ? '' : 's'}`
}
