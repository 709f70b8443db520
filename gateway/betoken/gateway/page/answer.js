// One answer: its text, reasoning and tool calls, and the tokens and rounds that made it.

import { TokenText } from "./paint.js";

const ROUND = [
  "begin_s", "duration_s", "draft_queue_s", "draft_forward_s", "verify_queue_s", "verify_forward_s",
  "num_tokens", "num_draft_tokens", "num_accepted_tokens",
];
const short = (number) => Number(number.toPrecision(5));

const isJson = (text) => {
  try {
    return typeof JSON.parse(text) === "object";
  } catch {
    return false;
  }
};

export class Answer {
  constructor(title, isText) {
    this.title = title;
    this.isText = isText;
    this.source = new TokenText();
    this.rounds = [];
    this.content = this.reasoning = this.finish = "";
    this.calls = [];
    this.duration_s = 0;
    this.end = null;
  }

  get tokens() {
    return this.source.tokens;
  }

  get canContinue() {
    return ["length", "stopped", "interrupted"].includes(this.finish) && this.content !== "" && !this.calls.length;
  }

  /** Rounds of a continued answer follow its earlier rounds. */
  begin() {
    const last = this.rounds.at(-1);
    this.offset_s = last ? last.begin_s + last.duration_s : 0;
    this.finish = "";
  }

  add({ tokens, rounds, content, reasoning, calls }) {
    this.rounds.push(...rounds.map((round) => ({ ...round, begin_s: round.begin_s + this.offset_s })));
    tokens.forEach((token) => this.source.add(token));
    this.content += content;
    this.reasoning += reasoning;
    for (const { index, id, function: called } of calls) {
      this.calls[index] ??= { id, name: called.name, arguments: "" };
      this.calls[index].arguments += called.arguments ?? "";
    }
  }

  /** Record the end; durations are the router's, since the page's clock includes drawing. */
  complete(end) {
    this.finish = end.finish;
    this.duration_s += end.betoken.duration_s;
    this.end = { seed: end.seed, finish: end.finish, usage: end.usage, betoken: end.betoken };
  }

  /** Keep what was received of an answer that did not end. */
  keep(finish) {
    this.finish = finish;
    this.calls = this.calls.filter((call) => isJson(call.arguments));
  }

  /** Return the message of a request. */
  message() {
    const calls = this.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
    return { role: "assistant", content: this.content, ...(calls.length ? { tool_calls: calls } : {}) };
  }

  /** Return a record for storage; `isSlim` leaves out tokens and rounds. */
  record(isSlim) {
    const { title, isText, content, reasoning, calls, finish, duration_s } = this;
    const text = { title, isText, content, reasoning, calls, finish: finish || "stopped", duration_s };
    if (isSlim) return text;
    const tokens = this.tokens.map(({ text, id, provenance, logprob, name }) => [text, id, provenance, logprob === undefined ? null : short(logprob), ...(text ? [] : [name])]);
    const rounds = this.rounds.map((round) => ROUND.map((name) => short(round[name])));
    return { ...text, tokens, rounds, end: this.end };
  }

  static restore({ tokens = [], rounds = [], ...text }) {
    const answer = Object.assign(new Answer(), text);
    for (const [text, id, provenance, logprob, name] of tokens) {
      answer.source.add({ text, id, provenance, logprob: logprob ?? undefined, name: name ?? text, likely: [] });
    }
    answer.rounds = rounds.map((values) => Object.fromEntries(ROUND.map((name, index) => [name, values[index]])));
    return answer;
  }
}
