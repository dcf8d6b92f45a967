// Bundle the page into src/transect/server/page/files/, which git and the wheel hold. Run `npm ci && npm run build`.
//
// The build writes a digest of its sources into build.json. tests/server/page/test_build.py computes the same digest
// without node, so that sources and build cannot drift apart.

import { createHash } from 'node:crypto'
import { copyFileSync, mkdirSync, readFileSync, readdirSync, writeFileSync } from 'node:fs'
import { dirname, join, relative } from 'node:path'
import { fileURLToPath } from 'node:url'
import * as esbuild from 'esbuild'

const here = dirname(fileURLToPath(import.meta.url))
const out = join(here, '../src/transect/server/page/files')
const SOURCES = ['package.json', 'package-lock.json', 'tsconfig.json', 'build.mjs']

/** List all files below a folder. */
function filesIn(folder) {
  return readdirSync(folder, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => join(entry.parentPath, entry.name))
}

/** Digest of the names and bytes of all sources, in the order of their names. */
function digestOfSources() {
  const names = [...SOURCES, ...filesIn(join(here, 'src')).map((path) => relative(here, path))]
  const hash = createHash('sha256')
  for (const name of names.sort()) {
    const bytes = readFileSync(join(here, name))
    hash.update(`${name}\0${bytes.length}\0`).update(bytes)
  }
  return hash.digest('hex')
}

const options = {
  absWorkingDir: here,
  entryPoints: { page: 'src/main.ts', style: 'src/style.css' },
  bundle: true,
  minify: true,
  format: 'esm',
  target: 'es2022',
  charset: 'utf8',
  legalComments: 'eof',
  loader: { '.svg': 'dataurl', '.woff2': 'copy' },
  outdir: out,
  assetNames: '[name]',
  logLevel: 'info',
}

mkdirSync(out, { recursive: true })
copyFileSync(join(here, 'src/index.html'), join(out, 'index.html'))
copyFileSync(join(here, 'src/icon.svg'), join(out, 'icon.svg'))
if (process.argv.includes('--watch')) {
  const context = await esbuild.context(options)
  await context.watch()
} else {
  await esbuild.build(options)
  writeFileSync(join(out, 'build.json'), JSON.stringify({ sources: digestOfSources() }) + '\n')
}
