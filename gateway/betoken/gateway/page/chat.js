// The open conversation: sends, stops, continues, regenerates and edits.

import { Answer } from "./answer.js";
import { ask, numTokens } from "./api.js";
import { make } from "./dom.js";
import * as settings from "./settings.js";
import { load, save } from "./store.js";
import { QuestionView, ReplyView, ResultView } from "./turn_view.js";

const NEAR_PX = 80;
const MEASURE_PERIOD_MS = 250;
const WELCOME = "Each token of an answer has the colour of its source. Point at a token, or use the arrow keys inside an answer, " +
  "to see its probability and its alternatives.";

export class Chat {
  /**
   * `place` holds the turns. `on` has `choose(token, span)`, `measure(turn)` for the answer whose statistics are shown,
   * `open()` to show them, `state(isBusy)`, `status(text)`, `fault(text)`, `lost(text)` for a message that was not answered,
   * and `saved(conversation)`.
   */
  constructor(place, on) {
    this.place = place;
    this.on = on;
    this.running = null;
    this.open(load());
  }

  get turns() {
    return this.conversation.turns;
  }

  open(conversation) {
    this.conversation = conversation;
    this.draw();
    this.place.scrollTop = this.place.scrollHeight;
    this.on.measure(this.turns.findLast((turn) => turn.role === "assistant") ?? null);
  }

  draw() {
    this.views = this.turns.map((turn, index) => this.#view(turn, index));
    const welcome = make("p", WELCOME, { class: "hint", id: "welcome" });
    this.place.replaceChildren(...(this.views.length ? this.views.map((view) => view.element) : [welcome]));
    this.#showActions();
  }

  send(content) {
    return this.#answer(this.turns.length, [{ role: "user", content }]);
  }

  edit(index, content) {
    return this.#answer(index, [{ role: "user", content }]);
  }

  regenerate(index) {
    return this.#answer(index, []);
  }

  sendResults(results) {
    return this.#answer(this.turns.length, results);
  }

  /** Continue the last answer. */
  resume() {
    return this.#attempt(() => this.#receive(this.turns.at(-1), this.turns.at(-1).answer, false, true));
  }

  /** Stop the answer; what was received of it stays in the conversation. */
  async stop() {
    this.running?.abort.abort();
    await this.running?.ended;
  }

  /** Replace the turns from `index` on by `turns` and an answer. The old turns return if no token arrives. */
  async #answer(index, turns) {
    if (this.running) return;
    const { conversation } = this;
    const before = [...conversation.turns];
    const isText = !settings.isChat();
    const sides = [new Answer(settings.isCompared() ? "With speculation" : "", isText)];
    if (settings.isCompared()) sides.push(new Answer("Without speculation", isText));
    const turn = { role: "assistant", answer: sides[0], other: sides[1] };
    conversation.turns = [...before.slice(0, index), ...turns, turn];
    conversation.title ||= turns[0].content.trim().slice(0, 60);
    this.draw();
    this.place.scrollTop = this.place.scrollHeight;
    const work = async () => {
      for (const side of sides) await this.#receive(turn, side, side === sides[1], false);
    };
    await this.#attempt(work, () => {
      if (turn.answer.end || turn.answer.tokens.length) return;
      conversation.turns = before;
      if (!before.length) conversation.title = "";
      this.draw();
      if (turns[0]?.role === "user") this.on.lost(turns[0].content);
    });
  }

  /** Run one request at a time and report its failure; then call `settle` and store the conversation. */
  async #attempt(work, settle) {
    if (this.running) return;
    const { conversation } = this;
    let end;
    this.running = { abort: new AbortController(), ended: new Promise((resolve) => (end = resolve)) };
    this.on.state(true);
    this.#showActions();
    save(conversation);
    try {
      await work();
    } catch (fault) {
      this.on.status("");
      if (fault.name !== "AbortError") this.on.fault(fault.message);
    } finally {
      this.running = null;
      settle?.();
      this.on.state(false);
      this.#followEnd(() => this.#showActions());
      this.keep();
      end();
    }
  }

  /** Receive one side of a turn. */
  async #receive(turn, answer, isOff, continues) {
    const { signal } = this.running.abort;
    const view = this.views[this.turns.indexOf(turn)];
    const earlier = answer.finish, numEarlier = answer.tokens.length;
    answer.begin();
    this.on.status(isOff ? "Generating without speculation…" : "Generating…");
    this.on.measure(turn);
    try {
      const seed = (continues || isOff) && turn.answer.end ? turn.answer.end.seed : settings.seed();
      const turns = this.turns.slice(0, this.turns.indexOf(turn));
      const room = (prompt) => numTokens(prompt, settings.key(), signal);
      const { path, body } = await settings.request(turns, continues ? answer : null, { seed, isOff, room });
      const end = await ask(path, body, settings.key(), signal, (piece) => {
        answer.add(piece);
        this.#drawSoon(turn, view);
      });
      answer.complete({ ...end, seed });
      this.on.status(`${answer.tokens.length} tokens`);
    } catch (fault) {
      const isNew = answer.tokens.length > numEarlier;
      answer.keep(isNew || !earlier ? (fault.name === "AbortError" ? "stopped" : "interrupted") : earlier);
      throw fault;
    } finally {
      this.#drawNow(turn, view);
    }
  }

  keep() {
    const isKept = save(this.conversation);
    if (!isKept) this.on.fault("The conversation could not be stored: the browser's storage is full.");
    this.on.saved(this.conversation);
  }

  #view(turn, index) {
    if (turn.role === "tool") return new ResultView(turn);
    if (turn.role === "user") return new QuestionView(turn, (content) => this.edit(index, content));
    return new ReplyView(turn, {
      choose: this.on.choose,
      regenerate: () => this.regenerate(index),
      resume: () => this.resume(),
      results: (results) => this.sendResults(results),
      measure: () => this.on.open(turn),
    });
  }

  #showActions() {
    const last = this.views.at(-1);
    this.place.classList.toggle("busy", Boolean(this.running));
    for (const view of this.views) if (view instanceof ReplyView) view.showActions(Boolean(this.running), view === last);
  }

  /** Call `draw`; a window that shows the end of the conversation goes on to show it. */
  #followEnd(draw) {
    const { place } = this;
    const isAtEnd = place.scrollHeight - place.scrollTop - place.clientHeight < NEAR_PX;
    draw();
    if (isAtEnd) place.scrollTop = place.scrollHeight;
  }

  /** Draw at most once a frame, however fast tokens arrive. */
  #drawSoon(turn, view) {
    this.frame ??= requestAnimationFrame(() => this.#drawNow(turn, view));
  }

  #drawNow(turn, view) {
    cancelAnimationFrame(this.frame);
    this.frame = undefined;
    this.#followEnd(() => view.update());
    if (turn.answer.finish || performance.now() - (this.measured_ms ?? 0) > MEASURE_PERIOD_MS) {
      this.measured_ms = performance.now();
      this.on.measure(turn);
    }
  }
}
