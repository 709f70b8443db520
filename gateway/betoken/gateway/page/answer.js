// One answer as it grows: tokens in the colour of where they came from, one of them chosen by pointer or keys.

export const LEGEND = [
  ["model", "drafted by a model"],
  ["ngram", "drafted by n-grams"],
  ["other", "drafted otherwise"],
  ["recovered", "the target's, where it refused a draft"],
  ["bonus", "the target's, after a whole draft"],
  ["plain", "the target's, without a draft"],
];

/** The colour's name for a provenance; drafters that have none of their own share one. */
const colour = (provenance) => (LEGEND.some(([name]) => name === provenance) ? provenance : "other");

export class Answer {
  /** `onChoose(token)` is told which token is looked at. */
  constructor(title, onChoose) {
    this.tokens = [];
    this.rounds = [];
    this.text = "";
    this.element = document.createElement("div");
    this.element.className = "side";
    this.heading = document.createElement("p");
    this.heading.textContent = title;
    this.heading.className = "title";
    this.title = title;
    this.body = document.createElement("div");
    this.body.className = "tokens";
    this.body.tabIndex = 0;
    this.body.setAttribute("role", "group");
    this.body.setAttribute("aria-label", `${title}: tokens, arrow keys choose one`);
    this.element.append(this.heading, this.body);
    this.onChoose = onChoose;
    this.chosen = -1;
    this.body.addEventListener("pointerover", (event) => this.#point(event));
    this.body.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Takes what came. */
  add({ tokens, rounds }) {
    this.rounds.push(...rounds);
    for (const token of tokens) {
      const span = document.createElement("span");
      span.className = `token from-${colour(token.provenance)}`;
      span.dataset.index = this.tokens.length;
      span.textContent = token.text;
      if (!token.text && /^<.*>$/.test(token.name ?? "")) {
        span.textContent = token.name;
        span.classList.add("special");
      }
      this.tokens.push({ ...token, span });
      this.text += token.text;
      this.body.append(span);
    }
  }

  /** Says how it went, by the router's clock: the page's own would count its drawing, too. */
  end(seconds) {
    const count = this.tokens.length;
    this.heading.textContent = `${this.title}: ${count} tokens in ${seconds.toFixed(2)} s, ${(count / seconds).toFixed(0)} a second`;
  }

  #point(event) {
    const index = event.target.dataset?.index;
    if (index !== undefined) this.choose(Number(index));
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const last = this.tokens.length - 1;
    const wanted = step ? this.chosen + step : { Home: 0, End: last }[event.key];
    if (wanted === undefined || last < 0) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(last, wanted)));
  }

  choose(index) {
    this.tokens[this.chosen]?.span.classList.remove("chosen");
    this.chosen = index;
    this.tokens[index].span.classList.add("chosen");
    this.onChoose(this.tokens[index]);
  }
}
