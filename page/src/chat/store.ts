// Conversations in this browser's IndexedDB; nothing of them is kept at the server.

import { newConversation, newId } from './tree'
import { type Answer, type Conversation, SETTINGS } from './types'

const DATABASE = 'transect'
const STORE = 'conversations'
export const FORMAT = 'transect.conversations.1'

function opened(): Promise<IDBDatabase> {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1)
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: 'id' })
    request.onsuccess = () => resolve(request.result)
    request.onerror = () => reject(request.error)
  })
}

function finished<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result)
    request.onerror = () => reject(request.error)
  })
}

/** The kept conversations. Where a browser keeps nothing (a private window), they live in memory. */
export class Store {
  private database: Promise<IDBDatabase | null> = opened().catch(() => null)
  private memory = new Map<string, Conversation>()

  /** List all conversations, newest first. */
  async all(): Promise<Conversation[]> {
    const database = await this.database
    const found = database
      ? await finished(database.transaction(STORE).objectStore(STORE).getAll() as IDBRequest<Conversation[]>)
      : [...this.memory.values()]
    for (const conversation of found) settle(conversation)
    return found.sort((a, b) => b.updated - a.updated)
  }

  /** Keep a conversation as it is now. Returns the milliseconds for which copying it kept the page busy. */
  async put(conversation: Conversation): Promise<number> {
    const database = await this.database
    const began = performance.now()
    if (!database) {
      this.memory.set(conversation.id, conversation)
      return 0
    }
    const request = database.transaction(STORE, 'readwrite').objectStore(STORE).put(conversation)
    const busy = performance.now() - began
    await finished(request)
    return busy
  }

  async remove(id: string): Promise<void> {
    const database = await this.database
    this.memory.delete(id)
    if (database) await finished(database.transaction(STORE, 'readwrite').objectStore(STORE).delete(id))
  }
}

/** Mark answers as stopped that were still running when the page was closed. */
function settle(conversation: Conversation): void {
  for (const { answer } of Object.values(conversation.messages)) {
    if (answer?.status === 'running') answer.status = 'stopped'
  }
}

/** Write conversations as a file's text. */
export function exported(conversations: Conversation[]): string {
  return JSON.stringify({ format: FORMAT, conversations }, null, 1)
}

/** Read conversations from a file's text, with new ids where `taken` has theirs. Throws an Error with a sentence. */
export function imported(text: string, taken: Set<string>): Conversation[] {
  let value: { format?: unknown; conversations?: unknown }
  try {
    value = JSON.parse(text)
  } catch {
    throw new Error('This file is not JSON. Choose a file that this page has exported.')
  }
  if (value?.format !== FORMAT || !Array.isArray(value.conversations))
    throw new Error(`This file has no conversations of this page (its "format" must be "${FORMAT}").`)
  return value.conversations.map((each) => checked(each, taken))
}

/** Copy the known fields of a conversation from a file, in case it was made by hand or by another version. */
function checked(given: Partial<Conversation>, taken: Set<string>): Conversation {
  const fresh = newConversation()
  const messages: Conversation['messages'] = {}
  for (const [id, message] of Object.entries(given.messages ?? {})) {
    if (!['user', 'assistant', 'tool'].includes(message.role) || typeof message.text !== 'string')
      throw new Error('A message in this file has no role or no text, so nothing was imported.')
    if ((message.role === 'assistant') !== isAnswer(message.answer))
      throw new Error('An answer in this file is not complete, so nothing was imported.')
    messages[id] = { ...message, id, parent: String(message.parent ?? '') }
  }
  const conversation: Conversation = {
    ...fresh,
    id: typeof given.id === 'string' && !taken.has(given.id) ? given.id : newId(),
    title: String(given.title ?? ''),
    created: Number(given.created) || fresh.created,
    updated: Number(given.updated) || fresh.updated,
    settings: { ...SETTINGS, ...given.settings },
    lanes: Array.isArray(given.lanes) ? given.lanes : [],
    messages,
    chosen: { ...given.chosen },
  }
  settle(conversation)
  return conversation
}

function isAnswer(value: Answer | undefined): boolean {
  return typeof value?.text === 'string' && Array.isArray(value.calls) && Array.isArray(value.tokens)
}
