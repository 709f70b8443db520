// The settings form: what it holds, and the request that follows from it.

import { field } from "./dom.js";
import { keepSetting, setting } from "./store.js";

const SEED_LIMIT = 2 ** 53;
const MAX_TEXT_TOKENS = 512;
const STORED = [
  "system", "temperature", "max-tokens", "top-p", "top-k", "seed", "stop-text", "drafter", "num-draft",
  "constraint-kind", "constraint", "tools",
];

/** Return a number of the form; undefined if it is empty. */
function number(id) {
  const text = field(id).value.trim();
  return text === "" ? undefined : Number(text);
}

export const key = () => field("key").value.trim();
export const isChat = () => field("mode").value === "chat";
export const isCompared = () => field("compare").checked;

/** Return the seed as decimal digits: 64 bits exceed the integers of JavaScript. */
export function seed() {
  const text = field("seed").value.trim();
  return text || String(Math.floor(Math.random() * SEED_LIMIT));
}

/** Return the constraint of the answer; undefined without one. */
function constraint() {
  const kind = field("constraint-kind").value;
  const text = field("constraint").value;
  if (!kind) return undefined;
  if (kind === "json_object") return { json_object: true };
  return { [kind]: kind === "choice" ? text.split("\n").filter((line) => line !== "") : text };
}

/** Return the tools of the form. Raises a SyntaxError that names the field. */
function tools() {
  const text = field("tools").value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (fault) {
    throw new SyntaxError(`Tools: ${fault.message}`);
  }
}

function followConstraint() {
  const isUnused = ["", "json_object"].includes(field("constraint-kind").value);
  field("constraint").disabled = isUnused;
  field("constraint-field").hidden = isUnused;
}

/** Restore the stored settings and store changes. */
export function begin() {
  const stored = setting("settings", {});
  for (const id of STORED) if (id in stored) field(id).value = stored[id];
  const initial = Object.fromEntries(STORED.map((id) => [id, field(id).defaultValue ?? field(id).options[0].value]));
  const keep = () => {
    followConstraint();
    keepSetting("settings", Object.fromEntries(STORED.map((id) => [id, field(id).value])));
  };
  field("settings").addEventListener("change", keep);
  field("reset").addEventListener("click", () => {
    for (const id of STORED) field(id).value = initial[id];
    if (!field("mode").options[0].disabled) field("mode").value = "chat";
    keep();
  });
  followConstraint();
}

const message = (turn) => (turn.role === "assistant" ? turn.answer.message() : { role: turn.role, content: turn.content, tool_call_id: turn.tool_call_id });

/** Return the chat's own fields. */
function chatBody(turns, partial) {
  const system = field("system").value.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  const last = partial ? [{ role: "assistant", content: partial.content }] : [];
  return {
    messages: [...first, ...turns.map(message), ...last],
    tools: tools(),
    continue_final_message: partial ? true : undefined,
    logprobs: true,
    top_logprobs: 5,
  };
}

/** Return the fields of a plain text, which has no memory of earlier turns. */
async function textBody(turns, partial, room) {
  const prompt = field("system").value.trim() + turns.findLast((turn) => turn.role === "user").content + (partial?.content ?? "");
  const max_tokens = number("max-tokens") ?? Math.max(1, Math.min(MAX_TEXT_TOKENS, await room(prompt)));
  return { prompt, max_tokens, logprobs: 5 };
}

/**
 * Return path and body. `turns` end with the question or results; `partial` is an answer to continue. `room(prompt)`
 * returns the number of tokens that fit after a prompt.
 */
export async function request(turns, partial, { seed: seedDigits, isOff, room }) {
  const speculation = isOff
    ? { off: true }
    : { drafter: field("drafter").value || undefined, num_draft_tokens: number("num-draft") };
  const body = {
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    top_p: number("top-p"),
    top_k: number("top-k"),
    max_tokens: number("max-tokens"),
    stop: field("stop-text").value || undefined,
    betoken: { ...speculation, constraint: constraint(), provenance: true, rounds: true },
    ...(isChat() ? chatBody(turns, partial) : await textBody(turns, partial, room)),
  };
  const text = JSON.stringify(body);
  return { path: isChat() ? "v1/chat/completions" : "v1/completions", body: `${text.slice(0, -1)},"seed":${seedDigits}}` };
}

/** Offer the available drafters, and plain text only if the model has no chat template. */
export function offer(model) {
  const select = field("drafter");
  const names = ["", ...model.betoken.drafters];
  if ([...select.options].map((option) => option.value).join() !== names.join()) {
    const chosen = select.value || setting("settings", {}).drafter;
    select.replaceChildren(...names.map((name) => new Option(name || "automatic", name)));
    select.value = names.includes(chosen) ? chosen : "";
  }
  const chat = field("mode").options[0];
  chat.disabled = !model.betoken.has_chat_template;
  if (chat.disabled) field("mode").value = "text";
  field("max-tokens").placeholder = isChat() ? "up to 1024" : `up to ${MAX_TEXT_TOKENS}`;
}
