// The page: a conversation, its settings, and what each answer measured.

import { Answer, LEGEND } from "./answer.js";
import { ask } from "./api.js";
import { showLanes } from "./lanes.js";
import { make, showNumbers, showPositions, showToken } from "./measures.js";
import * as settings from "./settings.js";
import { follow } from "./workers.js";

const field = (id) => document.getElementById(id);
const turns = [];
let running = null;
let frame = 0;

/** Draws at most once a frame, however fast tokens come. */
function drawSoon(side) {
  if (frame) return;
  frame = requestAnimationFrame(() => {
    frame = 0;
    if (running) showLanes(field("lanes"), [side]);
    field("turns").scrollTop = field("turns").scrollHeight;
  });
}

/** One side of a turn: asks and shows; resolves to its end. */
async function answer(side, seed, isOff, signal) {
  const { path, body } = settings.request(turns, seed, isOff);
  const end = await ask(path, body, settings.key(), signal, (piece) => {
    side.add(piece);
    drawSoon(side);
  });
  side.end(end.betoken.duration_s);
  return { ...end, seed };
}

/** Whether both sides say the same, and what that took. */
function verdict(one, other, ends) {
  const ids = (side) => side.tokens.map((token) => token.id).join();
  const isSame = ids(one) === ids(other);
  const ratio = ends[1].betoken.duration_s / ends[0].betoken.duration_s;
  const text = isSame
    ? `equal, token for token; ${ratio >= 1 ? `${ratio.toFixed(2)} times as fast with speculation` : `${(1 / ratio).toFixed(2)} times as fast without`}`
    : "different: this must not be; tell us of the request and its seed";
  return make("p", text, { class: `verdict ${isSame ? "good" : "bad"}` });
}

async function turn(question) {
  turns.push({ role: "user", content: question });
  field("welcome")?.remove();
  const seed = settings.seed();
  const isCompared = field("compare").checked;
  const look = (token) => showToken(field("token"), token);
  const sides = [new Answer("with speculation", look), ...(isCompared ? [new Answer("without speculation", look)] : [])];
  const shown = make("div", sides.map((side) => side.element), { class: "sides" });
  field("turns").append(make("div", question, { class: "question" }), shown);
  running = new AbortController();
  const ends = [];
  for (const [index, side] of sides.entries()) {
    field("status").textContent = `answering ${side.title}…`;
    ends.push(await answer(side, seed, index === 1, running.signal));
  }
  turns.push({ role: "assistant", content: sides[0].text });
  showLanes(field("lanes"), sides);
  showPositions(field("positions"), ends[0].betoken.speculation);
  showNumbers(field("numbers"), ends[0]);
  if (isCompared) shown.after(verdict(sides[0], sides[1], ends));
  field("turns").scrollTop = field("turns").scrollHeight;
  field("status").textContent = `${sides[0].tokens.length} tokens, seed ${seed}`;
}

async function submit(event) {
  event.preventDefault();
  const question = field("question").value;
  if (running || !question.trim()) return;
  field("fault").textContent = "";
  field("send").disabled = true;
  field("stop").disabled = false;
  const before = turns.length;
  try {
    await turn(question);
    field("question").value = "";
  } catch (fault) {
    turns.length = before;
    field("status").textContent = "";
    if (fault.name !== "AbortError") field("fault").textContent = fault.message;
  } finally {
    running = null;
    field("send").disabled = false;
    field("stop").disabled = true;
  }
}

function clear() {
  running?.abort();
  turns.length = 0;
  field("turns").replaceChildren();
  field("status").textContent = field("fault").textContent = "";
  field("question").focus();
}

function switchTheme() {
  const isDark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
}

settings.followConstraint();
field("ask").addEventListener("submit", submit);
field("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) field("ask").requestSubmit();
});
field("stop").addEventListener("click", () => running?.abort());
field("clear").addEventListener("click", clear);
field("theme").addEventListener("click", switchTheme);
field("legend").append(...LEGEND.map(([name, text]) => make("li", [make("span", "token", { class: `token from-${name}` }), ` ${text}`])));
follow(field("workers"), settings.key, (model, fault) => {
  field("model").textContent = model ? `${model.id}, context ${model.max_model_len}` : fault;
  if (model) settings.offer(model);
});
