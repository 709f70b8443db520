// Draws one answer as Markdown in the colours of its tokens, or token by token.

import { copyButton, make } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { tokenSpan } from "./paint.js";

const ENDS = { length: "maximum length reached", stopped: "stopped", interrupted: "interrupted" };

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Return a card that shows a call of a tool. */
function callCard(call) {
  const text = pretty(call.arguments);
  const head = make("div", [make("span", ["Tool call ", make("code", call.name)]), copyButton(() => text, "Copy arguments")], { class: "code-head" });
  return make("div", [head, make("pre", make("code", text), { tabindex: "0", role: "region", "aria-label": "Arguments" })], { class: "code call" });
}

export class AnswerView {
  /** `onChoose(token, span)` receives the token under the pointer or cursor, and null when there is none. */
  constructor(answer, onChoose) {
    this.answer = answer;
    this.onChoose = onChoose;
    this.chosen = -1;
    this.isRaw = answer.isText;
    this.heading = make("p", answer.title, { class: "title" });
    this.thoughts = make("details", [make("summary", "Reasoning"), make("div", "", { class: "reasoning" })]);
    this.body = make("div", [], { tabindex: "0", role: "group", "aria-label": "Answer; arrow keys choose a token" });
    this.calls = make("div");
    this.stats = make("p", "", { class: "stats" });
    this.element = make("div", [this.heading, this.thoughts, this.body, this.calls, this.stats], { class: "side" });
    this.body.addEventListener("pointerover", (event) => this.#point(event));
    this.body.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.choose(-1));
    this.body.addEventListener("blur", () => this.choose(-1));
    this.body.addEventListener("keydown", (event) => this.#move(event));
    this.show(this.isRaw);
  }

  /** Switch between Markdown and tokens. */
  show(isRaw) {
    this.isRaw = isRaw;
    this.numDrawn = 0;
    this.body.replaceChildren();
    this.body.className = isRaw ? "tokens" : "markdown";
    this.markdown = new MarkdownView(this.body, (...block) => this.#paint(...block));
    this.update();
  }

  /** Draw what was received since the last call. */
  update() {
    const { answer } = this;
    this.heading.textContent = answer.title;
    this.thoughts.hidden = !answer.reasoning;
    this.thoughts.lastChild.textContent = answer.reasoning;
    if (this.isRaw) this.#drawTokens();
    else this.#drawMarkdown();
    const calls = answer.calls.map(callCard);
    if (calls.length || this.calls.childElementCount) this.calls.replaceChildren(...calls);
    this.element.classList.toggle("writing", !answer.finish);
    this.stats.textContent = answer.finish ? this.#summary() : "";
  }

  #summary() {
    const { tokens, duration_s, end, finish } = this.answer;
    const rate = end && duration_s ? ` in ${duration_s.toFixed(2)} s, ${(tokens.length / duration_s).toFixed(0)} tokens/s` : "";
    const block = end?.betoken.speculation.num_draft_tokens ? `, ${end.betoken.speculation.block_efficiency.toFixed(2)} tokens per forward` : "";
    return [tokens.length ? `${tokens.length} tokens${rate}${block}` : "", ENDS[finish]].filter(Boolean).join(" · ");
  }

  #drawTokens() {
    const { tokens, content } = this.answer;
    if (!tokens.length) this.body.textContent = content;
    for (const token of tokens.slice(this.numDrawn)) {
      const isSpecial = !token.text && /^<.*>$/.test(token.name ?? "");
      const span = tokenSpan(token, this.numDrawn++, isSpecial ? token.name : token.text);
      if (isSpecial) span.classList.add("special");
      this.body.append(span);
    }
  }

  /** Colour a block of the content, which follows the reasoning in the text of the tokens. */
  #paint(element, begin, end) {
    this.answer.source.paint(element, this.start + begin, this.start + end);
  }

  #drawMarkdown() {
    const { source, content } = this.answer;
    this.start = Math.max(source.text.lastIndexOf(content), 0);
    this.markdown.update(content);
  }

  #point(event) {
    const index = event.target.dataset?.index;
    if (index !== undefined) this.choose(Number(index));
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const last = this.answer.tokens.length - 1;
    const wanted = step ? this.chosen + step : { Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.choose(-1);
    if (wanted === undefined || last < 0 || event.target !== this.body) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(last, wanted)));
  }

  choose(index) {
    const spansOf = (at) => this.body.querySelectorAll(`[data-index="${at}"]`);
    spansOf(this.chosen).forEach((span) => span.classList.remove("chosen"));
    this.chosen = index;
    const spans = spansOf(index);
    spans.forEach((span) => span.classList.add("chosen"));
    if (index >= 0) spans[0]?.scrollIntoView({ block: "nearest" });
    this.onChoose(index < 0 ? null : this.answer.tokens[index], spans[0] ?? this.body);
  }
}
