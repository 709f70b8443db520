// Draws rounds as two lanes, drafting above and verifying below, from the durations that the router measured.

import { make, table } from "./dom.js";

const NS = "http://www.w3.org/2000/svg";
const LANE = 26, GAP = 8, LABEL = 56, AXIS = 20, LEAST_PX_PER_ROUND = 4, LEAST_PX_PER_TICK = 90;

function draw(name, attributes, parent) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent?.append(element);
  return element;
}

/** Return name, begin, duration and lane of a round's four parts. Time that no worker accounts for is spread between them. */
function parts(round) {
  const known = round.draft_queue_s + round.draft_forward_s + round.verify_queue_s + round.verify_forward_s;
  const hop = Math.max(0, round.duration_s - known) / 4;
  const draft = round.begin_s + hop;
  const end = round.begin_s + round.duration_s - hop;
  return [
    ["draft waits", draft, round.draft_queue_s, 0],
    ["draft", draft + round.draft_queue_s, round.draft_forward_s, 0],
    ["verify waits", end - round.verify_forward_s - round.verify_queue_s, round.verify_queue_s, 1],
    ["verify", end - round.verify_forward_s, round.verify_forward_s, 1],
  ];
}

const described = (round, index) =>
  `round ${index + 1}: ${round.num_tokens} tokens, ${round.num_accepted_tokens} of ${round.num_draft_tokens} drafts accepted; ` +
  `drafting ${(1000 * round.draft_forward_s).toFixed(1)} ms, verifying ${(1000 * round.verify_forward_s).toFixed(1)} ms, ` +
  `total ${(1000 * round.duration_s).toFixed(1)} ms`;

function lanes(title, rounds, span_s, width) {
  const height = 2 * LANE + GAP + AXIS;
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${rounds.length} rounds in ${(1000 * span_s).toFixed(0)} ms` });
  const first = rounds[0].begin_s;
  const x = (seconds) => LABEL + ((seconds - first) / span_s) * (width - LABEL - 4);
  ["draft", "verify"].forEach((name, lane) => {
    draw("text", { x: 0, y: lane * (LANE + GAP) + LANE / 2 + 4 }, svg).textContent = name;
  });
  rounds.forEach((round, index) => {
    const group = draw("g", {}, svg);
    draw("title", {}, group).textContent = described(round, index);
    for (const [kind, begin, length, lane] of parts(round)) {
      if (length <= 0) continue;
      draw("rect", { class: kind, x: x(begin), y: lane * (LANE + GAP), height: LANE, rx: 2, width: Math.max(1, x(begin + length) - x(begin)) }, group);
    }
  });
  const bottom = 2 * LANE + GAP + 4;
  draw("line", { class: "axis", x1: LABEL, x2: width - 4, y1: bottom, y2: bottom }, svg);
  const last = Math.min(4, Math.max(1, Math.floor((width - LABEL) / LEAST_PX_PER_TICK)));
  for (let tick = 0; tick <= last; tick++) {
    const anchor = tick === 0 ? "start" : tick === last ? "end" : "middle";
    const at = { x: x(first + (tick / last) * span_s), y: bottom + 13, "text-anchor": anchor };
    draw("text", at, svg).textContent = `${((1000 * span_s * tick) / last).toFixed(0)} ms`;
  }
  return svg;
}

/** Show the lanes of each answer on one scale, and the first answer's rounds as a table. */
export function showLanes(place, answers) {
  const shown = answers.filter((answer) => answer.rounds.length);
  if (!shown.length) {
    place.replaceChildren(make("p", "Each answer shows here what was drafted and verified, and how long it took.", { class: "hint" }));
    return;
  }
  const isOpen = place.querySelector("details")?.open;
  const spans = shown.map(({ rounds }) => rounds.at(-1).begin_s + rounds.at(-1).duration_s - rounds[0].begin_s);
  const longest = Math.max(...spans);
  const most = Math.max(...shown.map((answer) => answer.rounds.length));
  const full = Math.max(place.clientWidth - 4, LABEL + most * LEAST_PX_PER_ROUND);
  const blocks = shown.flatMap((answer, index) => {
    const width = LABEL + (full - LABEL) * (spans[index] / longest);
    return [make("p", answer.title, { class: "hint" }), lanes(answer.title || "Answer", answer.rounds, spans[index], Math.max(width, LABEL + 120))];
  });
  const rows = shown[0].rounds.map((round, index) => [index + 1, round.num_tokens, round.num_draft_tokens, round.num_accepted_tokens, ...["draft_forward_s", "verify_forward_s", "duration_s"].map((name) => Number((1000 * round[name]).toFixed(2)))]);
  const head = ["round", "tokens", "drafted", "accepted", "drafting, ms", "verifying, ms", "total, ms"];
  place.replaceChildren(
    make("div", blocks, { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rounds" }),
    make("details", [make("summary", "Table"), make("div", table([head, ...rows], "Rounds"), { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rounds as a table" })], isOpen ? { open: "" } : {}),
  );
  if (!answers[0].finish) place.firstChild.scrollLeft = place.firstChild.scrollWidth;
}
