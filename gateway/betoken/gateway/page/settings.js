// What the form asks for, as the body of a request.

const field = (id) => document.getElementById(id);
const SEED_LIMIT = 2 ** 53;

/** A number of the form; undefined where it is left empty. */
function number(id) {
  const text = field(id).value.trim();
  return text === "" ? undefined : Number(text);
}

export const key = () => field("key").value.trim();
export const isChat = () => field("mode").value === "chat";

/** The seed as decimal digits: 64 bits are more than a number of JavaScript holds. */
export function seed() {
  const text = field("seed").value.trim();
  return text || String(Math.floor(Math.random() * SEED_LIMIT));
}

/** What the answer has to be; undefined where it may be anything. */
function constraint() {
  const kind = field("constraint-kind").value;
  const text = field("constraint").value;
  if (!kind) return undefined;
  if (kind === "json_object") return { json_object: true };
  return { [kind]: kind === "choice" ? text.split("\n").filter((line) => line !== "") : text };
}

/** The text of a constraint can be written where its kind has one. */
export function followConstraint() {
  const follow = () => {
    field("constraint").disabled = ["", "json_object"].includes(field("constraint-kind").value);
  };
  field("constraint-kind").addEventListener("change", follow);
  follow();
}

/** Path and body; `turns` are the messages so far, the last of them the question. */
export function request(turns, seedDigits, isOff) {
  const system = field("system").value.trim();
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
  };
  if (isChat()) {
    const first = system ? [{ role: "system", content: system }] : [];
    Object.assign(body, { messages: [...first, ...turns], logprobs: true, top_logprobs: 5 });
  } else {
    Object.assign(body, { prompt: system + turns.at(-1).content, logprobs: 5 });
  }
  const text = JSON.stringify(body);
  return { path: isChat() ? "v1/chat/completions" : "v1/completions", body: `${text.slice(0, -1)},"seed":${seedDigits}}` };
}

/** Offers the drafters there are, and text where the model has no template. */
export function offer(model) {
  const select = field("drafter");
  const names = ["", ...model.betoken.drafters];
  if ([...select.options].map((option) => option.value).join() !== names.join()) {
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => new Option(name || "the router's choice", name)));
    select.value = names.includes(chosen) ? chosen : "";
  }
  const chat = field("mode").options[0];
  chat.disabled = !model.betoken.has_chat_template;
  if (chat.disabled) field("mode").value = "text";
}
