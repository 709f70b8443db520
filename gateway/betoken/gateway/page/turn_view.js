// Draws one turn of a conversation with its actions.

import { AnswerView } from "./answer_view.js";
import { button, copyButton, make } from "./dom.js";

const actions = (buttons) => make("div", buttons, { class: "actions" });

/** Return the comparison of an answer with the one decoded without speculation; null unless both ended. */
function outcome({ answer, other }) {
  if (!answer.end || !other?.end) return null;
  const ids = (side) => side.tokens.map((token) => token.id).join();
  const isSame = ids(answer) === ids(other);
  const ratio = other.duration_s / answer.duration_s;
  const speed = ratio >= 1 ? `${ratio.toFixed(2)} times as fast with speculation` : `${(1 / ratio).toFixed(2)} times as fast without speculation`;
  const text = isSame ? `Same tokens; ${speed}` : "Different tokens: this is a bug, please report the request and its seed";
  return make("p", text, { class: `outcome ${isSame ? "good" : "bad"}` });
}

/** A message of the user; `onEdit(text)` receives the changed text. */
export class QuestionView {
  constructor(turn, onEdit) {
    this.turn = turn;
    this.onEdit = onEdit;
    this.element = make("div", [], { class: "turn user" });
    this.show();
  }

  show() {
    const { content } = this.turn;
    const bar = actions([copyButton(() => content, "Copy message"), button("Edit", () => this.edit(), { class: "edit" })]);
    this.element.replaceChildren(make("div", content, { class: "question" }), bar);
  }

  edit() {
    const area = make("textarea", [], { "aria-label": "Edit message", rows: "3" });
    area.value = this.turn.content;
    const send = () => area.value.trim() && this.onEdit(area.value);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.show();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      send();
    });
    this.element.replaceChildren(area, actions([button("Send", send, { class: "save" }), button("Cancel", () => this.show())]));
    area.focus();
  }
}

/** The result of a tool call. */
export class ResultView {
  constructor({ name, content }) {
    const head = make("div", make("span", ["Result of ", make("code", name)]), { class: "code-head" });
    const text = make("pre", make("code", content), { tabindex: "0", role: "region", "aria-label": "Result" });
    this.element = make("div", make("div", [head, text], { class: "code call" }), { class: "turn" });
  }
}

/** An answer, with the answer without speculation if it was compared. */
export class ReplyView {
  /** `on` has `choose`, `regenerate`, `resume`, `measure` and `results`. */
  constructor(turn, on) {
    this.turn = turn;
    this.on = on;
    this.sides = [turn.answer, turn.other].filter(Boolean).map((answer) => new AnswerView(answer, on.choose));
    this.after = make("div");
    this.element = make("div", [make("div", this.sides.map((side) => side.element), { class: "sides" }), this.after], { class: "turn reply" });
    this.update();
  }

  update() {
    this.sides.forEach((side) => side.update());
  }

  /** Show the actions; an answer that is being received has none. `isLast` offers to continue or to enter results. */
  showActions(isBusy, isLast) {
    const { answer } = this.turn;
    if (isBusy) return this.after.replaceChildren();
    const isRaw = this.sides[0].isRaw;
    const view = button(isRaw ? "Formatted" : "Tokens", () => {
      this.sides.forEach((side) => side.show(!isRaw));
      this.showActions(isBusy, isLast);
    }, { class: "show-tokens" });
    const bar = actions([
      copyButton(() => answer.content, "Copy answer"),
      button("Regenerate", this.on.regenerate, { class: "regenerate" }),
      ...(isLast && answer.canContinue && !this.turn.other ? [button("Continue", this.on.resume, { class: "continue" })] : []),
      ...(answer.tokens.length ? [view] : []),
      ...(answer.rounds.length ? [button("Rounds", this.on.measure, { class: "measure" })] : []),
    ]);
    const form = isLast && answer.calls.length ? this.#resultForm() : null;
    this.after.replaceChildren(...[outcome(this.turn), bar, form].filter(Boolean));
  }

  #resultForm() {
    const { calls } = this.turn.answer;
    const areas = calls.map((call) => make("textarea", [], { rows: "2", required: "", "aria-label": `Result of ${call.name}`, placeholder: `Result of ${call.name}` }));
    const form = make("form", [...areas, actions([make("button", "Send results", { type: "submit" })])], { class: "results" });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.on.results(calls.map((call, index) => ({ role: "tool", tool_call_id: call.id, name: call.name, content: areas[index].value })));
    });
    return form;
  }
}
