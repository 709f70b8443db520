// Speaks the gateway's HTTP: one description of the service, and answers as they stream.

/** Headers of a request; `key` may be empty. */
function headers(key) {
  const own = { "content-type": "application/json" };
  return key ? { ...own, authorization: `Bearer ${key}` } : own;
}

/** What a failed reply says. */
async function faultOf(reply) {
  try {
    const { error } = await reply.json();
    return new Error(error.message);
  } catch {
    return new Error(`status ${reply.status}`);
  }
}

/** The served model and its workers. */
export async function info(key) {
  const reply = await fetch("info", { headers: headers(key) });
  if (!reply.ok) throw await faultOf(reply);
  return reply.json();
}

/** Events of a streamed reply, parsed, without the last [DONE]. */
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    waiting += value;
    const parts = waiting.split("\n\n");
    waiting = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** Tokens of an event, each {text, id, provenance, logprob, likely: [{token, logprob}]}. */
function tokensOf(choice) {
  const told = choice.betoken?.tokens ?? [];
  const chat = choice.logprobs?.content;
  return told.map((token, index) => {
    const name = chat ? chat[index]?.token : choice.logprobs?.tokens[index];
    const logprob = chat ? chat[index]?.logprob : choice.logprobs?.token_logprobs[index];
    const likely = chat
      ? chat[index]?.top_logprobs ?? []
      : Object.entries(choice.logprobs?.top_logprobs[index] ?? {}).map(([token, logprob]) => ({ token, logprob }));
    return { text: token.text, id: token.id, name, logprob, likely, provenance: token.source ?? token.origin };
  });
}

/**
 * Asks, and calls `onPiece({tokens, rounds})` for what comes; resolves to {seed, betoken, usage, finish, took_s}.
 * `signal` ends it.
 */
export async function ask(path, body, key, signal, onPiece) {
  const began = performance.now();
  const reply = await fetch(path, { method: "POST", headers: headers(key), body, signal });
  if (!reply.ok) throw await faultOf(reply);
  const end = { first_s: null };
  for await (const event of events(reply)) {
    if (event.usage) end.usage = event.usage;
    const choice = event.choices[0];
    if (!choice) continue;
    const tokens = tokensOf(choice);
    if (tokens.length && end.first_s === null) end.first_s = (performance.now() - began) / 1000;
    if (tokens.length || choice.betoken?.rounds) onPiece({ tokens, rounds: choice.betoken?.rounds ?? [] });
    if (choice.finish_reason) Object.assign(end, { finish: choice.finish_reason, betoken: choice.betoken });
  }
  return { ...end, took_s: (performance.now() - began) / 1000 };
}
