// Keeps conversations and settings in the browser's local storage.

import { Answer } from "./answer.js";

const PREFIX = "betoken.conversation.";
const keys = () => Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));

/** Return a new conversation. It is stored once it has a turn. */
const newConversation = () => ({ id: `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`, title: "", updated_ms: Date.now(), turns: [] });

function record({ turns, ...conversation }, isSlim) {
  const sides = ({ answer, other }) => ({ role: "assistant", answer: answer.record(isSlim), other: other?.record(isSlim) });
  return { ...conversation, turns: turns.map((turn) => (turn.role === "assistant" ? sides(turn) : turn)) };
}

function restore({ turns, ...conversation }) {
  const sides = ({ answer, other }) => ({ role: "assistant", answer: Answer.restore(answer), other: other && Answer.restore(other) });
  return { ...conversation, turns: turns.map((turn) => (turn.role === "assistant" ? sides(turn) : turn)) };
}

function read(key) {
  try {
    return restore(JSON.parse(localStorage.getItem(key)));
  } catch {
    return null; // written by another version
  }
}

/** Return the stored conversations, latest first. */
export const conversations = () => keys().map(read).filter(Boolean).sort((one, other) => other.updated_ms - one.updated_ms);

/** Return a stored conversation, or a new one without an id. */
export const load = (id) => (id && read(PREFIX + id)) || newConversation();

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false; // the quota is used up
  }
}

export const forget = (id) => localStorage.removeItem(PREFIX + id);

/** Store a conversation, unless it is empty. If space runs out, the oldest ones lose their tokens and rounds; return false if that is not enough. */
export function save(conversation) {
  if (!conversation.turns.length) {
    forget(conversation.id);
    return true;
  }
  const key = PREFIX + conversation.id;
  if (write(key, record(conversation))) return true;
  for (const old of conversations().reverse().filter(({ id }) => id !== conversation.id)) {
    write(PREFIX + old.id, record(old, true));
    if (write(key, record(conversation))) return true;
  }
  return write(key, record(conversation, true));
}

/** Return a stored setting, or `otherwise`. */
export function setting(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`betoken.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export const keepSetting = (name, value) => write(`betoken.${name}`, value);
