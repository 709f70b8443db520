// Renders an answer's Markdown block by block. Raw HTML is shown as text, and the result is sanitised.

import { copyButton, make } from "./dom.js";
import { Marked } from "./third_party/marked.esm.js";
import DOMPurify from "./third_party/purify.es.mjs";

const TAGS = "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul #text".split(" ");
const ATTRIBUTES = ["href", "title", "align", "start", "class"];

const escaped = (text) => text.replace(/[&<>"]/g, (mark) => `&#${mark.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escaped(text)}</p>` : escaped(text)),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer");
});

/** Add a head with language and copy button to each code block, and let wide tables scroll. */
function finish(fragment) {
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.querySelector("code") ?? pre;
    const language = /language-(\S+)/.exec(code.className)?.[1] ?? "code";
    pre.tabIndex = 0;
    pre.setAttribute("role", "region");
    pre.setAttribute("aria-label", `${language} block`);
    const head = make("div", [make("span", language), copyButton(() => code.textContent, "Copy code")], { class: "code-head" });
    const box = make("div", head, { class: "code" });
    pre.replaceWith(box);
    box.append(pre);
  }
  for (const wide of fragment.querySelectorAll("table")) {
    const box = make("div", [], { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" });
    wide.replaceWith(box);
    box.append(wide);
  }
  return fragment;
}

function render(block) {
  const clean = DOMPurify.sanitize(marked.parser([block]), { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ATTRIBUTES, RETURN_DOM_FRAGMENT: true });
  return finish(clean);
}

/** Draws a growing text into `place` and replaces only blocks that changed. */
export class MarkdownView {
  /** `paint(element, begin, end)` colours a new block, which renders `[begin, end)` of the text. */
  constructor(place, paint) {
    this.place = place;
    this.paint = paint;
    this.blocks = [];
  }

  update(text) {
    let begin = 0;
    const blocks = marked.lexer(text).map((block) => {
      const end = begin + block.raw.length;
      const made = { raw: block.raw, begin, end, block };
      begin = end;
      return made;
    });
    const first = blocks.findIndex(({ raw }, index) => raw !== this.blocks[index]?.raw);
    const kept = first < 0 ? blocks.length : first;
    for (const { element } of this.blocks.splice(kept)) element?.remove();
    for (const entry of blocks.slice(kept)) {
      if (entry.block.type !== "space") {
        entry.element = make("div", render(entry.block), { class: "block" });
        this.paint(entry.element, entry.begin, entry.end);
        this.place.append(entry.element);
      }
      this.blocks.push(entry);
    }
  }
}
