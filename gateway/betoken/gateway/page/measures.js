// Statistics of an answer: acceptance by position, counts and durations; and the probabilities of one token.

import { make, table } from "./dom.js";

const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

/** Show the acceptance rate by position; `end` is null before an answer ended. */
export function showPositions(place, end) {
  const stats = end?.betoken.speculation;
  const drafted = stats?.num_drafted_per_position ?? [];
  if (!drafted.length) {
    place.replaceChildren(make("p", end ? "No drafts in this answer." : "Shown when an answer ends.", { class: "hint" }));
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

/** Show an answer's statistics; `end` is null before an answer ended. */
export function showNumbers(place, end) {
  if (!end) {
    place.replaceChildren(make("p", "Shown when an answer ends.", { class: "hint" }));
    return;
  }
  const { speculation: stats } = end.betoken;
  const ms = (seconds) => `${(1000 * seconds).toFixed(1)} ms`;
  const rows = [
    ["seed", String(end.seed)],
    ["drafter", end.betoken.drafter || "none"],
    ["mode", end.betoken.mode],
    ["finish reason", end.betoken.stop ? `${end.finish}: ${end.betoken.stop}` : end.finish],
    ["prompt tokens", `${end.usage.prompt_tokens}, ${end.usage.prompt_tokens_details.cached_tokens} cached`],
    ["time to first token", ms(end.betoken.time_to_first_token_s)],
    ["tokens per forward of the target", stats.block_efficiency.toFixed(2)],
    ["draft tokens accepted", `${stats.num_accepted_tokens} of ${stats.num_draft_tokens} (${percent(stats.acceptance_rate)})`],
    ["drafting, verifying", `${ms(stats.draft_forward_s)}, ${ms(stats.verify_forward_s)}`],
    ["failed drafts, failovers", `${stats.num_failed_drafts}${failureReasons(stats)}, ${stats.num_failovers + end.betoken.num_resumes}`],
    ["speculation", stats.policy ? stats.policy.reason : "off: no drafter"],
  ];
  place.replaceChildren(table([["statistic", "value"], ...rows], "Statistics of the answer"));
}

const MARGIN_PX = 8;

/** Place the card below `span`, or above it near the bottom of the window. */
export function placeToken(card, span) {
  card.hidden = !span?.isConnected;
  if (card.hidden) return;
  const { left, top, bottom } = span.getBoundingClientRect();
  const fits = bottom + card.offsetHeight + MARGIN_PX < innerHeight;
  card.style.left = `${Math.max(MARGIN_PX, Math.min(left, innerWidth - card.offsetWidth - MARGIN_PX))}px`;
  card.style.top = `${Math.max(MARGIN_PX, fits ? bottom + MARGIN_PX : top - card.offsetHeight - MARGIN_PX)}px`;
}

/** Show a token's probability and alternatives next to `span`; hide the card without a token. */
export function showToken(card, token, span) {
  if (!token) return placeToken(card, null);
  const written = (text) => JSON.stringify(text ?? "").slice(1, -1) || "(no text)";
  const likely = token.likely.map(({ token: name, logprob }) => [written(name), percent(Math.exp(logprob)), logprob.toFixed(3)]);
  card.replaceChildren(
    make("p", [
      make("strong", written(token.name ?? token.text)),
      ` id ${token.id}, ${token.provenance}`,
      token.logprob === undefined ? "" : `, logprob ${token.logprob.toFixed(3)} (${percent(Math.exp(token.logprob))})`,
    ]),
    ...(likely.length ? [table([["alternatives", "probability", "logprob"], ...likely], "Likely tokens at this position")] : []),
  );
  placeToken(card, span);
}
