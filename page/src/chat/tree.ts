// Operations on the tree of a conversation's messages.

import { type Answer, type Conversation, type Message, type Settings, SETTINGS } from './types'

const TITLE_LENGTH = 60

/** Make an id that is unique on this machine. `crypto.randomUUID` needs a secure address, which http is not. */
export function newId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(12))
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('')
}

export function newConversation(settings: Partial<Settings> = {}): Conversation {
  const now = Date.now()
  return {
    id: newId(), title: '', created: now, updated: now, settings: { ...SETTINGS, ...settings }, lanes: [], messages: {},
    chosen: {},
  }
}

export function newAnswer(): Answer {
  return {
    status: 'running', text: '', thoughts: '', calls: [], tokens: [], tokenIds: [], promptTokenIds: [], requestId: '',
    choice: 0, model: '', lane: null, body: {}, finish: '', error: '', passing: false, promptTokens: 0, cachedTokens: 0,
    firstMs: 0, restMs: 0, continuedAt: -1, group: '', branch: null,
  }
}

/** List the messages that answer or follow a message, oldest first. */
export function childrenOf(conversation: Conversation, parent: string): Message[] {
  return Object.values(conversation.messages).filter((message) => message.parent === parent)
}

/** List the shown messages from the beginning to the end. */
export function shownPath(conversation: Conversation): Message[] {
  const path: Message[] = []
  let id = ''
  for (;;) {
    const next = conversation.messages[conversation.chosen[id] ?? ''] ?? childrenOf(conversation, id).at(-1)
    if (!next) return path
    path.push(next)
    id = next.id
  }
}

/** List the messages from the beginning to `id`, which is included. */
export function pathTo(conversation: Conversation, id: string): Message[] {
  const path: Message[] = []
  for (let at = conversation.messages[id]; at; at = conversation.messages[at.parent]) path.unshift(at)
  return path
}

/** Add a message, and show it. */
export function append(conversation: Conversation, message: Omit<Message, 'id'>): Message {
  const added = { ...message, id: newId() }
  conversation.messages[added.id] = added
  conversation.chosen[added.parent] = added.id
  conversation.updated = Date.now()
  if (!conversation.title && message.role === 'user') conversation.title = titleOf(message.text)
  return added
}

/** Remove a message and all that follow it. */
export function removeMessage(conversation: Conversation, id: string): void {
  for (const child of childrenOf(conversation, id)) removeMessage(conversation, child.id)
  const parent = conversation.messages[id]?.parent ?? ''
  delete conversation.messages[id]
  delete conversation.chosen[id]
  if (conversation.chosen[parent] === id) delete conversation.chosen[parent]
}

function titleOf(text: string): string {
  const line = text.trim().replace(/\s+/g, ' ')
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line
}

/** Write messages in the form of the API. */
export function apiMessages(system: string, path: Message[]): Record<string, unknown>[] {
  const messages: Record<string, unknown>[] = system.trim() ? [{ role: 'system', content: system }] : []
  for (const { role, text, callId, answer } of path) {
    if (role === 'tool') messages.push({ role, content: text, tool_call_id: callId })
    else if (role === 'user') messages.push({ role, content: text })
    else {
      const calls = answer!.calls.map((call) => ({
        id: call.id, type: 'function', function: { name: call.name, arguments: call.arguments || '{}' },
      }))
      messages.push({ role, content: answer!.text, ...(calls.length ? { tool_calls: calls } : {}) })
    }
  }
  return messages
}
