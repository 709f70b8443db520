// What the last answer measured: acceptance by position, numbers, and one token's probabilities.

/** An element with text or children. */
export function make(name, content = [], attributes = {}) {
  const element = document.createElement(name);
  element.append(...[content].flat());
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

/** A table of rows; the first row is its head. Cells that are numbers stand to the right. */
export function table(rows, caption) {
  const cell = (tag, value) => make(tag, value instanceof Node ? value : String(value), typeof value === "number" ? { class: "number" } : {});
  const [head, ...body] = rows;
  const made = make("table", [
    make("thead", make("tr", head.map((value) => make("th", String(value), { scope: "col" })))),
    make("tbody", body.map((row) => make("tr", row.map((value) => cell("td", value))))),
  ]);
  if (caption) made.setAttribute("aria-label", caption);
  return made;
}

const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

export function showPositions(place, stats) {
  const drafted = stats?.num_drafted_per_position ?? [];
  if (!drafted.length) {
    place.replaceChildren(make("p", "no drafts in this answer", { class: "hint" }));
    return;
  }
  const rows = drafted.map((count, index) => {
    const share = stats.num_accepted_per_position[index] / count;
    const fill = make("div");
    fill.style.width = `${100 * share}%`;
    return [String(index + 1), make("div", fill, { class: "bar", "aria-hidden": "true" }), percent(share), count];
  });
  place.replaceChildren(table([["position", "share", "accepted", "drafted"], ...rows], "Share of accepted draft tokens by position"));
}

const failureReasons = ({ num_failed_drafts_by_reason: reasons }) => {
  const counts = Object.entries(reasons ?? {}).map(([reason, number]) => `${reason} ${number}`);
  return counts.length ? ` (${counts.join(", ")})` : "";
};

export function showNumbers(place, end) {
  const { speculation: stats } = end.betoken;
  const ms = (seconds) => `${(1000 * seconds).toFixed(1)} ms`;
  const rows = [
    ["seed", String(end.seed)],
    ["drafter", end.betoken.drafter || "none"],
    ["mode", end.betoken.mode],
    ["ended by", end.betoken.stop ? `${end.finish}: ${end.betoken.stop}` : end.finish],
    ["prompt tokens, of them cached", `${end.usage.prompt_tokens}, ${end.usage.prompt_tokens_details.cached_tokens}`],
    ["first token, as the router measured it", ms(end.betoken.time_to_first_token_s)],
    ["tokens per forward of the target", stats.block_efficiency.toFixed(2)],
    ["draft tokens accepted", `${stats.num_accepted_tokens} of ${stats.num_draft_tokens} (${percent(stats.acceptance_rate)})`],
    ["drafting, verifying", `${ms(stats.draft_forward_s)}, ${ms(stats.verify_forward_s)}`],
    ["failed drafts, failovers", `${stats.num_failed_drafts}${failureReasons(stats)}, ${stats.num_failovers + end.betoken.num_resumes}`],
    ["speculation", stats.policy ? stats.policy.reason : "off: no drafter"],
  ];
  place.replaceChildren(table([["what", "how much"], ...rows], "Numbers of the last answer"));
}

export function showToken(place, token) {
  const written = (text) => JSON.stringify(text ?? "").slice(1, -1) || "(no text)";
  const likely = token.likely.map(({ token: name, logprob }) => [written(name), percent(Math.exp(logprob)), logprob.toFixed(3)]);
  place.replaceChildren(
    make("p", [
      make("strong", written(token.name ?? token.text)),
      ` id ${token.id}, ${token.provenance}`,
      token.logprob === undefined ? "" : `, logprob ${token.logprob.toFixed(3)} (${percent(Math.exp(token.logprob))})`,
    ]),
    ...(likely.length ? [table([["likely here", "probability", "logprob"], ...likely], "Likely tokens at this place")] : []),
  );
}
