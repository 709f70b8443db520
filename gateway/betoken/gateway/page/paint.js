// Wraps the text of rendered Markdown in the tokens that it came from.

/** Number of characters of markup that may separate two words of one block. */
const MAX_SKIPPED = 400;

/** The colour of each source; other drafters share one. */
export const LEGEND = [
  ["model", "drafted by a model"],
  ["ngram", "drafted by n-grams"],
  ["other", "drafted by another drafter"],
  ["recovered", "target, after a rejected draft token"],
  ["bonus", "target, after a fully accepted draft"],
  ["plain", "target, without a draft"],
];

const colour = (source) => (LEGEND.some(([name]) => name === source) ? source : "other");

/** Return a span of token `index`. */
export function tokenSpan(token, index, text) {
  const span = document.createElement("span");
  span.className = `token from-${colour(token.provenance)}`;
  span.dataset.index = index;
  span.textContent = text;
  return span;
}

/** Tokens by their positions in the concatenated text. */
export class TokenText {
  constructor() {
    this.text = "";
    this.tokens = [];
    this.ends = [];
  }

  add(token) {
    this.text += token.text;
    this.tokens.push(token);
    this.ends.push(this.text.length);
  }

  /** Return the index of the token that holds character `at`. */
  indexAt(at) {
    let low = 0, high = this.ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] > at) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** Return `[begin, end)` of the text as spans. */
  spans(begin, end) {
    const made = [];
    for (let at = begin, index = this.indexAt(begin); at < end; index++) {
      const until = Math.min(end, this.ends[index]);
      if (until > at) made.push(tokenSpan(this.tokens[index], index, this.text.slice(at, until)));
      at = until;
    }
    return made;
  }

  /** Colour the text nodes of `element`, which render `[begin, end)`. Text that differs from the source stays plain. */
  paint(element, begin, end) {
    let at = begin;
    const find = (part) => {
      const found = this.text.indexOf(part, at);
      if (found < 0 || found + part.length > end || found > at + MAX_SKIPPED) return null;
      at = found + part.length;
      return this.spans(found, at);
    };
    const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
    const nodes = [];
    while (walker.nextNode()) nodes.push(walker.currentNode);
    for (const node of nodes) {
      if (!node.data.trim() || node.parentElement.closest(".code-head")) continue;
      const whole = find(node.data) ?? node.data.split(/(\s+)/).flatMap((part) => (part.trim() && find(part)) || [part]);
      node.replaceWith(...whole);
    }
  }
}
