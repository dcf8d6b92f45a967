// Icons as inline SVG: lines of 24 x 24, in the colour of the text around them.

import { svg, html, type TemplateResult } from 'lit'

const PATHS = {
  plus: 'M12 5v14M5 12h14',
  send: 'M12 19V5M6 11l6-6 6 6',
  stop: 'M7 7h10v10H7z',
  copy: 'M9 9h11v11H9zM5 15H4V4h11v1',
  edit: 'M4 20h4L19 9l-4-4L4 16zM13 7l4 4',
  again: 'M20 12a8 8 0 1 1-2.4-5.7L20 8.5M20 4v4.5h-4.5',
  trash: 'M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13',
  menu: 'M4 7h16M4 12h16M4 17h16',
  close: 'M6 6l12 12M18 6L6 18',
  tune: 'M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4',
  compare: 'M4 5h7v14H4zM13 5h7v14h-7z',
  tokens: 'M4 6h5v5H4zM11 6h9v5h-9zM4 13h9v5H4zM15 13h5v5h-5z',
  key: 'M14.5 9.5a4 4 0 1 1-1-3M13 9h8v4M18 9v3',
  sun: 'M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v3M12 19v3M2 12h3M19 12h3M5 5l2 2M17 17l2 2M5 19l2-2M17 7l2-2',
  moon: 'M19 14.5A8 8 0 0 1 9.5 5 7.5 7.5 0 1 0 19 14.5z',
  contrast: 'M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18zM12 3v18',
  branch: 'M6 4v16M6 14c6 0 10-2 10-7M13 9l3-3 3 3',
  down: 'M6 9l6 6 6-6',
  right: 'M9 6l6 6-6 6',
  left: 'M15 6l-6 6 6 6',
  pause: 'M8 5v14M16 5v14',
  play: 'M8 5l11 7-11 7z',
  download: 'M12 4v11M7 11l5 5 5-5M5 20h14',
  upload: 'M12 16V5M7 9l5-5 5 5M5 20h14',
  clock: 'M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18zM12 7v5l3 2',
  check: 'M5 12.5l4.5 4.5L19 7.5',
  receipt: 'M6 3h12v18l-3-2-3 2-3-2-3 2zM9 8h6M9 12h6',
} as const

export type IconName = keyof typeof PATHS

/** Draw an icon. It is decoration: its button needs a label. */
export function icon(name: IconName): TemplateResult {
  return html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true">${svg`<path d=${PATHS[name]}></path>`}</svg>`
}
