// Client of the gateway's HTTP API: the served model, token counts and streamed answers.

/** Headers of a request; `key` may be empty. */
function headers(key) {
  const own = { "content-type": "application/json" };
  return key ? { ...own, authorization: `Bearer ${key}` } : own;
}

/** Return the error of a failed response. */
async function faultOf(reply) {
  try {
    const { error } = await reply.json();
    return Object.assign(new Error(error.message), { code: error.code });
  } catch {
    return new Error(`status ${reply.status}`);
  }
}

/** Return the served model and its workers. */
export async function info(key) {
  const reply = await fetch("info", { headers: headers(key) });
  if (!reply.ok) throw await faultOf(reply);
  return reply.json();
}

/** Return how many tokens fit into the context after a prompt. */
export async function numTokens(prompt, key, signal) {
  const reply = await fetch("tokenize", { method: "POST", headers: headers(key), body: JSON.stringify({ prompt }), signal });
  if (!reply.ok) throw await faultOf(reply);
  const { count, max_model_len } = await reply.json();
  return max_model_len - count;
}

/** Yield the parsed events of a streamed response, without the last [DONE]. */
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

/** Return the tokens of an event, each {text, id, name, provenance, logprob, likely: [{token, logprob}]}. */
function tokensOf(choice) {
  const sources = choice.betoken?.tokens ?? [];
  const chat = choice.logprobs?.content;
  return sources.map((token, index) => {
    const name = chat ? chat[index]?.token : choice.logprobs?.tokens[index];
    const logprob = chat ? chat[index]?.logprob : choice.logprobs?.token_logprobs[index];
    const likely = chat
      ? chat[index]?.top_logprobs ?? []
      : Object.entries(choice.logprobs?.top_logprobs[index] ?? {}).map(([token, logprob]) => ({ token, logprob }));
    return { text: token.text, id: token.id, name, logprob, likely, provenance: token.source ?? token.origin };
  });
}

/** Return an event's part of an answer. */
const pieceOf = (choice) => ({
  tokens: tokensOf(choice),
  rounds: choice.betoken?.rounds ?? [],
  content: choice.text ?? choice.delta?.content ?? "",
  reasoning: choice.delta?.reasoning_content ?? "",
  calls: choice.delta?.tool_calls ?? [],
});

/** Send a request and call `onPiece` for each part of its answer; return {finish, betoken, usage}. `signal` aborts it. */
export async function ask(path, body, key, signal, onPiece) {
  const reply = await fetch(path, { method: "POST", headers: headers(key), body, signal });
  if (!reply.ok) throw await faultOf(reply);
  const end = {};
  for await (const event of events(reply)) {
    if (event.usage) end.usage = event.usage;
    const choice = event.choices[0];
    if (!choice) continue;
    onPiece(pieceOf(choice));
    if (choice.finish_reason) Object.assign(end, { finish: choice.finish_reason, betoken: choice.betoken });
  }
  if (!end.finish) throw new Error("The answer broke off.");
  return end;
}
